"""Cartridges on servers that do something else too: speculation, several engines, layers or ranks of their own.

Every answer is compared with the sheet, its logprobs with those of the same server's computed prompt. A cartridge with the
KV of another sheet is the control: its answers are wrong, so answers that are right come from the KV.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from families import FAMILIES, make_model, write
from serving import (
    SERVER_ARGS,
    Client,
    assert_injected_to_its_end,
    difference,
    question_ids,
    register_kv,
    stored_kv,
)

from lmcache_cartridge.artifact.identity import Identity
from lmcache_cartridge.cli.recall import MODEL_DIR, SHEETS_DIR, load_sheet
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make import prefill
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.serve.launch import plan
from lmcache_cartridge.serve.processes import SMALL, ServerProcess
from lmcache_cartridge.settings import Settings, from_mapping

NOISE = 0.25
"""As in test_end_to_end."""
INJECTED = 1024
"""Four chunks of the default size."""


class Home(NamedTuple):
    settings: Settings
    model: CausalModel


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """`ward-a` by prefill; `tailed`: the same KV by identity tokens; `trained`: less its tail; `other`: with that of ward-b."""
    settings = from_mapping(
        {"home": tmp_path_factory.mktemp("home"), "cpu_bytes": 64 << 20, "lookup_timeout_s": 10, "plain_prompts": "all"}
    )
    model, registry = CausalModel(str(MODEL_DIR)), Registry(settings.registry_path)
    for number, (sheet, name) in enumerate((("ward-a", "trained"), ("ward-b", "other"))):
        root = settings.cartridges_dir / sheet
        built = prefill.build(model, SHEETS_DIR / f"{sheet}.txt", root, cartridge_id=sheet, version=1)
        registry.register(root)
        ids = Identity(INJECTED, np.arange(10 + number, 640))
        register_kv(registry, settings.cartridges_dir, name, stored_kv(root)[:, :, :INJECTED], built, ids)
        if sheet == "ward-a":
            kv = stored_kv(root)
            register_kv(
                registry, settings.cartridges_dir, "tailed", kv, built, Identity(kv.shape[2], np.arange(10, 640))
            )
    return Home(settings, model)


@contextmanager
def served(home: Home, directory: Path, mode: str, *options: str, **environment: str) -> Iterator[Client]:
    launch = plan(str(MODEL_DIR), home.settings, mode=mode, vllm_args=[*SERVER_ARGS, *options])
    with (
        ServerProcess(launch, directory / "log", environment=SMALL | environment) as server,
        Client(server.url, str(MODEL_DIR)) as client,
    ):
        yield client


def right(client: Client, model: CausalModel, name: str) -> tuple[int, int]:
    """Return how many of ward-a's questions are answered right from a cartridge, and of how many; all of it injected."""
    questions, count = load_sheet("ward-a").questions[:12], 0
    for question in questions:
        own = question_ids(model, question.text)
        reply = client.post({"prompt": own, "cartridges": [name], "max_tokens": 6, "temperature": 0})
        body: dict[str, Any] = reply.json()
        assert reply.status_code == 200, body
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == INJECTED
        count += body["choices"][0]["text"].strip().startswith(question.answer)
    return count, len(questions)


def assert_served(client: Client, model: CausalModel) -> None:
    """Ask all cartridges, and compare a prompt that carries the document with the same one computed."""
    sheet = load_sheet("ward-a")
    assert right(client, model, "ward-a") == (12, 12)
    assert right(client, model, "trained")[0] >= 11, "the last 27 positions are missing"
    assert right(client, model, "other")[0] <= 4
    assert_injected_to_its_end(client, model)
    document = model.encode(sheet.text, special=True)
    for question in sheet.questions[:4]:
        prompt = document + question_ids(model, question.text)
        reply = client.ask(prompt)
        assert (reply.cached_tokens, reply.text.strip()) == (INJECTED, question.answer)
        assert difference(reply, client.computed(prompt)) < NOISE


def test_speculation_answers_as_the_model_does(home: Home, tmp_path: Path) -> None:
    """By ngram in multiprocess mode; `test_quantised_served` has a draft model's in-process."""
    speculation = '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}'
    with served(home, tmp_path, "multiprocess", "--speculative-config", speculation) as client:
        assert_served(client, home.model)
        metrics = client.get("/metrics").text
        assert float(re.search(r"^vllm:spec_decode_num_drafts_total\{.*\} (.*)$", metrics, re.M)[1]) > 0


def test_each_stage_of_a_pipeline_injects_its_own_layers(home: Home, tmp_path: Path) -> None:
    """The shipped model has three layers: one stage has one, the other two. vLLM 0.32 on CPU runs no eager pipeline."""
    stages = ("--no-enforce-eager", "--pipeline-parallel-size", "2")
    with served(home, tmp_path, "in-process", *stages, VLLM_CPU_OMP_THREADS_BIND="nobind") as client:
        assert_served(client, home.model)


def test_each_of_several_engines_answers_from_cartridges(home: Home, tmp_path: Path) -> None:
    with served(
        home, tmp_path, "multiprocess", "--data-parallel-size", "2", VLLM_CPU_OMP_THREADS_BIND="nobind"
    ) as client:
        assert_served(client, home.model)
        own = question_ids(home.model, load_sheet("ward-a").questions[0].text)
        with ThreadPoolExecutor(8) as pool:
            body = {"prompt": own, "cartridges": ["trained"], "max_tokens": 4, "temperature": 0}
            replies = list(pool.map(client.post, [body] * 24))
        answer = load_sheet("ward-a").questions[0].answer
        assert [reply.json()["choices"][0]["text"].strip() for reply in replies] == [answer] * 24
        metrics = client.get("/metrics").text
        finished = re.findall(
            r'^vllm:request_success_total\{engine="(\d)",finished_reason="(?:stop|length)".*\} (.*)$', metrics, re.M
        )
        assert {engine for engine, count in finished if float(count)} == {"0", "1"}, "one of them had nothing to do"


def test_stages_are_served_by_lmcaches_server_too_where_they_are_of_one_size(tmp_path: Path) -> None:
    """Random weights of four layers: what is compared is the distribution after the document and after the cartridge."""
    path = make_model(tmp_path / "model", FAMILIES["llama"]())
    settings, model = from_mapping({"home": tmp_path / "home", "cpu_bytes": 64 << 20}), CausalModel(str(path))
    documents = {name: [int(i) for i in np.random.default_rng(number).integers(5, 600, 768)] for number, name in
                 enumerate(("a", "b"))}  # fmt: skip
    for name, ids in documents.items():
        write(model, settings.cartridges_dir / name, ids)
        Registry(settings.registry_path).register(settings.cartridges_dir / name)
    options = [
        *SERVER_ARGS,
        "--max-model-len",
        "4096",
        "--no-enforce-eager",
        "--pipeline-parallel-size",
        "2",
        "--dtype",
        "float32",
    ]
    launch = plan(str(path), settings, mode="multiprocess", vllm_args=options)
    environment = SMALL | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with (
        ServerProcess(launch, tmp_path / "log", environment=environment) as server,
        Client(server.url, str(path)) as client,
    ):
        own, found = list(range(400, 410)), {}
        for name, ids in documents.items():
            found[name] = client.ask_with([name], own)
            assert found[name].cached_tokens == 768
            found[name, "computed"] = client.computed(ids + own)
        assert difference(found["a"], found["a", "computed"]) < 1e-2
        assert difference(found["b"], found["b", "computed"]) < 1e-2
        assert difference(found["a"], found["b"]) > 0.5, "nobody could tell the documents apart"
