"""The model as it is trained: HF's `LlamaForCausalLM` with an attention open to teaching.

Training HF's class keeps one set of names and one arithmetic: what is saved is what was trained.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from .ward import BOS, EOS, PAD, VOCAB_SIZE, VOCABULARY

ATTENTION = "recall_training"


@dataclass(slots=True)
class Gaze:
    """Where some attention heads ought to look, and how far they were from it in one forward pass.

    A training aid: finding the answer takes two hops (name and attribute are collected at one position, which
    is then matched from the question), and small models otherwise idle a long time before they discover them.
    """

    targets: dict[int, list[tuple[int, Tensor, Tensor]]]
    """Per layer: (head, rows, keys): query positions and the one each should attend to; [B, n], -1 pads."""
    losses: list[Tensor] = field(default_factory=list)
    """Filled by the forward pass: mean -log attention (nats) for each target, in layer order."""

    def observe(self, layer: int, query: Tensor, key: Tensor, scaling: float) -> None:
        """Add the losses of `layer`; query [B, H, T, D], key [B, KV, T, D], both rotated."""
        group = query.shape[1] // key.shape[1]
        for head, rows, keys in self.targets.get(layer, ()):
            valid = rows >= 0
            at = rows.clamp(min=0)
            picked = query[:, head].gather(1, at[..., None].expand(-1, -1, query.shape[-1]))
            scores = torch.bmm(picked, key[:, head // group].transpose(1, 2)).float() * scaling
            future = torch.arange(key.shape[2]) > at[..., None]
            log_attention = scores.masked_fill(future, float("-inf")).log_softmax(-1)
            nll = -log_attention.gather(2, keys.clamp(min=0)[..., None]).squeeze(-1)
            self.losses.append((nll * valid).sum() / valid.sum())


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    gaze: Gaze,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend causally without a cache or a mask, with the signature of an HF attention function. Returns [B, T, H, D]."""
    gaze.observe(module.layer_idx, query, key, scaling)
    found = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return found.transpose(1, 2), None


AttentionInterface.register(ATTENTION, attend)


def config() -> LlamaConfig:
    """Return the shape of the recall model: 1.23 M parameters, 1,536 bytes of bfloat16 KV a token."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=VOCABULARY[BOS],
        eos_token_id=VOCABULARY[EOS],
        pad_token_id=VOCABULARY[PAD],
        dtype="bfloat16",
    )


def new_model() -> LlamaForCausalLM:
    """Return an untrained float32 model with the training attention. Draws from torch's global generator."""
    model = AutoModelForCausalLM.from_config(config(), attn_implementation=ATTENTION, dtype=torch.float32)
    for name, weight in model.named_parameters():
        if "embed" in name:
            torch.nn.init.normal_(weight, std=0.02)
        elif weight.dim() == 2:
            writes_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5 * (0.5 if writes_residual else 1.0))
    return model


def logits_at(model: LlamaForCausalLM, tokens: Tensor, positions: Tensor, gaze: Gaze) -> Tensor:
    """Return float32 logits [n, V] after the flat `positions` [n] of `tokens` [B, T]. Fills `gaze.losses`."""
    hidden = model.model(input_ids=tokens, use_cache=False, gaze=gaze).last_hidden_state
    picked = hidden.reshape(-1, hidden.shape[-1])[positions]
    return F.linear(picked, model.lm_head.weight).float()
