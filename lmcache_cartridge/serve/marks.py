"""Marks: where a client says `cache_control` in a request, as Anthropic's clients do, the prompt up to there becomes a context."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from os.path import commonprefix
from typing import Any, NamedTuple

from ..engine import host_api

FIELD = "cache_control"
_MOST = 4
"""Marks of one request that count, the last ones."""
_TTL_S = {"5m": 300.0, "1h": 3600.0}
_OTHER = {"type": "text", "text": "\ue000"}
"""What no prompt goes on with."""


class Mark(NamedTuple):
    """A beginning of a prompt that is to be kept."""

    tokens: int
    ttl_s: float


def _ttl_s(block: Any) -> float | None:
    control = block.get(FIELD) if isinstance(block, Mapping) else None
    if not isinstance(control, Mapping) or control.get("type") != "ephemeral":
        return None
    return _TTL_S.get(str(control.get("ttl") or "5m"))


def _ended(turns: list[Any]) -> Iterator[tuple[float, list[Any]]]:
    """Yield for each mark its time, and the conversation going on with something else behind it.

    The next turn is left: templates may refuse a conversation of a system message alone.
    """
    for i, turn in enumerate(turns):
        blocks = turn.get("content")
        for j, block in enumerate(blocks if isinstance(blocks, list) else ()):
            if (ttl_s := _ttl_s(block)) is not None:
                yield ttl_s, [*turns[:i], {**turn, "content": [*blocks[: j + 1], _OTHER]}, *turns[i + 1 : i + 2]]


async def find(
    render: Callable[[Any], Awaitable[Any]],
    request: Any,
    body: Mapping[str, Any],
    ids: list[int],
    chunk_tokens: int,
    *,
    is_anthropic: bool,
) -> list[Mark]:
    """Return the marks of a request whose prompt has these `ids`, the shortest first, each cut to whole chunks.

    `body` is the request as it came, `request` what vLLM made of it to `render`. Where a prompt that goes on otherwise behind a
    mark begins to differ is its place, whatever the template. A mark where that cannot be rendered is none.
    """
    turns, found = list(body["messages"]), dict[int, float]()
    if body.get("system"):
        turns.insert(0, {"role": "system", "content": body["system"]})
    for ttl_s, ended in [*_ended(turns)][-_MOST:]:
        with suppress(Exception):
            messages = host_api.chat_messages(body, ended) if is_anthropic else ended
            _, (other,) = await render(request.model_copy(update={"messages": messages}))
            end = min(len(commonprefix([ids, other["prompt_token_ids"]])), len(ids) - 1)
            end -= end % chunk_tokens
            found[end] = max(ttl_s, found.get(end, 0.0))
    return [Mark(*mark) for mark in sorted(found.items()) if mark[0]]
