"""Questions of a canary that share a row are answered as if each stood alone, whatever a family does with positions and masks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from families import FAMILIES, make_model

from lmcache_cartridge.make import canary
from lmcache_cartridge.make.model import CausalModel

TOKENS = 100


@pytest.mark.parametrize("family", FAMILIES)
def test_questions_are_answered_together_as_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    model = CausalModel(str(make_model(tmp_path / "model", FAMILIES[family]())), max_model_len=1024, dtype="float32")
    draw = random.Random(family)
    ids = [draw.randrange(10, 620) for _ in range(TOKENS)]
    kv = torch.cat(list(model.prefill(ids, TOKENS)), dim=2)
    questions = [ids[start : start + length] for start, length in ((3, 12), (40, 12), (70, 5), (20, 31))]
    together = canary._greedy(model, kv, questions)
    damaged = canary.in_another_layout(kv, 80, 16)
    moved = canary._apart(model, damaged, together)
    monkeypatch.setattr(CausalModel, "has_alibi", True)  # each a row of its own
    alone = canary._greedy(model, kv, questions)
    for shared, single in zip(together, alone, strict=True):
        assert [row[0] for row in shared.answer.tokens] == [row[0] for row in single.answer.tokens]
        assert torch.allclose(*(torch.tensor(each.answer.logprobs) for each in (shared, single)), atol=2e-3)
    for shared, single in zip(moved, canary._apart(model, damaged, together), strict=True):
        assert torch.allclose(shared, single, atol=2e-3)
    assert max(float(each.mean()) for each in moved) > 0.05, "the KV does not matter"
