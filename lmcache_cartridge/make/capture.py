"""Capture: a cartridge of KV as a running server computes it, in its dtype and with its kernels, fetched over HTTP.

The server must run LMCache in-process and save (`serve MODEL --l1-bytes 4GiB --set admin=true`). It writes nothing.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from ..artifact.chat import Chat
from ..artifact.manifest import Manifest, Provenance
from ..artifact.model import Fingerprint, from_plain
from ..engine.contract import CAPTURE
from ..errors import ArtifactError, SourceError
from ..memory.layout import DTYPES
from .chat import question_ids
from .model import CausalModel
from .prefill import CANARY, passed_canary, questions
from .progress import Progress, silent
from .server import Server, cached_tokens
from .write import write_kv

LIKENESS = 0.99
"""Least cosine of a token's values in the first layer, which no other token has a say in, between the server's and ours.
Rounding leaves 0.9999; another model's have none."""


def conversation_ids(server: Server, messages: Any) -> list[int]:
    """Return the token ids of a conversation as the server's chat template renders it, without a turn to come.

    Raises `SourceError` where the server does not take the messages.
    """
    return server.tokenize(messages=messages, add_generation_prompt=False)


def build(
    model: CausalModel, server: Server, ids: list[int], root: Path, *, cartridge_id: str, version: int,
    canary: str = CANARY, encoding: str = "plain", chat: Chat | None = None, compare: bool = True,
    progress: Progress = silent, **facts: Any,
) -> Manifest:  # fmt: skip
    """Have the server compute the tokens `ids`, and write the KV that it has of them as an artefact at `root`.

    `model` is the server's own, which is compared: its canary is made here, and the first chunk compared. Without
    `compare` it computes nothing, so that a model that runs on servers alone can be built for, and there is no canary.
    `chat` is how servers go on with the ids; `facts` go into the provenance.
    Raises `SourceError` where the server computes or hands out something else, and `CanaryFailed` as a build does; leaves
    nothing then. Registers nothing.
    """

    def checked(kv: torch.Tensor) -> Provenance:
        asked, result = question_ids(model, canary, chat), None
        if compare:
            result = passed_canary(model, asked, kv, model.logits([*ids, *asked], len(asked)), canary, cartridge_id)
        return model.provenance("build --url", canary=result, **facts)

    model.need_values("build --url")
    if not ids:
        raise ArtifactError("there are no tokens to compute")
    tokens, served = server.post("/v1/cartridges/capture", {}, _served)
    if found := model.fingerprint.base.differences(served):
        raise SourceError(f"{server.url} runs another model than {model.name}: {'; '.join(found)}")
    return write_kv(
        model, _computed(model, server, ids, tokens, compare), root, checked, cartridge_id=cartridge_id, version=version,
        positions=len(ids), token_ids=ids, chunk_tokens=tokens, encoding=encoding,
        questions=questions(model, canary, chat), chat=chat, with_canary=compare, progress=progress,
    )  # fmt: skip


def _served(reply: Any) -> tuple[int, Fingerprint]:
    """Return a server's chunk size and model."""
    try:
        return int(reply["chunk_tokens"]), from_plain(reply["fingerprint"])
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error


def _computed(model: CausalModel, server: Server, ids: list[int], tokens: int, compare: bool) -> Iterator[torch.Tensor]:
    """Yield the canonical KV of `ids` in chunks of so many `tokens` as the server computes it; `compare` the first."""
    name = uuid.uuid4().hex
    # LMCache saves whole chunks: the last is filled up with tokens that no earlier one sees.
    whole = [*ids, *[ids[-1]] * (-len(ids) % tokens)]
    body = {"model": server.model, "prompt": [*whole, ids[-1]], "max_tokens": 1, "temperature": 0, "cache_salt": name,
            "kv_transfer_params": {CAPTURE: name}}  # fmt: skip
    cached = server.post("/v1/completions", body, cached_tokens)
    if cached:
        raise SourceError(f"{server.url} computed the text only from token {cached} on")
    for chunk in range(len(whole) // tokens):
        kv = _chunk(
            model, server.content("/v1/cartridges/capture", {"name": name, "token_ids": whole, "chunk": chunk}), tokens
        )
        if chunk == 0 and compare:
            _compare(model, server, ids[:tokens], kv)
        yield kv[:, :, : len(ids) - chunk * tokens]


def _chunk(model: CausalModel, raw: bytes, tokens: int) -> torch.Tensor:
    """Return canonical KV of the heads that all ranks sent, one after the other; of a head that several have, the first."""
    shape = model.fingerprint
    each = 2 * shape.layers * tokens * shape.head_size * DTYPES[shape.dtype].itemsize
    count, rest = divmod(len(raw), each)
    if rest or count == 0 or count % shape.kv_heads:
        raise SourceError(
            f"the server sent {len(raw)} bytes for {tokens} tokens: it runs another model, or in another dtype"
        )
    heads = torch.frombuffer(bytearray(raw), dtype=DTYPES[shape.dtype])
    heads = heads.view(count, 2, shape.layers, tokens, shape.head_size)[:: count // shape.kv_heads]
    return heads.permute(1, 2, 3, 0, 4).contiguous()


def _compare(model: CausalModel, server: Server, ids: list[int], kv: torch.Tensor) -> None:
    """Raise `SourceError` unless the server's first layer has the model's values."""
    own = next(iter(model.prefill(ids, len(ids))))[1, 0].flatten(1).float()
    alike = torch.nn.functional.cosine_similarity(own, kv[1, 0, : len(ids)].flatten(1).float(), dim=1).min()
    if not alike >= LIKENESS:
        raise SourceError(f"{server.url} has other KV for the text than {model.name}: it runs another model")
