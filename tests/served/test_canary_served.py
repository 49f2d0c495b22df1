"""No request is answered from KV that the engine gets wrong: its canary is asked first, alone and for chains."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch
from families import FAMILIES, make_model
from making import make_artifact
from serving import clear_lmcache, faulty, serving
from wards import Asker

from lmcache_cartridge.artifact.manifest import Provenance
from lmcache_cartridge.cli.main import main
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.make.write import write_kv
from lmcache_cartridge.serve.processes import SMALL
from lmcache_cartridge.settings import Settings, from_mapping

torch.set_num_threads(1)
CHUNK, POSITIONS = 64, 192
OPTIONS = ["--max-model-len", "2048", "--block-size", "32"]
LENGTHS = {
    **dict.fromkeys(("p0", "p1", "p2", "p3", "p4", "p5", "p6", "t0", "t1", "t2", "t3", "plain"), POSITIONS),
    "odd": 150, "short": 50,
}  # fmt: skip
"""Positions of each cartridge: those with t are trained, the others documents; `plain` has no canary."""


class Served(NamedTuple):
    asker: Asker
    model: Path
    settings: Settings
    faults: Path
    """Says what `faulty` does wrong."""

    def ask(self, *names: str) -> httpx.Response:
        return self.asker.post(prompt=[100, 101, 102], cartridges=names, max_tokens=2, temperature=0, logprobs=5)

    def count(self, name: str, outcome: str) -> float:
        return self.asker.metric(f'lmcache_cartridge_{name}_total{{outcome="{outcome}"}}')


@pytest.fixture(scope="module", params=["in-process", "multiprocess"])
def served(request, tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    config = FAMILIES["smollm3"]()
    config.no_rope_layers = [0, 1, 0, 1]  # which rotate; of a model with four layers the last one alone says little
    directory = make_model(home / "model", config, torch.bfloat16)
    settings, model = from_mapping({"home": home, "cpu_bytes": 64 << 20}), CausalModel(str(directory))
    for name, length in LENGTHS.items():
        root = settings.cartridges_dir / name
        _write(model, root, name, random.Random(name).choices(range(10, 640), k=length))
        Registry(settings.registry_path).register(root)
    faults = home / "faults.json"
    given = {"environment": SMALL | {"LMCACHE_FAULTY_FILE": str(faults)}, "change": faulty, "mode": request.param,
             "chunk_tokens": CHUNK, "on_load_failure": "fail"}  # fmt: skip
    with serving(settings, home / "log", str(directory), *OPTIONS, **given) as asker:
        yield Served(asker, directory, settings, faults)


def _write(model: CausalModel, root: Path, name: str, ids: list[int]) -> None:
    kv = torch.cat(list(model.prefill(ids, POSITIONS)), dim=2)
    if name == "plain":
        make_artifact(root, positions=POSITIONS, cartridge_id=name, fingerprint=model.fingerprint, token_ids=ids, kv=kv,
                      chunk_tokens=CHUNK)  # fmt: skip
        return
    made = Provenance(tool="tests", created="2026-01-01T00:00:00Z")
    write_kv(model, kv.split(CHUNK, dim=2), root, lambda kv: made, cartridge_id=name, version=1, positions=len(ids),
             token_ids=None if name.startswith("t") else ids, chunk_tokens=CHUNK)  # fmt: skip


@pytest.fixture
def broken(served):
    """Switch faults on; all are off again afterwards."""

    def switch(**faults: Any) -> None:
        served.faults.write_text(json.dumps(faults))
        clear_lmcache(served.asker.launch)

    yield switch
    switch()


def test_a_sound_engine_passes_once_and_the_canary_is_no_request(served):
    used, passed = served.count("requests", "used"), served.count("canaries", "passed")
    for name in ("p0", "t0"):
        for _ in range(3):
            reply = served.ask(name)
            assert reply.status_code == 200, reply.text
            assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == POSITIONS
    assert served.count("requests", "used") == used + 6
    assert served.count("canaries", "passed") == passed + 2
    assert (served.asker.state("p0")["canary"], served.asker.state("p1")["canary"]) == ("passed", None)


def test_a_chain_asks_about_the_later_ones_behind_themselves(served):
    assert served.ask("p1").status_code == 200
    passed = served.count("canaries", "passed")
    reply = served.ask("p0", "t0", "p1")
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 3 * POSITIONS
    assert served.count("canaries", "passed") == passed + 2
    assert served.ask("p1", "t0").status_code == 200
    assert served.count("canaries", "passed") == passed + 2


def test_documents_that_end_within_a_chunk_stand_in_chains(served):
    """What fills no chunk the engine computes, and behind another copy it is not what stands in the cartridge."""
    for chain, injected in ((("odd", "odd"), 256), (("short", "odd"), 192), (("p0", "short", "odd"), 384)):
        reply = served.ask(*chain)
        assert reply.status_code == 200, reply.text
        assert "served=document" not in reply.headers["x-cartridges"], reply.headers["x-cartridges"]
        assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == injected
    assert served.asker.state("odd")["canary"] == "passed"


def test_chunks_in_another_layout_are_found_before_anybody_gets_an_answer(served, broken):
    broken(unpacked=True)
    failed = served.count("canaries", "failed")
    for _ in range(2):
        reply = served.ask("t1")
        assert (reply.status_code, reply.headers["x-should-retry"]) == (422, "false"), reply.text
        assert "set aside on this engine" in reply.text
        assert "logprobs differ" in reply.text
    for _ in range(2):
        reply = served.ask("p2")
        assert reply.status_code == 200
        assert reply.headers["x-cartridges"].endswith(";served=document")
        assert (reply.json()["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0) in (0, None)
    assert served.count("canaries", "failed") == failed + 2
    for name in ("t1", "p2"):
        state = served.asker.state(name)
        assert (state["state"], state["canary"]) == ("refused", "failed")
        assert "logprobs differ" in state["reason"]
    broken()
    assert served.ask("t1").status_code == 422, "what an engine got wrong stays aside until it starts again"
    assert served.ask("t2").status_code == 200, "and nobody else is"


def test_keys_that_every_layer_rotates_are_found_before_anybody_gets_an_answer(served, broken):
    broken(rotate="all")
    assert served.ask("p4").status_code == 200, "alone nothing is rotated"
    reply = served.ask("p4", "t3")
    assert reply.status_code == 422, reply.text
    assert "logprobs differ" in reply.text
    chain = served.ask("p4", "p5")
    assert (chain.status_code, chain.headers["x-cartridges"].endswith(";served=document")) == (200, True)
    assert served.ask("t3").status_code == 200, "alone it is sound"
    broken()
    assert served.ask("p4", "p6").status_code == 200


@pytest.mark.parametrize("served", ["in-process"], indirect=True)
def test_validate_compares_what_engine_and_transformers_compute(served, capsys):
    """The tiers that no cell of the matrix is asked."""
    options = ["--model", str(served.model), "--home", str(served.settings.home), "--chunk-size", str(CHUNK)]
    asked = ["--url", served.asker.url, "--tier=-1,3", "--format", "json"]
    assert main(["validate", *options, *asked]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {(row["tier"], row["result"]) for row in rows} == {(tier, "pass") for tier in ("noise", "-1", "3")}, rows
