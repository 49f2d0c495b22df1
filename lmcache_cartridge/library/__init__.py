"""Which cartridges there are, and which of them one engine can have."""
