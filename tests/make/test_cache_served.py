"""A cache that a compression left of a document is a cartridge: its answers are transformers' own after that cache."""

from __future__ import annotations

import json
from pathlib import Path

import foreign
import pytest
import torch
from processor import noise
from safetensors import safe_open
from serving import serving
from transformers import DynamicCache
from wards import MODEL, patients, write_ward

from lmcache_cartridge import from_cache
from lmcache_cartridge.errors import ArtifactError
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.settings import from_mapping

TOKENS, KEPT = 192, 96
NOISE = noise(0.2)
"""Largest logprob difference taken for rounding; measured: 0.063 whatever the format, 10 and more for damaged KV."""
PRESSED = Path(__file__).parents[1] / "data" / "pressed.safetensors"
"""A quarter of a sheet, as kvpress's KeyDiffPress and `benchmarks/press.py --asked 12` wrote it, with questions and the top 20
log probabilities behind it, in float32 by transformers in kvpress's environment."""


@pytest.fixture(scope="module")
def model():
    return CausalModel(MODEL, dtype="float32")


@pytest.fixture(scope="module")
def ids(model):
    return write_ward(model, patients(0, 2), "ward", tokens=TOKENS).ids[:TOKENS]


@pytest.mark.parametrize("spoil, told", [
    (lambda cache: vars(cache.layers[0]).update(keys=list(cache.layers[0].keys[0])), "has no attribute 'shape'"),
    (lambda cache: cache.batch_repeat_interleave(2), "with {(2, "),
    (lambda cache: cache.layers[0].values[0, 0, 3].fill_(torch.nan), "not finite"),
    (lambda cache: cache.layers.pop(), "a cache of "),
])  # fmt: skip
def test_what_does_not_fit_is_refused_and_nothing_left(model, ids, tmp_path, spoil, told):
    cache = foreign.pressed(model, ids, KEPT)
    spoil(cache)
    with pytest.raises(ArtifactError) as refused:
        from_cache(model, cache, tmp_path / "a", cartridge_id="a", version=1, next_position=TOKENS)
    assert told in str(refused.value) and not list(tmp_path.iterdir())


def test_what_kvpress_kept_is_served_as_kvpress_answers(tmp_path):
    with safe_open(PRESSED, "pt") as kept:
        about, layers = kept.metadata(), range(len(kept.keys()) // 2)
        cache = DynamicCache([(kept.get_tensor(f"keys.{n}"), kept.get_tensor(f"values.{n}")) for n in layers])
    tokens, asked, worst = int(about["document_tokens"]), json.loads(about["asked"]), 0.0
    settings = from_mapping({"home": tmp_path, "cpu_bytes": 64 << 20})
    from_cache(CausalModel(MODEL), cache, tmp_path / "kvpress", cartridge_id="kvpress", version=1, next_position=tokens,
               chunk_tokens=64)  # fmt: skip
    Registry(settings.registry_path).register(tmp_path / "kvpress")
    with serving(settings, tmp_path / "server.log", chunk_tokens=64, on_load_failure="fail") as client:
        for prompt, expected in asked:
            reply = client.ask(prompt, tokens=1, cartridges=["kvpress"], return_tokens_as_token_ids=True)
            assert reply.cached_tokens == cache.get_seq_length() < tokens / 3.9
            found = {token.removeprefix("token_id:"): value for token, value in reply.logprobs[0].items()}
            top = sorted(expected, key=expected.__getitem__)[-5:]
            worst = max(worst, *(abs(expected[token] - found.get(token, -99.0)) for token in top))
            assert max(found, key=found.get) == top[-1]
    assert len(asked) == 12 and worst < NOISE
