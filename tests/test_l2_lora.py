"""LoRA in multiprocess mode: an adapter never gets the base model's KV, nor the base model an adapter's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from peft import LoraConfig, get_peft_model
from serving import SERVER_ARGS, Reply, difference
from test_l2_saving import _APART, NOISE, Served, _build, _cut, _questions
from transformers import AutoModelForCausalLM
from wards import MODEL, patients, write_ward

from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.serve.launch import plan
from lmcache_cartridge.serve.processes import SMALL, ServerProcess
from lmcache_cartridge.settings import from_mapping


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("home")
    settings, model = from_mapping({"home": home}), CausalModel(MODEL)
    ward = _cut(model, write_ward(model, patients(0, 6), "doc"), 1024)
    _build(model, settings, "doc", ward)
    adapters = [f"{name}={_adapter(home / name, seed)}" for seed, name in enumerate(("one", "two"))]
    launch = plan(
        MODEL, settings, mode="multiprocess",
        vllm_args=[*SERVER_ARGS, "--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules", *adapters],
    )  # fmt: skip
    environment = SMALL | {"VLLM_SERVER_DEV_MODE": "1"}
    with (
        ServerProcess(launch, home / "server.log", environment=environment) as server,
        httpx.Client(base_url=server.url, timeout=120) as http,
    ):
        served = Served(http, launch, model, settings, {"doc": ward})
        served.ask([5], "doc")  # the engine is tried with it, and from then on plain prompts are answered from it
        yield served


def _adapter(path: Path, seed: int) -> Path:
    """Write an adapter of keys and values with weights that change every answer."""
    torch.manual_seed(seed)
    config = LoraConfig(
        r=8, lora_alpha=32, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], init_lora_weights=False
    )
    get_peft_model(AutoModelForCausalLM.from_pretrained(MODEL), config).save_pretrained(path)
    return path


def test_an_adapter_and_the_base_model_have_kv_of_their_own(served: Served) -> None:
    question, answer = _questions(served.wards["doc"], 1)[0]
    ids, models = served.wards["doc"].ids + question, (MODEL, "one", "two")

    def ask(model: str, cached: int) -> Reply:
        return served.saved(cached, ids, salt="tenant", model=model)

    computed = {model: served.ask(ids, model=model, **_APART) for model in models}
    assert {reply.cached_tokens for reply in computed.values()} == {0}
    assert difference(computed["one"], computed["two"]) > 5 * NOISE, "the control: another adapter's KV would be seen"
    assert difference(computed["one"], computed[MODEL]) > 5 * NOISE
    assert ask(MODEL, 1024).text.strip() == answer, "the document's cartridge"
    for model in models[1:]:
        first = served.ask(ids, salt="tenant", model=model)
        assert first.cached_tokens == 0, "it got the base model's KV, or the other adapter's"
        assert difference(first, computed[model]) < NOISE
    for model in (*models, *models):
        assert difference(ask(model, 1024), computed[model]) < NOISE


def test_a_cartridge_is_refused_to_an_adapter(served: Served) -> None:
    body = {"model": "one", "prompt": [5, 6], "max_tokens": 1, "cartridges": ["doc"]}
    response = served.http.post("/v1/completions", json=body)
    assert (response.status_code, "ask the base model" in response.text) == (422, True)
    assert served.http.post("/v1/completions", json=body | {"model": MODEL}).status_code == 200
