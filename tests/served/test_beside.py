"""Cartridges on servers that do something else too: speculation, several engines, layers or ranks of their own.

Every answer is compared with the sheet, its logprobs with those of the same server's computed prompt. A cartridge with the
KV of another sheet is the control: its answers are wrong, so answers that are right come from the KV.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from processor import noise
from serving import (
    Client,
    assert_injected_to_its_end,
    build_sheet,
    difference,
    question_ids,
    register_trained,
    serving,
)

from lmcache_cartridge.cli.recall import MODEL_DIR, load_sheet
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.serve.processes import SMALL
from lmcache_cartridge.settings import Settings, from_mapping

NOISE = noise(0.25)
"""As in test_end_to_end."""
STAGES = "--no-enforce-eager", "--pipeline-parallel-size", "2"
PARALLEL = SMALL | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
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
    model = CausalModel(str(MODEL_DIR))
    for number, (sheet, name) in enumerate((("ward-a", "trained"), ("ward-b", "other"))):
        built, kv = build_sheet(settings, model, sheet)
        register_trained(settings, name, kv[:, :, :INJECTED], built, 10 + number)
        if sheet == "ward-a":
            register_trained(settings, "tailed", kv, built)
    return Home(settings, model)


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
    with serving(
        home.settings, tmp_path / "log", str(MODEL_DIR), "--speculative-config", speculation, mode="multiprocess"
    ) as client:
        assert_served(client, home.model)
        metrics = client.get("/metrics").text
        assert float(re.search(r"^vllm:spec_decode_num_drafts_total\{.*\} (.*)$", metrics, re.M)[1]) > 0


def test_each_stage_of_a_pipeline_injects_its_own_layers(home: Home, tmp_path: Path) -> None:
    """The shipped model has three layers: one stage has one, the other two. vLLM 0.32 on CPU runs no eager pipeline."""
    with serving(home.settings, tmp_path / "log", str(MODEL_DIR), *STAGES, environment=PARALLEL) as client:
        assert_served(client, home.model)


def test_each_of_several_engines_answers_from_cartridges(home: Home, tmp_path: Path) -> None:
    several = "--data-parallel-size", "2"
    with serving(
        home.settings, tmp_path / "log", str(MODEL_DIR), *several, environment=PARALLEL, mode="multiprocess"
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
