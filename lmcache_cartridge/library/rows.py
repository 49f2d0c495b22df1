"""Rows: what a catalog knows of each artefact that was read; kept in a file, so that the next start need not read them all."""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import msgspec
from blake3 import blake3

from ..artifact import files, reading
from ..artifact.cartridge import Cartridge, Place
from ..artifact.location import is_remote
from ..artifact.manifest import Kind
from ..artifact.model import Fingerprint
from ..errors import CartridgeError, ModelMismatch, UnsupportedEngine
from .index import KeyIndex
from .manifest_cache import ManifestCache

logger = logging.getLogger(__name__)

PERMANENT = (ModelMismatch, UnsupportedEngine)
"""Errors of sound cartridges that one engine can never serve; to read them again is no use."""
_FORMAT = 6


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a catalog must know of a cartridge that nobody asks for."""

    digest: str
    location: str
    root: str | None
    """Directory of its manifest and token ids; None where that is the location."""
    kind: Kind
    positions: int
    hashes: bytes
    """Of its chunks, as `KeyIndex.hash` returns them."""
    adapted: bool = False
    """Whether it was made with a LoRA adapter."""


_decode = msgspec.msgpack.Decoder(list[Row]).decode


class RowReader:
    """Reads artefacts for one engine. Safe from any thread.

    What it kept is in one file under `directory`, for each engine and registry another, replaced whole: any number of
    processes may share it. A file that is damaged is none.
    """

    def __init__(
        self,
        index: KeyIndex,
        copies: ManifestCache,
        fingerprint: Fingerprint,
        *,
        directory: Path,
        registry: Path,
        allow_trained: bool,
        accept_weights: bool,
    ) -> None:
        """Touches no file."""
        self._index, self._copies = index, copies
        self._allow_trained = allow_trained
        self._check = lambda manifest: manifest.fingerprint.check_fits(fingerprint, accept_weights=accept_weights)
        hashes = list(map(hex, index.probe)), index.chunk_tokens
        facts = (_FORMAT, hashes, fingerprint, allow_trained, accept_weights, str(registry.absolute()))
        self._file = directory / f"{blake3(msgspec.json.encode(facts)).hexdigest(16)}.rows"

    def find(self, digest: str, location: str) -> tuple[Row, Cartridge]:
        """`read` an artefact, one on S3 from the copy that is here, or else from a new one. Blocks for the network then."""
        if not is_remote(location):
            return self.read(digest, Place(Path(location), location))
        if copy := self._copies.known(location):
            with suppress(CartridgeError):
                return self.read(digest, Place(copy, location))
        return self.read(digest, Place(self._copies.fetch(location), location))

    def read(self, digest: str, place: Place) -> tuple[Row, Cartridge]:
        """Read an artefact and hash its document. Blocks for local reads.

        Raises `CartridgeError` where it cannot be served: one of `PERMANENT`, or another where it is not sound.
        """
        root, location = place
        manifest = reading.load_manifest(root, digest, payload=location == str(root))
        self._check(manifest)
        if manifest.kind == "trained" and not self._allow_trained:
            raise UnsupportedEngine(
                "a trained cartridge needs kv_load_failure_policy: fail, and layers whose KV has blocks of one kind (vLLM's "
                "--disable-hybrid-kv-cache-manager), since nothing can compute what of it was not loaded"
            )
        hashes = self._index.hash(manifest, reading.load_token_ids(manifest, root))
        beside = None if location == str(root) else str(root)
        adapted = manifest.fingerprint.lora is not None
        row = Row(digest, location, beside, manifest.kind, manifest.positions, hashes, adapted)
        return row, Cartridge(manifest, root, location)

    def recall(self) -> list[Row]:
        """Return what was kept last. Blocks for the read.

        A row was right then; it is compared with its artefact before a chunk is loaded.
        """
        with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
            return _decode(self._file.read_bytes())
        return []

    def forget(self) -> None:
        """Drop what was kept: something of it was found to be wrong."""
        with suppress(OSError):
            self._file.unlink()

    def keep(self, rows: Collection[Row]) -> None:
        """Keep rows in place of what was kept. Blocks for the write; never raises."""
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            files.replace(self._file, [msgspec.msgpack.encode(rows)], 0o600)
        except OSError as error:
            logger.warning("%s cannot be written (%s); the next start reads artefacts instead", self._file, error)
