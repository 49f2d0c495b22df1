"""Following servers' KV events over real sockets, told by vLLM's own publisher: bursts, restarts, and what is gone for good."""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from lmcache_cartridge.fleet.events import Follower
from lmcache_cartridge.fleet.index import Index, Source, Tokens

with warnings.catch_warnings():  # torch's, while vLLM is imported
    warnings.simplefilter("ignore")
    from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, ZmqEventPublisher

SIZE = 16


def ids_of(number: int) -> list[int]:
    """Return the tokens of a prompt of four blocks."""
    return [(number * 31 + i) % 50_000 for i in range(4 * SIZE)]


def stored(number: int, medium: str = "GPU") -> BlockStored:
    names: list[Any] = [number * 4 + i for i in range(4)]
    return BlockStored(
        block_hashes=names, parent_block_hash=None, token_ids=ids_of(number), block_size=SIZE, lora_id=None, medium=medium,
        lora_name=None, extra_keys=[("salt",), None, None, None], group_idx=0,
    )  # fmt: skip


def removed(number: int) -> BlockRemoved:
    return BlockRemoved(block_hashes=[number * 4 + i for i in range(4)], medium="GPU", group_idx=0)


class Engine:
    """vLLM's publisher, as a server has it; it can be ended and begun again in the same place."""

    def __init__(self, directory: Path, *, buffer: int = 10_000) -> None:
        self.events, self.replay = f"ipc://{directory}/events", f"ipc://{directory}/replay"
        self._buffer, self._publisher = buffer, None
        self.start()

    def start(self) -> None:
        self._publisher = ZmqEventPublisher(0, self.events, self.replay, buffer_steps=self._buffer, topic="kv@pod@m")

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.shutdown()
        self._publisher = None

    def tell(self, *batches: list[Any]) -> None:
        """Publish batches, and wait until they are in the buffer."""
        assert self._publisher is not None
        for events in batches:
            self._publisher.publish(KVEventBatch(ts=time.time(), events=events))
        self._publisher._event_queue.join()


@pytest.fixture
def engine(tmp_path):
    engine = Engine(tmp_path)
    yield engine
    engine.close()


@pytest.fixture
def follower(engine):
    return Follower(Index(), Source(0), engine.replay, name="pod", timeout_s=1.0)


async def seen(done: Callable[[], Any]) -> None:
    """Wait until something is so; fail if it never is."""
    async with asyncio.timeout(60):
        while not done():
            await asyncio.sleep(0.005)


async def known(follower: Follower, most: int = 60) -> set[int]:
    """Return whose prompts are in the index as a whole, once all is told, and check that nothing else is there."""
    await follower.catch_up()
    found = {n for n in range(most) if follower.index.matches(Tokens(ids_of(n))).get(0, {}).get("gpu") == 4 * SIZE}
    assert follower.index.blocks().get((0, "gpu"), 0) == 4 * len(found)
    return found


@pytest.mark.parametrize("more", [0, 1, 2, 6])
async def test_a_server_that_was_restarted_holds_nothing_of_before(engine, follower, more):
    """Whether the new process has told nothing yet, or fewer batches than the one before it, as many, or more."""
    engine.tell([stored(1)], [stored(2), removed(1)])
    assert await known(follower) == await known(follower) == {2}
    engine.close()
    engine.start()
    engine.tell(*[[stored(10 + i)] for i in range(more)])
    assert await known(follower) == set(range(10, 10 + more))
    assert (follower.known, follower.lost) == (True, 0)


async def test_what_the_buffer_no_longer_has_is_said_until_the_server_clears_its_blocks(tmp_path):
    engine = Engine(tmp_path, buffer=4)
    follower = Follower(Index(), Source(0), engine.replay, name="pod", timeout_s=1.0)
    engine.tell(*[[stored(i)] for i in range(10)])
    assert (await known(follower), follower.lost) == ({6, 7, 8, 9}, 1)
    engine.tell(*[[stored(i)] for i in range(20, 26)])
    assert (await known(follower), follower.lost) == ({22, 23, 24, 25}, 2)
    engine.tell([AllBlocksCleared()], [stored(30)])
    assert (await known(follower), follower.lost) == ({30}, 2)
    engine.close()


async def test_more_than_a_burst_is_known(engine, follower):
    """vLLM's socket drops what exceeds 1,000 of a burst."""
    engine.tell(*([stored(i)] + ([removed(i - 7)] if i >= 7 and i % 3 else []) for i in range(1500)))
    assert await known(follower, 1500) == {*range(1500)} - {i - 7 for i in range(7, 1500) if i % 3}
    assert follower.lost == 0


async def test_what_is_no_event_is_counted_and_skipped(engine, follower):
    engine.tell([{"type": "Else"}, stored(1)])
    assert (await known(follower), follower.malformed) == ({1}, 1)
    engine.close()
    follower.forget()
    with zmq.Context.instance().socket(zmq.ROUTER) as router:
        router.bind(engine.replay)
        for frames, malformed in (([(b"short", b"")], 2), ([(bytes(8), b"\xc1"), (b"\xff" * 8, b"")], 3)):
            asking = asyncio.create_task(follower.catch_up())
            await seen(lambda: router.poll(0))
            client, *_ = router.recv_multipart()
            for frame in frames:
                router.send_multipart([client, b"", b"t", *frame])
            await asking
            assert (follower.malformed, follower.known) == (malformed, malformed == 3)


async def test_a_server_that_is_not_there_yet_is_followed_when_it_comes(engine, follower):
    engine.close()
    assert await known(follower) == set() and not follower.known
    engine.start()
    engine.tell([stored(1)])
    assert await known(follower) == {1} and follower.known
