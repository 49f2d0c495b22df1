"""Making: what is kept of contexts when they change, and when their table does; how they are made is asked of vLLM in test_contexts."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from blocks import quietly
from making import make_artifact, make_fingerprint

from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.settings import Settings

with quietly():
    from lmcache_cartridge.serve import making
    from lmcache_cartridge.serve.adapters import Prefix
    from lmcache_cartridge.serve.contexts import Context, Patched, Posted
    from lmcache_cartridge.serve.making import Maker
    from lmcache_cartridge.serve.request import Reference, Refusal, StillMade
    from lmcache_cartridge.serve.resolve import Resolver
    from lmcache_cartridge.sources.published import Library


@pytest.fixture
def settings(tmp_path):
    return Settings(home=tmp_path)


def maker_of(settings: Settings, client: Any = None, **more: Any) -> Maker:
    """Return what makes contexts in a home, as a server of it starts with."""
    drain = SimpleNamespace(enter=lambda: False)
    admission = SimpleNamespace(settings=settings, resolver=Resolver(settings), client=client, drain=drain, **more)
    maker = Maker(admission, None, 16, make_fingerprint())
    maker.table.create()
    return maker


def kept(settings: Settings, maker: Maker, name: str, created_at: float = 1.0) -> Context:
    """Register a context as it lies once it is made, and note it in the table."""
    context = Context(name, "", f"key-of-{name}", created_at, 1e12, 32, 100, digest="d")
    make_artifact(maker.root(context), cartridge_id=name, positions=32)
    Registry(settings.registry_path).register(maker.root(context))
    maker.table.run(f"INSERT INTO contexts VALUES ({', '.join('?' * len(context))})", *context)
    return context


def test_of_a_context_that_is_not_changed_wholly_the_rest_stays(settings):
    maker = maker_of(settings)
    before = kept(settings, maker, "book")
    registry = Registry(settings.registry_path)
    maker.patch(before, Patched(labels=["one"]))
    maker.check(longest := Patched(ttl=settings.contexts_ttl_s))
    longer = maker.patch(before, longest).expires_at
    assert registry.labels() == {"one": "book@1"}
    maker.patch(before, Patched(labels=["two"]))  # which heard of the context before it was to be kept longer
    assert registry.labels() == {"two": "book@1"}
    assert maker.table.of(["book"])["book"].expires_at == longer != before.expires_at


def test_who_removes_a_context_late_leaves_the_one_that_was_made_of_the_text_since(settings):
    maker = maker_of(settings)
    before = kept(settings, maker, "book")
    maker.remove(before)
    after = kept(settings, maker, "book", created_at=2.0)
    maker.remove(before)
    assert maker.root(after).exists() and maker.patch(after, Patched(ttl=1e9)).expires_at > 1e9
    maker.table.run("UPDATE contexts SET expires_at = 0")
    with pytest.raises(Refusal, match="book is being removed"):
        maker.patch(after, Patched(ttl=1e9))
    maker.tidy()
    assert not maker.root(after).exists() and maker.table.of(["book"]) == {}


@pytest.fixture
def slow_engine(monkeypatch):
    """Nothing is computed in time."""

    async def waits(*_: Any) -> AsyncIterator[bytes]:
        await asyncio.sleep(60)
        yield b""

    monkeypatch.setattr(making, "kv_of", waits)
    monkeypatch.setattr(making, "_ANSWER_S", 0.01)


def test_what_takes_longer_than_its_lease_to_make_is_made_on_where_the_text_comes_again(settings, slow_engine):
    maker, prefix = maker_of(settings), Prefix([1] * 16)

    async def posted() -> list[Context]:
        first = await maker.post(prefix, Posted(), "")
        maker.table.run("UPDATE contexts SET expires_at = 1")  # nobody tidied up meanwhile
        return [first, await maker.post(prefix, Posted(), "")]

    first, again = asyncio.run(posted())
    assert (again.id, again.digest) == (first.id, "") and again.expires_at > time.time()


def test_what_the_owner_registers_under_the_id_of_a_context_is_everybodys_but_its_makers(settings):
    maker = maker_of(settings)
    kept(settings, maker, "book")
    make_artifact(root := settings.cartridges_dir / "book" / "2", cartridge_id="book", version=2, positions=32)
    Registry(settings.registry_path).register(root)

    def meant(name: str) -> list[str]:
        return [row.name for row in Resolver(settings).candidates(Reference(id=name))]

    assert [meant(name) for name in ("book", "book@1", "book@2")] == [["book@1"], ["book@1"], ["book@2"]]
    maker.table.run("UPDATE contexts SET digest = ''")
    with pytest.raises(StillMade):
        meant("book")
    maker.table.run("UPDATE contexts SET tenant = 'another', digest = 'd'")
    assert [meant(name) for name in ("book", "book@2")] == [["book@2"], ["book@2"]]
    with pytest.raises(Refusal, match="no cartridge is called 'book@1'"):
        meant("book@1")


def test_as_many_as_there_is_room_for_are_begun_however_many_are_posted_at_once(tmp_path, slow_engine, monkeypatch):
    def slow() -> uuid.UUID:
        time.sleep(0.05)
        return uuid.UUID(int=random.getrandbits(128))

    monkeypatch.setattr(making.uuid, "uuid4", slow)  # others are noted while an id is made
    maker = maker_of(Settings(home=tmp_path, contexts_count=3))

    async def posted() -> list[Any]:
        posts = [maker.post(Prefix([n] * 16), Posted(), "") for n in range(24)]
        return await asyncio.gather(*posts, return_exceptions=True)

    told = asyncio.run(posted())
    assert {each.status for each in told if isinstance(each, Refusal)} == {507}
    assert maker.table.run("SELECT count(*) FROM contexts") == [(3,)]


@pytest.fixture
def computing(settings, monkeypatch):
    """Return a function that makes a maker which has KV of 16 tokens once it may go on; it awaits `ask` when the KV is there."""

    def computing(ask: Any, may_go_on: Any) -> Maker:
        async def computed(*_: Any) -> AsyncIterator[bytes]:
            await may_go_on()
            yield bytes(16 * make_fingerprint().token_bytes)

        monkeypatch.setattr(making, "kv_of", computed)
        monkeypatch.setattr(making, "canary", AsyncMock(return_value=None))
        canaries = SimpleNamespace(check=AsyncMock(return_value=None))
        return maker_of(settings, client=SimpleNamespace(ask=ask), canaries=canaries)

    return computing


def test_what_is_posted_again_while_it_is_made_is_kept_as_was_said_last(settings, computing):
    posted_again, prefix = asyncio.Event(), Prefix([1] * 16)
    maker = computing(AsyncMock(), posted_again.wait)

    async def posted() -> list[Context]:
        first = asyncio.create_task(maker.post(prefix, Posted(labels=["one"]), ""))
        while not maker.table.run("SELECT 1 FROM contexts"):
            await asyncio.sleep(0.01)
        again = asyncio.create_task(maker.post(prefix, Posted(ttl=1e6, labels=["two"]), ""))
        await asyncio.sleep(0.1)
        posted_again.set()
        return [await first, await again]

    _, last = asyncio.run(posted())
    assert maker.table.of([last.id])[last.id].expires_at == last.expires_at > time.time() + 9e5
    assert Registry(settings.registry_path).labels() == {"two": f"{last.id}@1"}


def test_a_trial_that_finds_no_memory_is_held_again_and_one_that_fails_is_not(settings, computing):
    def made(*told: Refusal | None) -> Context:
        maker = computing(AsyncMock(), AsyncMock())
        trials = iter(told)
        maker._admission.canaries.check.side_effect = lambda _: next(trials)
        return asyncio.run(maker.post(Prefix([len(told)] * 16), Posted(), ""))

    assert made(Refusal(503, "it is not in memory", retry_after_s=2), None).digest
    with pytest.raises(Refusal, match="set aside"):
        made(Refusal(422, "it is set aside"))


def test_what_another_removed_while_it_was_made_is_nowhere_and_in_nobodys_way(settings, computing, monkeypatch):
    async def refresh(*_: Any) -> None:
        maker.table.run("DELETE FROM contexts")

    maker = computing(refresh, AsyncMock())
    monkeypatch.setattr(making, "_MOST", 1)
    for _ in range(2):
        with pytest.raises(Refusal, match="took too long and was removed") as refused:
            asyncio.run(maker.post(Prefix([1] * 16), Posted(), ""))
    assert refused.value.status == 503 and refused.value.retry_after_s
    assert Registry(settings.registry_path).all() == [] and not [*settings.contexts_dir.glob("*")]


def test_what_one_server_keeps_another_does_not_remove_as_over(tmp_path):
    """On two machines that share a library, where it was published."""

    def machine(name: str) -> Settings:
        return Settings(home=tmp_path / name, disk_dir=tmp_path / name / "cache", library=str(tmp_path / "library"))

    context = Context("ctx-book", "mine", "k", 1.0, time.time() + 0.5, 32, 100)
    make_artifact(tmp_path / "made", cartridge_id="ctx-book", positions=32)
    with Library(machine("a")) as library, Library(machine("b")) as other:
        library.publish(tmp_path / "made", label=context.label)
        other.registry.follow()
        one, two, registry = maker_of(machine("a")), maker_of(machine("b")), other.registry
        there = one.table.of(["ctx-book"])["ctx-book"]
        two.patch(there, Patched(ttl=1e3))
        time.sleep(max(0.0, there.expires_at - time.time()))
        one.tidy()
        registry.follow()
        assert [row.id for row in registry.all()] == ["ctx-book"]
        kept = one.table.of(["ctx-book"])["ctx-book"]
        assert kept.expires_at > 1e9
        one.remove(kept)
        registry.follow()
        assert registry.all() == [] == [*one.table.of(["ctx-book"])]
