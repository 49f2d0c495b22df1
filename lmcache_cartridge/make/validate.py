"""Validate: ask a running server a cartridge's canary over HTTP, as any client asks, and compare."""

from __future__ import annotations

import uuid
from functools import partial
from typing import Any, NamedTuple

from ..artifact.canary import Asked, Comparison, compare
from ..artifact.manifest import Manifest
from ..errors import CartridgeError, SourceError
from .progress import Progress, silent
from .server import Server

_TOP = 20
_PREFIX = "token_id:"
"""What vLLM writes before a token's id where it is asked for ids."""


class Row(NamedTuple):
    """One question, asked."""

    place: str
    """`alone`, or `behind itself`: with its keys rotated, as later in a chain."""
    positions: int
    """Of the answer, compared."""
    injected: int
    """Positions of the prompt that the engine did not compute."""
    difference: float | None
    bound: float
    passed: bool
    problem: str | None


def validate(manifest: Manifest, server: Server, progress: Progress = silent) -> list[Row]:
    """Ask all questions of a cartridge's canary of a server that serves it under its `id@version`, and compare.

    Those behind itself only where two copies are whole chunks: no request can name less than whole cartridges.
    A request that the server refuses is a row that did not pass. Raises `CartridgeError` for a cartridge without one.
    """
    if manifest.canary is None:
        raise CartridgeError(
            f"{manifest.name} has no canary, so nothing is known to ask; make it again with this release to have one"
        )
    asked = [("alone", 1, each) for each in manifest.canary.after]
    if manifest.canary.behind_positions is None:  # else the server would compute the rest of the second copy
        asked += [("behind itself", 2, each) for each in manifest.canary.behind]
    rows = []
    for place, times, each in asked:
        rows.append(_ask(manifest.name, server, place, times, each))
        progress("validate", len(rows), len(asked))
    return rows


def _ask(name: str, server: Server, place: str, times: int, asked: Asked) -> Row:
    body = {
        "model": server.model, "prompt": list(asked.question), "cartridges": [name] * times, "temperature": 0,
        "max_tokens": len(asked.answer.tokens), "logprobs": _TOP, "ignore_eos": True, "add_special_tokens": False,
        "return_tokens_as_token_ids": True, "cache_salt": uuid.uuid4().hex,
        # What the model's generation config may have set otherwise.
        "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0,
    }  # fmt: skip
    try:
        found, injected = server.post("/v1/completions", body, partial(_compared, asked))
    except SourceError as error:
        return Row(place, 0, 0, None, asked.answer.bound, False, str(error))
    problem = None if injected else "the server computed the document instead"
    passed = found.passed and problem is None
    return Row(place, found.positions, injected, round(found.difference, 4), found.bound, passed, problem)


def _compared(asked: Asked, reply: dict[str, Any]) -> tuple[Comparison, int]:
    logprobs = reply["choices"][0]["logprobs"]
    given = [_id(token) for token in logprobs["tokens"]]
    top = [{_id(token): value for token, value in row.items()} for row in logprobs["top_logprobs"]]
    injected = (reply["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return compare(asked.answer, given, top), injected


def _id(token: str) -> int:
    return int(token.removeprefix(_PREFIX))
