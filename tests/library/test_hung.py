"""A directory that hangs, as on a mount whose server is away, holds up its own cartridge and nothing else."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from homes import catalog_of
from waiting import until

from lmcache_cartridge.artifact import reading


class Mount:
    """Where every manifest hangs once it `is_away`."""

    def __init__(self) -> None:
        self.is_away, self.back = False, threading.Event()


@pytest.fixture
def mount(monkeypatch):
    mount, read = Mount(), reading._read_at_most

    def hang(path: Path, limit: int) -> bytes:
        if mount.is_away and "/nfs" in str(path) and threading.current_thread() is not threading.main_thread():
            assert mount.back.wait(60)
        return read(path, limit)

    monkeypatch.setattr(reading, "_read_at_most", hang)
    yield mount
    mount.back.set()


def test_a_manifest_that_hangs_when_it_is_read_again_holds_up_no_other(home, mount):
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
