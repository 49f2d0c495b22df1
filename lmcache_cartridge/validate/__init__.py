"""Validate: pytest checks of any server with cartridges, `lmcache-cartridge validate`."""
