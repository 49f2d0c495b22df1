"""The index of a fleet: what the servers' events tell is what is found, whatever they are and in whatever order."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from lmcache_cartridge.fleet.index import Index, Source, Tokens

CLEARED = {"type": "AllBlocksCleared"}
SIZE, PODS, MEDIA = 16, 3, {"gpu": "GPU", "cpu": "CPU", "disk": "STORAGE"}
Path = tuple[int, ...]
"""A prompt, by blocks; each block is one token many times over."""


read = msgspec.msgpack.encode


REMOVED = {"type": "BlockRemoved", "block_hashes": [3, 4], "medium": "GPU", "group_idx": 0}
STORED = {
    "type": "BlockStored", "block_hashes": [5], "parent_block_hash": None, "token_ids": list(range(SIZE)),
    "block_size": SIZE, "lora_id": None, "medium": "GPU", "lora_name": "nurse", "group_idx": 0,
}  # fmt: skip
"""As vLLM 0.32 writes them."""


def stored(names: list[Any], ids: list[int], parent: Any = None, **more: Any) -> bytes:
    return read(STORED | {"block_hashes": names, "parent_block_hash": parent, "token_ids": ids} | more)


def removed(names: list[Any], **more: Any) -> bytes:
    return read(REMOVED | {"block_hashes": names} | more)


def ids_of(path: Path) -> list[int]:
    return [token for token in path for _ in range(SIZE)]


class Engines:
    """What some servers hold, kept as simply as can be, with the events that they would tell of it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.held: dict[tuple[int, str], set[tuple[str, Path]]] = {
            (pod, tier): set() for pod in range(PODS) for tier in MEDIA
        }

    def path(self) -> Path:
        return tuple(self.random.randrange(3) for _ in range(self.random.randint(1, 8)))

    def step(self) -> tuple[int, bytes]:
        """Store, remove or clear something; return the server and its event."""
        pod, tier = self.random.choice(list(self.held))
        held, salt, choice = self.held[pod, tier], self.random.choice("ab"), self.random.random()
        if choice < 0.01:
            for other in MEDIA:
                self.held[pod, other].clear()
            return pod, read(CLEARED)
        if choice < 0.5 and held:
            gone = self.random.sample(sorted(held), min(len(held), self.random.randint(1, 3)))
            held.difference_update(gone)
            return pod, removed([_name(*one) for one in gone], medium=MEDIA[tier])
        path = self.path()
        there = next(n for n in range(len(path), -1, -1) if n == 0 or (salt, path[:n]) in held)
        new = [path[:n] for n in range(there + 1, len(path) + 1)] or [path]  # told again where all is there
        held.update((salt, one) for one in new)
        parent = new[0][:-1]
        return pod, stored(
            [_name(salt, one) for one in new], ids_of(new[-1])[len(parent) * SIZE :],
            _name(salt, parent) if parent else None, medium=MEDIA[tier],
        )  # fmt: skip

    def matches(self, path: Path) -> dict[int, dict[str, int]]:
        found: dict[int, dict[str, int]] = {}
        for (pod, tier), held in self.held.items():
            paths = {one for _, one in held}
            blocks = next((n for n in range(len(path)) if path[: n + 1] not in paths), len(path))
            if blocks:
                found.setdefault(pod, {})[tier] = blocks * SIZE
        return found


def _name(salt: str, path: Path) -> int:
    return hash((salt, path)) & (1 << 64) - 1


@pytest.mark.parametrize("seed", range(2))
def test_what_is_found_is_what_the_servers_hold_for_any_tenant(seed):
    engines, index = Engines(seed), Index()
    for _ in range(600):
        pod, event = engines.step()
        index.apply(Source(pod), event)
        path = engines.path()
        assert index.matches(Tokens(ids_of(path))) == engines.matches(path)


def test_ranks_and_groups_of_a_server_are_told_apart():
    index, ids = Index(), list(range(4 * SIZE))
    index.apply(Source(0, 1), stored([1, 2, 3, 4], ids))
    index.apply(Source(0, 0), stored([1], ids[:SIZE]))
    index.apply(Source(0, 0), stored([1, 2], ids[: 2 * SIZE], group_idx=5))
    assert index.matches(Tokens(ids)) == {0: {"gpu": 4 * SIZE}}
    index.apply(Source(0, 1), read(CLEARED))
    assert index.matches(Tokens(ids)) == {0: {"gpu": 2 * SIZE}}
    index.apply(Source(0, 0), removed([1, 2], group_idx=5))
    assert index.matches(Tokens(ids)) == {0: {"gpu": SIZE}}


def test_tiers_may_have_blocks_of_other_sizes_and_blocks_after_unknown_ones_are_not_guessed():
    index, source, ids = Index(), Source(7), list(range(256))
    index.apply(source, stored([1, 2], ids[: 2 * SIZE]))
    index.apply(source, stored([b"x"], ids, block_size=256, medium="cpu"))
    index.apply(source, stored([9], ids[:SIZE], parent=8))
    assert index.matches(Tokens(ids)) == {7: {"gpu": 2 * SIZE, "cpu": 256}}
    assert index.blocks() == {(7, "gpu"): 2, (7, "cpu"): 1}


def _mangled(choose: random.Random) -> Any:
    junk = [None, -1, (1 << 64) - 1, 1.5, "x", b"x", [], [None], {}, [-1] * SIZE, [1 << 40] * SIZE, True]
    event = dict(choose.choice([STORED, REMOVED, CLEARED]))
    for key in choose.sample(list(event), choose.randint(0, min(len(event), 3))):
        event[key] = choose.choice(junk)
        if choose.random() < 0.3:
            del event[key]
    return event


def test_no_event_whatever_it_says_harms_the_index():
    choose, index, ids, refused = random.Random(5), Index(), list(range(2 * SIZE)), 0
    index.apply(Source(0), stored([1, 2], ids))
    for event in [None, "x", [], *(_mangled(choose) for _ in range(2000))]:
        try:
            index.apply(Source(1), read(event))
        except (msgspec.DecodeError, ValueError):
            refused += 1
    assert refused > 500
    index.apply(Source(1), read(CLEARED))
    index.apply(Source(1), stored([1, 2], ids))
    assert index.matches(Tokens(ids)) == {0: {"gpu": 2 * SIZE}, 1: {"gpu": 2 * SIZE}}
