"""The index of a fleet: what the servers' events tell is what is found, whatever they are and in whatever order."""

from __future__ import annotations

import itertools
import random
from typing import Any

import msgspec
import pytest

from lmcache_cartridge.fleet.index import Index, Source, Tokens

SIZE, MEDIA = 16, {"gpu": "GPU", "cpu": "CPU", "disk": "STORAGE"}
Path = tuple[int, ...]
"""A prompt, by blocks; each block is one token many times over."""
CLEARED = {"type": "AllBlocksCleared"}
REMOVED = {"type": "BlockRemoved", "block_hashes": [3, 4], "medium": "GPU", "group_idx": 0}
STORED = {
    "type": "BlockStored", "block_hashes": [5], "parent_block_hash": None, "token_ids": list(range(SIZE)),
    "block_size": SIZE, "lora_id": None, "medium": "GPU", "lora_name": "nurse", "group_idx": 0,
}  # fmt: skip
"""As vLLM 0.32 writes them."""

packed = msgspec.msgpack.encode


def stored(names: list[Any], ids: list[int], **more: Any) -> bytes:
    return packed(STORED | {"block_hashes": names, "token_ids": ids} | more)


def ids_of(path: Path) -> list[int]:
    return [token for token in path for _ in range(SIZE)]


def name_of(salt: str, path: Path) -> int:
    return hash((salt, path)) & (1 << 64) - 1


def test_what_is_found_is_what_the_servers_hold_for_any_tenant():
    """Against sets of prompts for each server, rank, tier and group, of which events are told by chance."""
    choose, index = random.Random(0), Index()
    held: dict[Any, set[tuple[str, Path]]] = {
        place: set() for place in itertools.product(range(2), range(2), MEDIA, (0, 5))
    }

    def some() -> Path:
        return tuple(choose.choices(range(2), k=choose.randint(1, 6)))

    for _ in range(2000):
        pod, rank, tier, group = place = choose.choice(list(held))
        there, path, salt, step = held[place], some(), choose.choice("ab"), choose.random()
        where: dict[str, Any] = {"medium": MEDIA[tier], "group_idx": group}
        if step < 0.01:
            event = packed(CLEARED)
            for other in held:
                if other[:2] == (pod, rank):
                    held[other].clear()
        elif step < 0.5 and there:
            gone = choose.sample(sorted(there), min(len(there), 2))
            there.difference_update(gone)
            event = packed(REMOVED | where | {"block_hashes": [name_of(*one) for one in gone]})
        else:
            known = max(n for n in range(len(path) + 1) if n == 0 or (salt, path[:n]) in there)
            before = path[: min(known, len(path) - 1)]  # the last block is told again where all is there
            new = [path[: n + 1] for n in range(len(before), len(path))]
            there.update((salt, one) for one in new)
            where["parent_block_hash"] = name_of(salt, before) if before else None
            event = stored([name_of(salt, one) for one in new], ids_of(path[len(before) :]), **where)
        index.apply(Source(pod, rank), event)
        looked, expected = some(), {}
        for (pod, _, tier, _), copies in held.items():
            prompts = {one for _, one in copies}
            blocks = next((n for n in range(len(looked)) if looked[: n + 1] not in prompts), len(looked))
            if blocks:
                by_tier = expected.setdefault(pod, {})
                by_tier[tier] = max(by_tier.get(tier, 0), blocks * SIZE)
        assert index.matches(Tokens(ids_of(looked))) == expected


def test_tiers_may_have_blocks_of_other_sizes_and_blocks_after_unknown_ones_are_not_guessed():
    index, source, ids = Index(), Source(7), list(range(256))
    index.apply(source, stored([1, 2], ids[: 2 * SIZE]))
    index.apply(source, stored([b"x"], ids, block_size=256, medium="cpu"))
    index.apply(source, stored([9], ids[:SIZE], parent_block_hash=8))
    assert index.matches(Tokens(ids)) == {7: {"gpu": 2 * SIZE, "cpu": 256}}
    assert index.blocks() == {(7, "gpu"): 2, (7, "cpu"): 1}


@pytest.mark.parametrize("event", [
    None, [], CLEARED | {"type": "Else"}, REMOVED | {"block_hashes": [None]}, STORED | {"block_size": 0},
    STORED | {"token_ids": [-1] * SIZE}, STORED | {"token_ids": [1 << 40] * SIZE}, STORED | {"token_ids": [1]},
])  # fmt: skip
def test_what_is_no_event_changes_nothing(event):
    index = Index()
    index.apply(Source(0), packed(STORED))
    with pytest.raises((msgspec.DecodeError, ValueError)):
        index.apply(Source(0), packed(event))
    assert index.matches(Tokens(range(SIZE))) == {0: {"gpu": SIZE}}
