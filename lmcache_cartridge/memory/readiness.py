"""Readiness: how far chunks are on their way into memory, of a hold on a tier or of a claim on a cartridge or chain."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import CartridgeError, ModelMismatch


class Readiness(NamedTuple):
    """How far chunks are, and whether they will ever be resident."""

    resident: int
    """Chunks that are resident."""
    admitted: int
    """Chunks that have memory: resident or being loaded. The others wait for memory."""
    chunks: int
    refused: str | None = None
    """Why it will never be, None if it may."""
    mismatch: bool = False
    """Whether it was made for another model, so that even its token ids mean nothing here."""
    problem: str | None = None
    """Why a chunk could not be loaded when it was last tried; it is tried again."""
    digest: str | None = None
    """Of a cartridge that is refused by itself, not for its place in a chain."""
    eta_s: float | None = None
    """Seconds until it is resident at the pace so far, None before the first chunk."""
    opening: bool = False
    """Whether its manifest is still being read; it has no chunks until then."""

    @classmethod
    def never(cls, error: CartridgeError) -> Readiness:
        """Return the readiness of what is refused for this reason."""
        return cls(0, 0, 0, str(error), isinstance(error, ModelMismatch), digest=error.digest)

    @property
    def ready(self) -> bool:
        """Whether every chunk is resident."""
        return self.refused is None and not self.opening and self.resident == self.chunks
