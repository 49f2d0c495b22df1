"""Batch: makes cartridges of one document after the other with one load of the model, and none twice."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3

from ..artifact import reading
from ..artifact.bytesource import read_whole
from ..artifact.manifest import MAX_MANIFEST_BYTES, Manifest, check_id, decode
from ..errors import CartridgeError, CartridgeExists
from ..library.registry import Registry
from ..settings import Settings
from ..sources.locks import locked
from ..sources.published import Library
from ..sources.s3 import S3Source
from ..sources.sources import Sources
from . import prefill
from .chat import read_chat
from .compact.job import build_compact
from .compact.wanted import Wanted
from .corpus import Source
from .document import Document, read_document
from .gate import ACCEPT
from .model import CausalModel
from .train.initial import positions_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What is made of each document, as `build` is told it for one."""

    model: str
    dtype: str = "auto"
    device: str = "auto"
    lora: Path | None = None
    max_model_len: int | None = None
    chunk_size: int = 256
    payload: str = "plain"
    canary: str = prefill.CANARY
    chat: str | None = None
    """The role of a message that the document is."""
    chat_template: Path | None = None
    """In the place of the model's."""
    chat_arguments: Mapping[str, Any] = field(default_factory=dict)
    compact: tuple[float | None, int | None] | None = None
    """By how much to compress, or to how many positions."""
    accept: float = ACCEPT
    promote: bool = True


class Row(NamedTuple):
    """What became of a document."""

    document: str
    name: str | None = None
    """`id@version` of its cartridge."""
    made: bool = False
    """Whether it was made now; else it was there."""
    problem: str | None = None
    """Why there is none, or why it is not published."""


class Batch:
    """Makes cartridges in the home of `settings`, and publishes them where these name a library. Close it."""

    def __init__(self, recipe: Recipe, settings: Settings) -> None:
        """Load the model. Raises `CartridgeError` for what no document could be made with."""
        self._recipe, self._settings = recipe, settings
        self._registry = Registry(settings.model_copy(update={"library": None}).registry_path)
        self._model = CausalModel(
            recipe.model, dtype=recipe.dtype, device=recipe.device, lora=recipe.lora, max_model_len=recipe.max_model_len
        )
        if recipe.chat_template is not None:
            self._model.tokenizer.chat_template = recipe.chat_template.read_text()
        stack = ExitStack()
        self._sources = stack.enter_context(closing(Sources(S3Source(**settings.s3))))
        self._library = stack.enter_context(Library(settings)) if settings.library else None
        self.close = stack.close

    def add(self, source: Source) -> Row:
        """Make, register and publish the cartridge of a document. Where making it fails nothing is left behind.

        What was made of the same document in the same way, here or in the library, is left as it is, and registered and
        published where it is not yet.
        """
        name = str(source.path)
        try:
            directory = self._settings.cartridges_dir / check_id(source.id)
            document = self._read(source)
            directory.mkdir(parents=True, exist_ok=True)
            with locked(directory):
                return Row(name, *self._add(source.id, document, directory))
        except (CartridgeError, OSError, RuntimeError) as error:  # RuntimeError: torch is out of memory
            return Row(name, problem=str(error))

    def _read(self, source: Source) -> Document:
        recipe, raw = self._recipe, source.read()
        if recipe.chat is None:
            return read_document(self._model, source.path, raw)
        return read_chat(self._model, source.path, recipe.chat, recipe.chat_arguments, raw)

    def _add(self, cartridge_id: str, document: Document, directory: Path) -> tuple[str, bool]:
        for left in directory.glob(".*.partial"):  # of a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        promote, library = self._recipe.promote, self._library
        known = self._known(document, directory.glob("[1-9]*"))
        if known is None and (found := self._published(cartridge_id, document)):
            return found.name, False
        manifest = known or self._make(cartridge_id, document, directory)
        root = directory / str(manifest.version)
        if manifest.name not in self._registry.current([cartridge_id]):
            self._registry.register(root, promote=promote)
            if known and promote:
                self._registry.promote(manifest.name)
        if library and cartridge_id not in [row.id for row in library.registry.having([manifest.digest])]:
            try:
                library.publish(root, promote=promote)
            except CartridgeExists:
                if found := self._published(cartridge_id, document):  # another machine was first
                    return found.name, False
                raise
        return manifest.name, known is None

    def _make(self, cartridge_id: str, document: Document, directory: Path) -> Manifest:
        recipe, version = self._recipe, self._registry.next_version(cartridge_id, directory.parent)
        if self._library is not None:
            version = max(version, self._library.registry.next_version(cartridge_id))
        make: Any = prefill.build
        how: dict[str, Any] = {"canary": recipe.canary}
        if recipe.compact is not None:
            make, how = build_compact, {"wanted": lambda tokens: Wanted(self._positions(tokens), accept=recipe.accept)}
        return make(
            self._model, document, directory / str(version), cartridge_id=cartridge_id, version=version,
            chunk_tokens=recipe.chunk_size, encoding=recipe.payload, **how,
        )  # fmt: skip

    def _positions(self, tokens: int) -> int:
        compress, positions = self._recipe.compact or (None, tokens)
        return positions_of(tokens, self._recipe.chunk_size, compress=compress, positions=positions)

    def _published(self, cartridge_id: str, document: Document) -> Manifest | None:
        """Return the manifest of what the library has of a document now."""
        if self._library is None:
            return None
        self._library.registry.begin()
        rows = self._library.registry.page(8, after=cartridge_id)
        return self._known(document, (row.location for row in rows if row.id == cartridge_id))

    def _known(self, document: Document, places: Iterable[str | Path]) -> Manifest | None:
        """Return the first manifest of what would be made of a document, as far as that can be seen."""
        recipe = self._recipe
        ids = blake3(np.asarray(document.ids, "<u4").tobytes()).hexdigest()
        wanted = (ids, document.chat, self._positions(len(document.ids)), recipe.chunk_size, recipe.payload,
                  recipe.canary if recipe.compact is None else None)  # fmt: skip
        for place in map(str, places):
            with suppress(CartridgeError):
                found = decode(read_whole(self._sources, place, reading.MANIFEST, MAX_MANIFEST_BYTES), place)
                tokens, stored, canary = found.document or found.tokens, found.stored, found.provenance.canary
                facts = (tokens.blake3, found.chat, found.positions, stored.chunk_tokens, stored.encoding,
                         canary and canary.question)  # fmt: skip
                if facts == wanted and not found.fingerprint.differences(self._model.fingerprint):
                    return found
        return None
