"""KV events: what routers that follow a server's stream learn of cartridges, in both modes, from two servers of a fleet."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import msgspec
import pytest
import zmq
from serving import serving
from waiting import until
from wards import MODEL, Asker, patients, register, write_ward

from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.serve.launch import free_port
from lmcache_cartridge.serve.processes import SMALL
from lmcache_cartridge.settings import SECRET_VARIABLE, from_mapping

with warnings.catch_warnings():  # torch's, while vLLM is imported
    warnings.simplefilter("ignore")
    from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch


P, BLOCK = 1024, 128


class Stream:
    """One server's events from the first one on, in order, none missing."""

    def __init__(self, port: int) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._decoder, self._events = msgspec.msgpack.Decoder(type=KVEventBatch), []

    def events(self) -> list[Any]:
        """Return those so far."""
        while self._socket.poll(200):
            self._events += self._decoder.decode(self._socket.recv_multipart()[2]).events
        return self._events

    def blocks(self, medium: str) -> dict[int, BlockStored]:
        """Return what an index has of a medium now, by block hash."""
        held: dict[int, BlockStored] = {}
        for event in self.events():
            if event.medium == medium and isinstance(event, BlockStored):
                held |= dict.fromkeys(event.block_hashes, event)
            elif event.medium == medium and isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    held.pop(block_hash, None)
        return held

    def close(self) -> None:
        self._socket.close()


class Server(NamedTuple):
    asker: Asker
    stream: Stream

    def step(self) -> None:
        """Have the engine make a step: events go with one."""
        self.asker.complete([5, 6, 7], tokens=2)

    def tell(self, seen: Callable[[Stream], bool]) -> None:
        """Make steps until the stream has told something."""

        def found() -> bool:
            self.step()
            return seen(self.stream)

        until(found)


@pytest.fixture(scope="module")
def ids():
    return write_ward(CausalModel(MODEL), patients(0, 4), "a").ids[:P]


@pytest.fixture(scope="module")
def servers(tmp_path_factory, ids):
    """Two servers, one in each mode, with homes of their own and one secret."""
    found, model = {}, CausalModel(MODEL)
    with ExitStack() as stack:
        for mode in ("in-process", "multiprocess"):
            home = tmp_path_factory.mktemp(mode)
            settings = from_mapping(
                {"home": home, "disk_dir": home / "disk", "disk_local": True, "admin": True, "kv_events": True}
            )
            for kind in ("prefill", "trained"):
                register(model, settings, ids if kind == "prefill" else ids[:512], name=kind, kind=kind)
            port = free_port()
            events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}"}
            given = {"on_load_failure": "fail", "mode": mode, "environment": SMALL | {SECRET_VARIABLE: "s" * 40}}
            stream = Stream(port)
            stack.callback(stream.close)
            server = serving(settings, home / "log", MODEL, "--kv-events-config", json.dumps(events), **given)
            found[mode] = Server(stack.enter_context(server), stream)
        yield found


@pytest.mark.parametrize("mode", ["in-process", "multiprocess"])
@pytest.mark.parametrize("kind", ["prefill", "trained"])
def test_what_the_tiers_hold_is_told_until_it_is_evicted(servers, ids, mode, kind):
    server = servers[mode]
    server.asker.complete("x", [kind])
    positions = P if kind == "prefill" else 512
    identity = server.asker.http.post("/v1/cartridges/tokens", json={"cartridges": [kind]}).json()["token_ids"]
    assert (identity == ids) == (kind == "prefill")

    def told(medium: str) -> bool:
        return sum(e.token_ids == identity for e in server.stream.blocks(medium).values()) == positions // BLOCK

    for medium in ("CPU", "STORAGE"):
        server.tell(lambda _, medium=medium: told(medium))
    assert all(e.block_size == BLOCK for e in server.stream.blocks("CPU").values())
    server.asker.http.post(f"/v1/cartridges/{kind}/evict").raise_for_status()
    server.tell(lambda _: not told("CPU") and not told("STORAGE"))


def test_two_servers_with_one_secret_name_a_cartridges_blocks_alike(servers):
    hashes = []
    for server in servers.values():
        server.asker.complete("where is it", ["prefill"])
        server.step()
        (salted,) = {
            tuple(e.block_hashes)
            for e in server.stream.events()
            if isinstance(e, BlockStored)
            and e.medium == "GPU"
            and e.extra_keys
            and e.extra_keys[0]
            and len(e.token_ids) >= P
        } or {()}
        hashes.append(salted)
    assert len(hashes[0]) >= P // BLOCK
    assert hashes[0] == hashes[1]
