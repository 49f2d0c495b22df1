"""Tokens: what a server computes for a request, asked of a server itself: its tokenizer, template and cartridges are there.

vLLM's `/render` routes expand cartridges as the request's own route does. What a request's names stand for is remembered.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, Any

import aiohttp
import msgspec

from ..errors import NoTokens
from .index import Tokens
from .pods import UNREACHABLE, Pod

NAMING = ("cartridges", "kv_transfer_params", "model")
_PASSED = ("authorization", "x-cartridges", "x-api-key")
_PROBE = 5
"""A token id of every model, as a prompt to put cartridges before."""
_LATER = (408, 425, 429)
_MAX_KEPT, _MAX_KEPT_TOKENS = 10_000, 16 << 20
"""Requests whose tokens are remembered, and how many tokens, of 4 bytes."""
_REFUSED_S = 1.0
"""How long a server's refusal is believed."""


@dataclass(slots=True)
class _Kept:
    """What is known of a request's tokens."""

    tokens: Tokens | None = None
    problem: str = ""
    """Why there are none."""
    until: float = 0.0
    asking: asyncio.Task[None] | None = None


class _Shown(msgspec.Struct):
    """What `/render` says."""

    token_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]]
    model: str | None = None


_decoder = msgspec.json.Decoder(_Shown | list[_Shown])


class Renderer:
    """Asks servers for tokens. One event loop."""

    def __init__(self, session: Callable[[], aiohttp.ClientSession], ttl_s: float) -> None:
        """Tokens are remembered for `ttl_s`; those of a name are given out for longer, while they are asked for again."""
        self._session, self._ttl_s = session, ttl_s
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        self._turn = 0

    async def of_names(self, fields: Mapping[str, Any], headers: Mapping[str, str], pods: Sequence[Pod]) -> Tokens:
        """Return the tokens of a request's cartridges, without its prompt's. Waits only for what was never asked.

        Raises `NoTokens` with a server's own words where it refuses them, or where none answers.
        """
        naming = {name: fields[name] for name in fields if name in NAMING or "label" in name}
        body = naming | {"prompt": [_PROBE], "max_tokens": 1}
        return await self._remembered("/v1/completions", body, headers, pods, drop=1)

    async def of_request(
        self, path: str, fields: Mapping[str, Any], headers: Mapping[str, str], pods: Sequence[Pod]
    ) -> Tokens:
        """Return the tokens of a whole request; of several prompts the first's. Raises as `of_names`."""
        return await self._remembered(path, fields, headers, pods, drop=0)

    async def _remembered(
        self, path: str, fields: Mapping[str, Any], headers: Mapping[str, str], pods: Sequence[Pod], *, drop: int
    ) -> Tokens:
        headers = {name: headers[name] for name in _PASSED if name in headers}
        key = blake2b(msgspec.json.encode([path, headers, drop, fields]), digest_size=16).digest()
        kept = self._kept.setdefault(key, _Kept())
        self._kept.move_to_end(key)
        if kept.until < time.monotonic() and kept.asking is None:
            kept.asking = asyncio.create_task(self._ask(kept, path, fields, headers, pods, drop))
        if kept.asking is not None and (kept.tokens is None or not drop):
            await asyncio.shield(kept.asking)
        if kept.tokens is None:
            raise NoTokens(kept.problem)
        return kept.tokens

    async def _ask(
        self, kept: _Kept, path: str, fields: Mapping[str, Any], headers: Mapping[str, str], pods: Sequence[Pod], drop: int
    ) -> None:  # fmt: skip
        """Ask one server after the other until one answers, and remember what it says."""
        self._turn += 1
        kept.problem = "no server answers what a request's tokens are"
        try:
            for number in range(len(pods)):
                if await self._ask_one(pods[(self._turn + number) % len(pods)], kept, path, fields, headers, drop):
                    break
        finally:
            kept.asking = None
        while len(self._kept) > _MAX_KEPT or sum(map(_size, self._kept.values())) > _MAX_KEPT_TOKENS:
            self._kept.popitem(last=False)

    async def _ask_one(
        self, pod: Pod, kept: _Kept, path: str, fields: Mapping[str, Any], headers: Mapping[str, str], drop: int
    ) -> bool:
        """Take in what a server says; False where it says nothing of use."""
        try:
            async with self._session().post(f"{pod.url}{path}/render", json=fields, headers=headers) as response:
                status, told = response.status, await response.read()
            if 400 <= status < 500 and status not in _LATER:
                kept.tokens, kept.until = None, time.monotonic() + _REFUSED_S
                kept.problem = f"{pod.name} answers {status}: {told[:300].decode(errors='replace')}"
                return True
            if status != 200:
                return False
            shown = _decoder.decode(told)
            first = shown[0] if isinstance(shown, list) else shown
        except (*UNREACHABLE, msgspec.DecodeError, ValueError, IndexError):
            return False
        ids, adapter = first.token_ids[: len(first.token_ids) - drop], pod.adapter(first.model or fields.get("model"))
        kept.tokens, kept.until = Tokens(ids, adapter), time.monotonic() + self._ttl_s
        return True


def _size(kept: _Kept) -> int:
    return 0 if kept.tokens is None else len(kept.tokens.ids)
