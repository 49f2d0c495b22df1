"""Compact a document's KV into a cartridge: one prefill, keys and values in closed form, gradient steps where asked for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from ...artifact import reading
from ...artifact.manifest import Compaction, Manifest, Origin
from ...errors import ArtifactError, CanaryFailed
from ..document import read_document
from ..model import CausalModel
from ..payload import read_checked
from ..progress import Progress, silent
from ..train.initial import prefilled
from ..train.packing import Example
from ..write import write_trained
from .closed import compacted, rerotated
from .judge import held_out_errors, share_kept
from .references import References, collect
from .refine import refine
from .wanted import Wanted, check_positions, form_of, references_of

Say = Callable[[str], None]
_CANARIES = 8


def silence(line: str) -> None:
    """Say nothing."""


class Made(NamedTuple):
    """Compact KV, nothing of which was judged, and what it was made with."""

    kv: torch.Tensor
    """Canonical `[2, L, p, H, D]`, float32, its keys rotated for questions at position p."""
    examples: list[Example]
    asked: References
    seconds: float


class Compacted(NamedTuple):
    """KV as it is served, and how it came about."""

    kv: torch.Tensor
    """As in `Made`."""
    about: Compaction


def make(
    model: CausalModel,
    kv: torch.Tensor,
    ids: Sequence[int],
    wanted: Wanted,
    *,
    say: Say = silence,
    progress: Progress = silent,
) -> Made:
    """Compact the canonical `kv` of the document `ids` into `wanted.positions`; `say` is told the seconds of each step.

    Raises `CartridgeError` unless p is below the document's length, and `UnsupportedModel` for a model whose attention
    or positions are not understood.
    """
    model.need_values("compact")
    tokens, took = len(ids), 0.0
    check_positions(wanted.positions, tokens)

    @contextmanager
    def step(name: str) -> Iterator[None]:
        nonlocal took
        start = time.monotonic()
        yield
        took += time.monotonic() - start
        say(f"{name}: {time.monotonic() - start:.1f} s")

    kv = kv.to(model.model.dtype)
    with step("reference queries"):
        examples = references_of(model, ids, wanted)
        asked = collect(model, kv, examples, progress=progress)
    with step("keys and values"):
        found = rerotated(model, compacted(kv, asked, wanted.positions, progress=progress), tokens)
    if wanted.refine:
        with step(f"refine, {wanted.refine} steps a layer"):
            found = refine(model, found, examples, asked, steps=wanted.refine, progress=progress)
    if wanted.distill:
        from .distill import distill  # here, since it needs PEFT

        with step(f"distill, {wanted.distill} steps"):
            found = distill(model, kv, found, ids, examples, wanted, progress=progress)
    return Made(found, examples, asked, took)


def compact(
    model: CausalModel,
    kv: torch.Tensor,
    ids: Sequence[int],
    wanted: Wanted,
    *,
    say: Say = silence,
    progress: Progress = silent,
    seconds: float = 0.0,
) -> Compacted:
    """Make what `make` does and compare it with the document; `seconds` were spent on `kv` before and are counted.

    Raises what `make` does, and `CanaryFailed` where it keeps less than `wanted.accept`.
    """
    if seconds:
        say(f"prefill: {seconds:.1f} s")
    made = make(model, kv, ids, wanted, say=say, progress=progress)
    start = time.monotonic()
    errors = held_out_errors(kv.to(model.model.dtype), made.asked, wanted.positions)
    kept = share_kept(model, kv, made.kv, made.examples)
    judging = time.monotonic() - start
    say(f"comparison with the document: {judging:.1f} s")
    what = "questions" if wanted.questions else "pieces of the document"
    verdict = f"the document adds next to nothing to the model's first choices after {len(made.examples)} {what}"
    if kept is not None:
        verdict = f"it keeps {max(0.0, kept):.0%} of what the document adds to the model's first choices after {what}"
    if (kept or 0.0) < wanted.accept:
        accept = math.floor(100 * max(0.0, kept or 0.0)) / 100
        raise CanaryFailed(
            f"nothing is registered: {verdict}, and must keep {wanted.accept:.0%}. Give more positions, the questions that "
            f"it must answer, or --refine 100; or register it as it is, with --accept {accept:g}"
        )
    say(verdict)
    about = Compaction(
        "attention matching, no bias", "questions" if wanted.questions else "repeat", len(made.asked.answers),
        len(made.examples), tuple(round(error, 4) for error in errors), round(seconds + made.seconds + judging, 1),
        wanted.refine, wanted.distill, None if kept is None else round(kept, 4),
    )  # fmt: skip
    return Compacted(made.kv, about)


def build_compact(
    model: CausalModel,
    document: Path,
    root: Path,
    wanted: Callable[[int, str], Wanted],
    *,
    cartridge_id: str,
    version: int,
    chunk_tokens: int = 256,
    encoding: str = "plain",
    say: Say = silence,
    progress: Progress = silent,
) -> Manifest:
    """Compact the text file `document` into an artefact at `root` and return its manifest. Registers nothing.

    `wanted` is called with the document's length in tokens and its text. Raises what `compact` does, and leaves
    nothing behind then.
    """
    read = read_document(model, document)
    asked = wanted(len(read.ids), read.text)
    check_positions(asked.positions, len(read.ids))
    start = time.monotonic()
    kv = prefilled(model, read.ids, progress)
    made = compact(model, kv, read.ids, asked, say=say, progress=progress, seconds=time.monotonic() - start)
    provenance = model.provenance(
        "build", document=document.name, document_blake3=read.blake3, compaction=made.about
    )  # fmt: skip
    return write_trained(
        model, made.kv, root, provenance, cartridge_id=cartridge_id, version=version, chunk_tokens=chunk_tokens,
        document_ids=read.ids, encoding=encoding, questions=_canaries(model, asked), progress=progress,
    )  # fmt: skip


def compact_cartridge(
    model: CausalModel,
    source: Path,
    root: Path,
    wanted: Callable[[int], Wanted],
    *,
    cartridge_id: str,
    version: int,
    chunk_tokens: int | None = None,
    encoding: str = "plain",
    say: Say = silence,
    progress: Progress = silent,
) -> Manifest:
    """Compact the prefill cartridge at `source`, verified, into an artefact at `root`; its document is not computed again.

    `wanted` is called with the document's length in tokens; `chunk_tokens` is the source's unless
    given. Raises `ArtifactError` for a cartridge of another kind, or corrupt, and `ModelMismatch` for one of another
    model.
    """
    manifest = reading.load_manifest(source)
    if manifest.kind != "prefill" or manifest.payload is None:
        raise ArtifactError(f"cartridge {manifest.name} is {manifest.kind}; only a prefill cartridge can be compacted")
    if manifest.chat is not None:
        raise ArtifactError(f"cartridge {manifest.name} is of a chat; only a plain document's can be compacted")
    kv = read_checked(manifest, source, model, progress)
    ids = reading.load_token_ids(manifest, source).tolist()
    asked = wanted(len(ids))
    made = compact(model, kv, ids, asked, say=say, progress=progress)
    before = manifest.provenance
    provenance = model.provenance(
        "compact", document=before.document, document_blake3=before.document_blake3, compaction=made.about,
        origin=Origin("cartridge", manifest.name, manifest.digest),
    )  # fmt: skip
    return write_trained(
        model, made.kv, root, provenance, cartridge_id=cartridge_id, version=version,
        chunk_tokens=chunk_tokens or manifest.payload.chunk_tokens, document_ids=ids, encoding=encoding,
        questions=_canaries(model, asked), progress=progress,
    )  # fmt: skip


def _canaries(model: CausalModel, wanted: Wanted) -> list[list[int]]:
    form = form_of(model, wanted)
    return [model.question_ids(question.text, form) for question in wanted.questions[:_CANARIES]]
