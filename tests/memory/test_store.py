"""The store serves exactly the KV of sound, fitting cartridges; others are a miss with a reason, never wrong bytes."""

from __future__ import annotations

import msgspec
import pytest
import torch
from homes import CHUNK, CHUNK_BYTES, Home, Prompt, assert_served, chunk_bytes, claimed, lent, prompt_for
from making import (
    Made,
    flip_bit,
    make_artifact,
    make_engine,
    make_fingerprint,
    make_ids,
    make_rope,
)  # fmt: skip

from lmcache_cartridge.artifact.cartridge import Place
from lmcache_cartridge.artifact.reading import chunk_range, load_token_ids
from lmcache_cartridge.engine.trust import Trust
from lmcache_cartridge.errors import OverBudget
from lmcache_cartridge.library import index
from lmcache_cartridge.memory.store import CartridgeStore
from lmcache_cartridge.settings import Settings


def _assert_not_served(store: CartridgeStore, prompt: Prompt) -> None:
    """Look a prompt up in vain."""
    assert store.lookup(prompt.hashes, prompt.tag) == store.resident(prompt.hashes, prompt.tag) == 0
    assert not any(lent(store, chunk_hash, prompt.tag) for chunk_hash in prompt.hashes)


@pytest.mark.parametrize(
    ("field", "other", "can_be_accepted"),
    [("layers", 4, False), ("weights_digest", "00" * 32, True), ("quantisation", "online fp8", True)],
)
def test_a_cartridge_of_another_model_is_refused_and_of_other_weights_served_where_the_setting_accepts_them(
    home, field, other, can_be_accepted
):
    made, engine = home.make(), msgspec.structs.replace(make_fingerprint(), **{field: other})
    prompt, accepting = home.prompt(), home.open(fingerprint=engine, settings={"accept_weights": True})
    if can_be_accepted:
        assert_served(accepting, made, prompt)
    else:
        _assert_not_served(accepting, prompt)
    store = home.open(fingerprint=engine)  # which remembers nothing of what was accepted
    _assert_not_served(store, prompt)
    assert (store.names(), list(store.refused())) == ([], ["doc@1"])
    reason = store.refused()["doc@1"]
    assert reason.startswith("made for another model than the one served: ") and f" {field}: " in reason
    assert ("serve --accept-weights" in reason) == can_be_accepted


ONE_AT_A_TIME = {"load_threads": 1}
"""Loads chunks in order, so that those before a bad one are there when it quarantines the cartridge."""


def _corrupt(home: Home, made: Made, name: str, chunk: int) -> None:
    flip_bit(home.payload(name), chunk_range(made.manifest, chunk, range(1)).start)


@pytest.mark.parametrize("chunk", [0, 2])
def test_a_corrupt_cartridge_is_quarantined_what_was_promised_is_delivered_and_the_others_are_served(home, chunk):
    bad, good = home.make("bad", seed=1), home.make("good", seed=2)
    store, prompt = home.open(settings=ONE_AT_A_TIME), home.prompt("bad")
    _corrupt(home, bad, "bad", chunk)
    assert store.lookup(prompt.hashes) == chunk
    found = [lent(store, chunk_hash) for chunk_hash in prompt.hashes]
    assert found[:chunk] == [chunk_bytes(bad, promised) for promised in range(chunk)] and not any(found[chunk:])
    assert store.lookup(prompt.hashes) == store.resident(prompt.hashes) == 0
    home.check_served(store, "good")
    assert (store.names(), list(store.refused())) == (["good@1"], ["bad@1"])
    reason = store.refused()["bad@1"]
    assert f"cartridge bad@1: chunk {chunk}, KV head 0" in reason
    elsewhere = home.quarantine
    assert f"quarantined: {elsewhere.reason(bad.digest)}" == reason
    assert elsewhere.reason(good.digest) is None


def test_a_quarantine_that_cannot_be_noted_holds_in_this_process(home):
    made = home.make()
    (home.path / "quarantine").write_text("not a directory")
    store = home.open(settings=ONE_AT_A_TIME)
    prompt = home.prompt()._replace(tag=made.digest)
    _corrupt(home, made, "doc", 0)
    assert store.lookup(prompt.hashes, prompt.tag) == 0
    _assert_not_served(store, prompt)
    assert list(store.refused()) == ["doc@1"]
    store.close()
    assert store.cpu.stats().loading == 0, "a load hangs"


def test_a_chunk_that_was_named_and_left_memory_is_loaded_again(home):
    """Of a cartridge that is not registered too."""
    made, store = make_artifact(home.root(), positions=2 * CHUNK), home.open()
    tag = made.digest
    claimed(store, tag, {tag: Place(home.root(), str(home.root()))}).close()
    assert store.evict(tag) == 2
    assert lent(store, prompt_for(home, made).hashes[0], tag) == chunk_bytes(made, 0)


def test_part_of_a_trained_cartridge_is_not_answered(home):
    made = home.make(kind="trained", positions=64)
    store, prompt = home.open(), home.prompt()
    for count in range(4):
        assert store.lookup(prompt.hashes[:count], prompt.tag) == 0
    assert store.cpu.stats().promoted == 0
    assert_served(store, made, prompt)


@pytest.mark.parametrize("tag", [None, "", "00" * 32])
def test_the_ids_of_trained_cartridges_give_nothing_without_a_tag_and_with_it_the_one_it_names(home, tag):
    ids = make_ids(64, 3)
    for seed, name in enumerate("ab"):
        home.make(name, kind="trained", positions=64, token_ids=ids, seed=seed)
    store = home.open()
    for name in "ab":
        _assert_not_served(store, home.prompt(name)._replace(tag=tag))
        home.check_served(store, name)
        _assert_not_served(store, home.prompt(name)._replace(tag=tag))


def test_a_budget_that_holds_no_chunk_is_refused_at_the_start(home):
    with pytest.raises(OverBudget, match=f"at least {CHUNK_BYTES}"):
        CartridgeStore(Settings(home=home.path, cpu_bytes=CHUNK_BYTES - 1), make_engine(make_fingerprint()), Trust)


def test_a_chain_with_a_corrupt_member_answers_nothing_not_even_its_sound_part(home):
    fingerprint = make_fingerprint(rope=msgspec.structs.replace(make_rope(), pairing="half"))
    kinds = {"first": "trained", "second": "prefill"}
    made = [home.make(name, kind=kinds[name], positions=64, seed=len(name), fingerprint=fingerprint) for name in kinds]
    store, digests = home.open(fingerprint=fingerprint), [one.digest for one in made]
    ids = [
        i for one, name in zip(made, kinds, strict=True) for i in load_token_ids(one.manifest, home.root(name)).tolist()
    ]
    hashes, tag = list(store.engine.hasher(ids)), ".".join(digests)
    assert store.lookup(hashes, tag) == 8
    assert all(store.release(chunk_hash, tag) for chunk_hash in hashes)
    store.evict(tag)
    _corrupt(home, made[1], "second", 1)
    for _ in range(2):
        assert store.lookup(hashes, tag) == 0
    assert list(store.refused()) == ["second@1"]
    assert store.lookup(hashes[:4], tag) == store.resident(hashes, tag) == 0, "the trained part answered for the chain"
    assert store.lookup(hashes, digests[0]) == 4, "by itself the sound one is served"


def test_chunks_of_a_chain_that_was_forgotten_meanwhile_are_still_lent_and_released(home, monkeypatch):
    monkeypatch.setattr(index, "MAX_CACHED_CHUNKS", 5)
    made = {name: home.make(name, positions=64, seed=seed) for seed, name in enumerate("ab")}
    asked = [(home.prompt(name).hashes[:4], one.digest) for name, one in made.items()]
    store = home.open()
    for hashes, tag in asked:  # the first is forgotten for the second
        assert store.lookup(hashes, tag) == 4
    loans = store.lend_run(*asked[0])
    assert len(loans) == 4
    for loan in loans:
        loan.close()
    for hashes, tag in reversed(asked):  # each is forgotten for the other
        assert all(store.release(chunk_hash, tag) for chunk_hash in hashes)
    assert store.cpu.stats().leased == 0


@pytest.mark.parametrize(("layout", "positions"), [("heads", 13), ("fused", 79), ("vec/8", 72), ("amx/16/blocks", 79)])
def test_the_tail_of_a_trained_cartridge_is_lent_whole_while_it_is_claimed(home, positions, layout):
    made = home.make(kind="trained", positions=positions, chunk_tokens=64)
    store, prompt, digest = home.open(layout=layout), home.prompt(), made.digest
    claim = claimed(store, digest)
    whole = positions // CHUNK
    assert claim.poll().chunks == whole + 1
    assert (store.lookup(prompt.hashes, digest), store.lookup(prompt.hashes)) == (whole, 0)
    assert torch.equal(store.tail(digest), made.kv[:, :, whole * CHUNK :])
    home.ban(digest, "a test says so")
    store.refresh()
    assert store.tail(digest) is None
    claim.close()
