"""Tokens: what a server computes for a request, asked of a server itself: its tokenizer, template and cartridges are there.

vLLM's `/render` routes expand cartridges as the request's own route does. What a request's names stand for is remembered.
"""

from __future__ import annotations

import asyncio
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


class _Refused(NoTokens):
    """A server does not take the request."""


@dataclass(slots=True)
class _Kept:
    """What is known of the tokens of a request's cartridges."""

    found: Tokens | NoTokens
    until: float = 0.0
    asking: asyncio.Task[None] | None = None


class _Shown(msgspec.Struct):
    """What `/render` says."""

    token_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]]
    model: str | None = None


_decoder = msgspec.json.Decoder(_Shown | list[_Shown])


class Renderer:
    """Asks servers for tokens. One event loop."""

    def __init__(self, session: aiohttp.ClientSession, ttl_s: float) -> None:
        """Tokens of names are remembered for `ttl_s`, and given out for longer while they are asked for again."""
        self._session, self._ttl_s = session, ttl_s
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        self._turn = 0

    async def of_names(self, fields: Mapping[str, Any], headers: Mapping[str, str], pods: Sequence[Pod]) -> Tokens:
        """Return the tokens of a request's cartridges, without its prompt's. Waits only for what was never asked.

        Raises `NoTokens` with a server's own words where it refuses them, or where none answers.
        """
        naming = {name: fields[name] for name in fields if name in NAMING or "label" in name}
        key = msgspec.json.encode([naming, [headers.get(name) for name in _PASSED]])
        kept = self._kept.setdefault(key, _Kept(NoTokens("")))
        self._kept.move_to_end(key)
        if kept.until < time.monotonic() and kept.asking is None:
            body = naming | {"prompt": [_PROBE], "max_tokens": 1}
            kept.asking = asyncio.create_task(self._refresh(kept, body, headers, pods))
        if kept.asking is not None and isinstance(kept.found, NoTokens):
            await asyncio.shield(kept.asking)
        if isinstance(kept.found, NoTokens):
            raise NoTokens(str(kept.found))
        return kept.found

    async def _refresh(
        self, kept: _Kept, body: dict[str, Any], headers: Mapping[str, str], pods: Sequence[Pod]
    ) -> None:
        try:
            found = await self.of_request("/v1/completions", body, headers, pods)
            kept.found, kept.until = Tokens(found.ids[:-1], found.adapter), time.monotonic() + self._ttl_s
        except NoTokens as error:
            if isinstance(error, _Refused) or isinstance(kept.found, NoTokens):
                kept.found, kept.until = error, time.monotonic() + _REFUSED_S * isinstance(error, _Refused)
        finally:
            kept.asking = None
        while sum(map(_size, self._kept.values())) > _MAX_KEPT_TOKENS:
            self._kept.popitem(last=False)

    async def of_request(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str], pods: Sequence[Pod]
    ) -> Tokens:
        """Return the tokens of a whole request, of several prompts the first's, by the first server that answers."""
        self._turn += 1
        headers = {name: headers[name] for name in _PASSED if name in headers}
        for number in range(len(pods)):
            pod = pods[(self._turn + number) % len(pods)]
            try:
                async with self._session.post(f"{pod.url}{path}/render", json=body, headers=headers) as response:
                    status, told = response.status, await response.read()
                if status == 200:
                    shown = _decoder.decode(told)
                    first = shown[0] if isinstance(shown, list) else shown
                    return Tokens(first.token_ids, pod.adapter(first.model or body.get("model")))
            except (*UNREACHABLE, msgspec.DecodeError, ValueError, IndexError):
                continue
            if 400 <= status < 500 and status not in _LATER:
                raise _Refused(f"{pod.name} answers {status}: {told[:300].decode(errors='replace')}")
        raise NoTokens("no server answers what a request's tokens are")


def _size(kept: _Kept) -> int:
    return _ENTRY_TOKENS + (len(kept.found.ids) if isinstance(kept.found, Tokens) else 0)
