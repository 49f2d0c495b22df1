"""Which cartridges answer prompts that do not name them: those this engine was seen to answer right from, and no others."""

from __future__ import annotations

import pytest
from homes import CHUNK, Home, Prompt, chunk_bytes, lent
from making import make_artifact, make_ids

from lmcache_cartridge.artifact.reading import load_token_ids
from lmcache_cartridge.engine.withdrawals import Withdrawals
from lmcache_cartridge.memory.store import CartridgeStore

IDS = make_ids(64, 7)
TRUSTED = {"reload_s": 0, "plain_prompts": "trusted"}


class Twins:
    """Two cartridges of the same tokens, `bad` registered last, so that it would lead, and both in memory."""

    def __init__(self, home: Home, good: bool | None, bad: bool | None, shared: int = 64) -> None:
        """`good` and `bad` are how the canaries ended; None for one that was not asked."""
        self.good = home.make("good", positions=64, seed=1, token_ids=IDS)
        self.bad = home.make("zbad", positions=64, seed=2, token_ids=IDS[:shared] + make_ids(64 - shared, 8))
        self.store = home.open(settings=TRUSTED)
        self.hashes = home.prompt("good").hashes
        for name, made in (("good", self.good), ("zbad", self.bad)):
            _look_up(self.store, home.prompt(name), made.manifest.digest)
        self.told(good, bad)

    def told(self, good: bool | None, bad: bool | None) -> None:
        """Tell the store how the canaries ended."""
        for made, passed in ((self.good, good), (self.bad, bad)):
            if passed is not None:
                self.store.tried(made.manifest.digest, "canary", passed)

    def lent(self) -> list[str]:
        """Return whose chunks are lent, in a row."""
        found = []
        for chunk, loan in enumerate(self.store.lend_run(self.hashes[:4])):
            with loan:
                data = loan.bytes.numpy().tobytes()
            found += [name for name in ("good", "bad") if data == chunk_bytes(getattr(self, name), chunk)]
        return found


def _look_up(store: CartridgeStore, prompt: Prompt, tag: str | None = None) -> None:
    """Have all chunks found, and released."""
    assert store.lookup(prompt.hashes, tag) == 4
    assert all(store.release(chunk_hash, tag) for chunk_hash in prompt.hashes[:4])


@pytest.mark.parametrize(
    ("good", "bad", "shared"), [(True, False, 64), (True, None, CHUNK), (None, None, 64), (None, False, CHUNK)]
)
def test_what_is_not_trusted_is_never_lent_in_the_place_of_a_twin_but_to_those_that_name_it(home, good, bad, shared):
    """And a lease of who named it is no promise to a plain prompt, which ends none of them."""
    twins = Twins(home, good, bad, shared)
    digest, first = twins.bad.manifest.digest, home.prompt("zbad").hashes[0]
    assert twins.store.lookup(home.prompt("zbad").hashes, digest) == 4
    assert lent(twins.store, first, digest) == chunk_bytes(twins.bad, 0)
    if not good:
        assert not twins.store.release(first)
    assert twins.store.lookup(twins.hashes) == twins.store.resident(twins.hashes) == (4 if good else 0)
    assert twins.lent() == (["good"] * 4 if good else [])
    assert twins.store.release(first, digest)


def test_what_a_lookup_leased_is_lent_though_another_leads_since_unless_that_is_quarantined(home):
    twins = Twins(home, True, None)
    assert twins.store.lookup(twins.hashes) == 4
    twins.told(None, True)
    assert twins.lent() == ["good"] * 4
    assert all(map(twins.store.release, twins.hashes[:4]))
    assert twins.lent() == ["bad"] * 4, "without a lease the newest of those that are trusted"
    home.ban(twins.bad.manifest.digest, "by hand")
    twins.store.refresh()
    assert twins.store.lookup(twins.hashes) == 4
    assert twins.lent() == ["good"] * 4


def _alone(home: Home, **settings: object) -> tuple[CartridgeStore, str, Prompt]:
    made = home.make(positions=64)
    return home.open(settings=TRUSTED | settings), made.manifest.digest, home.prompt()


@pytest.mark.parametrize(
    ("settings", "passed", "found"),
    [
        ({"plain_prompts": "all"}, None, 4), ({"plain_prompts": "all"}, False, 0), ({"plain_prompts": "none"}, True, 0),
        ({}, True, 4), ({}, False, 0), ({"canary": False}, None, 0),
    ],
)  # fmt: skip
def test_the_setting_says_whom_plain_prompts_may_get(home, settings, passed, found):
    """And nothing is loaded for what they may not get: nobody will try it."""
    store, digest, prompt = _alone(home, **settings)
    if passed is not None:
        store.tried(digest, "canary", passed)
    assert (store.lookup(prompt.hashes), store.untried()) == (found, [])
    assert found or store.cpu.stats().misses == 0
    assert store.lookup(prompt.hashes, digest) == 4, "who names it gets it all the same"


def _stamp(home: Home) -> int | None:
    return Withdrawals(home.path / "quarantine").stamp()


def _answer(store: CartridgeStore, digest: str, prompt: Prompt) -> None:
    """Trust a cartridge and have it answer a prompt that does not name it."""
    store.tried(digest, "canary", True)
    _look_up(store, prompt)


@pytest.mark.parametrize(
    "why", ["removed", "removed but for a client's", "removed while none ran", "canary", "quarantine"]
)
def test_what_answered_plain_prompts_and_is_taken_back_is_a_withdrawal(home, why):
    store, digest, prompt = _alone(home)
    if why == "removed but for a client's":
        place = home.path / "contexts" / "key" / "1"
        ids = load_token_ids(home.made["doc"].manifest, home.root()).tolist()
        assert make_artifact(place, cartridge_id="a", positions=64, token_ids=ids).manifest.digest == digest
        home.registry.register(place)
        store.refresh()
    _answer(store, digest, prompt)
    store.refresh()
    assert _stamp(home) == 0, "nothing was withdrawn: routers' block hashes stay as they are"
    if why == "canary":
        store.tried(digest, "canary", False)
    elif why == "quarantine":
        home.ban(digest, "by hand")
    else:
        home.registry.remove("doc")
    if why == "removed while none ran":
        store.close()
        store = home.open(settings=TRUSTED)
    store.refresh()
    first = _stamp(home)
    assert store.lookup(prompt.hashes) == 0 < first
    home.open(settings=TRUSTED).refresh()
    assert _stamp(home) == first, "once"


def test_what_never_answered_a_plain_prompt_leaves_nothing_to_withdraw(home):
    store, digest, prompt = _alone(home)
    assert store.lookup(prompt.hashes, digest) == 4
    home.registry.remove("doc")
    store.refresh()
    assert _stamp(home) is None


def test_every_process_that_had_it_answer_withdraws_it(home):
    """Else the second would go on lending it for a moment to prompts that have the new salt already."""
    first, digest, prompt = _alone(home)
    second = home.open(settings=TRUSTED)
    for store in (first, second):
        _answer(store, digest, prompt)
    home.registry.remove("doc")
    first.refresh()
    stamp = _stamp(home)
    second.refresh()
    assert _stamp(home) > stamp > 0


def test_where_it_cannot_be_noted_nothing_answers_plain_prompts(home):
    store, digest, prompt = _alone(home)
    (home.path / "quarantine").write_text("no directory")
    store.tried(digest, "canary", True)
    assert (store.lookup(prompt.hashes), store.lend(prompt.hashes[0])) == (0, None)
    assert store.lookup(prompt.hashes, digest) == 4


@pytest.mark.parametrize("restarts", [False, True])
def test_another_engine_and_a_restart_begin_without_trust_and_withdraw_nothing(home, restarts):
    store, digest, prompt = _alone(home)
    _answer(store, digest, prompt)
    if restarts:
        store.close()
        store = home.open(settings=TRUSTED)
    else:
        store.trust.begin_trials()
    assert (store.lookup(prompt.hashes), store.untried(), _stamp(home)) == (0, [digest], 0)
