"""Marks: where in a prompt they are, whatever the template."""

from __future__ import annotations

import asyncio
from typing import Any

from blocks import quietly
from pydantic import BaseModel

with quietly():
    from lmcache_cartridge.serve.marks import find

MARK = {"cache_control": {"type": "ephemeral"}}
HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


class Asked(BaseModel):
    messages: list[Any]


def block(text: str, mark: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "text", "text": text} | (mark or {})


async def render(request: Asked) -> Any:
    """Render a token for each character, less spaces at a turn's ends; no conversation without a user."""
    if all(turn["role"] != "user" for turn in request.messages):
        raise ValueError("no user")
    prompt = "tools:"
    for turn in request.messages:
        content = turn["content"]
        text = content if isinstance(content, str) else "+".join(each["text"] for each in content)
        prompt += f"<{turn['role']}>{text.strip()}</>"
    return [], [{"prompt_token_ids": [*map(ord, prompt + "<assistant>")]}]


def marks(*messages: Any, chunk: int = 1, **body: Any) -> list[tuple[str, float]]:
    """Return the beginnings that are marked and their times."""
    body |= {"messages": list(messages)}
    system = [{"role": "system", "content": body["system"]}] if "system" in body else []
    _, (prompt,) = asyncio.run(render(Asked(messages=system + body["messages"])))
    ids = prompt["prompt_token_ids"]
    found = asyncio.run(find(render, Asked(messages=[]), body, ids, chunk, is_anthropic=False))
    return [("".join(map(chr, ids[:end])), ttl_s) for end, ttl_s in found]


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


QUESTION = {"role": "user", "content": "why?"}


def test_a_mark_ends_behind_its_block_and_before_the_next():
    system = [block("one", MARK), block("two")]
    assert marks(QUESTION, system=system) == [("tools:<system>one+", 300)], "what joins blocks is before the next"
    system = [block("one"), block("two ", HOUR)]
    assert marks(QUESTION, system=system) == [("tools:<system>one+two", 3600)], "the template cuts the space"
    assert marks(QUESTION, system=system, chunk=10) == [("tools:<system>one+two"[:20], 3600)]
    assert marks(QUESTION, system=system, chunk=100) == [], "it has no chunk"


def test_a_mark_at_the_end_is_before_what_the_template_adds():
    answer = {"role": "assistant", "content": "so"}
    found = marks(QUESTION, answer, user(block("x", HOUR)))
    assert found == [("tools:<user>why?</><assistant>so</><user>x", 3600)]
