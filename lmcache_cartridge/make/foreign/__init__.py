"""Cartridges and KV caches that other programs made."""
