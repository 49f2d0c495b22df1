"""Weights: which weights KV was computed with, a model's and a LoRA adapter's, each as one digest."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from ..errors import UnsupportedModel

_MAX_HEADER_BYTES, _STEP_BYTES = 100_000_000, 1 << 20
"""The most that safetensors reads of a header, and what is read of a tensor at once."""
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


def model_directory(model: str) -> Path | None:
    """Return the local directory of a model given as a path or as a Hub id that is in the cache; None if neither.

    Never reaches for the network.
    """
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def weights_digest(directory: Path) -> str | None:
    """Return a blake3 over the name, dtype, shape and 4 KiB of every tensor of the model's safetensors files.

    Reads a few MiB of the largest model. It tells apart fine-tunes that share a config, and is the same however
    the weights are split into files. None when the directory holds no safetensors weights.
    """
    samples: dict[str, Any] = {}
    for path in directory.glob("*.safetensors"):
        samples |= tensor_digests(path, sampled=True)
    if not samples:
        return None
    return blake3(json.dumps(samples, sort_keys=True).encode()).hexdigest()


class _Tensor(msgspec.Struct):
    """Of `__metadata__`, which is among them, nothing is read."""

    dtype: str = ""
    shape: list[int] = []
    data_offsets: tuple[int, int] = (0, 0)


_decode_header = msgspec.json.Decoder(dict[str, _Tensor]).decode


def tensor_digests(path: Path, *, sampled: bool = False) -> dict[str, tuple[str, list[int], str]]:
    """Return dtype, shape and blake3 of every tensor of a safetensors file: of 4 KiB from its middle where `sampled`.

    Takes no more memory than a small multiple of the file's header. Raises `OSError` or `ValueError`.
    """
    found = {}
    with path.open("rb") as file:
        size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
        if length > min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(f"{path.name} has {size} bytes, and is said to begin with a header of {length}")
        try:
            tensors = _decode_header(file.read(length))
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"{path.name} has no header of tensors: {error}") from None
        tensors.pop("__metadata__", None)
        for name, tensor in tensors.items():
            start, end = tensor.data_offsets
            if not 0 <= start <= end <= size - 8 - length:
                raise ValueError(f"{path.name} ends before its tensor {name}")
            if sampled:
                start, end = (start + end) // 2, min(end, (start + end) // 2 + 4096)
            file.seek(8 + length + start)
            hasher = blake3()
            for step in range(start, end, _STEP_BYTES):
                hasher.update(file.read(min(_STEP_BYTES, end - step)))
            found[name] = tensor.dtype, tensor.shape, hasher.hexdigest()
    return found


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
