"""What a server of a fleet owns comes into its memory before anybody asks, and no more than it has room for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from making import make_artifact, make_engine, make_fingerprint
from waiting import until

from lmcache_cartridge.errors import SettingsError
from lmcache_cartridge.library.placement import owner
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.memory.store import CartridgeStore
from lmcache_cartridge.settings import Settings, from_mapping

SERVERS = ("engine-0", "engine-1", "engine-2")
CHUNK, CHUNKS = 16, 2
FINGERPRINT = make_fingerprint()
CARTRIDGE_BYTES = FINGERPRINT.token_bytes * CHUNK * CHUNKS
NAMES = [f"doc-{number}" for number in range(24)]


def _register(home: Path, *names: str) -> Registry:
    registry = Registry(Settings(home=home).registry_path)
    for name in names:
        version = registry.next_version(name)
        root, seed = home / name / str(version), len(registry.all())
        make_artifact(root, positions=CHUNK * CHUNKS, chunk_tokens=CHUNK, cartridge_id=name, version=version, seed=seed)
        registry.register(root)
    return registry


@contextmanager
def _store(home: Path, me: str | None, cartridges: int = 100) -> Iterator[CartridgeStore]:
    settings = Settings(
        home=home,
        disk_bytes=0,
        cpu_bytes=cartridges * CARTRIDGE_BYTES,
        fleet_servers=SERVERS,
        warm_owned=me,
        reload_s=0,
    )
    with closing(CartridgeStore(settings, make_engine(FINGERPRINT, chunk_tokens=CHUNK))) as store:
        yield store
        store.check()


def _resident(store: CartridgeStore) -> dict[str, int]:
    return store.status()["resident"]["cpu"]


def _wait(store: CartridgeStore, digests: set[str]) -> None:
    """Wait until these and no others are whole in memory, and nothing is on its way."""
    until(lambda: _resident(store) == dict.fromkeys(digests, CHUNKS) and store.numbers()["loading"] == 0)


def _owned(registry: Registry, me: str) -> set[str]:
    return {row.digest for row in registry.newest(-1) if owner(row.id, SERVERS) == me}


def test_the_servers_of_a_fleet_have_everything_once(tmp_path: Path) -> None:
    registry = _register(tmp_path, *NAMES)
    with ExitStack() as stack:
        stores = {me: stack.enter_context(_store(tmp_path, me)) for me in SERVERS}
        for me, store in stores.items():
            _wait(store, _owned(registry, me))
        held = [digest for store in stores.values() for digest in _resident(store)]
    assert len(held) == len(set(held)) and set(held) == {row.digest for row in registry.all()}


def test_without_it_nothing_is_brought_in(tmp_path: Path) -> None:
    _register(tmp_path, *NAMES[:4])
    with _store(tmp_path, None) as store:
        assert store.numbers()["loading"] == 0 and _resident(store) == {}


def test_the_newest_come_as_far_as_there_is_room_and_it_says_how_far(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    registry = _register(tmp_path, *NAMES)
    owned = [row.digest for row in registry.newest(-1) if owner(row.id, SERVERS) == "engine-0"]
    assert len(owned) > 3
    with caplog.at_level(logging.WARNING), _store(tmp_path, "engine-0", 3) as store:
        _wait(store, set(owned[:3]))
        store.refresh()
        assert store.stats().evicted == 0
    told = [message for message in caplog.messages if "this server owns" in message]
    assert told == [
        f"3 of the {len(owned)} cartridges that this server owns fit in cpu_bytes, the newest: it has room for "
        f"{3 * CHUNKS} chunks, and they have {CHUNKS * len(owned)}"
    ]


def test_a_new_version_and_a_new_cartridge_are_followed_and_warm_labels_come_first(tmp_path: Path) -> None:
    mine = [name for name in NAMES if owner(name, SERVERS) == "engine-0"]
    others = [name for name in NAMES if owner(name, SERVERS) != "engine-0"]
    registry = _register(tmp_path, mine[0], others[0])
    first = registry.find(mine[0]).digest
    with _store(tmp_path, "engine-0", 4) as store:
        _wait(store, {first})
        _register(tmp_path, mine[0], mine[1], others[1])
        registry.label("hot", others[0], warm=True)
        store.refresh()
        _wait(store, {first, *(registry.find(name).digest for name in (mine[0], mine[1], others[0]))})
        assert registry.find(mine[0]).version == 2


def test_what_requests_hold_is_not_evicted_for_it(tmp_path: Path) -> None:
    mine = [name for name in NAMES if owner(name, SERVERS) == "engine-0"]
    other = next(name for name in NAMES if owner(name, SERVERS) != "engine-0")
    registry = _register(tmp_path, other)
    with _store(tmp_path, "engine-0", 2) as store:
        held = registry.find(other).digest
        with closing(store.claim(held, {})) as claim:
            until(lambda: claim.poll().ready)
            _register(tmp_path, *mine[:2])
            store.refresh()
            until(lambda: len(_resident(store)) == 2)
            assert _resident(store)[held] == CHUNKS
        _wait(store, _owned(registry, "engine-0"))


@pytest.mark.parametrize(
    "values, problem",
    [
        ({"fleet_servers": ["a", "b"], "warm_owned": "c"}, "warm_owned: c is none of fleet_servers, a, b"),
        ({"warm_owned": "c"}, "warm_owned: c is none"),
        ({"fleet_servers": ["a", "a"]}, "name every server once"),
    ],
)
def test_a_server_that_is_none_of_them_does_not_start(values: dict[str, object], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        from_mapping(values)
