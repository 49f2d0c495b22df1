"""Chunk hashes lead to prepared chunks: the longest leading run, a trained cartridge only under its tag."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from invariants import check_index

from lmcache_cartridge.library import index as index_module
from lmcache_cartridge.library.index import ChunkKey, KeyIndex


def test_what_was_registered_last_leads_in_whatever_order_they_are_read():
    index, chain = KeyIndex(_hasher(8), SHORT), _hasher(8)([1] * 4)
    hashes = b"".join(own.to_bytes(8, "big") for own in chain)

    def leader() -> str:
        return index.leading(chain, None)[0].digest

    for digest, rank, leading in (("b", "2", "b"), ("a", "1", "b"), ("d", "4", "d"), ("c", "3", "d")):
        index.add(digest, hashes, open_to_all=True, rank=rank)
        assert leader() == leading
    for forgotten, leading in (("d", "c"), ("c", "b"), ("b", "a")):
        index.forget(forgotten)
        assert leader() == leading
    check_index(index)


# However cartridges came into it, the index answers as a dict of everything would.

SHORT = 2
documents = st.lists(st.integers(0, 2), max_size=8)
"""Token ids; so few that many begin alike."""


def _hasher(width: int):
    def chain(ids: list[int]) -> list[int]:
        whole = [tuple(ids[:end]) for end in range(SHORT, len(ids) + 1, SHORT)]
        low = [int.from_bytes(bytes([1 + max(i, 0) for i in prefix]).rjust(8, b"\0"), "big") for prefix in whole]
        if width == 8:
            return low
        # The last 64 bits of every hash of a length alike: what tells them apart is above.
        return [(h << 128) | len(prefix) for h, prefix in zip(low, whole, strict=True)]

    return chain


class _Index(RuleBasedStateMachine):
    width = 8

    def __init__(self) -> None:
        super().__init__()
        self.hasher = _hasher(self.width)
        self.index = KeyIndex(lambda ids: self.hasher([min(i, 250) for i in ids]), SHORT)
        self.open: dict[str, list[int]] = {}
        self.closed: dict[str, list[int]] = {}
        self.gone: set[str] = set()

    # The digest stands for the document, as in an artefact.

    @rule(ids=documents, open_to_all=st.booleans())
    def add(self, ids: list[int], open_to_all: bool) -> None:
        digest = f"d{ids}"
        packed = b"".join(h.to_bytes(self.width, "big") for h in self.hasher(ids))
        self.index.add(digest, packed, open_to_all=open_to_all)
        if open_to_all or digest in self.open:
            self.closed.pop(digest, None)
            self.open[digest] = ids
        else:
            self.closed[digest] = ids

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        if known := sorted(self.open | self.closed):
            digest = data.draw(st.sampled_from(known))
            self.index.forget(digest)
            for table in (self.open, self.closed):
                table.pop(digest, None)
            self.gone.add(digest)

    @rule(ids=documents, data=st.data(), start=st.integers(0, 2))
    def ask(self, ids: list[int], data: st.DataObject, start: int) -> None:
        without = data.draw(st.sets(st.sampled_from(sorted(self.open)), max_size=3)) if self.open else set()
        hashes = self.hasher(ids)[start:]
        run = self.index.leading(hashes, None, lambda digest: digest not in without)
        holders = [self._holders(chunk_hash) for chunk_hash in hashes]
        usable = [{key for key in keys if key.digest not in without} for keys in holders]
        assert len(run) == len(list(itertools.takewhile(bool, usable)))
        assert all(key in keys for key, keys in zip(run, usable, strict=False))
        for chunk_hash, keys in zip(hashes, holders, strict=True):
            assert sorted(self.index.candidates(chunk_hash, None)) == sorted(keys)

    @invariant()
    def every_tag_has_its_own_chunks(self) -> None:
        for digest, ids in (self.open | self.closed).items():
            own = self.hasher(ids)
            assert self.index.chunks(digest) == [ChunkKey(digest, i) for i in range(len(own))]
            assert self.index.leading(own, digest) == self.index.chunks(digest)
            assert self.index.has(digest)

    @invariant()
    def nothing_is_kept_of_what_is_gone(self) -> None:
        check_index(self.index)
        for digest in self.gone - (self.open | self.closed).keys():
            assert not self.index.has(digest)
            assert self.index.chunks(digest) == []

    def _holders(self, chunk_hash: int) -> set[ChunkKey]:
        return {
            ChunkKey(digest, chunk)
            for digest, ids in self.open.items()
            for chunk, own in enumerate(self.hasher(ids))
            if own == chunk_hash
        }


@pytest.mark.parametrize(("width", "bound"), [(8, 1), (8, 1 << 18), (32, 5)])
def test_the_index_answers_as_a_dict_of_everything(width, bound, monkeypatch):
    monkeypatch.setattr(index_module, "MAX_CACHED_CHUNKS", bound)
    machine = type("_Index", (_Index,), {"width": width})
    run_state_machine_as_test(machine, settings=settings(max_examples=60, stateful_step_count=30, deadline=None))
