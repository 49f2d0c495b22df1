"""The plugin in LMCache's own engine: a request gets exactly its cartridge's KV or a miss, and nothing is left owed."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from blocks import Blocks, objects, vllm_config
from inprocess import (
    CHUNK,
    Cartridge,
    LMCacheEngine,
    keys_of,
    lmcache_config,
    lmcache_engine,
    load,
    look_up,
    nothing_is_owed,
    plugin,
    prepare,
)  # fmt: skip
from invariants import check
from lmcache.utils import CacheEngineKey
from lmcache.v1 import memory_management
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from making import heads_bytes, make_ids
from waiting import until

from lmcache_cartridge.engine import backend
from lmcache_cartridge.engine.backend import CartridgeBackend
from lmcache_cartridge.engine.capture import captured
from lmcache_cartridge.engine.contract import CAPTURE, TAG, TENANT
from lmcache_cartridge.engine.host_inprocess import InProcess
from lmcache_cartridge.engine.lmcache_file import PLUGIN
from lmcache_cartridge.engine.saving import tenant
from lmcache_cartridge.memory.store import CartridgeStore
from lmcache_cartridge.settings import from_mapping

CARTRIDGES = {
    "short": {"positions": 5 * CHUNK + 17},
    "long": {"positions": 6 * CHUNK, "chunk_tokens": 256},
    "trained": {"positions": 4 * CHUNK, "kind": "trained"},
}
"""Cartridges with and without a tail, stored in chunks of the engine's size and of another."""
CHUNKS = 15
"""Whole chunks of them all."""
P, BEHIND = 4 * CHUNK, 3 * CHUNK
"""Positions of the trained one, and tokens of what follows it that make up whole chunks."""


class Serving(NamedTuple):
    """LMCache's engine with the plugin as our connector sets it up, paged blocks, and the cartridges it serves."""

    engine: LMCacheEngine
    blocks: Blocks
    cartridges: dict[str, Cartridge]

    @property
    def plugin(self) -> CartridgeBackend:
        return plugin(self.engine)

    @property
    def store(self) -> CartridgeStore:
        return self.plugin.store

    def packed_chunks(self) -> list[bytes]:
        """Return the bytes that the whole chunks of `short` have in memory."""
        chunks, _, _ = objects(self.cartridges["short"].kv, self.store.shape, self.store.engine.layout)
        return [bytes(chunk.byte_array) for chunk in chunks]

    def keys(self, name: str = "short", configs: dict[str, Any] | None = None) -> list[CacheEngineKey]:
        """Return LMCache's keys of a cartridge's whole chunks, under a request configuration."""
        cartridge = self.cartridges[name]
        return keys_of(self.engine, cartridge.prompt[: cartridge.whole], configs)

    @property
    def hot(self) -> dict[Any, Any]:
        """What LMCache's own CPU cache holds."""
        return self.engine.storage_manager.local_cpu_backend.hot_cache

    def slots(self, ids: list[int], seed: int = 0) -> torch.Tensor:
        """Return blocks in an order of no pattern, for each whole chunk of a prompt."""
        return self.blocks.whole(len(ids) // CHUNK * CHUNK, seed)

    def save(self, ids: list[int], saved: int, configs: dict[str, str]) -> torch.Tensor:
        """Compute a prompt's whole chunks, save them but the first `saved` tokens, as vLLM's adapter does, and return all KV."""
        slots = self.slots(ids)
        kv, mask = self.blocks.noise(len(slots)), torch.ones(len(slots), dtype=torch.bool)
        self.blocks.write(kv, slots)
        mask[:saved] = False
        self.engine.store(
            ids[: len(slots)], mask=mask, kvcaches=[], slot_mapping=slots, offset=saved, request_configs=configs, req_id="save"
        )  # fmt: skip
        return kv

    def hits(self, ids: list[int], configs: dict[str, str]) -> int:
        """Return how many tokens LMCache promises; what that pins is let go."""
        promised = look_up(self.engine, ids, "hits", configs)
        self.engine.lookup_unpin("hits")
        return promised

    def loaded(self, ids: list[int], configs: dict[str, str]) -> torch.Tensor:
        """Return the KV of all that LMCache promises, loaded into other slots."""
        slots, promised = self.slots(ids, seed=7), look_up(self.engine, ids, "load", configs)
        assert load(self.engine, ids, promised, slots, "load", configs) == promised
        return self.blocks.kv()[:, :, slots[:promised]]


@pytest.fixture(autouse=True)
def nothing_is_swallowed(caplog):
    """The plugin catches every error, ours too; each it caught is in the log."""
    yield
    caught = [r for r in caplog.get_records("call") if r.name == backend.__name__ and r.levelno >= logging.ERROR]
    assert not caught, "; ".join(str(record.exc_info) for record in caught)


@contextmanager
def _serving(home: Path, cartridges: dict[str, Cartridge], block: int = 32, **options: Any) -> Iterator[Serving]:
    """Memory for all of them twice; at the end nothing may be lent out."""
    config = vllm_config(block_size=block, transfer={"kv_role": "kv_both"})
    blocks = Blocks(config, 1024 // block)
    connector, budget = blocks.connector(CHUNK, saves=True), 2 * CHUNKS * blocks.shape(CHUNK).size_bytes
    given = {"home": home, "cpu_bytes": budget, "lookup_timeout_s": 20, "reload_s": 0, "plain_prompts": "all"}
    lmcaches = lmcache_config(from_mapping(given), **{"local_cpu": True} | options)
    with lmcache_engine(lmcaches, config, connector, leaves_threads="local_cpu" in options) as engine:
        manager = SimpleNamespace(lmcache_engine=engine, _init_failed_reason="")
        adapter = SimpleNamespace(_manager=manager, load_specs={}, _lmcache_chunk_size=CHUNK)
        lmcache = InProcess(SimpleNamespace(_lmcache_engine=adapter))
        lmcache.name_layout(connector.layout)
        lmcache.ask_first(CartridgeBackend)
        serving = Serving(engine, blocks, cartridges)
        store = serving.store
        yield serving
        check(store)
        assert store.cpu.stats().lent == 0, "LMCache was left with a memory object"


@pytest.fixture
def cartridges(tmp_path):
    return prepare(tmp_path, CARTRIDGES, BEHIND + 20)


@pytest.fixture
def serving(tmp_path, cartridges):
    with _serving(tmp_path, cartridges) as serving:
        yield serving


def _serve(serving: Serving, name: str, cached: int = 0) -> int:
    """Look a cartridge's prompt up and load it; assert that it is its KV, or as much of it as was promised."""
    cartridge, expected = serving.cartridges[name], serving.blocks.kv()
    slots = serving.blocks.scattered(len(cartridge.prompt))
    promised = look_up(serving.engine, cartridge.prompt, "request", cartridge.configs)
    loaded = load(serving.engine, cartridge.prompt, promised, slots, "request", cartridge.configs, cached)
    assert loaded == promised - cached // CHUNK * CHUNK
    expected[:, :, slots[cached:promised]] = cartridge.kv[:, :, cached:promised]
    assert torch.equal(serving.blocks.kv(), expected), "other KV, or a slot that is not the cartridge's was written"
    return promised


def _get(serving: Serving, keys: list[CacheEngineKey]) -> list[MemoryObj | None]:
    """Return what LMCache's storage manager gets for keys from the plugin."""
    return serving.engine.storage_manager.batched_get(keys, PLUGIN)


def _says_nothing(plugin: CartridgeBackend, keys: list[CacheEngineKey]) -> None:
    """What LMCache asks is told when there is nothing to tell."""
    assert plugin.get_blocking(keys[0]) is None
    for name in ("contains", "pin", "unpin", "exists_in_put_tasks", "remove"):
        assert getattr(plugin, name)(keys[0]) is False
    assert plugin.batched_contains(keys, pin=True) == plugin.batched_contains(keys) == 0
    assert plugin.batched_get_blocking(keys) == [None] * len(keys)
    plugin.batched_submit_put_task(keys, [None] * len(keys))
    plugin.touch_cache()


def _release(objects: list[MemoryObj]) -> None:
    for memory_object in objects:
        memory_object.ref_count_down()


def test_the_memory_object_that_a_start_tries_is_given_back(serving, monkeypatch):
    """Else LMCache warned of a leak at each start."""
    warned = []
    monkeypatch.setattr(memory_management.logger, "warning", lambda *told: warned.append(told))
    backend.memory_objects(serving.store.shape)
    gc.collect()
    assert not warned


@pytest.mark.parametrize(
    ("name", "cached"),
    [*((name, 0) for name in CARTRIDGES), *(("short", n) for n in (1, 64, 100, 319))],
)
def test_a_request_gets_exactly_its_cartridges_kv_and_what_vllm_has_cached_itself_stays(serving, name, cached):
    assert _serve(serving, name, cached=cached) == serving.cartridges[name].whole
    assert nothing_is_owed(serving.store)
    stats = serving.store.cpu.stats()
    assert stats.promoted == stats.resident == serving.cartridges[name].whole // CHUNK


def test_what_is_handed_out_is_the_resident_memory_until_lmcaches_last_reference_ends_though_the_plugin_is_closed(
    serving,
):
    first, second = _get(serving, serving.keys()), _get(serving, serving.keys())
    serving.plugin.close()
    for one, other, data in zip(first, second, serving.packed_chunks(), strict=True):
        assert one.meta is not other.meta, "they are counted apart"
        assert one.tensor.data_ptr() == other.tensor.data_ptr() and one.byte_array == data
        assert (one.get_ref_count(), one.get_memory_format(), one.get_num_tokens()) == (1, MemoryFormat.KV_2LTD, CHUNK)
    _release(first * 3)
    assert serving.store.cpu.stats().lent == 5, "the other objects' loans were ended too"
    second[0].pin()
    _release(second[:1])
    assert second[0].is_valid()
    second[0].unpin()
    assert serving.store.cpu.stats().lent == 4
    del other
    second.clear()
    gc.collect()
    assert nothing_is_owed(serving.store), "nobody releases what is collected"


def test_only_leading_keys_are_counted_pinned_and_handed_out(serving):
    keys, strange, plugin = serving.keys(), serving.keys("long")[0], serving.plugin
    strange.chunk_hash ^= 1
    for asked, count in ((keys, 5), ([strange, *keys], 0), ([*keys[:2], strange, keys[3]], 2)):
        assert plugin.batched_contains(asked) == 0, "nothing is resident yet"
        assert plugin.batched_contains(asked, pin=True) == plugin.batched_contains(asked) == count
        objects = plugin.batched_get_blocking(asked)
        assert [found is not None for found in objects] == [i < count for i in range(len(asked))]
        _release(objects[:count])
        assert [plugin.unpin(key) for key in asked] == [i < count for i in range(len(asked))]
        assert nothing_is_owed(serving.store)
        serving.store.cpu.evict(serving.cartridges["short"].made.manifest.digest)


@pytest.mark.parametrize(
    ("name", "configs"),
    [
        ("short", {TAG: "somebody"}), ("short", {TAG: ["a", "list"]}), ("trained", {}), ("trained", {TAG: "somebody"}),
        ("trained", {TAG: "its digest", "lmcache.tag.tenant": "a"}),
    ],
)  # fmt: skip
def test_keys_under_other_tags_are_misses_everywhere(serving, name, configs):
    cartridge, plugin = serving.cartridges[name], serving.plugin
    digest = cartridge.made.manifest.digest
    _says_nothing(plugin, serving.keys(name, {k: digest if v == "its digest" else v for k, v in configs.items()}))
    assert _serve(serving, name) == cartridge.whole, "the control: under its own tag it is there"
    for own in ({"lmcache.skip_save": True}, {TENANT: "a"}) if name == "short" else ():
        assert plugin.batched_contains(serving.keys(name, own)) == 5, "that is no matter to cartridges"


@pytest.mark.parametrize("error", [KeyError, MemoryError, None])
def test_a_store_that_fails_or_is_closed_is_a_miss_in_the_log_and_never_an_error(serving, monkeypatch, caplog, error):
    def fail(*_: Any) -> None:
        raise error("the store is broken")

    keys = serving.keys()
    if error is None:
        serving.plugin.close()
    else:
        assert serving.plugin.batched_contains(keys, pin=True) == 5, "the control: the store could answer"
        assert all(serving.plugin.unpin(key) for key in keys)
    for name in ("lookup", "resident", "lend", "lend_run", "release") if error else ():
        monkeypatch.setattr(CartridgeStore, name, fail)
    _says_nothing(serving.plugin, keys)
    assert ("the store is broken" in caplog.text) is (error is not None)
    caplog.clear()  # for `nothing_is_swallowed`


# Beside what LMCache saves itself.


def test_lmcaches_cpu_cache_never_adopts_cartridge_memory(serving):
    cartridge, store = serving.cartridges["trained"], serving.store
    ids, configs = cartridge.prompt, cartridge.configs
    assert torch.equal(serving.loaded(ids, configs), cartridge.made.kv)
    serving.save(ids, P, configs)
    keys = keys_of(serving.engine, ids[: P + BEHIND], configs)
    for key in keys:
        serving.engine.storage_manager.get(key).ref_count_down()
    assert [key in serving.hot for key in keys] == [False] * 4 + [True] * 3
    store.evict(cartridge.made.manifest.digest)
    assert store.cpu.stats().resident_bytes == 0, "its memory is free"


def test_a_remote_place_of_lmcaches_keeps_what_is_computed_and_nothing_of_a_cartridge(tmp_path, cartridges):
    """It is read by the next server too, if that packs its blocks alike."""
    where = tmp_path / "elsewhere"
    where.mkdir()
    options = {"local_cpu": False, "remote_url": f"fs://localhost:0/{where}", "remote_serde": "naive"}
    cartridge = cartridges["trained"]
    ids, configs, kv = cartridge.prompt, cartridge.configs, cartridge.made.kv
    with _serving(tmp_path, cartridges, **options) as serving:
        serving.loaded(ids[:P], configs)
        expected = torch.cat([kv, serving.save(ids, P, configs)[:, :, P:]], dim=2)
        until(lambda: serving.hits(ids, configs) == P + BEHIND)
        assert torch.equal(serving.loaded(ids, configs), expected)
        until(lambda: nothing_is_owed(serving.store))
    assert len(list(where.rglob("*"))) == BEHIND // CHUNK
    with _serving(tmp_path, cartridges, **options) as serving:
        assert torch.equal(serving.loaded(ids, configs), expected)
    with _serving(tmp_path, cartridges, 64, **options) as serving:
        assert serving.hits(ids, configs) == P, "blocks of another size are no KV for these"


def test_what_was_computed_for_a_name_is_handed_out_under_it_once(serving):
    ids = make_ids(5 * CHUNK + 1, 9)
    kv = serving.save(ids, 0, {CAPTURE: "mine"} | tenant("mine"))
    for chunk in range(5):
        expected = heads_bytes(kv[:, :, chunk * CHUNK : (chunk + 1) * CHUNK])
        assert captured("other", ids, chunk) is None
        assert captured("mine", ids, chunk) == expected
        assert captured("mine", ids, chunk) is None, "it is let go of"
    assert captured("mine", ids, 5) is None
    assert not serving.hot
