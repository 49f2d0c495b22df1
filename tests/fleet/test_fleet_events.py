"""Following servers' KV events over real sockets, told by vLLM's own publisher: gaps, restarts, and what is gone for good."""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from lmcache_cartridge.fleet.events import Counts, Follower
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

    def tell(self, *batches: list[Any], behind_s: float = 0.0) -> None:
        assert self._publisher is not None
        for events in batches:
            self._publisher.publish(KVEventBatch(ts=time.time() - behind_s, events=events))

    def settle(self) -> None:
        """Wait until all is published, and is in the buffer."""
        assert self._publisher is not None
        self._publisher._event_queue.join()

    def drop(self, events: list[Any]) -> None:
        """Publish a batch that does not arrive, as when a subscriber's queue is full."""
        self.settle()
        publisher = self._publisher
        assert publisher is not None
        batch = KVEventBatch(ts=time.time(), events=events, data_parallel_rank=0)
        publisher._buffer.append((next(publisher._seq_gen), msgspec.msgpack.encode(batch)))


@pytest.fixture
def engine(tmp_path):
    engine = Engine(tmp_path)
    yield engine
    engine.close()


@asynccontextmanager
async def following(
    engine: Engine, *, verify_s: float = 0.3, timeout_s: float = 1.0, is_there: bool = True
) -> AsyncIterator[Follower]:
    follower = Follower(
        Index(), Source(0), engine.events, engine.replay, name="pod", timeout_s=timeout_s, verify_s=verify_s
    )  # fmt: skip
    task = asyncio.create_task(follower.follow())
    try:
        await seen(lambda: follower.known or task.done() or not is_there)
        yield follower
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def seen(done: Callable[[], Any]) -> None:
    """Wait until something is so; fail if it never is."""
    async with asyncio.timeout(60):
        while not done():
            await asyncio.sleep(0.005)


def known(follower: Follower, most: int = 60) -> set[int]:
    """Return whose prompts are in the index as a whole, and check that nothing else is there."""
    found = {n for n in range(most) if follower.index.matches(Tokens(ids_of(n))).get(0, {}).get("gpu") == 4 * SIZE}
    assert follower.index.blocks().get((0, "gpu"), 0) == 4 * len(found)
    return found


async def test_what_was_told_before_and_what_is_told_now_is_known(engine):
    engine.tell([stored(1)], [stored(2), removed(1)])
    async with following(engine) as follower:
        await seen(lambda: known(follower) == {2})
        engine.tell([AllBlocksCleared()], [stored(5)])
        await seen(lambda: known(follower) == {5})
        assert follower.counts == Counts()


async def test_a_batch_that_did_not_arrive_is_noticed_and_had_from_the_buffer(engine):
    async with following(engine, verify_s=60) as follower:
        engine.tell([stored(1)], [stored(2)])
        await seen(lambda: known(follower) == {1, 2})
        engine.drop([removed(1)])
        engine.drop([stored(3)])
        engine.tell([stored(4)])
        await seen(lambda: known(follower) == {2, 3, 4})
        assert follower.counts == Counts()


async def test_a_last_batch_that_did_not_arrive_is_found_without_another(engine):
    async with following(engine) as follower:
        engine.tell([stored(1)])
        await seen(lambda: known(follower) == {1})
        engine.drop([removed(1)])
        await seen(lambda: known(follower) == set())
        assert follower.counts == Counts()


@pytest.mark.parametrize("more", [0, 1, 2, 6])
async def test_a_server_that_was_restarted_holds_nothing_of_before(engine, more):
    """Whether the new process has told nothing yet, or fewer batches than the one before it, as many, or more."""
    async with following(engine) as follower:
        engine.tell([stored(1)], [stored(2)])
        await seen(lambda: known(follower) == {1, 2})
        engine.close()
        engine.start()
        engine.tell(*[[stored(10 + i)] for i in range(more)])
        await seen(lambda: known(follower) == set(range(10, 10 + more)))
        assert follower.counts == Counts()


async def test_a_restart_is_seen_while_events_come_even_where_the_new_clock_is_behind(engine):
    """It never pauses, and its numbers are those of batches that the one before it has told."""
    async with following(engine, verify_s=1.0) as follower:
        engine.tell(*[[stored(1)]] * 999, [stored(2)])
        await seen(lambda: known(follower) == {1, 2})
        engine.close()
        engine.start()
        told = 0

        def is_seen() -> bool:
            nonlocal told
            engine.tell([stored(10 + told)], behind_s=3600)
            told += 1
            assert told < 1000, "its numbers go on where the old ones ended, and it was not noticed"
            return not follower.index.matches(Tokens(ids_of(1)))

        await seen(is_seen)
        await seen(lambda: known(follower, 1100) == set(range(10, 10 + told)))
        assert follower.counts == Counts()


async def test_what_the_buffer_no_longer_has_is_said_until_the_server_clears_its_blocks(tmp_path):
    engine = Engine(tmp_path, buffer=4)
    engine.tell(*[[stored(i)] for i in range(10)])
    engine.settle()
    async with following(engine) as follower:
        await seen(lambda: known(follower) == {6, 7, 8, 9})
        assert follower.counts.lost == 1
        for i in range(20, 26):  # more than the buffer has
            engine.drop([stored(i)])
        await seen(lambda: known(follower) == {22, 23, 24, 25})
        assert follower.counts.lost == 2
        engine.tell([AllBlocksCleared()], [stored(30)])
        await seen(lambda: known(follower) == {30})
    engine.close()


async def test_a_service_that_was_restarted_knows_more_than_a_burst_and_leaves_nothing_when_it_ends(engine):
    for i in range(1500):  # vLLM's socket drops what exceeds 1,000 of a burst
        engine.tell([stored(i)] + ([removed(i - 7)] if i >= 7 and i % 3 else []))
    engine.settle()
    async with following(engine) as follower:
        gone = {i - 7 for i in range(7, 1500) if i % 3}
        await seen(lambda: known(follower, 1500) == {*range(1500)} - gone)
        assert follower.counts == Counts()
    assert known(follower) == set()


async def test_what_is_no_event_is_counted_and_skipped(engine):
    with zmq.Context.instance().socket(zmq.PUB) as socket:
        async with following(engine) as follower:
            engine.close()
            socket.bind(engine.events)
            batch = msgspec.msgpack.encode([0.0, [{"type": "Else"}, {"type": "AllBlocksCleared"}, stored(1)], 0])
            frames = [[b"t", i.to_bytes(8, "big"), part] for i, part in enumerate([b"\xc1", b"", batch])]

            def sent() -> bool:
                for one in [[b"alone"], [b"t", b"short", b""], *frames]:
                    socket.send_multipart(one)
                return follower.counts.malformed >= 5

            await seen(sent)


async def test_a_server_that_is_not_there_yet_is_followed_when_it_comes(engine):
    engine.close()
    async with following(engine, timeout_s=0.1, verify_s=0.2, is_there=False) as follower:
        await asyncio.sleep(0.3)
        assert not follower.known
        engine.start()
        engine.tell([stored(1)])
        await seen(lambda: follower.known and known(follower) == {1})
