"""Compact a document's KV into a cartridge: one prefill, keys and values in closed form, gradient steps where they help."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from ...artifact import reading
from ...artifact.manifest import Compaction, Manifest, Measured, Origin
from ...errors import ArtifactError
from .. import gate
from ..document import read_document
from ..model import CausalModel
from ..payload import as_served, read_checked, rounded
from ..progress import Progress, silent
from ..questions import Question, Split, split
from ..train.initial import check_positions, prefilled
from ..train.lesson import taught
from ..train.packing import Example
from ..write import write_trained
from .closed import compacted, rerotated
from .references import References, collect
from .refine import refine
from .wanted import Wanted, form_of, references_of

Say = Callable[[str], None]
ANSWER_TOKENS = 64
"""Longest answer, where the model's own is compared with."""
_CANARIES = 8


def silence(line: str) -> None:
    """Say nothing."""


class Made(NamedTuple):
    """Compact KV, and what it was made with."""

    kv: torch.Tensor
    """Canonical `[2, L, p, H, D]`, float32, its keys rotated for questions at position p."""
    asked: References
    examples: list[Example]
    refine: int
    """Steps a layer, where they answered no fewer of the validation questions than none."""
    seconds: float


class Compacted(NamedTuple):
    """KV as it is served, and how it came about."""

    kv: torch.Tensor
    about: Compaction


def make(
    model: CausalModel,
    kv: torch.Tensor,
    ids: Sequence[int],
    wanted: Wanted,
    validation: Sequence[Question] = (),
    *,
    say: Say = silence,
    progress: Progress = silent,
) -> Made:
    """Compact the canonical `kv` of the document `ids` for `wanted.questions`; `say` is told the seconds of each step.

    It is refined where `validation` questions are answered no worse so, and they are all that says so: without any it is
    not. Where p has room, and all of them are right as it is, that is not tried. Raises `CartridgeError` unless p is below
    the document's length, and `UnsupportedModel` for a model whose attention or positions are not understood.
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

    def right(found: torch.Tensor) -> Measured:
        return gate.measure(model, kv, rounded(found, model.fingerprint), validation, form_of(model, wanted),
                            ANSWER_TOKENS, progress=progress)  # fmt: skip

    kv = kv.to(model.model.dtype)
    with step("reference queries"):
        examples = references_of(model, ids, wanted)
        asked = collect(model, kv, examples, progress=progress)
    with step("keys and values"):
        found = rerotated(model, compacted(kv, asked, wanted.positions, progress=progress), tokens)
    made = Made(found, asked, examples, 0, took)
    if wanted.refine and validation:
        with step("validation"):
            plain = right(found)
        if plain.cartridge < plain.document or not wanted.has_room(tokens):
            with step(f"refine, {wanted.refine} steps a layer"):
                found = refine(model, found, examples, asked, steps=wanted.refine, progress=progress)
                better = right(found)
            say(f"{better.cartridge:.1%} of {better.count} validation questions refined, {plain.cartridge:.1%} not")
            if better.cartridge >= plain.cartridge:
                made = made._replace(kv=found, refine=wanted.refine)
    return made._replace(seconds=took)


def compact(
    model: CausalModel,
    kv: torch.Tensor,
    ids: Sequence[int],
    wanted: Wanted,
    *,
    encoding: str = "plain",
    chunk_tokens: int = 256,
    say: Say = silence,
    progress: Progress = silent,
    seconds: float = 0.0,
) -> Compacted:
    """Make what `make` does and measure it, as it is stored; `seconds` were spent on `kv` before and are counted.

    Of the questions a tenth is kept from the fit to choose by, and another, or those of `wanted.held_out`, to measure
    by at the end. Without any, the tokens of the document that it is made for say what is kept of them, and nothing says
    how questions are answered. Raises what `make` does, and `CanaryFailed` where it keeps less than `wanted.accept`.
    """
    if seconds:
        say(f"prefill: {seconds:.1f} s")
    parts = split(wanted.questions, wanted.held_out) if wanted.questions else Split([], [], list(wanted.held_out))
    made = make(model, kv, ids, replace(wanted, questions=parts.fit), parts.validation, say=say, progress=progress)
    start = time.monotonic()
    served = as_served(rounded(made.kv, model.fingerprint), model.fingerprint, encoding, chunk_tokens)
    if parts.test:
        found = gate.measure(model, kv, served, parts.test, form_of(model, wanted), ANSWER_TOKENS, progress=progress)
    else:
        found = _read_again(model, kv, served, made, progress)
    took = round(seconds + made.seconds + time.monotonic() - start, 1)
    say(f"comparison with the document: {time.monotonic() - start:.1f} s")
    gate.check(found, wanted.accept, "Give more positions, or the questions that it must answer, in several wordings")
    say(gate.verdict(found))
    queries = "questions" if parts.fit else "repeat"
    about = Compaction(queries, len(made.asked.answers), len(made.examples), took, made.refine, found)
    return Compacted(made.kv, about)


def _read_again(
    model: CausalModel, document: torch.Tensor, cartridge: torch.Tensor, made: Made, progress: Progress
) -> Measured:
    """Return how often the first choice is the document's where it is read again, which is what it was made for."""

    def choices(kv: torch.Tensor) -> torch.Tensor:
        found = taught(model, kv.to(model.model.dtype), made.examples, 1, progress).tokens
        assert found is not None, "the teacher was asked"
        return found[:, 0]

    wanted, nothing, found = map(choices, (document, document[:, :, :1], cartridge))
    shares = [float((each == wanted).float().mean()) for each in (nothing, found)]
    return gate.measured(gate.TOKENS, len(wanted), shares[0], 1.0, shares[1])


def build_compact(
    model: CausalModel,
    document: Path,
    root: Path,
    wanted: Callable[[int], Wanted],
    *,
    cartridge_id: str,
    version: int,
    chunk_tokens: int = 256,
    encoding: str = "plain",
    say: Say = silence,
    progress: Progress = silent,
) -> Manifest:
    """Compact the text file `document` into an artefact at `root` and return its manifest. Registers nothing.

    `wanted` is called with the document's length in tokens. Raises what `compact` does, and leaves
    nothing behind then.
    """
    read = read_document(model, document)
    asked = wanted(len(read.ids))
    check_positions(asked.positions, len(read.ids))
    start = time.monotonic()
    kv = prefilled(model, read.ids, progress)
    made = compact(
        model, kv, read.ids, asked, encoding=encoding, chunk_tokens=chunk_tokens, say=say, progress=progress,
        seconds=time.monotonic() - start,
    )  # fmt: skip
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
    chunk = chunk_tokens or manifest.payload.chunk_tokens
    made = compact(model, kv, ids, asked, encoding=encoding, chunk_tokens=chunk, say=say, progress=progress)
    before = manifest.provenance
    provenance = model.provenance(
        "compact", document=before.document, document_blake3=before.document_blake3, compaction=made.about,
        origin=Origin("cartridge", manifest.name, manifest.digest),
    )  # fmt: skip
    return write_trained(
        model, made.kv, root, provenance, cartridge_id=cartridge_id, version=version,
        chunk_tokens=chunk, document_ids=ids, encoding=encoding,
        questions=_canaries(model, asked), progress=progress,
    )  # fmt: skip


def _canaries(model: CausalModel, wanted: Wanted) -> list[list[int]]:
    form = form_of(model, wanted)
    return [model.question_ids(question.text, form) for question in wanted.questions[:_CANARIES]]
