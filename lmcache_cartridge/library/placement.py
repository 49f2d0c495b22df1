"""Placement: which server of a fleet a router's hash gives a cartridge, computed as the router does, without asking it.

`ROUTERS` has those that are known. What a server is called is what the router hashes of it: for Envoy the `hostname` of an
endpoint where `use_hostname_for_hashing` is set, as in our configuration, else `ADDRESS:PORT`; for vllm-router the URL
given to it; for `fleet serve` the names in its configuration. The order of the servers is that of the router's
configuration. All of them are taken to be healthy, and none
to be over its share of load.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Literal, NamedTuple

Router = Literal["envoy", "envoy-ring-hash", "vllm-router", "picker"]
_WORD = (1 << 64) - 1


class Ring(NamedTuple):
    """Points on a circle of hashes, sorted, and the server that each belongs to."""

    points: Sequence[int]
    servers: Sequence[str]

    def owner(self, hashed: int) -> str:
        """Return the server of the first point that is not before `hashed`."""
        return self.servers[bisect_left(self.points, hashed) % len(self.points)]


def owner(key: str, servers: Sequence[str], router: Router = "envoy") -> str:
    """Return which of `servers` gets requests with the affinity key `key`. Raises `ValueError` without any server.

    The first call for some servers builds a table of all their places: 0.1 s and more for Envoy.
    """
    if not servers or len(set(servers)) != len(servers):
        raise ValueError("name every server of the fleet once")
    return ROUTERS[router](tuple(servers))(key)


# Our own picker, `fleet serve`.


def owners(key: str, servers: Iterable[str]) -> list[str]:
    """Return the servers from the first to the last owner of an affinity key; the same for everybody who asks.

    Rendezvous hashing (Thaler and Ravishankar 1998): a server that comes or goes moves its own keys and no others.
    """
    return sorted(set(servers), key=lambda server: (_weight(key, server), server), reverse=True)


def _weight(key: str, server: str) -> bytes:
    own = blake2b(server.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return blake2b(key.encode("utf-8", "surrogatepass"), key=own, digest_size=8).digest()


# Envoy 1.40: source/extensions/load_balancing_policies/{maglev,ring_hash}.

_MAGLEV_PLACES = 65537
_RING_LEAST_POINTS = 1024


@lru_cache(maxsize=4)
def _maglev(servers: tuple[str, ...]) -> Callable[[str], str]:
    """Eisenbud et al. 2016, listing 1: the servers take turns, each its next free place."""
    places: list[str | None] = [None] * _MAGLEV_PLACES
    starts = [xxh64(server.encode()) % _MAGLEV_PLACES for server in servers]
    steps = [xxh64(server.encode(), 1) % (_MAGLEV_PLACES - 1) + 1 for server in servers]
    filled = 0
    while filled < _MAGLEV_PLACES:
        for number, server in enumerate(servers[: _MAGLEV_PLACES - filled]):
            place = starts[number]
            while places[place] is not None:
                place = (place + steps[number]) % _MAGLEV_PLACES
            places[place] = server
            starts[number] = (place + steps[number]) % _MAGLEV_PLACES
            filled += 1
    return lambda key: str(places[xxh64(key.encode()) % _MAGLEV_PLACES])


@lru_cache(maxsize=4)
def _ring_hash(servers: tuple[str, ...]) -> Callable[[str], str]:
    each = -(-_RING_LEAST_POINTS // len(servers))
    ring = _ring((xxh64(f"{server}_{number}".encode()), server) for server in servers for number in range(each))
    return lambda key: ring.owner(xxh64(key.encode()))


# vllm-router 0.1.17: src/policies/consistent_hash.rs. Its hash is mcrouter's.

_VIRTUAL_NODES = 160
_SEED = 4193360111
_MURMUR = 0xC6A4A7935BD1E995
_FURC_TRIES, _FURC_SHIFT, _FURC_LARGEST = 32, 23, (1 << 23) - 1


@lru_cache(maxsize=4)
def _vllm_router(servers: tuple[str, ...]) -> Callable[[str], str]:
    ring = _ring((_fbi(f"{server}:{number}"), server) for server in servers for number in range(_VIRTUAL_NODES))
    return lambda key: ring.owner(_fbi(f"header:x-session-id:{key}"))


def _fbi(text: str) -> int:
    return murmur64a(_furc(text.encode(), _FURC_LARGEST).to_bytes(4, "little"), _SEED)


def _furc(key: bytes, below: int) -> int:
    """Return furc_hash of a key, a number under `below`."""
    words = [murmur64a(key, _SEED)]

    def bit(index: int) -> int:
        while len(words) <= index >> 6:
            words.append(murmur64a(words[-1].to_bytes(8, "little"), _SEED))
        return words[index >> 6] >> (index & 63) & 1

    depth = (below - 1).bit_length()
    at = depth
    for _ in range(_FURC_TRIES):
        while not bit(at):
            if depth == 0:
                return 0
            depth -= 1
            at = depth
        at += _FURC_SHIFT
        number = 1
        for _ in range(depth - 1):
            number = number << 1 | bit(at)
            at += _FURC_SHIFT
        if number < below:
            return number
    return 0


def _ring(points: Iterable[tuple[int, str]]) -> Ring:
    """Return a ring of pairs of a point and a server; of equal points the last counts."""
    by_point = dict(points)
    return Ring(sorted(by_point), [by_point[point] for point in sorted(by_point)])


ROUTERS: dict[Router, Callable[[tuple[str, ...]], Callable[[str], str]]] = {
    "envoy": _maglev,
    "envoy-ring-hash": _ring_hash,
    "vllm-router": _vllm_router,
    "picker": lambda servers: lambda key: owners(key, servers)[0],
}
"""By router a function of the servers that returns the owner of a key. `envoy` is `MAGLEV`, as our configuration has it,
`picker` what `fleet serve` falls back on, for which the servers are the names of its pods."""


def murmur64a(data: bytes, seed: int) -> int:
    """Return MurmurHash64A of some bytes."""
    value = seed ^ (len(data) * _MURMUR & _WORD)
    whole = len(data) // 8 * 8
    for at in range(0, whole, 8):
        word = int.from_bytes(data[at : at + 8], "little") * _MURMUR & _WORD
        word = (word ^ word >> 47) * _MURMUR & _WORD
        value = (value ^ word) * _MURMUR & _WORD
    if rest := data[whole:]:
        value = (value ^ int.from_bytes(rest, "little")) * _MURMUR & _WORD
    value = (value ^ value >> 47) * _MURMUR & _WORD
    return value ^ value >> 47


_P1, _P2, _P3, _P4, _P5 = (
    0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5,
)  # fmt: skip


def xxh64(data: bytes, seed: int = 0) -> int:
    """Return XXH64 of some bytes, as `doc/xxhash_spec.md` of xxHash 0.8 has it."""
    at = 0
    if len(data) >= 32:
        lanes = [seed + _P1 + _P2 & _WORD, seed + _P2 & _WORD, seed, seed - _P1 & _WORD]
        while at + 32 <= len(data):
            for lane in range(4):
                lanes[lane] = _round(lanes[lane], int.from_bytes(data[at : at + 8], "little"))
                at += 8
        value = sum(_rotated(lane, by) for lane, by in zip(lanes, (1, 7, 12, 18), strict=True)) & _WORD
        for lane in lanes:
            value = (value ^ _round(0, lane)) * _P1 + _P4 & _WORD
    else:
        value = seed + _P5 & _WORD
    value = value + len(data) & _WORD
    while at + 8 <= len(data):
        value = _rotated(value ^ _round(0, int.from_bytes(data[at : at + 8], "little")), 27) * _P1 + _P4 & _WORD
        at += 8
    if at + 4 <= len(data):
        word = int.from_bytes(data[at : at + 4], "little")
        value = _rotated(value ^ word * _P1 & _WORD, 23) * _P2 + _P3 & _WORD
        at += 4
    for byte in data[at:]:
        value = _rotated(value ^ byte * _P5 & _WORD, 11) * _P1 & _WORD
    value = (value ^ value >> 33) * _P2 & _WORD
    value = (value ^ value >> 29) * _P3 & _WORD
    return value ^ value >> 32


def _round(lane: int, word: int) -> int:
    return _rotated(lane + word * _P2 & _WORD, 31) * _P1 & _WORD


def _rotated(value: int, by: int) -> int:
    return (value << by | value >> 64 - by) & _WORD
