"""vLLM's answers after a chain are those of transformers after the same KV, for models that treat positions their own way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import FAMILIES, ROTATING, chain, make_model, write

from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.settings import Settings

NOISE = 1e-3
"""Nats, in float32. Measured: up to 1.2e-4; of a chain of SmolLM3 with every layer rotated: 1.8."""
DOCUMENTS = {"a": range(5, 205), "b": range(240, 360)}
"""320 tokens, five chunks of the engine, of which the fourth holds some of both."""
QUESTION = list(range(400, 410))


def _ask(home: Path, model: Path, chains: list[list[str]], wrong_from: int) -> list[tuple[torch.Tensor, int]]:
    """Return of each chain the log probability of every token after the question, and how many were not computed."""
    script = Path(__file__).with_name("chains_offline.py")
    asked = json.dumps([[names, QUESTION] for names in chains])
    done = subprocess.run(
        [sys.executable, script, home, model, asked, str(wrong_from)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[[")))
    return [(torch.tensor(logprobs), cached) for logprobs, cached in answers]


@pytest.mark.parametrize("name", ["smollm3", "exaone4", "gptj", "falcon multi-query", "qwen2-moe"])
def test_a_chain_is_answered_as_transformers_answers_after_the_same_kv(tmp_path: Path, name: str) -> None:
    model = CausalModel(str(make_model(tmp_path / "model", FAMILIES[name]())))
    settings = Settings(home=tmp_path / "home")
    cartridges = {}
    for document, ids in DOCUMENTS.items():
        root = settings.cartridges_dir / document
        cartridges[document] = write(model, root, list(ids))
        Registry(settings.registry_path).register(root)
    chains = [["a"], ["a", "b"], ["b", "a"]]
    apart = []
    for names, (found, cached) in zip(chains, _ask(settings.home, tmp_path / "model", chains, 2), strict=True):
        expected = model.logits_after(chain([cartridges[n] for n in names]), QUESTION)[-1].log_softmax(-1)
        apart.append(float((found - expected).abs().max()))
        assert cached == (192 if len(names) == 1 else 320)
    print(name, apart)
    assert max(apart[:2]) < NOISE
    if len(ROTATING[name]) == model.fingerprint.layers:
        assert apart[2] < NOISE
    else:
        assert apart[2] > 100 * NOISE, "every layer was rotated, and nobody could tell"
