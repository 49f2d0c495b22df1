"""A step that is replayed as one CUDA graph: vLLM's answers after a chain are those of transformers after the same KV."""

from __future__ import annotations

import json

import torch
from families import FAMILIES, MAX_MODEL_LEN, chain, make_model, write

from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.settings import Settings

NOISE = 1e-3
"""Nats, in float32. Measured: up to 1.2e-4."""
DOCUMENTS = {"a": range(5, 205), "b": range(240, 360)}
"""320 tokens, five chunks of the engine, of which the fourth holds some of both."""


def test_a_step_that_is_replayed_as_one_cuda_graph_loads_before_it(tmp_path, run_offline):
    """As vLLM on a GPU has it where a single token of the prompt is not in a cartridge."""
    path = make_model(tmp_path / "model", FAMILIES["smollm3"]())
    model, settings = CausalModel(str(path), max_model_len=MAX_MODEL_LEN), Settings(home=tmp_path / "home")
    cartridges = [write(model, settings.cartridges_dir / name, list(ids)) for name, ids in DOCUMENTS.items()]
    for name in DOCUMENTS:
        Registry(settings.registry_path).register(settings.cartridges_dir / name)
    question, asked = [400], [["a"], ["a", "b"]]
    said = run_offline("replayed_offline.py", settings.home, path, json.dumps([[names, question] for names in asked]))
    answers = json.loads(next(line for line in said.splitlines() if line.startswith("[[")))
    assert [cached for _, cached in answers] == [192, 320], "of the chain all but the question"
    for names, (found, _) in zip(asked, answers, strict=True):
        expected = model.logits_after(chain(cartridges[: len(names)]), question)[-1].log_softmax(-1)
        assert float((torch.tensor(found) - expected).abs().max()) < NOISE
