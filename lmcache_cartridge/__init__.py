"""Serve prepared KV caches (cartridges) through unmodified vLLM and unmodified LMCache."""

from .errors import CartridgeError

__version__ = "0.1.0"
__all__ = ["CartridgeError", "__version__"]
