"""Prompts that begin with a document's text are answered from KV this engine was seen to answer right from, and no other.

Answers are counted: each question has one right answer, which the model knows. The bad cartridges hold the KV of a sheet
with the same patients and other values, under the good one's tokens and with right checksums.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from making import flip_bit
from recall.ward import Fact, ask
from serving import serving
from waiting import until
from wards import MODEL, Ward, patients, prefill, sure, write_ward

from lmcache_cartridge.artifact.manifest import Manifest, Provenance
from lmcache_cartridge.artifact.reading import PAYLOAD, chunk_range, load_manifest
from lmcache_cartridge.artifact.writing import ArtifactWriter
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.make.payload import pack
from lmcache_cartridge.make.write import write_kv
from lmcache_cartridge.settings import Settings, from_mapping

CHUNK, POSITIONS, FACTS = 256, 512, 5
MADE = Provenance(tool="tests", created="2026-01-01T00:00:00Z")


class Library(NamedTuple):
    """A good cartridge `p` that is registered, and bad ones that are not, most of its tokens.

    `zbad` fails its canary, `zbegin` too and shares the first chunk alone, `znone` has none and answers whoever names it, `zself` has
    one made of its wrong KV; `zdup` and `zflip` are copies of `p`, with a wrong canary and a flipped bit.
    """

    settings: Settings
    registry: Registry
    ward: Ward
    facts: list[Fact]

    def root(self, name: str) -> Path:
        return self.settings.home / "made" / name


def _write(root: Path, name: str, like: Manifest, ids: list[int], kv: torch.Tensor) -> None:
    """Write KV with right checksums, and the canary of another cartridge."""
    with ArtifactWriter(
        root, cartridge_id=name, version=1, kind="prefill", fingerprint=like.fingerprint, token_ids=np.array(ids),
        chunk_tokens=CHUNK,
    ) as writer:  # fmt: skip
        for chunk in kv.split(CHUNK, dim=2):
            writer.write(pack(chunk, like.fingerprint))
        writer.commit(MADE, like.canary)


def make_library(home: Path) -> Library:
    settings = from_mapping({"home": home, "cpu_bytes": 256 << 20, "admin": True, "reload_s": 0.2})
    model = CausalModel(MODEL)
    ward, other = (write_ward(model, patients(0, 6), seed, tokens=520) for seed in ("trust", "other"))
    values = {(fact.patient, fact.attribute): fact.value for fact in other.document.facts}
    ids, size = ward.ids[:POSITIONS], POSITIONS
    good, bad = prefill(model, ids), prefill(model, other.ids[:size])
    facts = [f for f in sure(model, good, ward.facts) if values.get((f.patient, f.attribute), f.value) != f.value]
    library = Library(settings, Registry(settings.registry_path), ward, facts[:FACTS])
    assert len(library.facts) == FACTS

    def make(name: str, ids: list[int], kv: torch.Tensor, *, with_canary: bool = True) -> Manifest:
        return write_kv(
            model, kv.split(CHUNK, dim=2), library.root(name), lambda _: MADE, cartridge_id=name, version=1,
            positions=len(ids), token_ids=ids, chunk_tokens=CHUNK, with_canary=with_canary,
        )  # fmt: skip

    p = make("p", ids, good)
    _write(library.root("zbad"), "zbad", p, ids, bad)
    begins = [*ids[:300], *other.ids[1 : size - 299]]
    like = make("like", begins, prefill(model, begins))
    _write(library.root("zbegin"), "zbegin", like, begins, bad)
    make("znone", ids, bad, with_canary=False)
    make("zself", ids, bad)
    _write(library.root("zdup"), "zdup", like, ids, good)
    assert load_manifest(library.root("zdup")).digest == p.digest
    _write(library.root("zflip"), "zflip", p, ids, good)
    assert load_manifest(library.root("zflip")).digest == p.digest
    flip_bit(library.root("zflip") / PAYLOAD, chunk_range(p, 0, range(1)).start + 9)
    library.registry.register(library.root("p"))
    return library


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return make_library(tmp_path_factory.mktemp("home"))


class Served:
    """A server over the library, which can be started again."""

    def __init__(self, library: Library, mode: Any) -> None:
        self.library, self._mode, self.stack = library, mode, ExitStack()
        self.start()

    def start(self) -> None:
        """Start the server, after the end of the one that runs."""
        self.stack.close()
        settings, log = self.library.settings, self.library.settings.home / f"log-{uuid.uuid4().hex}"
        server = serving(settings, log, MODEL, "--enable-scale-out", chunk_tokens=CHUNK, mode=self._mode)
        self.asker = self.stack.enter_context(server)

    def right(self, cartridge: str | bool | None = None, *, salted: bool = True, salt: str | None = None) -> int:
        """Return how many of the questions are answered right, of the document's text, with False computed, or of a cartridge.

        Each has a `cache_salt` of its own, or all have `salt`, or none has one.
        """
        head = "" if cartridge else self.library.ward.document.text
        found = 0
        for fact in self.library.facts:
            extra: dict[str, Any] = {"cache_salt": salt or uuid.uuid4().hex} if salted else {}
            answer = self.asker.complete(f"{head} {ask(fact, 0)}", cartridge, **extra)
            found += answer.text.strip() == fact.value
        return found

    def plain(self) -> tuple[int, int]:
        """Return `right` of the document's text, of clients with a salt of their own and without."""
        return self.right(), self.right(salted=False)

    def injects(self, name: str) -> bool:
        """Ask for a cartridge; whether its KV was used, and not its document's text in its place."""
        answer = self.asker.complete(" x", name, cache_salt=uuid.uuid4().hex)
        assert (answer.used or "").endswith(";served=document") == (answer.injected == 0)
        return answer.injected == POSITIONS

    def external(self) -> float:
        """Return how many tokens the connector has injected."""
        return self.asker.metric("vllm:external_prefix_cache_hits_total")

    def requests(self) -> float:
        """Return how many requests were answered from a cartridge that they named."""
        return self.asker.metric('lmcache_cartridge_requests_total{outcome="used"}')

    @contextmanager
    def registered(self, name: str) -> Iterator[None]:
        """Have a cartridge registered meanwhile; afterwards the server has noticed that it is gone."""
        registry = self.library.registry
        registry.register(self.library.root(name))
        until(lambda: self.asker.state(name).get("id") == name and self._served() == len(registry.all()))
        try:
            yield
        finally:
            registry.remove(name)
            until(lambda: self._served() == len(registry.all()))

    def _served(self) -> int:
        return int(sum(self.asker.metric(f"lmcache_cartridge_{of}_cartridges") for of in ("served", "refused")))


ALL = (FACTS, FACTS)


class TrustTests:
    """In each mode: a subclass with a `mode`."""

    mode = ""

    @pytest.fixture(scope="class")
    @classmethod
    def served(cls, library):
        served = Served(library, cls.mode)
        with served.stack:
            yield served

    def test_the_good_one_answers_those_that_name_it_and_those_that_bring_its_text(self, served):
        assert served.right("p") == FACTS
        assert served.plain() == ALL
        text, fact = served.library.ward.document.text, served.library.facts[0]
        found = served.asker.complete(f"{text} {ask(fact, 0)}", cache_salt=uuid.uuid4().hex)
        assert found.cached_tokens == POSITIONS, "else nothing in here says anything of what plain prompts are lent"

    def test_a_client_is_told_and_can_compare(self, served):
        """Each request twice with one salt: what the connector injected is told apart from what vLLM had of the first."""
        asker, fact = served.asker, served.library.facts[0]
        prompt = f"{served.library.ward.document.text} {ask(fact, 0)}"
        assert (served.right("p"), served.plain()) == (FACTS, ALL)
        for complete in (asker.complete, asker.stream):
            for text, cartridge in ((prompt, None), (ask(fact, 0), "p")):
                salt, before = uuid.uuid4().hex, served.external()
                first, second = (complete(text, cartridge, tokens=4, cache_salt=salt) for _ in range(2))
                assert served.external() - before == POSITIONS
                if cartridge:
                    assert first[3:6] == (f"p@1;positions={POSITIONS}", POSITIONS, 0)
                    assert second[3:6] == (f"p@1;positions={POSITIONS}", 0, POSITIONS)
                assert first.cached_tokens == POSITIONS <= second.cached_tokens
                before = served.external()
                given = [complete(prompt, False, tokens=4, cache_salt=salt) for _ in range(2)]
                assert served.external() == before, "nothing is injected into what is to be computed"
                assert [each.used for each in given] == [None] * 2
                assert given[0].cached_tokens == 0 or cartridge, "nothing of a prompt that was answered from KV is left"
                assert {each.text.split()[0] for each in (first, second, *given)} == {fact.value}

    def test_a_client_of_any_route_can_compare(self, served):
        fact, http = served.library.facts[0], served.asker.http
        text = f"{served.library.ward.document.text} {ask(fact, 0)}"
        asked = {"role": "user", "content": text}
        for path, body in (
            ("/v1/completions", {"prompt": text}), ("/v1/chat/completions", {"messages": [asked]}),
            ("/v1/responses", {"input": text, "store": False}), ("/v1/messages", {"messages": [asked]}),
        ):  # fmt: skip
            limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
            body = {"model": MODEL, limit: 4, "temperature": 0, **body}
            before = served.requests()
            for stream in (False, True):
                computed = http.post(path, json=body | {"cartridges": False, "stream": stream})
                assert (computed.status_code, computed.headers.get("x-cartridges")) == (200, None), computed.text
            assert served.requests() == before, "no cartridge was asked for"
            for more, headers in (
                ({}, {"X-Cartridges": "p"}), ({"cartridges_required": True}, {}), ({"model": f"{MODEL}:p"}, {}),
            ):  # fmt: skip
                refused = http.post(path, json=body | {"cartridges": False} | more, headers=headers)
                assert refused.status_code == 400, (path, more, refused.text)
        assert http.post("/tokenize", json={"prompt": "x", "cartridges": False}).status_code == 400

    @pytest.mark.parametrize(
        ("name", "is_served"), [("zbad", False), ("zbegin", False), ("znone", True), ("zdup", False)]
    )
    def test_a_bad_one_takes_no_answer_away_before_it_is_named_then_and_once_it_is_gone(self, served, name, is_served):
        with served.registered(name):
            assert served.plain() == ALL
            assert served.right(name) < FACTS if is_served else not served.injects(name)
            assert (served.plain(), served.right("p")) == (ALL, FACTS)
        assert (served.plain(), served.right("p")) == (ALL, FACTS)

    def test_a_flipped_bit_is_its_own_copys(self, served):
        def is_found() -> bool:
            with served.registered("zflip"):
                served.asker.http.post("/v1/cartridges/p/evict").raise_for_status()
                assert (served.right("zflip"), served.right("p"), served.plain()) == (FACTS, FACTS, ALL)
                assert served.asker.state("p")["state"] == "resident"
                return served.asker.state("zflip")["state"] == "quarantined"

        until(is_found)  # of two copies that of which the server reads the manifest last is loaded
        assert (served.right("p"), served.plain()) == (FACTS, ALL)

    def test_nothing_that_was_injected_outlives_the_trust_in_it(self, served):
        """It holds wrong KV and has a canary that was made of it: only its owner can know, who removes it."""
        assert served.plain() == ALL
        with served.registered("zself"):
            assert served.injects("zself")
            assert served.right() < FACTS, "the newest that this engine trusts leads"
            assert served.right(salt="team") < FACTS, "what follows says nothing of the blocks that this leaves"
            assert (served.right(False, salt="team"), served.right(False), served.right(False, salted=False)) == (
                FACTS,
            ) * 3
            assert served.right(salt="team") < FACTS, (
                "the control: what was computed is nobody's who did not ask for that"
            )
            assert served.right("p") == FACTS
        assert (served.right(salt="team"), served.plain(), served.right("p")) == (FACTS, ALL, FACTS)


class TestInProcess(TrustTests):
    mode = "in-process"


class TestMultiprocess(TrustTests):
    mode = "multiprocess"

    def test_nothing_that_was_injected_outlives_a_restart(self, served):
        """In this mode alone, in which LMCache's server starts again too."""
        served.start()
        assert served.plain() == ALL, "this engine was tried with nothing yet"
        assert served.right("p") == FACTS
        assert served.plain() == ALL
