"""Requests wait for their own cartridges only: no client that leaves, no file that hangs and no slow source costs others."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from blocks import quietly
from homes import CHUNK, STILL, Home, claimed
from making import make_artifact
from waiting import until

with quietly():
    from lmcache_cartridge.serve import admission as admitting
    from lmcache_cartridge.serve.admission import Admission

from lmcache_cartridge.artifact import reading
from lmcache_cartridge.artifact.reading import MANIFEST, PAYLOAD
from lmcache_cartridge.engine.control import ControlServer
from lmcache_cartridge.errors import RegistryError
from lmcache_cartridge.serve.request import Reference, Refusal
from lmcache_cartridge.settings import from_mapping


@pytest.fixture
def store(home):
    home.make("hot", kind="trained", positions=4 * CHUNK)
    return home.open(settings=STILL)


@pytest.fixture
def serve(home, store):
    """Return a function that starts the admission of an API server over the store."""
    server = ControlServer(lambda: store)

    def make(engine: Any = None, **settings: Any) -> Admission:
        given = {"home": home.path, "roots": [str(home.path / "roots")], "ready_timeout_s": 60} | settings
        admission = Admission(from_mapping(given))
        config = SimpleNamespace(max_model_len=1 << 20, model=str(home.path / "none"))
        engine = engine or SimpleNamespace(model_config=config)
        engine.collective_rpc = partial(_answer, [server.path])
        asyncio.run(admission.start(engine))
        return admission

    yield make
    gc.collect()  # who still refers to a claim
    until(lambda: store.status()["claims"] == 0)
    threading.Thread(target=server.close).start()


async def _answer(answer: Any, method: str) -> Any:
    return answer


def _run(coroutine: Coroutine) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 120))


async def _admit(admission: Admission, *ids: str, **options: Any) -> tuple[str, bool]:
    """Let a request in and out again; return what it was let in with, and whether that is its KV."""
    async with admission.admit(
        await admission.resolve([Reference(id=name, **options) for name in ids]), id, None
    ) as claim:
        assert not claim.is_text
        return claim.selection.names, claim.is_whole


async def _status(admission: Admission, *ids: str, **options: Any) -> int:
    try:
        await _admit(admission, *ids, **options)
    except Refusal as refusal:
        return refusal.status
    return 200


def test_workers_are_asked_for_their_numbers_though_contexts_cannot_be_tidied_up(serve, vllm_log):
    admission = serve()

    def tidy() -> None:
        raise RegistryError("database is locked")

    admission.maker = SimpleNamespace(tidy=tidy)
    (rank,) = _run(admission.numbers())
    assert rank["served"] == 1 and "database is locked" in vllm_log.text


# Files and sources that hang.


@pytest.mark.parametrize("file", [MANIFEST, "token_ids.npy", PAYLOAD])
def test_a_fifo_in_the_place_of_a_file_is_not_read_and_keeps_nobody_waiting(serve, store, home, file):
    admission = serve(ready_timeout_s=5)
    home.make(positions=5 * CHUNK)  # whose ids have a file of their own
    (home.root() / file).unlink()
    os.mkfifo(home.root() / file)
    status = 200 if file == PAYLOAD else 422  # its tokens are enough to compute it
    assert [_run(_status(admission, name)) for name in ("doc", "doc", "hot")] == [status, status, 200]
    store.refresh()
    assert "doc@1" in store.refused()


def test_the_version_before_one_without_its_payload_answers(serve, home):
    admission = serve()
    for version in (1, 2):
        root = home.path / str(version)
        make_artifact(root, version=version, kind="trained", positions=CHUNK, seed=version)
        home.registry.register(root)
    (root / PAYLOAD).unlink()
    assert _run(_admit(admission, "doc")) == ("doc@1", True)
    assert _run(_status(admission, "doc@2")) == 422


class _Hanging:
    """Artefacts whose manifests are read once `go_on` is set: on a mount that hangs until then."""

    def __init__(self, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory, self.go_on, self.waiting = home.path / "roots" / "nfs", threading.Event(), []
        load = reading.load_manifest

        def slow(root: Path, *args: Any, **kwargs: Any) -> Any:
            if root.is_relative_to(self.directory):
                self.waiting.append(root)
                assert self.go_on.wait(100)
            return load(root, *args, **kwargs)

        for number in range(4):
            make_artifact(
                self.directory / str(number), cartridge_id=f"n{number}", positions=CHUNK, kind="trained", seed=number
            )
        monkeypatch.setattr(reading, "load_manifest", slow)

    def root(self, number: int) -> str:
        return str(self.directory / str(number))


@pytest.fixture
def hanging(home, monkeypatch):
    hanging = _Hanging(home, monkeypatch)
    yield hanging
    hanging.go_on.set()


def test_artefacts_that_hang_take_a_thread_for_each_location_and_no_other_requests_time(serve, hanging, monkeypatch):
    monkeypatch.setattr(admitting, "MAX_READS", 3)
    admission = serve()

    async def live() -> None:
        await _admit(admission, "hot")
        ways = {}, {"source": "local"}  # two requests, of one location
        places = [(n % 2, ways[n // 2 % 2]) for n in range(24)] + [(2, {}), (3, {})]
        stuck = [asyncio.create_task(_status(admission, hanging.root(n), **way)) for n, way in places]
        await asyncio.to_thread(until, lambda: len(hanging.waiting) == 3)
        for _ in range(20):
            await _admit(admission, "hot")
        assert len(hanging.waiting) == 3, "each takes one thread, and all together as many as they may"
        assert not any(task.done() for task in stuck)
        hanging.go_on.set()
        assert await asyncio.gather(*stuck) == [200] * 26

    _run(live())


def test_a_manifest_that_is_not_read_in_time_is_a_503(serve, hanging, monkeypatch):
    monkeypatch.setattr(admitting, "MAX_READS", 1)
    admission = serve(ready_timeout_s=0.5)
    assert [_run(_status(admission, hanging.root(n))) for n in (0, 0, 1)] == [503] * 3
    assert len(hanging.waiting) == 1
    assert _run(_status(serve(), "hot")) == 200


# What a client may have dropped.


@pytest.mark.parametrize(("admin", "evicted"), [(False, 0), (True, 4)])
def test_force_redownload_drops_what_is_in_memory_for_administrators_only(serve, store, home, admin, evicted):
    home.make("other", positions=2 * CHUNK, seed=2)
    store.refresh()
    for name in ("hot", "other"):
        claimed(store, home.registry.find(name).digest).close()
    _run(_admit(serve(admin=admin), "hot", force_redownload=True))
    assert store.cpu.stats().evicted == evicted
