"""A home directory with artefacts registered in it, the stores opened over it, and the prompts that ask for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from invariants import check
from making import Made, heads_bytes, make_artifact, make_engine, make_fingerprint, make_ids, sha256_hasher
from waiting import Clock, until

from lmcache_cartridge.artifact.model import Fingerprint
from lmcache_cartridge.artifact.reading import PAYLOAD, load_token_ids
from lmcache_cartridge.library.catalog import Catalog
from lmcache_cartridge.library.quarantine import Quarantine
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.settings import Settings

if TYPE_CHECKING:
    from lmcache_cartridge.memory.claims import Claim
    from lmcache_cartridge.memory.store import CartridgeStore

CHUNK = 16
CHUNK_BYTES = make_fingerprint().token_bytes * CHUNK
STILL = {"reload_s": 0}
"""Settings of a store that looks for changes only when it is told to."""
GRACE_S = 50.0
"""How long the stores of `opened` keep what was removed."""


class Prompt(NamedTuple):
    """A cartridge's ids with a question behind them, as the engine hashes it."""

    hashes: list[int]
    """Of the cartridge's whole chunks, then of the question."""
    whole: int
    """How many are the cartridge's."""
    tag: str | None


class Home:
    """A home directory, with the artefacts registered in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.registry = Registry(path / "registry.sqlite")
        self.quarantine = Quarantine(path / "quarantine")
        self._opened: list[CartridgeStore] = []
        self.made: dict[str, Made] = {}

    def make(self, name: str = "doc", *, version: int = 1, promote: bool = True, **arguments: Any) -> Made:
        root, arguments = self.root(name, version), {"positions": 72} | arguments
        self.made[name] = make_artifact(root, cartridge_id=name, version=version, **arguments)
        self.registry.register(root, promote=promote)
        return self.made[name]

    def check_served(self, store: CartridgeStore, *names: str) -> None:
        """Compare what a store answers from cartridges, that of `make` without a name."""
        for name in names or ("doc",):
            assert_served(store, self.made[name], self.prompt(name))

    def prompt(self, name: str = "doc") -> Prompt:
        """Return a prompt that begins with one of `make`."""
        return prompt_for(self, self.made[name], name)

    def ban(self, digest: str, reason: str) -> None:
        """Quarantine every copy that is registered."""
        for row in self.registry.having([digest]):
            self.quarantine.put(digest, reason, row.location)

    def root(self, name: str = "doc", version: int = 1) -> Path:
        return self.path / "cartridges" / name / str(version)

    def payload(self, name: str = "doc") -> Path:
        return self.root(name) / PAYLOAD

    def open(
        self,
        *,
        fingerprint: Fingerprint | None = None,
        chunks: int = 16,
        settings: dict[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
        **engine: Any,
    ) -> CartridgeStore:
        """Return a store with memory for `chunks`, closed and checked at the end of the test."""
        from lmcache_cartridge.engine.trust import Trust
        from lmcache_cartridge.memory.layout import rank_heads
        from lmcache_cartridge.memory.store import CartridgeStore

        engine = make_engine(fingerprint or make_fingerprint(), **engine)
        heads = len(rank_heads(engine.fingerprint.kv_heads, engine.rank, engine.world)) / engine.fingerprint.kv_heads
        budget = int(chunks * engine.chunk_tokens * engine.fingerprint.token_bytes * heads)
        # What few tests are about, `engine/test_trust.py` first of all, is whom this engine trusts.
        given = {"home": self.path, "cpu_bytes": budget, "lookup_timeout_s": 20, "plain_prompts": "all"}
        given |= settings or {}
        store = CartridgeStore(Settings(**given), engine, Trust, clock=clock)
        self._opened.append(store)
        return store

    def close(self) -> None:
        for store in self._opened:
            store.close()
            check(store)
            assert store.cpu.stats().lent == 0, "a test forgot to close a loan"


@pytest.fixture
def home(tmp_path):
    """An empty home, whose stores are closed and checked at the end."""
    home = Home(tmp_path / "home")
    yield home
    home.close()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def opened(home, clock):
    """Return a function that opens a store, with settings and what an engine has, that looks for changes only when told to."""

    def open_store(settings: dict[str, Any] | None = None, **engine: Any) -> CartridgeStore:
        return home.open(settings=STILL | {"lease_s": GRACE_S} | (settings or {}), clock=clock, **engine)

    return open_store


def prompt_for(home: Home, made: Made, name: str = "doc") -> Prompt:
    """Return a prompt that begins with a cartridge of the home."""
    ids = load_token_ids(made.manifest, home.root(name)).tolist()
    tag = made.manifest.digest if made.manifest.kind == "trained" else None
    hashes = list(sha256_hasher(CHUNK)(ids + make_ids(2 * CHUNK, 99)))
    return Prompt(hashes, made.manifest.positions // CHUNK, tag)


def chunk_bytes(made: Made, chunk: int) -> bytes:
    """Return what chunk `chunk` of an engine with all heads must be."""
    return heads_bytes(made.kv[:, :, chunk * CHUNK : (chunk + 1) * CHUNK])


def lent(store: CartridgeStore, chunk_hash: int, tag: str | None = None) -> bytes | None:
    """Return a copy of what a store lends, None if it lends nothing."""
    loan = store.lend(chunk_hash, tag)
    if loan is None:
        return None
    with loan:
        return loan.bytes.numpy().tobytes()


def assert_served(store: CartridgeStore, made: Made, prompt: Prompt) -> None:
    """Look a prompt up, and compare every chunk with the KV, bit by bit."""
    assert store.lookup(prompt.hashes, prompt.tag) == prompt.whole
    for chunk, chunk_hash in enumerate(prompt.hashes[: prompt.whole]):
        assert lent(store, chunk_hash, prompt.tag) == chunk_bytes(made, chunk), chunk
        assert store.release(chunk_hash, prompt.tag) is True
    assert store.release(prompt.hashes[0], prompt.tag) is False


def read(claim: Claim) -> Claim:
    """Wait until what a claim is on was read, and return the claim."""
    until(lambda: not claim.poll().opening)
    return claim


def claimed(store: CartridgeStore, tag: str, places: dict[str, Any] | None = None) -> Claim:
    """Claim what a tag says, wait until all of it is there, and return the claim."""
    claim = store.claim(tag, places or {})
    until(lambda: claim.poll().ready)
    return claim


def catalog_of(store: CartridgeStore) -> Catalog:
    """Return the catalog that a store serves from."""
    return store._catalog
