"""Maker: makes cartridges of generated text with the user's own model, and shows them to the server."""

from __future__ import annotations

import logging
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...artifact import reading
from ...errors import CartridgeError, CartridgeNotFound
from ...library.quarantine import Quarantine
from ...library.registry import Registry
from ..progress import Progress, silent
from . import texts

if TYPE_CHECKING:
    import torch

    from ...artifact.manifest import Manifest
    from ...settings import Settings
    from ..model import CausalModel

logger = logging.getLogger(__name__)

_WINDOW = 12
"""Tokens of a question that is a part of the document."""


class Held(NamedTuple):
    """A cartridge on a server, made of a document by prefill, with what may be asked about it."""

    name: str
    """`id@version`."""
    ids: tuple[int, ...]
    questions: tuple[tuple[int, ...], ...]
    """Token ids that may follow it: on its facts, or parts of it."""
    texts: tuple[str, ...]
    """Questions as a user's message."""
    chunk: int | None = None
    """Tokens a chunk, where that is known."""
    manifest: Manifest | None = None
    root: Path | None = None

    @property
    def whole(self) -> int | None:
        """Positions in whole chunks, which are injected; None where the chunk size is not known."""
        return None if self.chunk is None else len(self.ids) // self.chunk * self.chunk


def parts(ids: Sequence[int]) -> list[tuple[int, ...]]:
    """Return parts of a document as questions: a model that reads words again looks there for what follows."""
    starts = [max(1, int(share * (len(ids) - _WINDOW))) for share in (0.2, 0.5, 0.8)]
    return [tuple(ids[start : start + _WINDOW]) for start in starts]


class Maker:
    """Makes cartridges in the registry that a server follows, and takes them away again."""

    def __init__(self, model: CausalModel, settings: Settings, chunk: int, progress: Progress = silent) -> None:
        """`model` is the user's, as transformers has it, `settings` the server's, `chunk` the tokens of its chunks."""
        self.model, self.chunk, self._progress = model, chunk, progress
        self.registry, self._quarantine = Registry(settings.registry_path), Quarantine(settings.quarantine_dir)
        self.directory = settings.cartridges_dir
        self.run = f"trial-{uuid.uuid4().hex[:6]}"
        """How the ids of these cartridges begin."""
        self._made: list[str] = []
        self._kv: dict[str, torch.Tensor] = {}

    def three(self) -> list[Held]:
        """Make the three cartridges that most checks ask: two chunks and a tail, two whole chunks, one and a tail."""
        context = self.model.context_tokens
        if context and 4 * self.chunk + 200 > context:
            raise CartridgeError(
                f"the model's context of {context} has no room for chains of chunks of {self.chunk}; give a "
                "smaller --chunk-size"
            )
        sizes = {"a": 2 * self.chunk + self.chunk // 6, "b": 2 * self.chunk, "c": self.chunk + self.chunk // 12}
        return [self.prefill(f"{self.run}-{name}", positions) for name, positions in sizes.items()]

    def prefill(self, cartridge_id: str, positions: int, *, version: int = 1, add: bool = True) -> Held:
        """Make a cartridge of a generated document; another version has another document, another run the same."""
        from blake3 import blake3

        from .. import prefill
        from ..document import Document

        text = texts.write(f"{cartridge_id.removeprefix(self.run)}@{version}", positions)
        ids = self.model.encode(text.text, special=True)[:positions]
        root = self.directory / cartridge_id / str(version)
        document = Document(Path(f"{cartridge_id}.txt"), text.text, ids, blake3(text.text.encode()).hexdigest())
        manifest = prefill.build(self.model, document, root, cartridge_id=cartridge_id, version=version,
                                 chunk_tokens=self.chunk, progress=self._progress)  # fmt: skip
        if add:
            self.add(root)
        asked = [tuple(self.model.encode(f"\nQuestion: {q}\nAnswer:", special=False)) for q in text.questions[:10]]
        return Held(
            manifest.name,
            tuple(ids),
            (*parts(ids), *asked),
            text.questions,
            manifest.stored.chunk_tokens,
            manifest,
            root,
        )

    def add(self, root: Path) -> Manifest:
        """Let the server have an artefact until `clear`, which takes it away even where this raises half-way."""
        self._made.append(reading.load_manifest(root, payload=False).name)
        return self.registry.register(root)

    def trained(self, one: Held) -> str:
        """Return the name of a `trained` cartridge, found by identity tokens, whose KV is that of `one`; made once.

        So its right answers are known: those of the document. `one` must be whole chunks.
        """
        from ..write import write_trained

        cartridge_id = f"{one.name.partition('@')[0]}-trained"
        root = self.directory / cartridge_id / "1"
        if not root.exists():
            write_trained(
                self.model, self.kv(one), root, self.model.provenance("validate"),
                cartridge_id=cartridge_id, version=1, chunk_tokens=self.chunk, document_ids=one.ids,
                progress=self._progress,
            )  # fmt: skip
            self.add(root)
        return f"{cartridge_id}@1"

    def kv(self, one: Held) -> torch.Tensor:
        """Return the canonical KV of a cartridge, as it is served; read once, since checks spoil what lies there."""
        from ..payload import read_kv

        if one.name not in self._kv:
            assert one.manifest is not None and one.root is not None
            self._kv[one.name] = read_kv(one.manifest, one.root)
        return self._kv[one.name]

    def clear(self) -> None:
        """Take away what was made, from the registry and from disk."""
        for name in reversed(self._made):
            try:
                self._quarantine.lift(self.registry.remove(name).digest)
            except CartridgeNotFound:
                continue  # a check removed it, or it was never there
            except CartridgeError as error:
                logger.warning("%s stays registered: %s", name, error)
        self._made.clear()
        for root in self.directory.glob(f"{self.run}-*"):
            shutil.rmtree(root, ignore_errors=True)
