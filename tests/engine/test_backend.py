"""The plugin in LMCache's own engine: a request gets exactly its cartridge's KV or a miss, and nothing is left owed."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from blocks import Blocks, vllm_config
from inprocess import (
    CHUNK,
    lmcache_config,
    lmcache_engine,
    load,
    look_up,
    nothing_is_owed,
    plugin,
    tags,
)  # fmt: skip
from invariants import check
from lmcache.utils import CacheEngineKey
from lmcache.v1.cache_engine import LMCacheEngine
from lmcache.v1.memory_management import MemoryFormat, MemoryObj, TensorMemoryObj
from making import Made, make_artifact
from vllm.config import VllmConfig, set_current_vllm_config
from waiting import Clock, run_threads

from lmcache_cartridge.artifact.model import Fingerprint
from lmcache_cartridge.artifact.reading import PAYLOAD
from lmcache_cartridge.cli.recall import MODEL_DIR
from lmcache_cartridge.engine import backend
from lmcache_cartridge.engine.backend import CartridgeBackend, MemoryObjects
from lmcache_cartridge.engine.inject import EngineWriteConnector
from lmcache_cartridge.engine.lmcache_file import PLUGIN
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.memory import tiles
from lmcache_cartridge.memory.store import CartridgeStore
from lmcache_cartridge.settings import from_mapping

VOCABULARY = 640
QUESTION = 20
"""Tokens after the cartridge in a prompt."""
CARTRIDGES = {
    "short": {"positions": 5 * CHUNK + 17},
    "long": {"positions": 6 * CHUNK, "chunk_tokens": 256},
    "trained": {"positions": 4 * CHUNK, "kind": "trained"},
}
"""Cartridges with and without a tail, stored in chunks of the engine's size and of another."""
CHUNKS = 15
"""Whole chunks of them all."""


class Cartridge(NamedTuple):
    """What a test knows of one cartridge."""

    root: Path
    made: Made
    prompt: list[int]
    """Its token ids and a question."""
    whole: int
    """Tokens in its whole chunks."""
    configs: dict[str, str]
    """The request configuration under which it is found."""

    @property
    def kv(self) -> torch.Tensor:
        return self.made.kv[:, :, : self.whole]


class Serving(NamedTuple):
    """LMCache's engine with the plugin, paged blocks to load into, and the cartridges it serves."""

    engine: LMCacheEngine
    blocks: Blocks
    cartridges: dict[str, Cartridge]

    @property
    def plugin(self) -> CartridgeBackend:
        return plugin(self.engine)

    @property
    def store(self) -> CartridgeStore:
        return self.plugin.store

    def packed(self, kv: torch.Tensor) -> bytes:
        """Return the bytes that a chunk of canonical KV has in memory."""
        out = torch.empty(self.store.shape.size_bytes, dtype=torch.uint8)
        tiles.pack(kv, out, self.store.shape, self.store.engine.layout)
        return out.numpy().tobytes()

    def keys(self, name: str, configs: dict[str, Any] | None = None) -> list[CacheEngineKey]:
        """Return LMCache's keys of a cartridge's whole chunks, under its own request configuration or another."""
        cartridge = self.cartridges[name]
        configs = cartridge.configs if configs is None else configs
        ids = cartridge.prompt[: cartridge.whole]
        return [key for _, _, key in self.engine.token_database.process_tokens(tokens=ids, request_configs=configs)]


@pytest.fixture(autouse=True)
def nothing_is_swallowed(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The plugin catches every error, ours too; each it caught is in the log."""
    yield
    caught = [r for r in caplog.get_records("call") if r.name == backend.__name__ and r.levelno >= logging.ERROR]
    assert not caught, "; ".join(str(record.exc_info) for record in caught)


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    return vllm_config()


@pytest.fixture(scope="module")
def blocks(config: VllmConfig) -> Blocks:
    return Blocks(config, 16)


@pytest.fixture(scope="module")
def fingerprint() -> Fingerprint:
    """The model as an author's tools see it."""
    return CausalModel(str(MODEL_DIR)).fingerprint


@pytest.fixture
def home(tmp_path: Path, fingerprint: Fingerprint) -> dict[str, Cartridge]:
    """Cartridges of noise, registered under `tmp_path`."""
    registry, cartridges = Registry(tmp_path / "registry.sqlite"), {}
    for seed, (name, given) in enumerate(CARTRIDGES.items()):
        root = tmp_path / "cartridges" / name
        ids = np.random.default_rng(seed).integers(0, VOCABULARY, given["positions"] + QUESTION).tolist()
        made = make_artifact(root, cartridge_id=name, seed=seed, token_ids=ids[: given["positions"]],
                             fingerprint=fingerprint, **({"chunk_tokens": CHUNK} | given))  # fmt: skip
        registry.register(root)
        configs = tags(made.manifest.digest if made.manifest.kind == "trained" else None)
        cartridges[name] = Cartridge(root, made, ids, given["positions"] // CHUNK * CHUNK, configs)
    return cartridges


@contextmanager
def _serving(
    cartridges: dict[str, Cartridge],
    config: VllmConfig,
    blocks: Blocks,
    *,
    chunks: int = 2 * CHUNKS,
    connector: Any = None,
    **settings: Any,
) -> Iterator[Serving]:
    """Serve with memory for `chunks` chunks of `CHUNK` tokens; at the end nothing may be lent out."""
    if connector is None:
        connector = EngineWriteConnector()
        connector.bind(blocks.caches, blocks.layers, blocks.shape(CHUNK))
    home = cartridges["short"].root.parent.parent
    given = {
        "home": home,
        "cpu_bytes": chunks * blocks.shape(CHUNK).size_bytes,
        "lookup_timeout_s": 20,
        "plain_prompts": "all",
        **settings,
    }
    with lmcache_engine(lmcache_config(from_mapping(given)), config, connector) as engine:
        serving = Serving(engine, blocks, cartridges)
        store = serving.store
        yield serving
        check(store)
        assert store.cpu.stats().lent == 0, "LMCache was left with a memory object"


@pytest.fixture
def serving(home: dict[str, Cartridge], config: VllmConfig, blocks: Blocks) -> Iterator[Serving]:
    with _serving(home, config, blocks) as serving:
        yield serving


def _scattered(serving: Serving, tokens: int) -> torch.Tensor:
    """Return a slot for each token, no two neighbours, over parts of all blocks."""
    return torch.randperm(serving.blocks.slots, generator=torch.Generator().manual_seed(tokens))[:tokens]


def _serve(serving: Serving, name: str, request: str = "request", cached: int = 0) -> int:
    """Look a cartridge's prompt up and load it; assert that it is its KV, or as much of it as was promised."""
    cartridge, before = serving.cartridges[name], serving.blocks.kv()
    slots = _scattered(serving, len(cartridge.prompt))
    promised = look_up(serving.engine, cartridge.prompt, request, cartridge.configs)
    loaded = load(serving.engine, cartridge.prompt, promised, slots, request, cartridge.configs, cached)
    after = serving.blocks.kv()
    injected = slots[cached:promised]
    assert loaded == promised - cached // CHUNK * CHUNK
    assert torch.equal(after[:, :, injected], cartridge.kv[:, :, cached:promised])
    others = torch.ones(serving.blocks.slots, dtype=torch.bool)
    others[injected] = False
    assert torch.equal(after[:, :, others], before[:, :, others]), "a slot that is not the cartridge's was written"
    return promised


def _get(serving: Serving, keys: list[CacheEngineKey]) -> list[MemoryObj | None]:
    """Return what LMCache's storage manager gets for keys from the plugin."""
    return serving.engine.storage_manager.batched_get(keys, PLUGIN)


def _release(objects: list[MemoryObj | None]) -> None:
    for memory_object in objects:
        if memory_object is not None:
            memory_object.ref_count_down()


def _raise(error: Exception) -> Callable[..., None]:
    def fail(*_: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize("name", CARTRIDGES)
def test_a_request_gets_exactly_its_cartridges_kv_and_owes_nothing(serving: Serving, name: str) -> None:
    assert _serve(serving, name) == serving.cartridges[name].whole
    assert nothing_is_owed(serving.store)
    stats = serving.store.cpu.stats()
    assert stats.promoted == stats.resident == serving.cartridges[name].whole // CHUNK


@pytest.mark.parametrize("cached", [1, 31, 63, 64, 65, 100, 128, 319])
def test_what_vllm_has_cached_itself_stays_untouched_inside_a_chunk_too(serving: Serving, cached: int) -> None:
    assert _serve(serving, "short", cached=cached) == 5 * CHUNK
    assert nothing_is_owed(serving.store)


def test_a_retrieval_that_nobody_looked_up_gets_what_is_resident(serving: Serving) -> None:
    cartridge, slots = serving.cartridges["short"], _scattered(serving, 5 * CHUNK)
    assert load(serving.engine, cartridge.prompt, 5 * CHUNK, slots, "stranger") == 0
    _serve(serving, "short")
    before = serving.blocks.kv()
    assert load(serving.engine, cartridge.prompt, 5 * CHUNK, slots.flip(0), "stranger") == 5 * CHUNK
    assert torch.equal(serving.blocks.kv()[:, :, slots.flip(0)], cartridge.kv)
    assert not torch.equal(before[:, :, slots.flip(0)], cartridge.kv), "it was there before"
    assert nothing_is_owed(serving.store)


def test_what_is_handed_out_is_the_resident_memory_itself(serving: Serving) -> None:
    keys = serving.keys("short")
    first, second = _get(serving, keys), _get(serving, keys)
    for chunk, (one, other) in enumerate(zip(first, second, strict=True)):
        assert one is not other, "LMCache counts references in the object"
        assert one.tensor.data_ptr() == other.tensor.data_ptr() == one.meta.address
        with serving.store.lend(keys[chunk].chunk_hash) as loan:
            assert loan.bytes.data_ptr() == one.tensor.data_ptr()
        assert one.tensor.view(torch.uint8).numpy().tobytes() == serving.packed(
            serving.cartridges["short"].kv[:, :, chunk * CHUNK : (chunk + 1) * CHUNK]
        )
    _release(first + second)
    assert nothing_is_owed(serving.store)


def test_what_is_handed_out_is_what_lmcache_expects_of_a_memory_object(serving: Serving) -> None:
    (memory_object,) = _get(serving, serving.keys("short")[:1])
    assert memory_object.get_ref_count() == 1
    assert memory_object.get_memory_format() == MemoryFormat.KV_2LTD
    assert memory_object.get_num_tokens() == CHUNK
    assert memory_object.get_shape() == serving.engine.gpu_connector.get_shape(CHUNK) == memory_object.tensor.shape
    assert memory_object.get_shapes() == [memory_object.get_shape()]
    assert memory_object.get_dtypes() == [memory_object.get_dtype()] == [torch.bfloat16]
    assert memory_object.get_size() == memory_object.get_physical_size() == serving.store.shape.size_bytes
    assert memory_object.raw_data.dtype == torch.uint8
    assert memory_object.raw_data.shape == (memory_object.get_size(),)
    assert not memory_object.is_pinned
    _release([memory_object])
    assert not memory_object.is_valid()
    assert memory_object.tensor is None


def test_what_is_handed_out_is_what_lmcaches_constructors_make(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    def facts(memory_object: MemoryObj) -> dict[str, Any]:
        own = dict(vars(memory_object))
        return own | {"meta": dict(vars(own["meta"])), "lock": type(own["lock"]), "end_loan": type(own["end_loan"])}

    class Longer(TensorMemoryObj):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.of_a_later_lmcache = []

    keys, shape = serving.keys("short")[:1] * 2, serving.store.shape
    first, second = copied = _get(serving, keys)
    assert {id(first.lock), id(first.meta)}.isdisjoint({id(second.lock), id(second.meta)})
    monkeypatch.setattr(backend, "CartridgeMemory", Longer)
    monkeypatch.setattr(serving.plugin, "_objects", MemoryObjects(shape))
    one, other = constructed = _get(serving, keys)
    assert one.of_a_later_lmcache is not other.of_a_later_lmcache, "an attribute of which nothing is known is copied"
    assert [facts(o) for o in copied] == [
        {name: value for name, value in facts(o).items() if name != "of_a_later_lmcache"} for o in constructed
    ]
    _release([*copied, *constructed])
    assert nothing_is_owed(serving.store)


def test_releasing_more_often_than_lmcache_should_counts_once(serving: Serving) -> None:
    first, second = _get(serving, serving.keys("short")[:1] * 2)
    assert serving.store.cpu.stats().lent == 2
    for _ in range(3):
        first.ref_count_down()
    assert serving.store.cpu.stats().lent == 1, "the other object's loan was ended too"
    assert second.is_valid()
    second.ref_count_down()
    second.ref_count_down()
    assert nothing_is_owed(serving.store)


def test_an_object_that_lmcache_refers_to_twice_is_lent_until_both_are_gone(serving: Serving) -> None:
    (memory_object,) = _get(serving, serving.keys("short")[:1])
    memory_object.ref_count_up()
    memory_object.ref_count_down()
    assert serving.store.cpu.stats().lent == 1
    memory_object.pin()
    memory_object.ref_count_down()
    assert serving.store.cpu.stats().lent == 1
    memory_object.unpin()
    assert nothing_is_owed(serving.store)


def test_an_object_that_nobody_releases_is_lent_until_it_is_collected(serving: Serving) -> None:
    objects = _get(serving, serving.keys("short"))
    assert serving.store.cpu.stats().lent == 5
    del objects
    gc.collect()
    assert nothing_is_owed(serving.store)
    assert _serve(serving, "short") == 5 * CHUNK


def test_only_leading_keys_are_counted(serving: Serving) -> None:
    keys, strange = serving.keys("short"), serving.keys("long")[0]
    strange.chunk_hash ^= 1
    for asked, count in (([], 0), (keys, 5), (keys[:3], 3), ([strange, *keys], 0), ([*keys[:2], strange, keys[3]], 2)):
        assert serving.plugin.batched_contains(asked) == 0, "nothing is resident yet"
        assert serving.plugin.batched_contains(asked, pin=True) == count
        assert serving.plugin.batched_contains(asked) == count
        assert [serving.plugin.unpin(key) for key in asked] == [i < count for i in range(len(asked))]
        assert nothing_is_owed(serving.store)
        serving.store.cpu.evict(serving.cartridges["short"].made.manifest.digest)


def test_a_pin_is_counted_and_ends_once_for_each_unpin(serving: Serving) -> None:
    key = serving.keys("short")[0]
    assert serving.plugin.unpin(key) is False
    assert serving.plugin.pin(key) is True
    assert serving.plugin.contains(key, pin=True) is True
    assert serving.plugin.contains(key) is True
    assert [serving.plugin.unpin(key) for _ in range(4)] == [True, True, False, False]
    assert nothing_is_owed(serving.store)


@pytest.mark.parametrize(
    ("name", "configs"),
    [
        ("short", {"lmcache.tag.cartridge": "somebody"}),
        ("short", {"lmcache.tag.tenant": "a"}),
        ("short", {"lmcache.tag.cartridge": ""}),
        ("short", {"lmcache.tag.cartridge": None}),
        ("short", {"lmcache.tag.cartridge": ["a", "list"]}),
        ("trained", {}),
        ("trained", {"lmcache.tag.cartridge": "somebody"}),
        ("trained", {"lmcache.tag.cartridge": ""}),
        ("trained", {"lmcache.tag.cartridge": 7}),
        ("trained", {"lmcache.tag.tenant": "its digest"}),
        ("trained", {"lmcache.tag.cartridge": "its digest", "lmcache.tag.tenant": "a"}),
        ("trained", {"lmcache.tag.tenant": "a", "lmcache.tag.cartridge": "its digest"}),
        ("trained", {"lmcache.cartridge": "its digest"}),
    ],
)
def test_keys_under_other_tags_are_misses_everywhere(serving: Serving, name: str, configs: dict[str, Any]) -> None:
    cartridge = serving.cartridges[name]
    digest = cartridge.made.manifest.digest
    keys = serving.keys(name, {key: digest if value == "its digest" else value for key, value in configs.items()})
    assert serving.plugin.batched_contains(keys, pin=True) == 0
    assert serving.plugin.batched_contains(keys) == 0
    assert serving.plugin.batched_get_blocking(keys) == [None] * len(keys)
    assert [serving.plugin.pin(key) for key in keys] == [False] * len(keys)
    assert [serving.plugin.unpin(key) for key in keys] == [False] * len(keys)
    assert serving.store.cpu.stats().promoted == 0
    assert _serve(serving, name) == cartridge.whole, "the control: under its own tag it is there"


def test_tags_that_are_none_of_lmcaches_change_nothing(serving: Serving) -> None:
    keys = serving.keys("short", {"lmcache.skip_save": True})
    assert serving.plugin.batched_contains(keys, pin=True) == 5
    assert all(serving.plugin.unpin(key) for key in keys)


def test_a_list_of_the_same_length_comes_back_with_none_from_the_first_miss_on(serving: Serving) -> None:
    keys, (strange, *_) = serving.keys("short"), serving.keys("long", tags("somebody"))
    for asked, count in (([], 0), (keys, 5), ([strange, *keys], 0), ([*keys[:2], strange, *keys[3:]], 2)):
        objects = serving.plugin.batched_get_blocking(asked)
        assert [found is not None for found in objects] == [i < count for i in range(len(asked))]
        assert serving.store.cpu.stats().lent == count
        _release(objects)
    _release([found := serving.plugin.get_blocking(keys[2])])
    assert found is not None and serving.plugin.get_blocking(strange) is None
    assert nothing_is_owed(serving.store)


def test_what_lmcache_wants_stored_is_not_taken(serving: Serving) -> None:
    manager, key = serving.engine.storage_manager, serving.keys("short", tags("new"))[0]
    shape = serving.engine.gpu_connector.get_shape(CHUNK)
    offered = manager.allocate(shape, torch.bfloat16)
    offered.ref_count_up()
    manager.batched_put([key], [offered])
    assert offered.get_ref_count() == 1, "LMCache's reference is gone and the plugin took none"
    assert serving.plugin.exists_in_put_tasks(key) is False
    assert serving.plugin.contains(key, pin=True) is False
    assert _get(serving, [key]) == [None]
    offered.ref_count_down()


def test_nothing_can_be_removed_or_allocated_through_the_plugin(serving: Serving) -> None:
    _serve(serving, "short")
    keys, manager = serving.keys("short"), serving.engine.storage_manager
    assert serving.plugin.remove(keys[0]) is False
    assert manager.remove(keys[0]) == 0
    assert manager.batched_remove(keys) == 0
    assert serving.engine.clear(tokens=serving.cartridges["short"].prompt) == 0
    assert serving.plugin.batched_contains(keys) == 5
    assert serving.plugin.get_allocator_backend() is manager.local_cpu_backend is not None
    assert serving.plugin.touch_cache() is None
    assert serving.plugin.cancel_request("request") is None
    assert str(serving.plugin) == "CartridgeBackend"


CALLS: dict[str, tuple[Callable[[CartridgeBackend, list[CacheEngineKey]], Any], Any]] = {
    "batched_contains": (lambda plugin, keys: plugin.batched_contains(keys), 0),
    "batched_contains, pinning": (lambda plugin, keys: plugin.batched_contains(keys, pin=True), 0),
    "contains": (lambda plugin, keys: plugin.contains(keys[0]), False),
    "contains, pinning": (lambda plugin, keys: plugin.contains(keys[0], pin=True), False),
    "pin": (lambda plugin, keys: plugin.pin(keys[0]), False),
    "unpin": (lambda plugin, keys: plugin.unpin(keys[0]), False),
    "get_blocking": (lambda plugin, keys: plugin.get_blocking(keys[0]), None),
    "batched_get_blocking": (lambda plugin, keys: plugin.batched_get_blocking(keys), [None] * 5),
    "exists_in_put_tasks": (lambda plugin, keys: plugin.exists_in_put_tasks(keys[0]), False),
    "batched_submit_put_task": (lambda plugin, keys: plugin.batched_submit_put_task(keys, [None] * 5), None),
    "remove": (lambda plugin, keys: plugin.remove(keys[0]), False),
    "touch_cache": (lambda plugin, keys: plugin.touch_cache(), None),
    "close": (lambda plugin, keys: plugin.close(), None),
}
"""Everything that LMCache calls, and what it is told when there is nothing to tell."""


@pytest.mark.parametrize("call", CALLS)
def test_a_store_that_fails_is_a_miss_and_never_an_error(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    ask, neutral = CALLS[call]
    keys = serving.keys("short")
    assert serving.plugin.batched_contains(keys, pin=True) == 5, "the control: the store could answer"
    assert all(serving.plugin.unpin(key) for key in keys)
    for error in (RuntimeError, KeyError, MemoryError, OSError, AssertionError):
        for name in ("lookup", "resident", "lend", "lend_run", "release"):
            monkeypatch.setattr(CartridgeStore, name, _raise(error("the store is broken")))
        assert ask(serving.plugin, keys) == neutral
    caplog.clear()


def test_a_store_that_fails_is_logged(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(CartridgeStore, "resident", _raise(RuntimeError("the store is broken")))
    with caplog.at_level(logging.ERROR):
        serving.plugin.batched_contains(serving.keys("short"))
    assert "the store is broken" in caplog.text
    caplog.clear()


@pytest.mark.parametrize("call", CALLS)
def test_a_store_that_is_closed_is_a_miss_and_never_an_error(serving: Serving, call: str) -> None:
    ask, neutral = CALLS[call]
    serving.plugin.close()
    assert ask(serving.plugin, serving.keys("short")) == neutral


@pytest.mark.parametrize("call", CALLS)
def test_the_schedulers_process_has_no_store_and_answers_no(
    home: dict[str, Cartridge], config: VllmConfig, call: str
) -> None:
    settings = from_mapping({"home": home["short"].root.parent.parent})
    ask, neutral = CALLS[call]
    with lmcache_engine(lmcache_config(settings), config, None, role="scheduler") as engine:
        assert plugin(engine).store is None
        keys = Serving(engine, None, home).keys("short")
        assert ask(plugin(engine), keys) == neutral


def test_chunks_that_cannot_be_had_after_all_are_left_to_vllm_from_the_first_on(
    home: dict[str, Cartridge], config: VllmConfig, blocks: Blocks
) -> None:
    with _serving(home, config, blocks, chunks=8) as serving:
        clock, cartridge = Clock(), home["short"]
        serving.store.cpu.clock = clock
        assert look_up(serving.engine, cartridge.prompt, "slow") == 5 * CHUNK
        clock.now += 301
        assert _serve(serving, "long") == 6 * CHUNK
        assert serving.plugin.batched_contains(serving.keys("short")) == 2, "the other has taken most of its memory"
        (cartridge.root / PAYLOAD).unlink()
        slots, before = _scattered(serving, len(cartridge.prompt)), blocks.kv()
        assert load(serving.engine, cartridge.prompt, 5 * CHUNK, slots, "slow") == 2 * CHUNK
        after = blocks.kv()
        assert torch.equal(after[:, :, slots[: 2 * CHUNK]], cartridge.kv[:, :, : 2 * CHUNK])
        assert torch.equal(after[:, :, slots[2 * CHUNK :]], before[:, :, slots[2 * CHUNK :]])
        assert nothing_is_owed(serving.store)


@pytest.mark.parametrize("chunks", [CHUNKS, 8])
def test_lookups_and_retrievals_of_many_threads_do_not_mix(home: dict[str, Cartridge], chunks: int) -> None:
    """With memory for all chunks, and with so little that they push each other out."""
    config = vllm_config()
    blocks = Blocks(config, 8 * 13)
    served: list[tuple[str, int]] = []

    def work(number: int) -> None:
        first = number * 13 * blocks.block
        for turn in range(12):
            name = list(home)[(number + turn) % len(home)]
            cartridge, request = home[name], f"{number}-{turn}"
            promised = look_up(serving.engine, cartridge.prompt, request, cartridge.configs)
            slots = first + torch.randperm(13 * blocks.block)[: len(cartridge.prompt)]
            loaded = load(serving.engine, cartridge.prompt, promised, slots, request, cartridge.configs)
            assert loaded == promised
            assert name != "trained" or promised in (0, cartridge.whole)
            served.append((name, promised))
            if turn == 11:
                last[number] = (name, slots[:promised])

    last: dict[int, tuple[str, torch.Tensor]] = {}
    with _serving(home, config, blocks, chunks=chunks) as serving:
        run_threads(8, work)
        assert nothing_is_owed(serving.store)
        kv = blocks.kv()
        for name, slots in last.values():
            assert torch.equal(kv[:, :, slots], home[name].kv[:, :, : len(slots)])
        whole = [promised == home[name].whole for name, promised in served]
        assert len(whole) == 8 * 12
        assert all(whole) or chunks < CHUNKS
        for name, cartridge in home.items():
            assert _serve(serving, name) == cartridge.whole, "afterwards each is served alone"
        assert (serving.store.cpu.stats().evicted > 0) is (chunks < CHUNKS)


def test_a_plugin_that_lmcache_builds_again_shares_the_store(serving: Serving, config: VllmConfig) -> None:
    first = serving.plugin
    _serve(serving, "short")
    with set_current_vllm_config(config):
        assert serving.engine.storage_manager.create_backends() == {PLUGIN: "CartridgeBackend"}
    assert serving.plugin is not first
    assert serving.plugin.store is first.store, "the memory budget would be spent twice"
    _serve(serving, "short")
    assert serving.store.cpu.stats().promoted == 5
    first.close()


def test_a_plugin_that_lmcache_closes_and_builds_again_serves_again(serving: Serving, config: VllmConfig) -> None:
    first, store = serving.plugin, serving.store
    objects = _get(serving, serving.keys("short"))
    with set_current_vllm_config(config):
        serving.engine.storage_manager.recreate_backend(PLUGIN)
    assert serving.plugin is not first
    assert serving.store is not store
    for chunk, memory_object in enumerate(objects):
        expected = serving.packed(serving.cartridges["short"].kv[:, :, chunk * CHUNK : (chunk + 1) * CHUNK])
        assert memory_object.byte_array == expected, "what was handed out stays"
    _release(objects)
    assert nothing_is_owed(store)
    assert _serve(serving, "short") == 5 * CHUNK


def test_a_plugin_that_cannot_be_built_again_leaves_the_first_one_serving(serving: Serving) -> None:
    """As it is from LMCache's API thread, where no vLLM configuration is set."""
    first = serving.plugin
    assert serving.engine.storage_manager.create_backends() == {}
    assert serving.plugin is first
    assert "no vLLM configuration" in str(CartridgeBackend.refusal)
    assert _serve(serving, "short") == 5 * CHUNK


def test_objects_handed_out_outlive_the_plugin(serving: Serving) -> None:
    objects = _get(serving, serving.keys("short"))
    serving.plugin.close()
    assert objects[4].byte_array == serving.packed(serving.cartridges["short"].kv[:, :, 4 * CHUNK :])
    _release(objects)
    assert nothing_is_owed(serving.store)
