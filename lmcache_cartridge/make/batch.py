"""Batch: makes cartridges of one document after the other with one load of the model, and none twice."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

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
from .corpus import Row, Source
from .document import Document, read_document
from .gate import ACCEPT
from .model import CausalModel
from .train.initial import positions_of

if TYPE_CHECKING:
    from .trained import Trained


@dataclass(slots=True, kw_only=True)
class Recipe:
    """What is made of each document, as `build` or `train` is told it for one."""

    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of `CausalModel`."""
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
    train: Mapping[str, Any] | None = None
    """Of `Task`, but for the document and its id: it is trained to the length that `compact` says."""
    restart: bool = False
    """Whether to forget interrupted trainings."""


class Batch:
    """Makes cartridges in the home of `settings`, or of the library that they name. Close it."""

    def __init__(self, recipe: Recipe, settings: Settings) -> None:
        """Load the model. Raises `CartridgeError` for what no document could be made with."""
        self._recipe, self._settings, self._directory = recipe, settings, settings.cartridges_dir
        self._model = CausalModel(recipe.model, **recipe.options)
        if recipe.chat_template is not None:
            self._model.tokenizer.chat_template = recipe.chat_template.read_text()
        self._sources = Sources(S3Source(**settings.s3))
        self._scratch = TemporaryDirectory()
        self._library = Library(settings) if settings.library else None
        self._registry = self._library.registry if self._library else Registry(settings.registry_path)
        self._register = self._library.publish if self._library else self._registry.register
        if self._library and recipe.train is None:  # what was trained is worth more than its place here
            self._directory = Path(self._scratch.name)

    def close(self) -> None:
        """Give back connections and threads."""
        self._sources.close()
        self._scratch.cleanup()
        if self._library:
            self._library.close()

    def add(self, source: Source) -> Row:
        """Make the cartridge of a document, and register or publish it. Where that fails nothing half-made is left.

        What was made of the same document in the same way is left as it is, and is what its id means.
        """
        try:
            directory = self._directory / check_id(source.id)
            document = self._read(source)
            directory.mkdir(parents=True, exist_ok=True)
            with locked(directory):
                return Row(source.name, *self._add(source.id, document, directory))
        except (CartridgeError, OSError, RuntimeError) as error:  # RuntimeError: torch is out of memory
            return Row(source.name, problem=str(error))

    def _read(self, source: Source) -> Document:
        recipe, path = self._recipe, Path(source.name)
        if recipe.chat is None:
            return read_document(self._model, path, source.raw)
        return read_chat(self._model, path, recipe.chat, recipe.chat_arguments, source.raw)

    def _add(self, cartridge_id: str, document: Document, directory: Path) -> tuple[str, bool]:
        for left in directory.glob(".*.partial"):  # of a run that was killed
            shutil.rmtree(left)
        if found := self._find(cartridge_id, document):
            return found, False
        job, version = self._job(cartridge_id, document), self._registry.next_version(cartridge_id, directory.parent)
        root = job.root if job else directory / str(version)
        try:
            if job:
                made = job.run(restart=self._recipe.restart, accept=self._recipe.accept)
            else:
                self._make(document, root, cartridge_id=cartridge_id, version=version)
                made = self._register(root)
        except CartridgeExists:
            if self._library and (found := self._find(cartridge_id, document)):  # another machine was first
                return found, False
            raise
        finally:
            if self._library:
                shutil.rmtree(root, ignore_errors=True)
        return made.name, True

    def _job(self, cartridge_id: str, document: Document) -> Trained | None:
        """Return what trains the cartridge, where it is to be trained."""
        if self._recipe.train is None:
            return None
        from .trained import Task, Trained  # which need PEFT

        task = Task(**{**self._recipe.train, "id": cartridge_id, "document": document})
        shelf = SimpleNamespace(next_version=self._registry.next_version, register=self._register)
        return Trained(self._model, task, self._settings, shelf)

    def _make(self, document: Any, root: Path, **how: Any) -> Manifest:
        recipe = self._recipe
        how |= {"chunk_tokens": recipe.chunk_size, "encoding": recipe.payload}
        if recipe.compact is None:
            return prefill.build(self._model, document, root, canary=recipe.canary, **how)
        wanted = Wanted(self._positions(document), accept=recipe.accept)
        return build_compact(self._model, document, root, lambda tokens: wanted, **how)

    def _positions(self, document: Document) -> int:
        tokens = len(document.ids)
        compress, positions = self._recipe.compact or (None, tokens)
        return positions_of(tokens, self._recipe.chunk_size, compress=compress, positions=positions)

    def _find(self, cartridge_id: str, document: Document) -> str | None:
        """Return the name of what there is already of a document, as far as that can be seen; its id means it then."""
        if self._library:
            self._library.registry.begin()
        recipe, ids = self._recipe, blake3(np.asarray(document.ids, "<u4").tobytes()).hexdigest()
        job = self._job(cartridge_id, document)
        wanted = (ids, document.chat, self._positions(document), recipe.chunk_size, recipe.payload,
                  recipe.canary if recipe.compact is None else None, job and job.task.init)  # fmt: skip
        with suppress(CartridgeError):
            for row in self._registry.candidates(cartridge_id):
                data = read_whole(self._sources, row.location, reading.MANIFEST, MAX_MANIFEST_BYTES)
                found = decode(data, row.location)
                tokens, stored, about = found.document or found.tokens, found.stored, found.provenance
                facts = (tokens.blake3, found.chat, found.positions, stored.chunk_tokens, stored.encoding,
                         about.canary and about.canary.question, about.training and about.training.init)  # fmt: skip
                same = facts == wanted and (job is None or job.is_of(found.version))
                if same and not found.fingerprint.differences(self._model.fingerprint):
                    if row.name not in self._registry.current([cartridge_id]):
                        self._registry.promote(row.name)
                    return row.name
        return None


def rows(recipe: Recipe, sources: Iterable[Source], settings: Settings) -> Iterator[Row]:
    """Yield what becomes of each document, as `Batch.add` does."""
    with closing(Batch(recipe, settings)) as batch:
        yield from map(batch.add, sources)
