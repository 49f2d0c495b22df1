"""Questions of a canary that share a row are answered as if each stood alone, whatever a family does with positions and masks."""

from __future__ import annotations

import random

import pytest
import torch
from families import FAMILIES, make_model

from lmcache_cartridge.artifact.canary import Asked
from lmcache_cartridge.make import canary
from lmcache_cartridge.make.model import CausalModel

TOKENS = 100


@pytest.mark.parametrize("family", FAMILIES)
def test_questions_are_answered_together_as_alone(tmp_path, family):
    model = CausalModel(str(make_model(tmp_path / "model", FAMILIES[family]())), max_model_len=1024, dtype="float32")
    draw = random.Random(family)
    ids = [draw.randrange(10, 620) for _ in range(TOKENS)]
    kv = torch.cat(list(model.prefill(ids, TOKENS)), dim=2)
    damaged = canary.in_another_layout(kv, 80, 16)
    together = canary._greedy(
        model, kv, [ids[start : start + length] for start, length in ((3, 12), (40, 12), (70, 5), (20, 31))]
    )

    def alone(kv: torch.Tensor, asked: Asked) -> torch.Tensor:
        best = [row[0] for row in asked.answer.tokens]
        logits = model.logits_after(kv, [*asked.question, *best[:-1]])[-len(best) :]
        return logits.log_softmax(-1).gather(1, torch.tensor(asked.answer.tokens))

    moved = canary._apart(model, damaged, together)
    for asked, apart in zip(together, moved, strict=True):
        expected = torch.tensor(asked.answer.logprobs)
        assert torch.allclose(alone(kv, asked), expected, atol=2e-3)
        assert torch.allclose((alone(damaged, asked) - expected).abs(), apart, atol=2e-3)
    assert max(float(each.mean()) for each in moved) > 0.05, "the KV does not matter"
