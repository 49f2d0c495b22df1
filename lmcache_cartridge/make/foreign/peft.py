"""PEFT's KV: adapter directories of `adapter_config.json` and one tensor `prompt_embeddings`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ...errors import ForeignFormatError
from . import pickle
from .formats import Foreign
from .ids import DOCUMENT_IDS, IDS, ids_beside, read_json

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
TENSOR = "prompt_embeddings"
PICKLED = "adapter_model.bin"
_NUMBERS = ("num_virtual_tokens", "num_layers", "num_attention_heads", "token_dim")


def to_peft(kv: torch.Tensor) -> torch.Tensor:
    """Return canonical KV `[2, L, p, H, D]` as PEFT stores it: `[p, L * 2 * H * D]`, K then V of each layer."""
    return kv.permute(2, 1, 0, 3, 4).reshape(kv.shape[2], -1)


def from_peft(packed: torch.Tensor, layers: int, kv_heads: int) -> torch.Tensor:
    """Return KV as PEFT stores it as canonical `[2, L, p, H, D]`; a view."""
    return packed.view(packed.shape[0], layers, 2, kv_heads, -1).permute(2, 1, 0, 3, 4)


def read(directory: Path) -> Foreign:
    """Return the KV of a `CARTRIDGE` or `PREFIX_TUNING` adapter as PEFT gives it to the model, positions 0 to p - 1."""
    config = read_json(directory / CONFIG)
    if not isinstance(config, dict):
        raise ForeignFormatError(f"{directory / CONFIG}: not a PEFT configuration")
    kind = config.get("peft_type")
    if kind not in ("CARTRIDGE", "PREFIX_TUNING"):
        raise ForeignFormatError(
            f"{directory}: a PEFT adapter of type {kind!s:.40} is no KV; CARTRIDGE and PREFIX_TUNING are"
        )
    if config.get("prefix_projection"):
        raise ForeignFormatError(
            f"{directory}: prefix_projection is on, so its parameters are an MLP and not the KV. PEFT's "
            "save_pretrained stores what the MLP puts out; if PEFT saved it, set prefix_projection to false in "
            f"{CONFIG} and import again"
        )
    positions, layers, heads, token_dim = (_number(directory, config, name) for name in _NUMBERS)
    if config.get("num_transformer_submodules", 1) != 1 or token_dim % heads:
        raise ForeignFormatError(
            f"{directory / CONFIG}: {heads} heads of {token_dim} elements, or an encoder too, are no KV of a decoder"
        )
    source, packed = _tensor(directory)
    expected = (positions, 2 * layers * token_dim)
    if tuple(packed.shape) != expected:
        raise ForeignFormatError(
            f"{source}: {TENSOR} of shape {tuple(packed.shape)}; {CONFIG} says {expected}, which is num_virtual_tokens "
            "rows of K and V of every layer"
        )
    kv = from_peft(packed, layers, heads)
    base = config.get("base_model_name_or_path")
    return Foreign(
        form=f"PEFT {kind} adapter",
        source=source,
        segments=([(kv[0, layer], kv[1, layer]) for layer in range(layers)],),
        axes="THD",
        token_ids=ids_beside(directory, IDS),
        document_ids=ids_beside(directory, DOCUMENT_IDS),
        base_model=base if isinstance(base, str) else None,
    )


def _number(directory: Path, config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    if type(value) is not int or not 0 < value < 1 << 31:
        raise ForeignFormatError(f"{directory / CONFIG}: {name} is {value!s:.40}, not a positive number")
    return value


def _tensor(directory: Path) -> tuple[Path, torch.Tensor]:
    """Return the file of the weights and the one tensor in it."""
    if (source := directory / WEIGHTS).is_file():
        try:
            with safe_open(source, framework="pt") as file:
                names = set(file.keys())
                tensor = file.get_tensor(TENSOR) if names == {TENSOR} else None
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise ForeignFormatError(f"{source}: not a sound safetensors file: {error}") from error
    elif (source := directory / PICKLED).is_file():
        content = pickle.load(source)
        names = set(content) if isinstance(content, dict) else set()
        tensor = content[TENSOR] if names == {TENSOR} else None
    else:
        raise ForeignFormatError(f"{directory}: neither {WEIGHTS} nor {PICKLED} is there")
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
        others = ", ".join(sorted(str(name)[:80] for name in list(names)[:8]))
        raise ForeignFormatError(f"{source}: the one tensor {TENSOR} was expected; there are: {others or 'none'}")
    return source, tensor
