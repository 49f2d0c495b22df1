"""Helpers of the LoRA tests: adapters with which the recall model computes other KV and still recalls."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from wards import MODEL


def write_adapter(path: Path, seed: int) -> Path:
    """Write an adapter of random weights for attention.

    Measured on a sheet of 1024 tokens: 9 of 10 questions answered right, and logprobs 1 to 8 from those after the base
    model's KV, or without the adapter.
    """
    torch.manual_seed(seed)
    modules = ["q_proj", "k_proj", "v_proj", "o_proj"]
    config = LoraConfig(r=8, lora_alpha=32, target_modules=modules, init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(MODEL), config).save_pretrained(path)
    return path
