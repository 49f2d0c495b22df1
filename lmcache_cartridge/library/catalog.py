"""Catalog: the cartridges and chains that one engine can be served, as requests name them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..artifact import reading
from ..artifact.cartridge import Segment
from ..artifact.location import is_remote
from ..artifact.model import check_shift
from ..errors import CartridgeError, CartridgeNotFound
from .entries import Entries
from .index import ChunkKey


class Needed(NamedTuple):
    """What of a cartridge or chain must be had together or not at all: up to the end of its last trained cartridge."""

    chunks: int
    """Whole chunks."""
    tail: int
    """Positions behind the last whole chunk."""


class Catalog(Entries):
    """Cartridges by their tags: a digest, or those of a chain joined by dots."""

    def is_at_hand(self, tag: str) -> bool:
        """Whether `require` answers without reading anything."""
        return "." not in tag or self.index.has(tag) or not all(map(self.knows, tag.split(".")))

    def locations(self, tag: str) -> set[str]:
        """Return where those cartridges of a tag lie that are known."""
        return {location for digest in tag.split(".") if (location := self._location_of(digest))}

    def is_remote(self, tag: str) -> bool:
        """Whether a cartridge of a tag has to be fetched over the network."""
        return any(map(is_remote, self.locations(tag)))

    def require(self, tag: str) -> Needed:
        """`derive`, but raise why a cartridge or chain will not be served."""
        for digest in tag.split("."):
            entry = self._entries.get(digest)
            error = entry.error if entry else None
            if error is None and (reason := self.why_quarantined(digest)):
                error = CartridgeError(reason)
            if error is not None:
                error.digest = digest
                raise error.with_traceback(None)  # which would grow each time
        needed = self.derive(tag)
        if needed is None:
            raise CartridgeNotFound("a cartridge of it is not there")
        return needed

    def segments(self, tag: str) -> list[Segment]:
        """Return the cartridges that a tag names, each at its place; empty if one is not there or quarantined.

        Blocks for local reads where a manifest is not at hand; one that is not what was registered is refused from now on.
        """
        segments, offset = [], 0
        for digest in tag.split("."):
            cartridge = None if self.why_quarantined(digest) else self._cartridge(digest)
            if cartridge is None:
                return []
            segments.append(Segment(cartridge, offset))
            offset += cartridge.manifest.positions
        return segments

    def derive(self, tag: str | None) -> Needed | None:
        """Make the chunks of a tag findable and return what of it must be had together or not at all.

        None for a tag of which a cartridge is not there or quarantined: the others must not answer in its place.
        Raises `UnsupportedModel` for cartridges that cannot stand in that order. Blocks for local reads, and to hash it, where
        a chain is new; others pass meanwhile.
        """
        if tag is None:
            return Needed(0, 0)
        rows = []
        for digest in tag.split("."):
            row = self._row(digest)
            if row is None or self.why_quarantined(digest):
                return None
            rows.append(row)
        end = trained_end = 0
        for row in rows:
            end += row.positions
            if row.kind == "trained":
                trained_end = end
        chunk = self._chunk_tokens
        whole = end // chunk
        needed = Needed(min(-(-trained_end // chunk), whole), max(trained_end - whole * chunk, 0))
        if len(rows) > 1 and not self.index.has(tag):
            segments = self.segments(tag)
            if not segments:
                return None
            for segment in segments[1:]:
                check_shift(segment.cartridge.manifest.fingerprint.rope)
            ids = np.concatenate([reading.load_token_ids(*s.cartridge[:2]) for s in segments])
            own = rows[0].positions // chunk
            keys = [ChunkKey(rows[0].digest if i < own else tag, i) for i in range(whole + bool(needed.tail))]
            self.index.add_chain(tag, ids, keys)
        return needed
