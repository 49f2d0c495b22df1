"""LMCache's own saving and cartridges in one server, by the command and variables that the production stack's chart makes.

`data/production-stack.json` has what Helm rendered of `configs/production-stack/values.yaml`: vLLM's own connector name,
`kv_both`, and LMCache's offloading switched on by its variables.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from processor import noise
from recall.ward import ask, encode
from serving import difference
from wards import MODEL, Asker, Ward, patients, prefill, register, sure, write_ward

from lmcache_cartridge.engine.versions import PROVEN
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.serve.launch import Launch
from lmcache_cartridge.serve.processes import SMALL, ServerProcess
from lmcache_cartridge.settings import Settings, from_mapping

RENDERED = json.loads((Path(__file__).parents[1] / "data" / "production-stack.json").read_text(encoding="utf-8"))
VALUES = Path(__file__).parents[2] / "configs" / "production-stack" / "values.yaml"
CHUNK = 256
NOISE = noise(0.25)
"""As the matrix has it."""


class Served(NamedTuple):
    asker: Asker
    model: CausalModel
    settings: Settings
    wards: dict[str, Ward]
    """By kind of cartridge, and `text` for one that prompts have."""
    fault: Path
    log: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    settings, model = from_mapping({"home": home, "plain_prompts": "all"}), CausalModel(MODEL)
    wards = {name: write_ward(model, patients(i, 4), name) for i, name in enumerate(("prefill", "trained", "text"))}
    wards["trained"] = wards["trained"]._replace(ids=wards["trained"].ids[:CHUNK])
    for kind in ("prefill", "trained"):
        register(model, settings, wards[kind].ids, name=kind, kind=kind)
    # The wheel for CPU has the script `vllm`, which asks for a distribution of that name: here one without a file is in the path.
    (info := home / "modules" / f"vllm-{PROVEN['vllm']}.dist-info").mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {PROVEN['vllm']}+cpu\n")
    path, rendered = home / "lmcache.yaml", {variable["name"]: variable.get("value") for variable in RENDERED["env"]}
    environment = SMALL | {name: "pod" if value is None else value for name, value in rendered.items()} | {
        "LMCACHE_CONFIG_FILE": str(path), "LMCACHE_CARTRIDGE_HOME": str(home), "VLLM_SERVER_DEV_MODE": "1",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.5", "PROMETHEUS_MULTIPROC_DIR": str(home), "HF_HOME": str(home),
        "PYTHONPATH": f"{home / 'modules'}:{Path(__file__).parents[1]}", "LMCACHE_FAULTY_FILE": str(home / "fault.json"),
    }  # fmt: skip
    assert environment["LMCACHE_LOCAL_CPU"] == "True"
    program, verb, _, host, _, port, _, *options = RENDERED["command"]
    assert (program, verb, host, port) == ("vllm", "serve", "--host", "--port")
    # Sixteen prompts of two documents are more than fits: LMCache has them where vLLM's own cache has not.
    command = [
        str(Path(sys.executable).with_name(program)), verb, MODEL, *options, "--max-model-len", "8192", "--enforce-eager",
        "--kv-cache-memory-bytes", str(32 << 20),
    ]  # fmt: skip
    [config_map] = yaml.safe_load(VALUES.read_text(encoding="utf-8"))["extraObjects"]
    config = yaml.safe_load(config_map["data"]["lmcache.yaml"])
    ours = "storage_plugin.cartridge."
    for name in ("library", "disk_bytes", "disk_dir"):  # of a bucket and a volume
        del config["extra_config"][ours + name]
    config["extra_config"] |= {
        ours + "module_path": "faulty", ours + "home": str(home), ours + "cpu_bytes": "1GiB",
        ours + "drain_s": 0, ours + "plain_prompts": "all",
    }  # fmt: skip
    text = yaml.safe_dump(config)
    assert "local_cpu: false" in text and "VLLM_PLUGINS" not in os.environ
    log = home / "log"
    with (
        ServerProcess(
            Launch(path, text, environment, command, {}), log, environment=environment, timeout_s=900
        ) as server,
        Asker(server.url) as asker,
    ):
        yield Served(asker, model, settings, wards, home / "fault.json", log)


def test_prompts_are_saved_and_read_back_for_their_tenant_and_documents_answer_everybody(served):
    """Of other words than sheets have, so that equal logprobs say that the KV is right."""
    rng, words = random.Random(5), served.wards["text"].ids[1:]
    own = [served.wards["text"].ids[0], *rng.sample(words, 1040)]
    document, computed = served.wards["prefill"].ids, served.asker.computed([*own, 9])
    salts: list[dict[str, Any]] = [{}, {"cache_salt": "x"}, {"cache_salt": "y"}]
    for salt in salts:
        seen = []
        for _ in range(2):
            served.asker.forget()
            plain = served.asker.complete([*own, 9], logprobs=20, **salt)
            assert difference(plain, computed) < NOISE
            behind = served.asker.complete([*own[1:], 9], "prefill", **salt)
            trained = served.asker.complete([*own[1:], 9], "trained", **salt)
            head = served.asker.complete([*document, *own[1:], 9], **salt)
            seen.append([reply.cached_tokens for reply in (plain, behind, trained, head)])
        assert seen == [[0, 1024, 256, 1024], [1024, 2048, 1280, 2048]], salt


def _break(served: Served, **fault: Any) -> None:
    served.fault.write_text(json.dumps(fault))


def test_nothing_is_saved_after_a_trained_cartridge_that_could_not_be_loaded(served):
    """vLLM ends the request, but in the same step LMCache would save what was computed from its identity tokens."""
    text = served.wards["text"].ids[1:]
    kv = prefill(served.model, [*served.wards["trained"].ids, *text])
    fact = sure(served.model, kv, served.wards["text"].facts)[0]
    stored = _stored(served)
    served.asker.forget()
    _break(served, drop=0)
    try:
        reply = served.asker.http.post("/v1/completions", json={
            "model": MODEL, "prompt": [*text, 9], "cartridges": ["trained"], "max_tokens": 1, "cache_salt": "failed",
        })  # fmt: skip
        assert reply.status_code >= 500, reply.text
    finally:
        _break(served)
    assert _stored(served) == stored, "LMCache saved something of the request"
    served.asker.forget()
    first = served.asker.complete([*text, *encode(ask(fact, 0))], "trained", cache_salt="failed")
    assert (first.cached_tokens, first.text.strip()) == (256, fact.value)


def _stored(served: Served) -> int:
    """Return how often LMCache has said that it saved something."""
    return len(re.findall(r"Stored \d+ out of total", served.log.read_text()))
