"""A bounded dict keeps what was used last, and never more than it may."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lmcache_cartridge.artifact.lru import Lru


@given(st.lists(st.tuples(st.sampled_from(["put", "get"]), st.sampled_from("abcd"), st.integers(0, 7))))
def test_what_was_used_least_recently_is_dropped_first_and_the_newest_always_stays(steps):
    cache: Lru[str, int] = Lru(5, int)
    kept: dict[str, int] = {}
    for call, key, size in steps:
        if call == "put":
            cache.put(key, size)
            kept.pop(key, None)
            kept[key] = size
            while len(kept) > 1 and sum(kept.values()) > 5:
                del kept[next(iter(kept))]
        elif cache.get(key) is not None:
            kept[key] = kept.pop(key)
        assert list(cache) == list(kept)
