"""Makers of foreign checkpoints: PEFT's by PEFT itself, others by code that follows their published formats."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import CartridgeConfig, PeftModel, PrefixTuningConfig, get_peft_model
from peft.tuners.cartridge.utils import prompt_embeddings_from_past_key_values
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache

from lmcache_cartridge.cli.recall import MODEL_DIR

LAYERS, HEADS, HEAD_SIZE = 3, 2, 64
"""Geometry of the shipped model."""


def random_kv(
    positions: int, *, layers: int = LAYERS, heads: int = HEADS, head_size: int = HEAD_SIZE, seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:  # fmt: skip
    """Return canonical KV `[2, L, T, H, D]`, no two elements alike by intent."""
    shape = (2, layers, positions, heads, head_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def htd(kv: torch.Tensor) -> list[list[torch.Tensor]]:
    """Return canonical KV as keys and values `(1, H, T, D)` of each layer, as transformers' cache has them."""
    return [[layer.transpose(0, 1)[None].contiguous() for layer in plane] for plane in kv]


def base_model(dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return the shipped model as transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=dtype).eval()


def peft_adapter(
    kv: torch.Tensor, directory: Path, *, kind: str = "CARTRIDGE", safe: bool = True, **config: Any
) -> Path:
    """Save canonical KV with PEFT: put into its prompt encoder as its own initialiser does, saved by `save_pretrained`."""
    maker = {"CARTRIDGE": CartridgeConfig, "PREFIX_TUNING": PrefixTuningConfig}[kind]
    wrapped = get_peft_model(base_model(), maker(task_type="CAUSAL_LM", num_virtual_tokens=kv.shape[2], **config))
    if not config.get("prefix_projection"):
        keys, values = htd(kv)
        past = tuple(zip(keys, values, strict=True))
        packed = prompt_embeddings_from_past_key_values(past, num_virtual_tokens=kv.shape[2])
        wrapped.prompt_encoder["default"].load_prompt_embeddings(packed)
    wrapped.save_pretrained(directory, safe_serialization=safe)
    return directory


@torch.inference_mode()
def peft_logits(directory: Path, ids: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return float32 logits `[len(ids), vocabulary]` of PEFT's own forward pass with an adapter."""
    wrapped = PeftModel.from_pretrained(base_model(dtype), directory).eval()
    return wrapped(input_ids=torch.tensor([list(ids)])).logits[0].float()


def hazy(kv: torch.Tensor, path: Path, *, frozen: int = 1, prefix: str = "frozen", plain: bool = False) -> Path:
    """Save canonical KV as HazyResearch's `TrainableCache` does: frozen before trainable, each a `ParameterList` of `(1, H, T, D)`;
    `plain` lists of tensors instead, None where nothing is frozen, as knlp has them."""
    content: dict[str, Any] = {}
    for name, layers in zip(("keys", "values"), htd(kv), strict=True):
        for part, span in ((prefix, slice(frozen)), ("trainable", slice(frozen, None))):
            tensors = [layer[:, :, span].contiguous() for layer in layers if frozen or part != prefix]
            content[f"{part}_{name}"] = (tensors or None) if plain else nn.ParameterList(map(nn.Parameter, tensors))
    torch.save(content, path)
    return path


def pairs(kv: torch.Tensor, path: Path, *, names: tuple[str, str] | None = None) -> Path:
    """Save canonical KV as knlp's older list of (K, V), or of dicts of `names`."""
    layers = list(zip(*htd(kv), strict=True))
    torch.save([dict(zip(names, layer, strict=True)) for layer in layers] if names else layers, path)
    return path


def flat(kv: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return canonical KV under the vLLM fork's names, positions before heads."""
    return {
        f"layers.{number}.attention.prefix.{name}": layer[None].clone()
        for name, plane in zip(("keys", "values"), kv, strict=True)
        for number, layer in enumerate(plane)
    }


def write_ids(directory: Path, ids: Sequence[int]) -> None:
    """Write token ids beside a checkpoint."""
    (directory / "prefix_token_ids.json").write_text(json.dumps(list(ids)))


def edit_config(directory: Path, **fields: Any) -> Path:
    """Change fields of an adapter's configuration."""
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return directory


def quiet_load(path: Path) -> Any:
    """Load a pickle without any care."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.load(path, weights_only=False)


def pressed(model: Any, ids: list[int], kept: int | None = None) -> DynamicCache:
    """Return a cache of `ids` as a press leaves it: of each head the `kept` positions of the largest values, others in each,
    with their keys as they were rotated."""
    cache: Any = DynamicCache()
    with torch.inference_mode():
        model.model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True)
    for layer in cache.layers:
        largest = layer.values.norm(dim=-1).topk(kept or len(ids), dim=-1).indices.sort(dim=-1).values
        each = largest[..., None].expand(-1, -1, -1, layer.keys.shape[-1])
        layer.keys, layer.values = layer.keys.gather(2, each), layer.values.gather(2, each)
    return cache
