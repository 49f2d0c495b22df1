"""Placement computes the hashes of the routers; that the real ones choose so is in test_routers.py."""

from __future__ import annotations

import pytest

from lmcache_cartridge.library.placement import ROUTERS, Router, murmur64a, owner, xxh64

SERVERS = ["engine-0", "engine-1", "engine-2"]
KEYS = [f"doc-{number}" for number in range(600)]


def test_xxh64_is_that_of_the_specification() -> None:
    # The values of xxHash's own sanity check, and the bytes of a sentence longer than one stripe.
    assert xxh64(b"") == 0xEF46DB3751D8E999
    assert xxh64(b"a") == 0xD24EC4F1A98C6E5B
    assert xxh64(b"abc") == 0x44BC2CF5AD770999
    assert xxh64(b"Nobody inspects the spammish repetition") == 0xFBCEA83C8A378BF1
    assert xxh64(b"abc", 1) != xxh64(b"abc")


def test_murmur64a_of_words_and_of_what_is_left() -> None:
    values = {murmur64a(b"abcdefgh"[:length], 7) for length in range(9)}
    assert len(values) == 9 and all(0 <= value < 1 << 64 for value in values)


@pytest.mark.parametrize("router", ROUTERS)
def test_every_server_owns_its_share_and_keeps_nearly_all_of_it_when_another_goes(router: Router) -> None:
    homes = {key: owner(key, SERVERS, router) for key in KEYS}
    shares = [list(homes.values()).count(server) for server in SERVERS]
    assert min(shares) > 120 and sum(shares) == 600, shares
    after = {key: owner(key, SERVERS[:2], router) for key in KEYS}
    moved = [key for key in KEYS if homes[key] != SERVERS[2] and after[key] != homes[key]]
    assert len(moved) <= 0.15 * 600


@pytest.mark.parametrize("servers", [[], ["a", "b", "a"]])
def test_servers_that_are_none_or_the_same_have_no_owner(servers: list[str]) -> None:
    with pytest.raises(ValueError, match="every server"):
        owner("x", servers)


def test_one_server_owns_everything() -> None:
    assert {owner(key, ["only"], router) for key in KEYS[:20] for router in ROUTERS} == {"only"}
