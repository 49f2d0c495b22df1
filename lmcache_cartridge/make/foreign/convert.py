"""Import: KV that other programs made, checked against a model and written as an artefact."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from blake3 import blake3

from ...artifact.manifest import Manifest, Origin
from ...artifact.writing import ArtifactWriter
from ...errors import ForeignFormatError
from ..document import check_fits, read_document
from ..model import CausalModel
from ..progress import Progress, silent
from ..write import write_kv
from .fit import Fitted, fit
from .formats import Foreign
from .ids import check_vocabulary

FIRST_LAYER = {"bfloat16": 0.02, "float16": 0.003, "float32": 0.0005}
"""How far the K or V of one position of layer 0 may be from a plain forward pass's, relative to its norm.

Layer 0 depends on token and position alone, so only rounding is forgiven: on the shipped model 0.005 between bfloat16
and float32, 0.004 between vLLM and transformers, 0.0006 for float16; the nearest other word is 0.26 away.
"""
EVERY_LAYER = {"bfloat16": 0.1, "float16": 0.02, "float32": 0.005}
"""The same for the K or V of all positions of a layer, where rounding has grown on the way: 0.05, 0.03 and 0.006."""
SINK = 4
"""More frozen positions than these are hardly an attention sink alone."""


class Imported(NamedTuple):
    """What an import did."""

    manifest: Manifest
    evidence: str
    """Why it counts as prefill, trained or tokens."""
    warnings: tuple[str, ...]


def import_(
    model: CausalModel,
    foreign: Foreign,
    root: Path,
    *,
    cartridge_id: str,
    version: int,
    chunk_tokens: int = 256,
    document: Path | None = None,
    rounding: bool = False,
    encoding: str = "plain",
    compare: bool = True,
    progress: Progress = silent,
) -> Imported:
    """Write what `foreign` holds, as `recognise` found it, as an artefact of `model` at `root`.

    It is a prefill cartridge if it has token ids whose forward pass gives its KV but for rounding, else a trained
    one, which carries the ids of the text file `document` if that is given. `rounding` allows a dtype that does not hold every
    value. Without
    `compare` nothing is computed, so `model` may be without weights: KV is then trained, with its own ids as its document,
    and has no canary. Raises `ModelMismatch` or `ForeignFormatError`, and leaves nothing behind. Registers nothing.
    """
    if not foreign.segments:
        if document is not None:
            raise ForeignFormatError(f"{foreign.source}: token ids alone are a document; leave --document out")
        ids = foreign.token_ids or []
        check_vocabulary(model, ids, foreign.source)
        with ArtifactWriter(
            root, cartridge_id=cartridge_id, version=version, kind="tokens", fingerprint=model.fingerprint,
            token_ids=np.array(ids),
        ) as writer:  # fmt: skip
            manifest = writer.commit(model.provenance("import", origin=_origin(foreign)))
        warnings = tuple(_warnings(model, foreign))
        return Imported(manifest, "token ids without KV in a known form", warnings)
    model.need_values("import")
    fitted = fit(foreign, model.fingerprint, rounding=rounding)
    positions = fitted.kv.shape[2]
    check_fits(model, foreign.source, range(positions))
    check_vocabulary(model, foreign.token_ids or [], foreign.source)
    evidence, prefill = "not compared with the model: trained", False
    if compare:
        evidence, prefill = _judge(model, foreign, fitted, chunk_tokens, progress)
    if prefill and document is not None:
        raise ForeignFormatError(f"{foreign.source}: {evidence}, so the ids are its document; leave --document out")
    about = read_document(model, document) if document else None
    document_ids = about.ids if about else foreign.document_ids
    if document_ids is None and not compare:
        document_ids = foreign.token_ids
    check_vocabulary(model, document_ids or [], foreign.source)
    named = {"document": about.path.name, "document_blake3": about.blake3} if about else {}
    document_ids = None if prefill else document_ids
    manifest = write_kv(
        model, fitted.kv.split(chunk_tokens, dim=2), root,
        lambda kv: model.provenance("import", origin=_origin(foreign), **named),
        cartridge_id=cartridge_id, version=version, positions=positions,
        token_ids=foreign.token_ids if prefill else None, document_ids=document_ids, chunk_tokens=chunk_tokens,
        encoding=encoding, with_canary=compare, progress=progress,
    )  # fmt: skip
    return Imported(manifest, evidence, tuple(_warnings(model, foreign, fitted.frozen)))


def _judge(
    model: CausalModel, foreign: Foreign, fitted: Fitted, chunk_tokens: int, progress: Progress
) -> tuple[str, bool]:
    """Return the evidence for the kind of a cartridge, and whether it is prefill."""
    ids, kv = foreign.token_ids, fitted.kv
    if ids is None:
        return "no token ids come with it: trained", False
    if len(ids) != kv.shape[2]:
        raise ForeignFormatError(f"{foreign.source}: {len(ids)} token ids for KV of {kv.shape[2]} positions")
    worst, apart, size, done = 0.0, torch.zeros(1), torch.zeros(1), 0
    for found, computed in zip(kv.split(chunk_tokens, dim=2), model.prefill(ids, chunk_tokens), strict=True):
        exact = computed.double().flatten(3)
        squares, norms = (found.double().flatten(3) - exact).square().sum(-1), exact.square().sum(-1)
        worst = max(worst, float((squares[:, 0] / norms[:, 0].clamp_min(1e-12)).max().sqrt()))
        apart, size = apart + squares.sum(-1), size + norms.sum(-1)
        done += found.shape[2]
        progress("compare", done, kv.shape[2])
    whole = float((apart / size).max().sqrt())
    dtypes = [dtype for dtype in (*fitted.source_dtypes, model.fingerprint.dtype) if dtype in FIRST_LAYER]
    first, every = (max(limits[dtype] for dtype in dtypes) for limits in (FIRST_LAYER, EVERY_LAYER))
    same = worst <= first and whole <= every
    verdict = "prefill" if same else "trained; the ids are not its tokens"
    return (
        f"a forward pass over its token ids differs by {worst:.2g} in layer 0 (at most {first:g}) and {whole:.2g} in "
        f"any (at most {every:g}): {verdict}"
    ), same


def _origin(foreign: Foreign) -> Origin:
    digest = blake3().update_mmap(foreign.source).hexdigest()
    return Origin(foreign.form, foreign.name or foreign.source.name, digest)


def _warnings(model: CausalModel, foreign: Foreign, frozen: int = 0) -> Iterator[str]:
    """Yield what whoever imports should know."""
    theirs = foreign.base_model
    if theirs and Path(theirs).name.lower() != Path(model.name).name.lower():
        yield f"it says it was made for {theirs}, and --model is {model.name}; KV of another model answers nonsense"
    if frozen > SINK:
        yield (
            f"{frozen} frozen positions stay in front of the trained ones. A checkpoint trained jointly with others "
            "keeps those others there: import it with --drop-frozen"
        )
