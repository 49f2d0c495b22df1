"""Owners: which servers of a fleet an affinity key belongs to, the first one before all others."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b


def owners(key: str, servers: Iterable[str]) -> list[str]:
    """Return the servers from the first to the last owner of an affinity key; the same for everybody who asks.

    Rendezvous hashing (Thaler and Ravishankar 1998): a server that comes or goes moves its own keys and no others.
    """
    return sorted(set(servers), key=lambda server: (_weight(key, server), server), reverse=True)


def _weight(key: str, server: str) -> bytes:
    own = blake2b(server.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return blake2b(key.encode("utf-8", "surrogatepass"), key=own, digest_size=8).digest()
