"""Training a cartridge much smaller than its document."""
