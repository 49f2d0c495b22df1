"""One request at a time asks for what LMCache has no copy of, and nobody waits for one that has gone."""

from __future__ import annotations

import pytest

from lmcache_cartridge.engine.turns import Turns


@pytest.fixture
def turns():
    return Turns()


def test_the_first_asks_alone_and_the_others_once_it_was_answered(turns):
    assert [turns.may_ask(name, "key", "prefix") for name in "abca"] == [True, False, False, True]
    assert turns.may_ask("z", "another key", "another prefix")
    turns.answered("a", found=True)
    assert [turns.may_ask(name, "key", "prefix") for name in "bcd"] == [True] * 3
    turns.answered("b", found=False)
    assert [turns.may_ask(name, "key", "prefix") for name in "cd"] == [True, False], "the copy is gone"


def test_a_request_that_ends_before_it_was_answered_keeps_nobody_waiting(turns):
    assert [turns.may_ask(name, "key", "prefix") for name in "ab"] == [True, False]
    turns.answered("b", found=False)
    turns.answered("nobody", found=False)
    assert not turns.may_ask("c", "key", "prefix"), "the first still asks"
    turns.answered("a", found=False)
    assert turns.may_ask("c", "key", "prefix")
