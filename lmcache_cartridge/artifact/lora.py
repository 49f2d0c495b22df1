"""LoRA: which adapter KV was computed with, as one digest, and which adapters an engine computes as PEFT does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from blake3 import blake3

from ..errors import UnsupportedModel
from .fingerprint import tensor_digests

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_COUNTS = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "fan_in_fan_out")
"""Fields of PEFT's config that decide, with the weights, what an adapter computes."""
_OTHERS = (
    "use_dora", "lora_bias", "use_bdlora", "use_qalora", "modules_to_save", "layer_replication", "target_parameters",
    "trainable_token_indices", "alora_invocation_tokens",
)  # fmt: skip
"""Fields by which PEFT computes what vLLM 0.32 does not, or the adapter only from some token on."""
_PLAIN_STARTS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""Values of `init_lora_weights` after which PEFT loads a plain LoRA; by others (PiSSA, OLoRA) it changes the model too."""


def adapter_digest(directory: Path) -> str:
    """Return a blake3 over the weights of a PEFT LoRA adapter, all of their bytes, and the config fields that count.

    Raises `UnsupportedModel` for what is no such adapter, or one that an engine may compute otherwise than PEFT.
    """
    try:
        config = json.loads((directory / CONFIG).read_text())
        tensors = tensor_digests(directory / WEIGHTS)
    except FileNotFoundError as error:
        raise UnsupportedModel(
            f"{directory.name} is no LoRA adapter that PEFT saved as safetensors: it has no {Path(error.filename).name}"
        ) from None
    except (OSError, ValueError, LookupError) as error:
        raise UnsupportedModel(f"the LoRA adapter {directory.name} cannot be read: {error}") from None
    _check(config, directory.name)
    fields = {name: config[name] for name in _COUNTS if config.get(name)}
    if isinstance(targets := fields.get("target_modules"), list):
        fields["target_modules"] = sorted(targets)  # PEFT writes a set
    return blake3(json.dumps((fields, tensors), sort_keys=True).encode()).hexdigest()


def _check(config: Any, name: str) -> None:
    if config.get("peft_type") != "LORA":
        raise UnsupportedModel(f"{name} is an adapter of type {config.get('peft_type')}, not LORA")
    if odd := [field for field in _OTHERS if config.get(field)]:
        raise UnsupportedModel(
            f"the LoRA adapter {name} has {', '.join(odd)}, which vLLM does not compute as PEFT does"
        )
    if config.get("bias", "none") != "none":
        raise UnsupportedModel(f"the LoRA adapter {name} has biases, which vLLM does not compute")
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower() not in _PLAIN_STARTS:
        raise UnsupportedModel(
            f"the LoRA adapter {name} began with init_lora_weights={start}, by which PEFT changes the model's own weights; "
            "convert it with path_initial_model_for_weight_conversion"
        )
