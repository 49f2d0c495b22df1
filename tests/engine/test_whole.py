"""A trained cartridge is injected to its last position, or its blocks are reported as not loaded and nothing of it is saved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from blocks import Blocks, quietly, vllm_config  # vLLM before LMCache

from lmcache_cartridge.engine.contract import GRANT, NULL_BLOCK, TAG

with quietly():
    from vllm.v1.attention.backends.utils import NULL_BLOCK_ID

    from lmcache_cartridge.engine.whole import InjectsWhole, Tail, Whole

CHUNK, BLOCK = 64, 32


def _request(must_inject: int) -> Any:
    params = {TAG: "digest", GRANT: {"must_inject": must_inject}} if must_inject else {}
    return SimpleNamespace(request_id="r", kv_transfer_params=params)


def _blocks(count: int) -> Any:
    """Blocks 100, 101, ..."""
    return SimpleNamespace(get_block_ids=lambda: ([100 + i for i in range(count)],))


def _tail(skip: int, first: int, last: int, turn: int = 0) -> Tail:
    return Tail("r", "digest", skip, [100 * BLOCK + at for at in range(first, last)], turn)


@pytest.mark.parametrize(("must_inject", "computed", "found", "lost", "tail"), [
    (0, 0, 0, (), None), (64, 0, 64, (), None), (13, 0, 0, (), (0, 0, 13)), (100, 0, 64, (), (0, 64, 100)),
    (100, 96, 96, (), (32, 96, 100)), (100, 0, 128, (), None),  # what LMCache saved has the tail too
    (150, 32, 64, range(101, 105), None),  # a whole chunk is missing: all blocks have nothing
])  # fmt: skip
def test_what_lmcache_has_not_behind_the_last_whole_chunk_is_ours_to_write(must_inject, computed, found, lost, tail):
    whole, request = Whole(CHUNK, BLOCK), _request(must_inject)
    until = whole.owes(request, computed, found)
    assert until == (must_inject if lost or tail else None)
    whole.allocated(request, _blocks(12), 0 if until is None else until - computed)
    assert whole.step(set()) == ({*lost}, [] if tail is None else [_tail(*tail)])
    assert whole.step(set()) == (set(), [])


def test_a_request_that_waits_for_lmcache_is_told_of_twice_and_one_that_loads_nothing_never():
    whole, request = Whole(CHUNK, BLOCK), _request(100)
    assert whole.owes(request, 0, 64, is_async=True) == 100
    for external in (100, 0, 0):
        whole.allocated(request, _blocks(7), external)
    assert whole.step(set())[1] == [_tail(0, 64, 100, turn) for turn in (1, 2)]
    whole.owes(request, 0, 64)
    whole.allocated(request, _blocks(7), 0)  # vLLM had the blocks itself meanwhile
    whole.owes(request, 0, 64)
    whole.step({"r"})
    whole.allocated(request, _blocks(7), 100)
    assert whole.step(set()) == (set(), [])


class _LMCache:
    """The connector of LMCache's that ours stands before."""

    bind_connector_metadata = start_load_kv = lambda self, given: None

    def build_connector_meta(self, output: Any) -> Any:
        return SimpleNamespace(requests=[])

    def get_block_ids_with_load_errors(self) -> set[int]:
        return {0, 3}


class _Connector(InjectsWhole, _LMCache):
    def __init__(self, kv: torch.Tensor | None) -> None:
        self.kv, self.whole, self.blocks = kv, Whole(CHUNK, BLOCK), Blocks(vllm_config(), 9)
        layers = [(self.blocks.layers[name], cache) for name, cache in self.blocks.caches.items()]
        self.write_tails(lambda tag: self.kv, layers, None, torch.bfloat16)

    def run(self, *tails: Tail) -> set[int]:
        """Run a step and return the blocks that failed."""
        metadata = self.build_connector_meta(SimpleNamespace(finished_req_ids=set()))
        metadata.cartridges[1].extend(tails)
        self.bind_connector_metadata(metadata)
        self.start_load_kv(None)
        return self.get_block_ids_with_load_errors() - {3}


@pytest.mark.parametrize("shape", [None, (2, 3, 20, 2, 64), (2, 2, 36, 2, 64)], ids=["gone", "short", "other"])
def test_where_a_tail_cannot_be_written_its_blocks_are_reported_once_the_request_may_be_ended(shape):
    assert NULL_BLOCK == NULL_BLOCK_ID, "which all requests have, and none of them loses"
    connector = _Connector(shape and torch.zeros(shape, dtype=torch.bfloat16))
    first = Tail("r", "digest", 5, list(range(40, 71)), 1)
    assert connector.run(first) == set(), "vLLM cannot end it yet"
    assert "r" in connector.spoilt
    again = first._replace(turn=2)
    assert connector.run(again) == {1, 2}
    blocks = connector.blocks
    connector.kv, expected = blocks.noise(36), blocks.kv()
    assert connector.run(again) == set(), "the second time it is there"
    expected[:, :, 40:71] = connector.kv[:, :, 5:]
    assert torch.equal(blocks.kv(), expected), "every layer has it, and nothing else was written"
