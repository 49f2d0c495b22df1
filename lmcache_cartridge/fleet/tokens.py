"""Tokens: what a server computes for a request, asked of a server itself: its tokenizer, template and cartridges are there.

vLLM's `/render` routes expand cartridges as the request's own route does. What a request's names stand for is remembered.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
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
TTL_S = 60.0
"""How long the tokens of a name are used before a server is asked again."""
_MAX_KEPT_TOKENS = 16 << 20
"""How many tokens of requests are remembered, of 4 bytes."""
_ENTRY_TOKENS = 256
"""What an entry counts beside its tokens."""


class _Shown(msgspec.Struct):
    """What `/render` says."""

    token_ids: Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]], msgspec.Meta(min_length=1)]


_decode = msgspec.json.Decoder(tuple[_Shown]).decode


class Renderer:
    """Asks servers for tokens. One event loop."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._kept: OrderedDict[bytes, tuple[float, asyncio.Task[Tokens]]] = OrderedDict()

    async def of_names(self, fields: Mapping[str, Any], headers: Mapping[str, str], pods: Sequence[Pod]) -> Tokens:
        """Return the tokens of a request's cartridges, without its prompt's. One question is asked for all who wait.

        Raises `NoTokens` with a server's own words where it refuses them, or where none answers.
        """
        naming = {name: fields[name] for name in fields if name in NAMING or "label" in name}
        headers = {name: headers[name] for name in _PASSED if name in headers}
        key = msgspec.json.encode([naming, headers])
        until, asking = self._kept.get(key, (0.0, None))
        if asking is None or (asking.done() and until < time.monotonic()):
            asking = asyncio.create_task(self._ask(naming | {"prompt": [_PROBE], "max_tokens": 1}, headers, pods))
            self._kept[key] = time.monotonic() + TTL_S, asking
        self._kept.move_to_end(key)
        try:
            found = await asyncio.shield(asking)
        except NoTokens:
            self._kept.pop(key, None)  # it may be made by the next request
            raise
        while sum(_size(each) for _, each in self._kept.values()) > _MAX_KEPT_TOKENS:
            self._kept.popitem(last=False)
        return found

    async def _ask(self, body: dict[str, Any], headers: dict[str, str], pods: Sequence[Pod]) -> Tokens:
        """Return what the first server that answers says, without the prompt's own token. Raises `NoTokens`."""
        for pod in random.sample(pods, len(pods)):
            try:
                url = f"{pod.url}/v1/completions/render"
                async with self._session.post(url, json=body, headers=headers) as response:
                    status, told = response.status, await response.read()
                if status == 200:
                    [shown] = _decode(told)
                    return Tokens(shown.token_ids[:-1])
            except (*UNREACHABLE, msgspec.DecodeError, ValueError):
                continue
            if 400 <= status < 500 and status not in _LATER:
                raise NoTokens(f"{pod.name} answers {status}: {told[:300].decode(errors='replace')}")
        raise NoTokens("no server answers what a request's tokens are")


def _size(asking: asyncio.Task[Tokens]) -> int:
    is_there = asking.done() and asking.exception() is None
    return _ENTRY_TOKENS + (len(asking.result().ids) if is_there else 0)
