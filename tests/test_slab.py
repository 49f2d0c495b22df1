"""A slab hands out each slot once, in memory that does not overlap, and no more than its budget."""

from __future__ import annotations

import pytest

from lmcache_cartridge.errors import OverBudget
from lmcache_cartridge.memory.slab import Slab


@pytest.mark.parametrize(("budget", "slots"), [(100, 1), (199, 1), (200, 2), (1050, 10)])
def test_a_slab_has_as_many_slots_as_its_budget_holds_whole(budget: int, slots: int) -> None:
    slab = Slab(100, budget)
    assert slab.slots == slab.free_slots == slots


@pytest.mark.parametrize("budget", [0, 99])
def test_a_budget_that_holds_no_slot_is_refused_with_what_it_needs(budget: int) -> None:
    with pytest.raises(OverBudget, match=f"a budget of {budget} bytes holds no chunk of 100 bytes"):
        Slab(100, budget)


def test_slots_do_not_overlap() -> None:
    slab = Slab(100, 500)
    slots = [slab.take() for _ in range(5)]
    for slot in slots:
        slab.tensor(slot).fill_(slot)
    assert sorted(slots) == [0, 1, 2, 3, 4]
    assert all((slab.tensor(slot) == slot).all() and slab.tensor(slot).numel() == 100 for slot in slots)


def test_a_slot_is_handed_out_again_only_after_it_was_given_back() -> None:
    slab = Slab(100, 200)
    first, second = slab.take(), slab.take()
    assert slab.free_slots == 0
    with pytest.raises(IndexError):
        slab.take()
    slab.give(first)
    assert slab.free_slots == 1
    assert slab.take() == first != second


def test_slots_of_whole_pages_begin_at_a_page() -> None:
    slab = Slab(8192, 5 * 8192)
    assert [slab.tensor(slab.take()).data_ptr() % 4096 for _ in range(5)] == [0] * 5
