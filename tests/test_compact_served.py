"""Compacted cartridges on a real vLLM server, in both modes: alone, and in chains, which say what was made alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from lessons import write_questions
from recall.ward import NAMES, Fact, ask, encode, write_document
from serving import SERVER_ARGS
from wards import MODEL

from lmcache_cartridge.cli.main import main
from lmcache_cartridge.serve.launch import plan
from lmcache_cartridge.serve.processes import ServerProcess
from lmcache_cartridge.settings import from_mapping

P = 256
UNSEEN = 1
"""Which of the wordings is asked: the questions that the cartridge is made with have the two others."""


class Served(NamedTuple):
    http: httpx.Client
    facts: dict[str, tuple[Fact, ...]]
    """Of the sheet of each cartridge."""
    refuses: bool
    """Whether `on_made_alone` is `error`."""

    def post(self, question: str, *names: str) -> httpx.Response:
        body = {"model": MODEL, "prompt": encode(question), "max_tokens": 2, "temperature": 0, "cartridges": names}
        return self.http.post("/v1/completions", json=body)

    def right(self, fact: Fact, *names: str) -> bool:
        """Whether a fact is answered right, and from all positions of the cartridges."""
        reply = self.post(ask(fact, UNSEEN), *names)
        assert reply.status_code == 200, reply.text
        assert "x-cartridges-notice" not in reply.headers
        assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == P * len(names)
        return reply.json()["choices"][0]["text"].strip() == fact.value


class Made(NamedTuple):
    home: Path
    facts: dict[str, tuple[Fact, ...]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Two compacted cartridges of sheets without a patient in common, and one that was trained alone."""
    home: Path = tmp_path_factory.mktemp("home")
    facts = {}
    for number, name in enumerate(("short", "second")):
        document = write_document(random.Random(f"compact served {number}"), 1024, NAMES[number::2])
        facts[name] = document.facts[::3]
        (home / f"{name}.txt").write_text(document.text)
        common = ("--model", MODEL, "--document", str(home / f"{name}.txt"), "--home", str(home), "--questions",
                  str(write_questions(home / f"{name}.jsonl", document)), "--format", "json")  # fmt: skip
        assert main(["build", *common, "--id", name, "--compact", "4x"]) == 0
    train = ["train", *common, "--id", "trained", "--compress", "4x", "--steps", "2", "--accept", "0"]
    assert main([*train, "--set", "rate=0.1", "--set", "answer_tokens=4"]) == 0
    return Made(home, facts)


@pytest.fixture(scope="module", params=["in-process", "multiprocess"])
def served(request: pytest.FixtureRequest, made: Made) -> Iterator[Served]:
    home, refuses = made.home, request.param == "multiprocess"
    settings = from_mapping({"home": home, "cpu_bytes": 64 << 20, "on_made_alone": "error" if refuses else "notice"})
    launch = plan(MODEL, settings, on_load_failure="fail", vllm_args=SERVER_ARGS, mode=request.param)
    with ServerProcess(launch, home / "server.log") as server, httpx.Client(base_url=server.url, timeout=120) as http:
        yield Served(http, made.facts, refuses)


def test_a_quarter_of_the_positions_answers_wordings_it_was_not_made_with(served: Served) -> None:
    facts = served.facts["short"]
    assert sum(served.right(fact, "short") for fact in facts) >= 0.96 * len(facts)


@pytest.mark.parametrize("chain", [("short", "second"), ("second", "short")])
def test_a_chain_of_two_loses_next_to_nothing_of_either(served: Served, chain: tuple[str, ...]) -> None:
    for name, facts in served.facts.items():
        alone, together = (sum(served.right(fact, *names) for fact in facts) for names in ((name,), chain))
        print(f"{name}: {alone} of {len(facts)} alone, {together} in the chain")
        assert together >= alone - 0.04 * len(facts)


def test_a_chain_of_what_was_made_alone_says_so_or_is_refused(served: Served) -> None:
    question = ask(served.facts["short"][0], UNSEEN)
    reply, alone = served.post(question, "short", "trained"), served.post(question, "trained")
    assert (alone.status_code, "x-cartridges-notice" in alone.headers) == (200, False)
    notice = "made for fewer than 1 others: trained@1 (0)"
    if served.refuses:
        assert (reply.status_code, notice in reply.text) == (400, True)
    else:
        assert (reply.status_code, reply.headers["x-cartridges-notice"]) == (200, notice)
        by_header = served.http.post(
            "/v1/completions", headers={"X-Cartridges": "trained, short"},
            json={"model": MODEL, "prompt": encode(question), "max_tokens": 2},
        )  # fmt: skip
        assert by_header.headers["x-cartridges-notice"] == notice
