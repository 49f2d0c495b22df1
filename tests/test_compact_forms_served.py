"""Compacted cartridges on a real vLLM server, in both modes: in bfloat16, in int8, and refined."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from lessons import write_questions
from recall.ward import Document, Fact, ask, encode, write_document
from serving import SERVER_ARGS
from wards import MODEL

from lmcache_cartridge.artifact.reading import load_manifest
from lmcache_cartridge.cli.main import main
from lmcache_cartridge.serve.launch import plan
from lmcache_cartridge.serve.processes import ServerProcess
from lmcache_cartridge.settings import from_mapping

CHUNK = 64
MADE = {
    "short": (256, ("--compact", "4x")),
    "int8": (256, ("--compact", "4x", "--payload", "int8")),
    "shortest": (64, ("--compact", "16x", "--accept", "0.7")),
}
"""Positions and options of each cartridge."""
UNSEEN = 1
"""Which of the wordings is asked: the questions that the cartridge is made with have the two others."""


class Served(NamedTuple):
    http: httpx.Client
    facts: tuple[Fact, ...]
    is_refined: bool
    """Whether the shortest was refined."""

    def right(self, cartridge: str, fact: Fact) -> bool:
        """Whether a fact is answered right, and from all positions of the cartridge."""
        body = {"model": MODEL, "prompt": encode(ask(fact, UNSEEN)), "cartridges": [cartridge], "max_tokens": 2,
                "temperature": 0}  # fmt: skip
        reply = self.http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == MADE[cartridge][0]
        return reply.json()["choices"][0]["text"].strip() == fact.value


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Document]:
    """Return a home with what `MADE` has, and the sheet that it is of."""
    home: Path = tmp_path_factory.mktemp("home")
    document = write_document(random.Random("compact served"), 1024)
    (home / "sheet.txt").write_text(document.text)
    questions = write_questions(home / "questions.jsonl", document)
    for name, (_, options) in MADE.items():
        command = ("build", "--model", MODEL, "--document", str(home / "sheet.txt"), "--id", name, "--home", str(home))
        how = ("--questions", str(questions), "--chunk-size", str(CHUNK), "--format", "json", *options)
        assert main([*command, *how]) == 0
    return home, document


@pytest.fixture(scope="module", params=["in-process", "multiprocess"])
def served(request: pytest.FixtureRequest, made: tuple[Path, Document]) -> Iterator[Served]:
    home, document = made
    settings = from_mapping({"home": home, "cpu_bytes": 64 << 20})
    launch = plan(
        MODEL, settings, chunk_tokens=CHUNK, on_load_failure="fail", vllm_args=[*SERVER_ARGS, "--block-size", str(CHUNK)], mode=request.param
    )  # fmt: skip
    with ServerProcess(launch, home / "server.log") as server, httpx.Client(base_url=server.url, timeout=120) as http:
        shortest = load_manifest(home / "cartridges" / "shortest" / "1").provenance.compaction
        yield Served(http, document.facts[::3], shortest.refine > 0)


@pytest.mark.parametrize("cartridge", MADE)
def test_what_was_compacted_answers_wordings_it_was_not_made_with(served: Served, cartridge: str) -> None:
    """Whether 16x is refined goes by its validation questions, and so by how a processor rounds bfloat16."""
    right, least = sum(served.right(cartridge, fact) for fact in served.facts), 0.96
    if cartridge == "shortest":
        least = 0.9 if served.is_refined else 0.7
    assert right >= least * len(served.facts)
