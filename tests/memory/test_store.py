"""The store serves exactly the KV of sound, fitting cartridges; others are a miss with a reason, never wrong bytes."""

from __future__ import annotations

import time

import msgspec
import pytest
import torch
from homes import CHUNK, CHUNK_BYTES, Home, Prompt, assert_served, lent, prompt_for
from making import (
    Made,
    files_under,
    flip_bit,
    heads_bytes,
    make_artifact,
    make_engine,
    make_fingerprint,
    make_ids,
    make_kv,
    make_rope,
)  # fmt: skip
from waiting import until

from lmcache_cartridge.artifact.reading import MANIFEST, PAYLOAD, chunk_range, load_manifest, load_token_ids
from lmcache_cartridge.engine.trust import Trust
from lmcache_cartridge.errors import OverBudget, RegistryError
from lmcache_cartridge.library import index
from lmcache_cartridge.library.quarantine import Quarantine
from lmcache_cartridge.memory.layout import VIEWS
from lmcache_cartridge.memory.store import CartridgeStore
from lmcache_cartridge.settings import Settings


def _assert_not_served(store: CartridgeStore, prompt: Prompt, made: Made | None = None) -> None:
    """Look a prompt up in vain. Only of chunks of `made` that were promised before may bytes be had: the right ones."""
    assert store.lookup(prompt.hashes, prompt.tag) == 0
    assert store.resident(prompt.hashes, prompt.tag) == 0
    for chunk, chunk_hash in enumerate(prompt.hashes):
        found = lent(store, chunk_hash, prompt.tag)
        assert found is None or (made and found == heads_bytes(made.kv[:, :, chunk * CHUNK : (chunk + 1) * CHUNK]))


def test_what_is_not_trusted_yet_loads_and_answers_nothing(home):
    """So that it is in memory by the time that the engine was tried with it, or its damage is known."""
    made = home.make(positions=64)
    prompt, store = prompt_for(home, made), home.open(settings={"plain_prompts": "trusted"})
    digest = made.manifest.digest
    assert store.lookup(prompt.hashes) == 0
    until(lambda: store.resident(prompt.hashes, digest) == prompt.whole)
    assert (store.lookup(prompt.hashes), store.untried()) == (0, [digest])
    store.tried(digest, "canary", True)
    assert_served(store, made, prompt)


_ENGINES = {
    "layers": {"layers": 4},
    "kv_heads": {"kv_heads": 4},
    "dtype": {"dtype": "float16"},
    "rope kind": {"rope": (make_rope(kind="yarn"),)},
    "weights_digest": {"weights_digest": "00" * 32},
    "quantisation": {"quantisation": "online fp8"},
}


@pytest.mark.parametrize("field", _ENGINES)
def test_a_cartridge_of_another_model_is_refused_by_the_field_that_differs(home, field):
    made = home.make()
    store = home.open(fingerprint=msgspec.structs.replace(make_fingerprint(), **_ENGINES[field]))
    assert store.names() == []
    assert list(store.refused()) == ["doc@1"]
    reason = store.refused()["doc@1"]
    assert reason.startswith("made for another model than the one served: ")
    assert f" {field}: " in reason
    assert ("serve --accept-weights" in reason) == (field in ("weights_digest", "quantisation"))
    _assert_not_served(store, prompt_for(home, made))


def test_other_weights_are_served_where_the_setting_accepts_them_and_nothing_else_is(home):
    made, accept = home.make(), {"accept_weights": True}
    for changes in ({"weights_digest": "00" * 32}, {"quantisation": "online fp8"}):
        engine = msgspec.structs.replace(make_fingerprint(), **changes)
        assert list(home.open(fingerprint=engine).refused()) == ["doc@1"]
        assert_served(home.open(fingerprint=engine, settings=accept), made, prompt_for(home, made))
        assert list(home.open(fingerprint=engine).refused()) == ["doc@1"], "what was accepted is not remembered"
    engine = msgspec.structs.replace(make_fingerprint(), config_digest="00" * 32)
    assert list(home.open(fingerprint=engine, settings=accept).refused()) == ["doc@1"]


def test_a_cartridge_whose_fingerprint_differs_by_rounding_or_ignorance_is_served(home):
    made = home.make()
    rope = msgspec.structs.replace(make_rope(), inv_freq=tuple(f * (1 + 1e-7) for f in make_rope().inv_freq))
    engine = msgspec.structs.replace(make_fingerprint(), rope=(rope,), weights_digest=None)
    assert_served(home.open(fingerprint=engine), made, prompt_for(home, made))


ONE_AT_A_TIME = {"load_threads": 1}
"""Loads chunks in order, so that those before a bad one are there when it quarantines the cartridge."""


def _corrupt(home: Home, made: Made, name: str, chunk: int) -> None:
    flip_bit(home.payload(name), chunk_range(made.manifest, chunk, range(1)).start)


@pytest.mark.parametrize("chunk", [0, 2, 3])
def test_a_corrupt_cartridge_is_quarantined_and_the_others_are_served(home, chunk):
    bad, good = home.make("bad", seed=1), home.make("good", seed=2)
    store, prompt = home.open(settings=ONE_AT_A_TIME), prompt_for(home, bad, "bad")
    _corrupt(home, bad, "bad", chunk)
    assert store.lookup(prompt.hashes) == chunk
    _assert_not_served(store, prompt, bad)
    assert_served(store, good, prompt_for(home, good, "good"))
    assert store.names() == ["good@1"]
    assert list(store.refused()) == ["bad@1"]
    reason = store.refused()["bad@1"]
    assert f"cartridge bad@1: chunk {chunk}, KV head 0" in reason
    elsewhere = Quarantine(Settings(home=home.path).quarantine_dir)
    assert f"quarantined: {elsewhere.reason(bad.manifest.digest)}" == reason
    assert elsewhere.reason(good.manifest.digest) is None


def test_a_quarantine_that_cannot_be_noted_holds_in_this_process(home):
    made = home.make()
    (home.path / "quarantine").write_text("not a directory")
    store, prompt = home.open(), prompt_for(home, made)._replace(tag=made.manifest.digest)
    _corrupt(home, made, "doc", 0)
    assert store.lookup(prompt.hashes, prompt.tag) == 0
    _assert_not_served(store, prompt, made)
    assert list(store.refused()) == ["doc@1"]
    store.close()
    assert store.cpu.stats().loading == 0, "a load hangs"


def test_what_a_lookup_promised_is_delivered_after_a_quarantine_and_nothing_else(home):
    made = home.make()
    store, prompt = home.open(settings=ONE_AT_A_TIME), prompt_for(home, made)
    _corrupt(home, made, "doc", 2)
    assert store.lookup(prompt.hashes) == 2
    assert list(store.refused()) == ["doc@1"]
    for chunk in range(2):
        assert lent(store, prompt.hashes[chunk]) == heads_bytes(made.kv[:, :, chunk * CHUNK : (chunk + 1) * CHUNK])
    assert store.lend(prompt.hashes[2]) is None


@pytest.mark.parametrize("also_manifest", [False, True])
def test_an_artefact_replaced_while_it_is_served_is_quarantined(home, tmp_path, also_manifest):
    made = home.make()
    ids = load_token_ids(made.manifest, home.root()).tolist()
    make_artifact(tmp_path / "other", positions=72, seed=5, token_ids=ids)
    store, prompt = home.open(), prompt_for(home, made)
    for name in [PAYLOAD, MANIFEST][: 1 + also_manifest]:
        (tmp_path / "other" / name).replace(home.root() / name)
    assert store.lookup(prompt.hashes) == 0
    _assert_not_served(store, prompt)
    expected = "was replaced after it was registered" if also_manifest else "KV head 0 of "
    assert expected in store.refused()["doc@1"]


@pytest.mark.parametrize("chunk", [0, 1, 2, 3])
def test_a_trained_cartridge_with_one_corrupt_chunk_answers_nothing_at_all(home, chunk):
    made = home.make(kind="trained", positions=64)
    store, prompt = home.open(), prompt_for(home, made)
    _corrupt(home, made, "doc", chunk)
    assert store.lookup(prompt.hashes, prompt.tag) == 0
    assert store.cpu.stats().leased == 0
    _assert_not_served(store, prompt, made)
    assert store.lend(prompt.hashes[chunk], prompt.tag) is None
    assert f"chunk {chunk}," in store.refused()["doc@1"]


def test_part_of_a_trained_cartridge_is_not_answered(home):
    made = home.make(kind="trained", positions=64)
    store, prompt = home.open(), prompt_for(home, made)
    for count in range(4):
        assert store.lookup(prompt.hashes[:count], prompt.tag) == 0
    assert store.cpu.stats().promoted == 0
    assert_served(store, made, prompt)


def test_a_document_that_memory_cannot_hold_is_served_as_far_as_it_goes(home):
    made = home.make(positions=64)
    store, prompt = home.open(chunks=3), prompt_for(home, made)
    assert_served(store, made, prompt._replace(whole=3))
    assert store.cpu.stats().resident_bytes == store.cpu.stats().budget_bytes == 3 * CHUNK_BYTES


@pytest.mark.parametrize("tag", [None, "", "00" * 32])
def test_the_ids_of_a_trained_cartridge_give_nothing_without_its_tag(home, tag):
    made = home.make(kind="trained", positions=64)
    store, prompt = home.open(), prompt_for(home, made)
    _assert_not_served(store, prompt._replace(tag=tag))
    assert_served(store, made, prompt)
    _assert_not_served(store, prompt._replace(tag=tag))


def test_two_trained_cartridges_of_the_same_ids_are_told_apart_by_their_tags(home):
    ids = make_ids(64, 3)
    for seed, name in enumerate(("one", "other")):
        home.make(name, kind="trained", positions=64, token_ids=ids, seed=seed)
    store = home.open()
    for seed, name in enumerate(("one", "other")):
        made = Made(load_manifest(home.root(name)), None)
        kv = make_artifact(home.path / f"copy-{name}", positions=64, token_ids=ids, seed=seed, kind="trained").kv
        assert_served(store, made._replace(kv=kv), prompt_for(home, made, name))


def test_a_trained_cartridge_is_refused_where_the_engine_computes_what_it_cannot_load(home):
    trained, plain = home.make("trained", kind="trained", positions=64, seed=1), home.make("plain", seed=2)
    store = home.open(allow_trained=False)
    assert "needs kv_load_failure_policy: fail" in store.refused()["trained@1"]
    _assert_not_served(store, prompt_for(home, trained, "trained"))
    assert_served(store, plain, prompt_for(home, plain, "plain"))


def test_a_source_that_is_away_for_a_while_is_a_miss_and_then_served_again(home):
    made = home.make()
    store, prompt = home.open(), prompt_for(home, made)
    away = home.payload().rename(home.path / "away")
    assert store.lookup(prompt.hashes) == 0
    assert store.lend(prompt.hashes[0]) is None
    assert store.cpu.stats().failed > 0
    assert store.refused() == {}
    assert store.names() == ["doc@1"]
    while store.cpu.stats().loading:  # a lookup now would wait for the same loads, and share their failure
        time.sleep(0.001)
    away.rename(home.payload())
    assert_served(store, made, prompt)


def _alike(home: Home) -> tuple[Made, Made]:
    """Make two documents with the same first two chunks; the one registered later answers for them."""
    kv = [make_kv(make_fingerprint(), 64, seed) for seed in range(2)]
    kv[1][:, :, :32] = kv[0][:, :, :32]
    return tuple(
        home.make(name, positions=64, token_ids=make_ids(32, 0) + make_ids(32, 1 + seed), kv=kv[seed])
        for seed, name in enumerate(("older", "zz-newer"))
    )


def test_documents_that_begin_alike_are_served_when_the_newer_one_is_corrupt(home):
    older, newer = _alike(home)
    store, prompt = home.open(), prompt_for(home, older, "older")
    _corrupt(home, newer, "zz-newer", 0)
    assert store.lookup(prompt.hashes) == 0
    assert list(store.refused()) == ["zz-newer@1"]
    assert_served(store, older, prompt)


def test_serving_changes_no_artefact_and_no_registry(home):
    made = home.make()
    before = files_under(home.path)
    assert_served(home.open(), made, prompt_for(home, made))
    changed = dict(files_under(home.path).items() - before.items())
    assert set(changed) == {"quarantine/plain/withdrawn", f"quarantine/plain/{made.manifest.digest}"}, "who answered"


def test_a_budget_that_holds_no_chunk_is_refused_at_the_start(home):
    with pytest.raises(OverBudget, match=f"at least {CHUNK_BYTES}"):
        CartridgeStore(Settings(home=home.path, cpu_bytes=CHUNK_BYTES - 1), make_engine(make_fingerprint()), Trust)


def test_a_registry_that_cannot_be_read_is_refused_at_the_start(home):
    home.registry.path.write_bytes(b"no database" * 1000)
    with pytest.raises(RegistryError):
        home.open()


def test_after_closing_everything_is_a_miss(home):
    made = home.make()
    store, prompt = home.open(), prompt_for(home, made)
    store.close()
    _assert_not_served(store, prompt)


def test_a_chain_with_a_corrupt_member_answers_nothing_not_even_its_sound_part(home):
    fingerprint = make_fingerprint(rope=msgspec.structs.replace(make_rope(), pairing="half"))
    first = home.make("first", kind="trained", positions=4 * CHUNK, seed=1, fingerprint=fingerprint)
    second = home.make("second", positions=4 * CHUNK, seed=2, fingerprint=fingerprint)
    store = home.open(fingerprint=fingerprint)
    ids = [
        load_token_ids(made.manifest, home.root(name)).tolist() for name, made in (("first", first), ("second", second))
    ]
    hashes, tag = list(store.engine.hasher(ids[0] + ids[1])), f"{first.manifest.digest}.{second.manifest.digest}"
    assert store.lookup(hashes, tag) == 8
    for chunk_hash in hashes:
        store.release(chunk_hash, tag)
    store.evict(tag)
    flip_bit(home.payload("second"), chunk_range(second.manifest, 1, range(1)).start)
    for _ in range(2):
        assert store.lookup(hashes, tag) == 0
    assert list(store.refused()) == ["second@1"]
    assert store.lookup(hashes[:4], tag) == 0, "the trained part answered for the chain"
    assert store.resident(hashes, tag) == 0
    assert store.lookup(hashes, first.manifest.digest) == 4, "by itself the sound one is served"


def test_chunks_of_a_chain_that_was_forgotten_meanwhile_are_still_lent_and_released(home, monkeypatch):
    made = {name: home.make(name, positions=4 * CHUNK, seed=seed) for seed, name in enumerate("ab")}
    prompts = {name: prompt_for(home, made[name], name) for name in made}
    tags = {name: made[name].manifest.digest for name in made}
    monkeypatch.setattr(index, "MAX_CACHED_CHUNKS", 5)
    store = home.open()
    assert store.lookup(prompts["a"].hashes, tags["a"]) == 4
    assert store.lookup(prompts["b"].hashes, tags["b"]) == 4, "a is forgotten for b"
    loans = store.lend_run(prompts["a"].hashes[:4], tags["a"])
    assert len(loans) == 4
    for loan in loans:
        loan.close()
    for name in "ba":  # each is forgotten for the other
        assert all(store.release(chunk_hash, tags[name]) for chunk_hash in prompts[name].hashes[:4])
    assert store.cpu.stats().leased == 0


@pytest.mark.parametrize("layout", [*sorted(VIEWS), "vec/8", "amx/16/blocks"])
@pytest.mark.parametrize("positions", [13, 72, 79])
def test_the_tail_of_a_trained_cartridge_is_lent_whole_while_it_is_claimed(home, positions, layout):
    made = home.make(kind="trained", positions=positions, chunk_tokens=64)
    store, prompt, digest = home.open(layout=layout), prompt_for(home, made), made.manifest.digest
    claim = store.claim(digest, {})
    until(lambda: claim.poll().ready)
    whole = positions // CHUNK
    assert claim.poll().chunks == whole + 1
    assert (store.lookup(prompt.hashes, digest), store.lookup(prompt.hashes)) == (whole, 0)
    assert torch.equal(store.tail(digest), made.kv[:, :, whole * CHUNK :])
    Quarantine(Settings(home=home.path).quarantine_dir).put(digest, "a test says so")
    store.refresh()
    assert store.tail(digest) is None
    claim.close()


def test_what_has_no_tail_lends_none(home):
    prefill, trained = home.make("a", positions=72), home.make("b", kind="trained", positions=64, seed=2)
    store = home.open()
    assert [store.tail(made.manifest.digest) for made in (prefill, trained)] == [None, None]
