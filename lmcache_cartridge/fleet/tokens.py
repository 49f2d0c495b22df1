"""Tokens: what a server computes for a request, asked of a server itself: its tokenizer, template and cartridges are there.

vLLM's `/render` routes expand cartridges as the request's own route does, and where they are not enabled `/tokenize` does so
for completions and chats. What a name stands for is remembered.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Annotated, Any, NamedTuple

import aiohttp
import msgspec

from ..errors import NoTokens
from .index import Tokens
from .pods import UNREACHABLE, Pod

ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
"""Those that have `/render` behind them (vLLM 0.32)."""
NAMING = ("cartridges", "kv_transfer_params", "model")
_PASSED = ("authorization", "x-cartridges", "x-api-key")
_PROBE, _PROBE_TEXT = 5, {"prompt": "x", "add_special_tokens": False}
"""A token id of every model, as a prompt to put cartridges before; and a text."""
_LATER = (408, 425, 429)
_NOT_ENABLED = 403
"""What `/render` answers without `--enable-scale-out` (vLLM 0.32)."""
_TEXTS = ("prompt", "messages", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt",
          "continue_final_message", "documents")  # fmt: skip
"""Fields of requests that `/tokenize` has too."""
_MAX_KEPT, _MAX_KEPT_TOKENS = 10_000, 16 << 20
"""Requests and names whose tokens are remembered, and how many tokens, of 4 bytes."""
_REFUSED_S = 1.0
"""How long a server's refusal of a name is believed."""


class _Kept(NamedTuple):
    tokens: Tokens | None
    problem: str
    until: float
    is_answer: bool = False
    """Whether a server said so."""


def _size(kept: _Kept) -> int:
    return 0 if kept.tokens is None else len(kept.tokens.ids)


_Ids = list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]]


class _Shown(msgspec.Struct):
    """What `/render` says, or `/tokenize`."""

    token_ids: _Ids = []
    tokens: _Ids = []
    model: str | None = None

    @property
    def ids(self) -> list[int]:
        return self.token_ids or self.tokens


_shown, _several = msgspec.json.Decoder(_Shown), msgspec.json.Decoder(list[_Shown])


class Renderer:
    """Asks servers for tokens. One event loop."""

    def __init__(self, session: Callable[[], aiohttp.ClientSession], ttl_s: float) -> None:
        """Tokens are remembered for `ttl_s`; those of a name are given out for longer, while they are asked for again."""
        self._session, self._ttl_s = session, ttl_s
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        self._asking: dict[bytes, asyncio.Task[_Kept]] = {}
        self._tokens = 0
        self.asked = 0
        """Requests to servers so far."""

    async def of_names(self, fields: Mapping[str, Any], headers: Mapping[str, str], pods: Sequence[Pod]) -> Tokens:
        """Return the tokens of a request's cartridges, without its prompt's. Waits only for what was never asked.

        Raises `NoTokens` with a server's own words where it refuses them, or where none answers.
        """
        probe = {name: fields[name] for name in fields if _names(name)}
        body = msgspec.json.encode(probe | {"prompt": [_PROBE], "max_tokens": 1})
        return await self._remembered("/v1/completions", headers, body, pods, drop=1, stale=True)

    async def of_request(self, path: str, headers: Mapping[str, str], body: bytes, pods: Sequence[Pod]) -> Tokens:
        """Return the tokens of a whole request; of several prompts the first's. Raises as `of_names`."""
        if path not in ROUTES:
            raise NoTokens(f"{path} has no tokens; {', '.join(ROUTES)} have")
        return await self._remembered(path, headers, body, pods, drop=0, stale=False)

    async def _remembered(
        self, path: str, headers: Mapping[str, str], body: bytes, pods: Sequence[Pod], *, drop: int, stale: bool
    ) -> Tokens:
        passed = {name: headers[name] for name in _PASSED if name in headers}
        key = blake2b(msgspec.json.encode([path, passed, drop]) + body, digest_size=16).digest()
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
        if kept is None or kept.until < time.monotonic():
            task = self._asking.get(key)
            if task is None:
                task = asyncio.create_task(self._ask(key, path, passed, body, pods, drop))
                self._asking[key] = task
            if kept is None or kept.tokens is None or not stale:
                kept = await asyncio.shield(task)
        if kept.tokens is None:
            raise NoTokens(kept.problem)
        return kept.tokens

    async def _ask(
        self, key: bytes, path: str, headers: Mapping[str, str], body: bytes, pods: Sequence[Pod], drop: int
    ) -> _Kept:
        """Ask one server after the other until one answers, and remember what it says."""
        kept = _Kept(None, "no server answers what a request's tokens are", time.monotonic())
        try:
            for turn in range(len(pods)):
                pod = pods[(self.asked + turn) % len(pods)]
                if (found := await self._ask_one(pod, path, headers, body, drop)) is not None:
                    kept = found
                    break
            self.asked += 1
            if (before := self._kept.get(key)) is not None and kept.tokens is None and not kept.is_answer:
                kept = before
            self._keep(key, kept)
        finally:
            del self._asking[key]
        return kept

    def _keep(self, key: bytes, kept: _Kept) -> None:
        before = self._kept.pop(key, None)
        if before is not None:
            self._tokens -= _size(before)
            if before.tokens is not None and before.tokens == kept.tokens:
                kept = kept._replace(tokens=before.tokens)  # with what was hashed of it
        self._kept[key] = kept
        self._tokens += _size(kept)
        while len(self._kept) > _MAX_KEPT or self._tokens > _MAX_KEPT_TOKENS:
            self._tokens -= _size(self._kept.popitem(last=False)[1])

    async def _ask_one(self, pod: Pod, path: str, headers: Mapping[str, str], body: bytes, drop: int) -> _Kept | None:
        """Return what a server says; None where it says nothing of use."""
        try:
            status, told = await self._post(pod, f"{path}/render", headers, body)
            if status == _NOT_ENABLED and (fields := _as_text(path, body, drop)) is not None:
                status, told = await self._post(pod, "/tokenize", headers, msgspec.json.encode(fields))
                if status == 200 and drop:
                    base = next((name for name, parent in pod.models.items() if parent is None), None)
                    plain = _PROBE_TEXT | ({"model": base} if base else {})
                    _, alone = await self._post(pod, "/tokenize", headers, msgspec.json.encode(plain))
                    drop = len(_shown.decode(alone).ids)
            if 400 <= status < 500 and status not in _LATER:
                words = f"{pod.name} answers {status}: {told[:300].decode(errors='replace')}"
                return _Kept(None, words, time.monotonic() + _REFUSED_S, True)
            if status != 200:
                return None
            shown = _several.decode(told)[0] if told.startswith(b"[") else _shown.decode(told)
        except (*UNREACHABLE, msgspec.DecodeError, ValueError, IndexError):
            return None
        ids = shown.ids[: len(shown.ids) - drop]
        model = shown.model or _fields(body).get("model")
        return _Kept(Tokens(ids, pod.adapter(model)), "", time.monotonic() + self._ttl_s, True)

    async def _post(self, pod: Pod, route: str, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
        sent = {**headers, "content-type": "application/json"}
        async with self._session().post(pod.url + route, data=body, headers=sent) as response:
            return response.status, await response.read()


def _names(field: str) -> bool:
    """Whether a request's field may name cartridges."""
    return field in NAMING or "label" in field


def _fields(body: bytes) -> dict[str, Any]:
    fields = msgspec.json.decode(body)
    return fields if isinstance(fields, dict) else {}


def _as_text(path: str, body: bytes, drop: int) -> dict[str, Any] | None:
    """Return a request to `/tokenize` that shows what one to `/render` would; None where none does."""
    fields = {name: value for name, value in _fields(body).items() if name in _TEXTS or _names(name)}
    if drop:
        return fields | _PROBE_TEXT
    if path == "/v1/chat/completions":
        return fields
    return fields if path == "/v1/completions" and isinstance(fields.get("prompt"), str) else None
