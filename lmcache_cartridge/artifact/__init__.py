"""What a cartridge is, on disk: manifest, fingerprint, identity tokens, reading, writing, int8."""
