"""Tokens: what a server computes for a request, asked of a server itself: its tokenizer, template and cartridges are there.

vLLM's `/render` routes expand cartridges as the request's own route does. What a request's names stand for is remembered.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
_MAX_KEPT_TOKENS = 16 << 20
"""How many tokens of requests are remembered, of 4 bytes."""
_ENTRY_TOKENS = 256
"""What an entry counts beside its tokens."""
_REFUSED_S = 1.0
"""How long a server's refusal is believed."""


@dataclass(slots=True)
class _Kept:
    """What is known of the tokens of a request's cartridges."""

    found: Tokens | NoTokens
    until: float = 0.0
    asking: asyncio.Task[None] | None = None


class _Shown(msgspec.Struct):
    """What `/render` says."""

    token_ids: Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]], msgspec.Meta(min_length=1)]
    model: str | None = None


_decode = msgspec.json.Decoder(tuple[_Shown]).decode


class Renderer:
    """Asks servers for tokens. One event loop."""

    def __init__(self, session: aiohttp.ClientSession, ttl_s: float) -> None:
        """Tokens of names are remembered for `ttl_s`, and given out for longer while they are asked for again."""
        self._session, self._ttl_s = session, ttl_s
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()

    async def of_names(self, fields: Mapping[str, Any], headers: Mapping[str, str], pods: Sequence[Pod]) -> Tokens:
        """Return the tokens of a request's cartridges, without its prompt's. Waits only for what was never asked.

        Raises `NoTokens` with a server's own words where it refuses them, or where none answers.
        """
        naming = {name: fields[name] for name in fields if name in NAMING or "label" in name}
        headers = {name: headers[name] for name in _PASSED if name in headers}
        key = msgspec.json.encode([naming, headers])
        kept = self._kept.setdefault(key, _Kept(NoTokens("")))
        self._kept.move_to_end(key)
        if kept.until < time.monotonic() and kept.asking is None:
            kept.asking = asyncio.create_task(self._refresh(kept, naming, headers, pods))
        if kept.asking is not None and isinstance(kept.found, NoTokens):
            await asyncio.shield(kept.asking)
        if isinstance(kept.found, NoTokens):
            raise NoTokens(str(kept.found))
        return kept.found

    async def _refresh(self, kept: _Kept, naming: dict[str, Any], headers: dict[str, str], pods: Sequence[Pod]) -> None:
        try:
            found = await self._ask(naming | {"prompt": [_PROBE], "max_tokens": 1}, headers, pods)
            if found is not None:
                kept.found = found
                kept.until = time.monotonic() + (self._ttl_s if isinstance(found, Tokens) else _REFUSED_S)
            elif isinstance(kept.found, NoTokens):
                kept.found = NoTokens("no server answers what a request's tokens are")
        finally:
            kept.asking = None
        while sum(map(_size, self._kept.values())) > _MAX_KEPT_TOKENS:
            self._kept.popitem(last=False)

    async def _ask(
        self, body: dict[str, Any], headers: dict[str, str], pods: Sequence[Pod]
    ) -> Tokens | NoTokens | None:
        """Return what the first server that answers says, without the prompt's own token; None if none does."""
        for pod in random.sample(pods, len(pods)):
            try:
                url = f"{pod.url}/v1/completions/render"
                async with self._session.post(url, json=body, headers=headers) as response:
                    status, told = response.status, await response.read()
                if status == 200:
                    [shown] = _decode(told)
                    return Tokens(shown.token_ids[:-1], pod.adapter(shown.model or body.get("model")))
            except (*UNREACHABLE, msgspec.DecodeError, ValueError):
                continue
            if 400 <= status < 500 and status not in _LATER:
                return NoTokens(f"{pod.name} answers {status}: {told[:300].decode(errors='replace')}")
        return None


def _size(kept: _Kept) -> int:
    return _ENTRY_TOKENS + (len(kept.found.ids) if isinstance(kept.found, Tokens) else 0)
