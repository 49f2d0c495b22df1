"""Quantised models served: their own cartridges are exact, their originals' are as far off as the weights, and both answer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest
from processor import needs_avx512
from quantising import quantised
from serving import build_sheet, difference, question_ids, serving
from waiting import until
from wards import MODEL, Answer, Asker

from lmcache_cartridge.artifact.reading import load_manifest
from lmcache_cartridge.cli.main import main
from lmcache_cartridge.cli.recall import SHEETS_DIR, load_sheet
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.settings import Settings, from_mapping

pytestmark = needs_avx512
NOISE = 0.6
"""Largest logprob difference taken for rounding: twice what eight bits for activations make of it, 0.28; four bits for weights
0.16."""
WEIGHTS = 4.0
"""Largest that is taken for what four bits do to the weights, 2.1; damaged KV gives 10 and more."""
QUESTIONS, INJECTED = 6, 1024


class Served(NamedTuple):
    client: Asker
    model: CausalModel
    directory: Path
    settings: Settings
    mode: str
    log: Path

    def behind(self, *names: str) -> list[Answer]:
        """Return the answers to ward-a's first questions behind cartridges, all of them injected and all right."""
        replies = []
        for question in load_sheet("ward-a").questions[:QUESTIONS]:
            reply = self.client.ask(question_ids(self.model, question.text), *names)
            assert reply.cached_tokens // INJECTED == len(names)
            assert reply.text.strip() == question.answer
            replies.append(reply)
        return replies

    def far(self, replies: list[Answer], times: int = 1) -> float:
        """Return the largest logprob difference from this server's own answers to the text in the prompt."""
        document = self.model.encode(load_sheet("ward-a").text, special=True) * times
        questions = [question_ids(self.model, each.text) for each in load_sheet("ward-a").questions]
        return max(
            difference(reply, self.client.computed(document + own))
            for reply, own in zip(replies, questions, strict=False)
        )


@pytest.fixture(scope="module", params=[("in-process", "W8A8"), ("multiprocess", "W4A16")], ids="-".join)
def served(request, tmp_path_factory):
    """`own`: of the quantised model that is served; `original`: of the model in full, which is accepted."""
    mode, form = request.param
    home = tmp_path_factory.mktemp("home")
    directory = quantised(form, home / form)
    settings = from_mapping(
        {"home": home, "cpu_bytes": 64 << 20, "lookup_timeout_s": 10, "contexts": True, "accept_weights": True}
    )
    model, log = CausalModel(str(directory)), home / "log"
    for name, maker in (("own", model), ("original", CausalModel(MODEL))):
        build_sheet(settings, maker, "ward-a", name)
    with serving(settings, log, str(directory), mode=mode, l1_bytes=64 << 20) as client:
        yield Served(client, model, directory, settings, mode, log)


def test_its_own_cartridge_answers_as_its_own_prompt(served):
    """One that the server computed too, without the weights here: as of models that transformers cannot compute."""
    assert served.far(served.behind("own")) < NOISE
    home, sheet = str(served.settings.home), str(SHEETS_DIR / "ward-a.txt")
    assert not main(["build", "--home", home, "--document", sheet, "--url", served.client.url, "--id", "fetched"])
    until(lambda: "id" in served.client.state("fetched"))
    assert served.far(served.behind("fetched")) < NOISE


def test_its_originals_cartridge_answers_too_and_is_as_far_off_as_the_weights(served):
    """In chains as well. The canary, which knows the original's answers, is asked, says what it found and blocks nothing."""
    assert 0 < served.far(served.behind("original")) < WEIGHTS
    served.behind("own", "original")
    own, original = (served.client.state(name)["canary"] for name in ("own", "original"))
    assert own == "passed" and original in ("passed", "accepted")
    said = re.findall(r"original@1[^\n]*logprobs differ by", served.log.read_text())
    assert said, "what it found is in the log"


def test_the_engine_refuses_what_it_would_accept_where_nobody_accepts_weights(served, home):
    """By the fingerprint that this engine gives, which both modes tell."""
    made = served.client.http.post("/v1/cartridges", json={"document": "A document."}).json()
    entry = Registry(served.settings.registry_path, read_only=True).find(made["id"])
    engine = load_manifest(Path(entry.location)).fingerprint
    assert served.model.fingerprint.differences(engine) == []
    for name in ("own", "original"):
        home.registry.register(served.settings.cartridges_dir / name)
    refused = home.open(fingerprint=engine, chunks=256, settings={"cpu_bytes": 64 << 20}, chunk_tokens=256).refused()
    assert list(refused) == ["original@1"]
    assert f"quantisation: none, not {engine.quantisation}" in refused["original@1"]
    assert "--accept-weights" in refused["original@1"]
