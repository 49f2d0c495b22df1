"""Several servers behind a router that others keep: what it hashes so that one cartridge's requests meet on one server."""
