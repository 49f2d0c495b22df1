"""Engines other than the usual one: with a failing plugin, with tensor parallelism, and one that must not start."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from adapters import write_adapter
from processor import noise
from serving import (
    Client,
    Reply,
    assert_injected_to_its_end,
    build_sheet,
    difference,
    question_ids,
    register_trained,
    serving,
)

from lmcache_cartridge.artifact.reading import MANIFEST
from lmcache_cartridge.cli.recall import MODEL_DIR, SHEETS_DIR, load_sheet
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make import prefill
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.serve.processes import SMALL
from lmcache_cartridge.settings import Settings, from_mapping

NOISE = noise(0.25)
"""As in test_end_to_end."""


@pytest.fixture(scope="module")
def model() -> CausalModel:
    return CausalModel(str(MODEL_DIR))


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, model: CausalModel) -> Settings:
    """A home with ward-a in chunks of 256, and the same KV as trained cartridges: `tailed`, and `trained` less its tail."""
    made = from_mapping(
        {"home": tmp_path_factory.mktemp("home"), "cpu_bytes": 64 << 20, "lookup_timeout_s": 10, "plain_prompts": "all"}
    )
    built, kv = build_sheet(made, model, "ward-a")
    for name, part in (("tailed", kv), ("trained", kv[:, :, :1024])):
        register_trained(made, name, part, built)
    return made


def _prompts(model: CausalModel, count: int) -> list[tuple[list[int], str]]:
    sheet = load_sheet("ward-a")
    document = model.encode(sheet.text, special=True)
    return [(document + question_ids(model, q.text), q.answer) for q in sheet.questions[:count]]


def test_the_demo_command_answers_from_the_cartridge_as_from_the_document(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lmcache_cartridge.cli.main", "demo", "--format", "json"]
    done = subprocess.run([*command, "--home", tmp_path], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["questions"] >= 10
    exact = {way: round(found["exact"] * result["questions"]) for way, found in result["ways"].items()}
    assert exact["document"] == exact["cartridge"] >= result["questions"] - 1
    assert exact["no prefix"] <= result["questions"] // 3


PARALLEL = SMALL | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_SERVER_DEV_MODE": "1"}


def assert_documents_are_injected(client: Client, model: CausalModel) -> None:
    """Ask prompts that carry a document, and compare each with the same one computed."""
    for prompt, answer in _prompts(model, 4):
        reply = client.ask(prompt)
        assert reply.cached_tokens == 1024
        assert reply.text.strip() == answer
        assert difference(reply, client.computed(prompt)) < NOISE


def ask_for_what_was_saved(client: Client, model: CausalModel) -> None:
    """Have what follows a cartridge computed, and read back from LMCache by every rank, once vLLM has forgotten it."""
    first, between = (model.encode(load_sheet(name).text, special=name == "ward-a") for name in ("ward-a", "ward-b"))
    for question in load_sheet("ward-a").questions[4:6]:
        prompt = [*first, *between, *question_ids(model, question.text)]
        found = []
        for cached in (1024, len(prompt) // 256 * 256):
            client.forget()
            found.append(client.ask(prompt, cache_salt=question.text))
            assert found[-1].cached_tokens == cached
        plain = client.computed(prompt)
        assert {reply.text.strip() for reply in found} == {plain.text.strip()}
        assert max(difference(reply, plain) for reply in found) < NOISE


def test_each_tensor_parallel_rank_injects_its_own_heads(
    settings: Settings, model: CausalModel, tmp_path: Path
) -> None:
    two = "--tensor-parallel-size", "2"
    given = {"environment": PARALLEL, "on_load_failure": "fail", "l1_bytes": 128 << 20}
    with serving(settings, tmp_path / "log", str(MODEL_DIR), *two, **given) as client:
        for name, question in itertools.product(("ward-a", "trained"), load_sheet("ward-a").questions[:4]):
            own = question_ids(model, question.text)
            body = client.post({"prompt": own, "cartridges": [name], "max_tokens": 4, "temperature": 0}).json()
            assert body["choices"][0]["text"].strip() == question.answer
            assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 1024
        assert_injected_to_its_end(client, model)
        assert_documents_are_injected(client, model)
        ask_for_what_was_saved(client, model)


def test_offline_inference_takes_cartridges_that_the_engine_answers_right_from(
    settings: Settings, model: CausalModel, tmp_path: Path
) -> None:
    registry, root = Registry(settings.registry_path), settings.cartridges_dir / "odd"
    manifest = prefill.build(model, SHEETS_DIR / "ward-b.txt", root, cartridge_id="odd", version=1)
    (first, *others) = manifest.canary.after
    wrong = msgspec.structs.replace(
        first.answer, logprobs=tuple(tuple(n - 5 for n in each) for each in first.answer.logprobs)
    )
    canary = msgspec.structs.replace(manifest.canary, after=(msgspec.structs.replace(first, answer=wrong), *others))
    (root / MANIFEST).write_bytes(msgspec.structs.replace(manifest, canary=canary).encode())
    registry.register(root)
    adapter = write_adapter(tmp_path / "nurse", 0)
    root = settings.cartridges_dir / "nurse"
    prefill.build(
        CausalModel(str(MODEL_DIR), lora=adapter), SHEETS_DIR / "ward-a.txt", root, cartridge_id="nurse", version=1
    )
    registry.register(root)
    script = Path(__file__).parents[1] / "ask_offline.py"
    done = subprocess.run(
        [sys.executable, script, settings.home, MODEL_DIR, adapter], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[[")))
    assert [found for found, _, _ in answers] == [expected for _, expected, _ in answers]
    assert [cached for _, _, cached in answers] == [1024] * 12 + [0] + [1024] * 5, (
        "the odd one's text is computed, once"
    )
    assert done.stderr.count("odd@1 is set aside on this engine") + done.stdout.count("odd@1 is set aside") == 1
    assert "refused: no cartridge is called 'short'" in done.stdout
    assert done.stdout.count("made with") == 2, "each is refused to the other"
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"nurse')))
    replies = {name: Reply("", [logprobs], 0, cached) for name, (cached, logprobs) in found.items()}
    assert {name: reply.cached_tokens for name, reply in replies.items()} == {
        "nurse's": 1024, "base's": 1024, "nurse's without it": 0, "base's with it": 0, "dense with it": 0,
    }, "what is prepared for one and generated by the other is computed"  # fmt: skip
    own, base = replies["nurse's"], replies["base's"]
    assert difference(own, base) > 4 * NOISE, "the control: the other's KV is seen"
    for name, of in (("dense with it", own), ("base's with it", own), ("nurse's without it", base)):
        assert difference(replies[name], of) < NOISE, name
    registry.remove("odd@1")
    registry.remove("nurse@1")
