"""LMCache saves KV in-process beside cartridges: the right bytes, for the right tenant, and nothing of a cartridge's own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from blocks import Blocks, vllm_config
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
)
from making import heads_bytes, make_ids
from torch import distributed
from vllm import SamplingParams
from vllm.distributed import parallel_state
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request
from waiting import until

from lmcache_cartridge.engine import host_inprocess
from lmcache_cartridge.engine.backend import CartridgeBackend
from lmcache_cartridge.engine.capture import captured
from lmcache_cartridge.engine.contract import ADAPTER, CAPTURE, GRANT, TAG, TENANT
from lmcache_cartridge.engine.host_inprocess import InProcess, over_ranks
from lmcache_cartridge.engine.saving import Lost, keep_apart, tenant
from lmcache_cartridge.settings import from_mapping

P = 4 * CHUNK
"""Positions of the cartridge."""
BEHIND = 3 * CHUNK
"""Tokens of what follows it that make up whole chunks."""
SAVING = {"local_cpu": True, "max_local_cpu_size": 0.01}


class Saving(NamedTuple):
    """LMCache's engine with the plugin as our connector sets it up, and paged blocks."""

    engine: LMCacheEngine
    blocks: Blocks
    cartridge: Cartridge

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


@pytest.fixture
def cartridge(tmp_path):
    return prepare(tmp_path, {"it": {"positions": P, "kind": "trained"}}, BEHIND + 20)["it"]


@contextmanager
def _saving(home: Path, cartridge: Cartridge, block: int = 32, **options: Any) -> Iterator[Saving]:
    config = vllm_config(block_size=block, transfer={"kv_role": "kv_both"})
    blocks = Blocks(config, 1024 // block)
    connector, budget = blocks.connector(CHUNK, saves=True), 8 * blocks.shape(CHUNK).size_bytes
    given = {"home": home, "cpu_bytes": budget, "lookup_timeout_s": 20, "reload_s": 0, "plain_prompts": "all"}
    config_ = lmcache_config(from_mapping(given), **SAVING | options)
    with lmcache_engine(config_, config, connector, leaves_threads="local_cpu" in options) as engine:
        manager = SimpleNamespace(lmcache_engine=engine, _init_failed_reason="")
        adapter = SimpleNamespace(_manager=manager, load_specs={}, _lmcache_chunk_size=CHUNK)
        lmcache = InProcess(SimpleNamespace(_lmcache_engine=adapter))
        lmcache.name_layout(connector.layout)
        lmcache.ask_first(CartridgeBackend)
        yield Saving(engine, blocks, cartridge)
        assert plugin(engine).store.cpu.stats().lent == 0, "LMCache was left with cartridge memory"


@pytest.fixture
def saving(tmp_path, cartridge):
    with _saving(tmp_path, cartridge) as saving:
        yield saving


def test_lmcaches_cpu_cache_never_adopts_cartridge_memory(saving):
    cartridge, store = saving.cartridge, plugin(saving.engine).store
    ids, configs = cartridge.prompt, cartridge.configs
    assert torch.equal(saving.loaded(ids, configs), cartridge.made.kv)
    saving.save(ids, P, configs)
    keys = keys_of(saving.engine, ids[: P + BEHIND], configs)
    for key in keys:
        saving.engine.storage_manager.get(key).ref_count_down()
    assert [key in saving.hot for key in keys] == [False] * 4 + [True] * 3
    store.evict(cartridge.made.manifest.digest)
    assert store.cpu.stats().resident_bytes == 0, "its memory is free"


def test_a_remote_place_of_lmcaches_keeps_what_is_computed_and_nothing_of_a_cartridge(tmp_path, cartridge):
    """It is read by the next server too, if that packs its blocks alike."""
    where = tmp_path / "elsewhere"
    where.mkdir()
    options = {"local_cpu": False, "remote_url": f"fs://localhost:0/{where}", "remote_serde": "naive"}
    ids, configs, kv = cartridge.prompt, cartridge.configs, cartridge.made.kv
    with _saving(tmp_path, cartridge, **options) as saving:
        saving.loaded(ids[:P], configs)
        expected = torch.cat([kv, saving.save(ids, P, configs)[:, :, P:]], dim=2)
        until(lambda: saving.hits(ids, configs) == P + BEHIND)
        assert torch.equal(saving.loaded(ids, configs), expected)
        until(lambda: nothing_is_owed(plugin(saving.engine).store))
    assert len(list(where.rglob("*"))) == BEHIND // CHUNK
    with _saving(tmp_path, cartridge, **options) as saving:
        assert torch.equal(saving.loaded(ids, configs), expected)
    with _saving(tmp_path, cartridge, 64, **options) as saving:
        assert saving.hits(ids, configs) == P, "blocks of another size are no KV for these"


def test_what_was_computed_for_a_name_is_handed_out_under_it_once(saving):
    ids = make_ids(5 * CHUNK + 1, 9)
    kv = saving.save(ids, 0, {CAPTURE: "mine"} | tenant("mine"))
    for chunk in range(5):
        expected = heads_bytes(kv[:, :, chunk * CHUNK : (chunk + 1) * CHUNK])
        assert captured("other", ids, chunk) is None
        assert captured("mine", ids, chunk) == expected
        assert captured("mine", ids, chunk) is None, "it is let go of"
    assert captured("mine", ids, 5) is None
    assert not saving.hot


# Who is kept apart, and what is not saved.


def _request(params: dict[str, Any], salt: str | None = None, adapter: LoRARequest | None = None) -> Request:
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params})
    request = Request("id", [1, 2, 3], sampling, None, cache_salt=salt, lora_request=adapter)
    keep_apart(request)
    return request


def test_an_adapter_that_was_loaded_in_place_finds_nothing_but_within_one_request():
    replaced = LoRARequest("one", 1, "/one", load_inplace=True)
    request = _request({}, adapter=replaced)
    first = request.kv_transfer_params[ADAPTER]
    keep_apart(request)
    assert request.kv_transfer_params[ADAPTER] == first != _request({}, adapter=replaced).kv_transfer_params[ADAPTER]
    assert _request({ADAPTER: first}, adapter=LoRARequest("one", 1, "/one")).kv_transfer_params[ADAPTER] != first
    assert ADAPTER not in _request({ADAPTER: first}).kv_transfer_params


@pytest.mark.parametrize(
    ("salt", "params", "own"),
    [
        (None, {}, None), ("a", {TENANT: "b"}, "a"), (None, {TENANT: "b"}, None),
        ("made by the server", {TAG: "x", GRANT: {"must_inject": 0, "salt": "a"}}, "a"),
        ("made by the server", {TAG: "x", GRANT: {"must_inject": 0, "salt": None}}, None),
        ("a", {"lmcache.tag.own": "x"}, "a"),
    ],
)  # fmt: skip
def test_a_tenant_is_the_clients_own_salt(salt, params, own):
    before, request = dict(params), _request(params, salt)
    expected = {name: value for name, value in params.items() if name != TENANT} | tenant(own)
    found = request.kv_transfer_params
    assert found == request.sampling_params.extra_args["kv_transfer_params"] == expected
    assert [*found] == [*expected], "LMCache's keys have tags in their order"
    assert params == before, "others may share them"
    assert len({*map(str, map(tenant, ("a", "b", None)))}) == 3


def _step(name: str, blocks: list[int], *, loads: bool = False) -> Any:
    slots, load = torch.tensor(blocks)[:, None] * 4 + torch.arange(4), SimpleNamespace(can_load=loads)
    return SimpleNamespace(
        req_id=name, slot_mapping=slots.flatten(), load_spec=load, save_spec=SimpleNamespace(can_save=True)
    )


def _saved(lost: Lost, steps: list[Any], failed: set[int]) -> list[str]:
    lost.withhold(steps, failed)
    return [step.req_id for step in steps if step.save_spec.can_save]


def test_nothing_is_saved_that_rests_on_what_a_rank_could_not_load(monkeypatch):
    told = [{2}, set()]
    monkeypatch.setattr(host_inprocess, "over_ranks", lambda blocks: blocks | told.pop(0))
    lost = Lost(4)
    steps = [_step("a", [1, 2, 3], loads=True), _step("b", [4, 5]), _step("shares", [2, 9]), _step("own", [6])]
    assert _saved(lost, steps, {6}) == ["b"]
    steps = [_step("a", [1, 2, 3]), _step("b", [4, 5]), _step("new", [2, 8]), _step("shares", [12])]
    assert _saved(lost, steps, set()) == ["b"], "vLLM may have scheduled this step before it knew"
    assert _saved(lost, [_step("other", [2, 8]), _step("a", [7])], set()) == ["other"], "the block has KV again"
    assert told == [set()], "ranks wait for each other only in steps that load"
    lost.forget({"a"})
    assert _saved(lost, [_step("a", [7])], set()) == ["a"]


def _union(rank: int, place: str) -> list[set[int]]:
    distributed.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)
    group = SimpleNamespace(world_size=2, cpu_group=distributed.group.WORLD)
    parallel_state.get_tp_group = lambda: group
    mine = [set(), {1, 2}, set()], [set(), {2, 3}, {9}]
    found = [over_ranks(blocks) for blocks in mine[rank]]
    distributed.destroy_process_group()
    return found


def test_ranks_tell_each_other_what_they_could_not_load(tmp_path):
    with ProcessPoolExecutor(2, get_context("fork")) as pool:
        assert (
            list(pool.map(_union, range(2), [str(tmp_path / "meet")] * 2, timeout=240)) == [[set(), {1, 2, 3}, {9}]] * 2
        )
