"""Compacted cartridges on a real vLLM server answer questions in wordings that they were not made with, alone and in a chain."""

from __future__ import annotations

import random
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

    def right(self, fact: Fact, *names: str) -> bool:
        """Whether a fact is answered right, and from all positions of the cartridges."""
        body = {
            "model": MODEL,
            "prompt": encode(ask(fact, UNSEEN)),
            "max_tokens": 2,
            "temperature": 0,
            "cartridges": names,
        }
        reply = self.http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        assert "x-cartridges-notice" not in reply.headers
        assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == P * len(names)
        return reply.json()["choices"][0]["text"].strip() == fact.value


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Two compacted cartridges of sheets without a patient in common, the first of them refined."""
    home: Path = tmp_path_factory.mktemp("home")
    facts = {}
    for number, name in enumerate(("short", "second")):
        document = write_document(random.Random(f"compact served {number}"), 1024, NAMES[number::2])
        facts[name] = document.facts[::3]
        (home / f"{name}.txt").write_text(document.text)
        refined = ["--refine", "0"] if name == "second" else []
        questions = str(write_questions(home / f"{name}.jsonl", document))
        build = ("build", "--model", MODEL, "--document", str(home / f"{name}.txt"), "--home", str(home), "--id", name)
        assert main([*build, "--questions", questions, "--compact", "4x", *refined, "--format", "json"]) == 0
    settings = from_mapping({"home": home, "cpu_bytes": 64 << 20})
    launch = plan(MODEL, settings, on_load_failure="fail", vllm_args=SERVER_ARGS)
    with ServerProcess(launch, home / "server.log") as server, httpx.Client(base_url=server.url, timeout=120) as http:
        yield Served(http, facts)


@pytest.fixture(scope="module")
def alone(served):
    """How many facts each answers."""
    return {name: sum(served.right(fact, name) for fact in facts) for name, facts in served.facts.items()}


def test_a_quarter_of_the_positions_answers_wordings_it_was_not_made_with(served, alone):
    assert alone["short"] >= 0.96 * len(served.facts["short"])


@pytest.mark.parametrize("chain", [("short", "second"), ("second", "short")])
def test_a_chain_of_two_loses_next_to_nothing_of_either(served, alone, chain):
    for name, facts in served.facts.items():
        together = sum(served.right(fact, *chain) for fact in facts)
        print(f"{name}: {alone[name]} of {len(facts)} alone, {together} in the chain")
        assert together >= alone[name] - 0.04 * len(facts)
