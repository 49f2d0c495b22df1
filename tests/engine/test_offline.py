"""What the offline engine asks of its `LLM` while it admits cartridges, and what becomes of that where a wait runs out."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from blocks import quietly

with quietly():
    from lmcache_cartridge.serve import offline


class Llm:
    """Answers `collective_rpc` when it may, and notes in which threads it was asked."""

    def __init__(self) -> None:
        self.llm_engine = SimpleNamespace(vllm_config=SimpleNamespace(model_config=None))
        self.begun, self.may_answer = threading.Event(), threading.Event()
        self.threads: list[threading.Thread] = []

    def collective_rpc(self, method: str) -> list[str]:
        self.threads.append(threading.current_thread())
        self.begun.set()
        assert self.may_answer.wait(30)
        if method == "interrupt":
            raise KeyboardInterrupt
        return [method]


def test_a_call_that_outlasts_whoever_waits_for_it_or_is_interrupted_leaves_an_engine_that_answers():
    llm: Any = Llm()
    engine = offline._Engine(llm)

    async def impatient() -> str:
        asking = [asyncio.create_task(engine.collective_rpc(name)) for name in ("first", "second")]
        await asyncio.to_thread(llm.begun.wait, 30)
        for each in asking:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        llm.may_answer.set()
        return "gave up"

    assert engine.run(impatient) == "gave up"
    assert engine.run(lambda: engine.collective_rpc("third")) == ["third"]
    assert llm.threads == [threading.current_thread()] * 2, "what nobody waited for any more was not begun"
    with pytest.raises(KeyboardInterrupt):
        engine.run(lambda: engine.collective_rpc("interrupt"))
    assert engine.run(lambda: engine.collective_rpc("next")) == ["next"]
