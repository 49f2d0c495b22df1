"""A real vLLM CPU server answers from cartridges exactly as from the documents themselves, or does not use them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from processor import noise
from serving import SERVER_ARGS, Client, difference, question_ids, register_kv, stored_kv

from lmcache_cartridge.artifact import reading
from lmcache_cartridge.artifact.manifest import Manifest
from lmcache_cartridge.cli.recall import MODEL_DIR, load_sheet
from lmcache_cartridge.engine.contract import REQUEST_API
from lmcache_cartridge.library.quarantine import Quarantine
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make import prefill
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.serve.launch import plan
from lmcache_cartridge.serve.processes import ServerProcess
from lmcache_cartridge.settings import Settings, from_mapping

CHUNK = 64
"""The servers' chunk size."""
BLOCKS = {"written": 128, "copied": 32}
"""vLLM's block sizes: its own default on CPU, of which a chunk is half, so that the engine's op has to write it; and one of
which a chunk is two, so that they are copied."""
NOISE = noise(0.25)
"""Largest logprob difference taken for rounding: two bfloat16 steps of a logit between 16 and 32. Measured against full
prefill: 0.17 for KV made by transformers, 10 and more for damaged KV."""
# Wards with one, two and many whole chunks of 64, each with a tail; the last is stored in chunks of 256.
DOCUMENTS = {
    "one": ("ward-a", 75, 64),
    "two": ("ward-b", 170, 256),
    "a": ("ward-a", None, 64),
    "c": ("ward-c", None, 256),
}
WHOLE_CHUNKS = {"one": 1, "two": 2, "a": 16, "c": 16}
DAMAGE = {
    "zeroed": torch.zeros_like,
    "keys and values swapped": lambda kv: kv.flip(0),
    "heads permuted": lambda kv: kv.flip(3),
    "one layer shifted": lambda kv: kv.roll(1, 1),
    "values one position late": lambda kv: torch.stack([kv[0], kv[1].roll(1, 1)]),
}


class Built(NamedTuple):
    model: CausalModel
    settings: Settings
    ids: dict[str, list[int]]
    """Token ids of each document."""
    trained: dict[str, Manifest]
    """Variants of ward-a's KV, each to be found under its digest."""


class Served(NamedTuple):
    client: Client
    log: Path
    model: CausalModel
    settings: Settings
    ids: dict[str, list[int]]
    trained: dict[str, Manifest]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    home = tmp_path_factory.mktemp("home")
    settings = from_mapping({"home": home, "cpu_bytes": 64 << 20, "lookup_timeout_s": 10, "plain_prompts": "all"})
    registry = Registry(settings.registry_path)
    model = CausalModel(str(MODEL_DIR))
    ids = {name: _build(model, registry, settings, name) for name in (*DOCUMENTS, "flipped")}
    _flip_a_bit(settings.cartridges_dir / "flipped")
    return Built(model, settings, ids, _register_variants(registry, home, ids["a"]))


@pytest.fixture(scope="module", params=BLOCKS)
def served(built: Built, request: pytest.FixtureRequest) -> Served:
    home, block = built.settings.home, str(BLOCKS[request.param])
    # Without the request API, so that a test may name KV by its tag.
    transfer = json.dumps({"kv_connector_extra_config": {REQUEST_API: "off"}})
    launch = plan(
        str(MODEL_DIR), built.settings, chunk_tokens=CHUNK, on_load_failure="fail",
        vllm_args=[*SERVER_ARGS, "--block-size", block, "--kv-transfer-config", transfer],
    )  # fmt: skip
    launch = launch._replace(environment=launch.environment | {"VLLM_PLUGINS": ""})
    log = home / f"{request.param}.log"
    with ServerProcess(launch, log) as server, Client(server.url, str(MODEL_DIR)) as client:
        yield Served(client, log, *built)


def _build(model: CausalModel, registry: Registry, settings: Settings, name: str) -> list[int]:
    sheet, tokens, chunk = DOCUMENTS.get(name, ("ward-b", None, 64))
    words = load_sheet(sheet).text
    if tokens is not None:
        words = model.tokenizer.decode(model.encode(words, special=False)[: tokens - 1])
    document = settings.home / f"{name}.txt"
    document.write_text(words)
    root = settings.cartridges_dir / name
    manifest = prefill.build(model, document, root, cartridge_id=name, version=1, chunk_tokens=chunk)
    registry.register(root)
    return reading.load_token_ids(manifest, root).tolist()


def _flip_a_bit(root: Path) -> None:
    with (root / "payload.safetensors").open("r+b") as file:
        file.seek(reading.load_manifest(root).payload.data_offset_bytes + 300_000)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0x10]))


def _register_variants(registry: Registry, home: Path, ids: list[int]) -> dict[str, Manifest]:
    """Register ward-a's KV as made by transformers and damaged in every way, under tags."""
    whole = CHUNK * WHOLE_CHUNKS["a"]
    root = home / "cartridges" / "a"
    made = stored_kv(root)[:, :, :whole]
    variants = {"made": made} | {name: damage(made) for name, damage in DAMAGE.items()}
    like = reading.load_manifest(root)
    return {
        name: register_kv(registry, home / "variants", name.replace(" ", "-"), kv, like, np.array(ids[:whole]))
        for name, kv in variants.items()
    }


def test_chunks_are_copied_where_they_are_whole_blocks_and_written_where_not(served: Served) -> None:
    layout = re.search(r"serving \d+ cartridges .*, rank 0 of 1, (\S+)", served.log.read_text())[1]
    assert re.fullmatch(r"heads" if served.log.stem == "written" else r"\w+/32/blocks", layout)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_cartridge_of_any_length_answers_as_full_prefill_does(served: Served, name: str) -> None:
    for question in load_sheet(DOCUMENTS[name][0]).questions[:6]:
        prompt = served.ids[name] + question_ids(served.model, question.text)
        computed, injected = served.client.computed(prompt), served.client.ask(prompt)
        assert injected.cached_tokens == WHOLE_CHUNKS[name] * CHUNK
        assert injected.prompt_tokens == len(prompt)
        assert injected.text == computed.text
        assert difference(injected, computed) < NOISE


def test_the_shipped_questions_are_answered_right_from_the_cartridge(served: Served) -> None:
    for question in load_sheet("ward-a").questions:
        reply = served.client.ask(served.ids["a"] + question_ids(served.model, question.text))
        assert reply.text.strip() == question.answer


@pytest.mark.parametrize("length", [64, 65, 127, 128, 129, 200, 700, 1023])
def test_a_prompt_that_ends_inside_the_document_uses_its_whole_chunks(served: Served, length: int) -> None:
    prompt = served.ids["a"][:length]
    injected = served.client.ask(prompt)
    # vLLM always computes the last prompt token itself.
    assert injected.cached_tokens == min(length // CHUNK * CHUNK, length - 1)
    assert difference(injected, served.client.computed(prompt)) < NOISE


def test_concurrent_requests_over_three_cartridges_get_their_own_answers(served: Served) -> None:
    names = ["a", "c", "two", "a", "c", "two", "a", "c"]
    prompts = [
        served.ids[name] + question_ids(served.model, load_sheet(DOCUMENTS[name][0]).questions[i].text)
        for i, name in enumerate(names)
    ]
    alone = [served.client.computed(prompt) for prompt in prompts]
    for _ in range(3):
        together = served.client.ask_at_once(prompts)
        assert [r.cached_tokens for r in together] == [WHOLE_CHUNKS[name] * CHUNK for name in names]
        assert [r.text for r in together] == [r.text for r in alone]
        assert max(map(difference, together, alone)) < NOISE


def test_kv_made_by_transformers_and_named_answers_as_full_prefill_does(served: Served) -> None:
    for question in load_sheet("ward-a").questions[:6]:
        prompt = served.ids["a"] + question_ids(served.model, question.text)
        reply = served.client.ask(prompt, tag=served.trained["made"].digest)
        assert reply.cached_tokens == CHUNK * WHOLE_CHUNKS["a"]
        assert difference(reply, served.client.computed(prompt)) < NOISE


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_kv_changes_the_answers_so_the_comparison_can_see_it(served: Served, damage: str) -> None:
    differences = []
    for question in load_sheet("ward-a").questions[:6]:
        prompt = served.ids["a"] + question_ids(served.model, question.text)
        reply = served.client.ask(prompt, tag=served.trained[damage].digest)
        assert reply.cached_tokens == CHUNK * WHOLE_CHUNKS["a"]
        differences.append(difference(reply, served.client.computed(prompt)))
    assert min(differences) > 5 * NOISE


def test_a_flipped_bit_is_refused_and_noted_and_the_document_computed(served: Served) -> None:
    questions = load_sheet("ward-b").questions[:3]
    for question in questions:
        prompt = served.ids["flipped"] + question_ids(served.model, question.text)
        reply = served.client.ask(prompt)
        assert reply.text.strip() == question.answer
        # Chunks before the damage may be used: each is verified by itself.
        assert reply.cached_tokens < len(served.ids["flipped"]) // CHUNK * CHUNK
    digest = reading.load_manifest(served.settings.cartridges_dir / "flipped").digest
    assert "checksum" in Quarantine(served.settings.quarantine_dir).reason(digest)
    healthy = served.ids["a"] + question_ids(served.model, load_sheet("ward-a").questions[0].text)
    assert served.client.ask(healthy).cached_tokens == CHUNK * WHOLE_CHUNKS["a"]


def test_a_trained_cartridge_is_found_under_its_tag_only(served: Served) -> None:
    prompt = served.ids["a"][: CHUNK * WHOLE_CHUNKS["a"]] + [5]
    zeroed = served.trained["zeroed"].digest
    plain = served.client.ask(prompt)
    assert difference(plain, served.client.computed(prompt)) < NOISE, "an untagged prompt got somebody's cartridge"
    assert served.client.ask(prompt, tag=zeroed[:-1] + "0").cached_tokens == 0
    short = served.client.ask(prompt[: CHUNK * 3 + 1], tag=zeroed)
    assert short.cached_tokens == 0, "a trained cartridge answered with a part of itself"
