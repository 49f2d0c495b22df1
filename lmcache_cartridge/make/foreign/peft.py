"""PEFT's KV: adapter directories of `adapter_config.json` and one tensor `prompt_embeddings`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
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
_Number = Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]


class _Config(msgspec.Struct):
    peft_type: Literal["CARTRIDGE", "PREFIX_TUNING"]
    num_virtual_tokens: _Number
    num_layers: _Number
    num_attention_heads: _Number
    token_dim: _Number
    num_transformer_submodules: Literal[1] = 1
    """Two are an encoder and a decoder."""
    prefix_projection: bool = False
    base_model_name_or_path: str | None = None


_decode_config = msgspec.json.Decoder(_Config).decode


def to_peft(kv: torch.Tensor) -> torch.Tensor:
    """Return canonical KV `[2, L, p, H, D]` as PEFT stores it: `[p, L * 2 * H * D]`, K then V of each layer."""
    return kv.permute(2, 1, 0, 3, 4).reshape(kv.shape[2], -1)


def from_peft(packed: torch.Tensor, layers: int, kv_heads: int) -> torch.Tensor:
    """Return KV as PEFT stores it as canonical `[2, L, p, H, D]`; a view."""
    return packed.view(packed.shape[0], layers, 2, kv_heads, -1).permute(2, 1, 0, 3, 4)


def read(directory: Path) -> Foreign:
    """Return the KV of a `CARTRIDGE` or `PREFIX_TUNING` adapter as PEFT gives it to the model, positions 0 to p - 1."""
    config = read_json(directory / CONFIG, _decode_config)
    if config.prefix_projection:
        raise ForeignFormatError(
            f"{directory}: prefix_projection is on, so its parameters are an MLP and not the KV. PEFT's "
            "save_pretrained stores what the MLP puts out; if PEFT saved it, set prefix_projection to false in "
            f"{CONFIG} and import again"
        )
    source, packed = _tensor(directory)
    layers, heads = config.num_layers, config.num_attention_heads
    expected = (config.num_virtual_tokens, 2 * layers * config.token_dim)
    if tuple(packed.shape) != expected or config.token_dim % heads:
        raise ForeignFormatError(
            f"{source}: {TENSOR} of shape {tuple(packed.shape)}; {CONFIG} says {expected}, which is num_virtual_tokens "
            f"rows of K and V of every layer, of {heads} heads"
        )
    kv = from_peft(packed, layers, heads)
    return Foreign(
        form=f"PEFT {config.peft_type} adapter",
        source=source,
        segments=([(kv[0, layer], kv[1, layer]) for layer in range(layers)],),
        axes="THD",
        token_ids=ids_beside(directory, IDS),
        document_ids=ids_beside(directory, DOCUMENT_IDS),
        base_model=config.base_model_name_or_path,
    )


def _tensor(directory: Path) -> tuple[Path, torch.Tensor]:
    """Return the file of the weights and the one tensor in it."""
    if (source := directory / WEIGHTS).is_file():
        try:
            with safe_open(source, framework="pt") as file:
                content = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dict
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise ForeignFormatError(f"{source}: not a sound safetensors file: {error}") from error
    else:
        source = directory / PICKLED
        content = pickle.load(source)
    tensor = content.get(TENSOR) if isinstance(content, dict) and len(content) == 1 else None
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
        raise ForeignFormatError(f"{source}: the one tensor {TENSOR} was expected, and nothing else")
    return source, tensor
