"""A directory that hangs, as on a mount whose server is away, holds up its own cartridge and nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from homes import Home, catalog_of
from waiting import until

from lmcache_cartridge.artifact import reading


class Mount:
    """Where every manifest hangs once it `is_away`."""

    def __init__(self) -> None:
        self.is_away, self.back = False, threading.Event()


@pytest.fixture
def mount(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mount]:
    mount, read = Mount(), reading._read_at_most

    def hang(path: Path, limit: int) -> bytes:
        if mount.is_away and "/nfs" in str(path) and threading.current_thread() is not threading.main_thread():
            assert mount.back.wait(60)
        return read(path, limit)

    monkeypatch.setattr(reading, "_read_at_most", hang)
    yield mount
    mount.back.set()


def test_what_is_registered_later_is_served_and_the_store_closes(home: Home, mount: Mount) -> None:
    home.make("a", positions=64, seed=1)
    store = home.open(settings={"reload_s": 0.05})
    relieved: list[float] = []
    relieve = store.cpu.relieve
    store.cpu.relieve = lambda: relieved.append(time.monotonic()) or relieve()  # type: ignore[func-returns-value]
    mount.is_away = True
    for number in range(5):  # registering reads them in this thread
        home.make(f"nfs-{number}", positions=64, seed=10 + number)
    until(lambda: any("nfs" in name for name in list(catalog_of(store)._unread)))
    home.make("later", positions=64, seed=4)
    until(lambda: "later@1" in store.names())
    told = len(relieved)
    until(lambda: len(relieved) > told + 3)  # the keeper goes on
    closing = threading.Thread(target=store.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive() and not mount.back.is_set()


def test_a_store_starts_beside_it(home: Home, mount: Mount) -> None:
    home.make("nfs", positions=64, seed=3)
    home.make("sound", positions=64, seed=4)
    mount.is_away = True
    store = home.open(settings={"reload_s": 0})
    until(lambda: store.names() == ["sound@1"])
    mount.is_away = False
    mount.back.set()
    until(lambda: sorted(store.names()) == ["nfs@1", "sound@1"])


def test_a_manifest_that_hangs_when_it_is_read_again_holds_up_no_other(home: Home, mount: Mount) -> None:
    made = [home.make(f"{'nfs' if number == 0 else 'n'}{number}", positions=16, seed=number) for number in range(24)]
    store = home.open(settings={"reload_s": 0})
    catalog = catalog_of(store)
    until(lambda: len(store.names()) == len(made))
    for one in made:
        catalog._manifests.pop(one.manifest.digest)  # as if 256 others were used since
    mount.is_away = True
    found: list[list] = []
    hung = [
        threading.Thread(target=lambda: found.append(catalog.segments(made[0].manifest.digest)), daemon=True)
        for _ in range(2)
    ]
    for thread in hung:
        thread.start()
    others = threading.Thread(target=lambda: [catalog.segments(one.manifest.digest) for one in made[1:]], daemon=True)
    others.start()
    others.join(30)
    assert not others.is_alive() and all(thread.is_alive() for thread in hung)
    mount.back.set()
    for thread in hung:
        thread.join(30)
    assert [len(segments) for segments in found] == [1, 1]
