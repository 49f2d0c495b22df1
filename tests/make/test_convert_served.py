"""An imported cartridge, and what a press kept, on a real vLLM server: tokens are as likely as transformers says after that KV."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import foreign
import pytest
import torch
from commands import Cli
from processor import noise
from recall.ward import ask, encode
from safetensors import safe_open
from serving import Client, serving
from transformers import DynamicCache
from wards import MODEL, patients, prefill, sure, write_ward

from lmcache_cartridge import from_cache
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.settings import from_mapping

CHUNK = 64
P = 512
NOISE = noise(0.2)
"""Largest logprob difference taken for rounding; measured: 0.063 whatever the format, 10 and more for damaged KV."""
QUESTIONS = 12


class Pressed(NamedTuple):
    """What kvpress's KeyDiffPress kept of a sheet, a quarter, as `benchmarks/press.py --asked 12` wrote it."""

    cache: DynamicCache
    tokens: int
    """Of the sheet."""
    asked: list[tuple[list[int], dict[str, float]]]
    """Questions, and the top 20 log probabilities behind the cache, in float32 by transformers in kvpress's environment."""

    @classmethod
    def read(cls) -> Pressed:
        with safe_open(Path(__file__).parents[1] / "data" / "pressed.safetensors", "pt") as kept:
            about, layers = kept.metadata(), range(len(kept.keys()) // 2)
            cache = DynamicCache([(kept.get_tensor(f"keys.{n}"), kept.get_tensor(f"values.{n}")) for n in layers])
        return cls(cache, int(about["document_tokens"]), json.loads(about["asked"]))


class Served(NamedTuple):
    client: Client
    model: CausalModel
    questions: list[list[int]]
    kv: torch.Tensor
    """What is imported: P positions of the sheet and small changes of training."""

    def after(self, prompt: list[int], name: str) -> tuple[dict[int, float], int]:
        """Return the top 20 of the next token by id, and how many prompt tokens came from a cache."""
        reply = self.client.ask(prompt, tokens=1, cartridges=[name], return_tokens_as_token_ids=True)
        top = reply.logprobs[0].items()
        return {int(token.removeprefix("token_id:")): value for token, value in top}, reply.cached_tokens


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    home, model = tmp_path_factory.mktemp("home"), CausalModel(MODEL)
    ward = write_ward(model, patients(0, 4), "imported")
    ids = ward.ids[:P]
    kv = prefill(model, ids).float()
    kv = (kv + 0.02 * kv.std() * torch.randn(kv.shape, generator=torch.Generator().manual_seed(1))).bfloat16()
    questions = [encode(ask(fact, 0)) for fact in sure(model, kv, ward.facts)[:QUESTIONS]]
    foreign.peft_adapter(kv, home / "peft")
    Cli(home).json("import", home / "peft", "--model", MODEL, "--chunk-size", CHUNK, "--id", "peft")
    settings, pressed = from_mapping({"home": home, "cpu_bytes": 64 << 20}), Pressed.read()
    from_cache(model, pressed.cache, home / "kvpress", cartridge_id="kvpress", version=1, next_position=pressed.tokens,
               chunk_tokens=CHUNK)  # fmt: skip
    Registry(settings.registry_path).register(home / "kvpress")
    with serving(settings, home / "server.log", chunk_tokens=CHUNK, on_load_failure="fail") as client:
        yield Served(client, model, questions, kv)


def _apart(found: dict[int, float], expected: torch.Tensor) -> float:
    """Return the largest difference between a top 20 and logits of the same position."""
    logprobs = expected.log_softmax(-1)
    return max(abs(value - float(logprobs[token])) for token, value in found.items())


def test_what_kvpress_kept_answers_as_with_kvpress(served):
    pressed, worst = Pressed.read(), 0.0
    for prompt, expected in pressed.asked:
        found, cached = served.after(prompt, "kvpress")
        assert cached == pressed.cache.get_seq_length() < pressed.tokens / 3.9
        top = sorted(expected, key=expected.__getitem__)[-5:]
        worst = max(worst, *(abs(expected[token] - found.get(int(token), -99.0)) for token in top))
        assert max(found, key=found.get) == int(top[-1])
    print(f"{len(pressed.asked)} questions, {worst:.3f}")
    assert len(pressed.asked) == QUESTIONS and worst < NOISE


def test_the_server_says_what_transformers_says_after_the_same_kv(served):
    """And would be seen to say something else after KV in a wrong place."""
    assert len(served.questions) == QUESTIONS
    apart, wrong = 0.0, 0.0
    for question in served.questions:
        found, cached = served.after(question, "peft")
        assert cached >= P, "all of the KV came from the cartridge"
        right, swapped = (served.model.logits_after(kv, question)[-1] for kv in (served.kv, served.kv.flip(0)))
        apart, wrong = max(apart, _apart(found, right)), max(wrong, _apart(found, swapped))
    print(apart, wrong)
    assert apart < NOISE < wrong / 10
