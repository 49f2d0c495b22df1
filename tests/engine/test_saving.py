"""LMCache saves KV in-process for the right tenant, and nothing that rests on what could not be loaded."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed
from vllm import SamplingParams
from vllm.distributed import parallel_state
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

from lmcache_cartridge.engine import host_inprocess
from lmcache_cartridge.engine.contract import ADAPTER, GRANT, TAG, TENANT
from lmcache_cartridge.engine.host_inprocess import over_ranks
from lmcache_cartridge.engine.saving import Lost, keep_apart, tenant


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
        ("a", {TENANT: "b"}, "a"), (None, {TENANT: "b"}, None),
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
