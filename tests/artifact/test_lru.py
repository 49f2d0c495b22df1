"""A bounded dict keeps what was used last, and never more than it may."""

from __future__ import annotations

from lmcache_cartridge.artifact.lru import Lru


def test_what_was_used_least_recently_is_dropped_first():
    cache: Lru[str, int] = Lru(2)
    cache.put("a", 1), cache.put("b", 2)
    assert (cache.get("a"), cache.get("none")) == (1, None)
    assert cache.put("c", 3) == 3
    assert (list(cache), "b" in cache) == (["a", "c"], False)
    assert "a" in cache  # which is no use of it
    cache.put("d", 4)
    assert list(cache) == ["c", "d"]


def test_values_of_unlike_sizes_share_the_capacity_and_the_newest_always_stays():
    cache: Lru[str, str] = Lru(5, len)
    cache.put("a", "12"), cache.put("b", "34"), cache.put("a", "1")
    assert list(cache) == ["b", "a"]
    cache.put("c", "567")
    assert list(cache) == ["a", "c"]
    cache.put("large", "x" * 10)
    assert list(cache) == ["large"]
    assert (cache.pop("large"), cache.pop("large"), list(cache)) == ("x" * 10, None, [])
    cache.put("a", "12345")
    assert cache.get("a") == "12345", "what was taken out still counts"
