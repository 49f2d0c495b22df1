"""Marks: where in a prompt they are, whatever the template."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
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


def marks(body: dict[str, Any], chunk: int = 1) -> list[tuple[str, float]]:
    """Return the beginnings that are marked and their times."""
    _, (prompt,) = asyncio.run(render(Asked(messages=_turns(body))))
    ids = prompt["prompt_token_ids"]
    found = asyncio.run(find(render, Asked(messages=[]), body, ids, chunk, is_anthropic=False))
    return [("".join(map(chr, ids[:end])), ttl_s) for end, ttl_s in found]


def _turns(body: dict[str, Any]) -> list[Any]:
    system = [{"role": "system", "content": body["system"]}] if "system" in body else []
    return system + body["messages"]


QUESTION = {"role": "user", "content": "why?"}


def test_a_mark_ends_behind_its_block_and_before_the_next():
    body = {"system": [block("one", MARK), block("two")], "messages": [QUESTION]}
    assert marks(body) == [("tools:<system>one+", 300)], "what joins blocks is before the next"
    body = {"system": [block("one"), block("two ", HOUR)], "messages": [QUESTION]}
    assert marks(body) == [("tools:<system>one+two", 3600)], "the template cuts the space"
    assert marks(body, 10) == [("tools:<system>one+two"[:20], 3600)]
    assert marks(body, 100) == [], "it has no chunk"


def test_a_mark_at_the_end_is_before_what_the_template_adds():
    body = {"messages": [{"role": "user", "content": [block("why?", MARK)]}]}
    assert marks(body) == [("tools:<user>why?", 300)]
    body = {
        "messages": [QUESTION, {"role": "assistant", "content": "so"}, {"role": "user", "content": [block("x", HOUR)]}]
    }
    assert marks(body) == [("tools:<user>why?</><assistant>so</><user>x", 3600)]


def test_of_many_marks_the_last_four_count():
    turns = [{"role": "user", "content": [block(str(n), MARK)]} for n in range(6)]
    assert [text[-1] for text, _ in marks({"messages": turns})] == ["2", "3", "4", "5"]


@pytest.mark.parametrize(
    "control", [None, "ephemeral", {}, {"type": "lasting"}, {"type": "ephemeral", "ttl": "2h"}, {"type": "ephemeral", "ttl": ["5m"]}]
)  # fmt: skip
def test_what_is_no_mark_is_passed_over(control):
    blocks = [block("a", {"cache_control": control}), block("b", MARK)]
    assert marks({"messages": [{"role": "user", "content": blocks}]}) == [("tools:<user>a+b", 300)]
