"""Fingerprint: which model a cartridge's KV belongs to, and how a difference is reported."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from blake3 import blake3

from ..errors import UnsupportedModel

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""RoPE types whose frequencies do not depend on the sequence length, so that KV stays valid under any prompt."""

_LOCAL_ROTATES = ("cohere2", "exaone4")
"""Model types whose layers rotate keys where their attention is local (`sliding_attention`)."""
_PLAIN_LAYERS = ("attention", "full_attention", "sliding_attention", "chunked_attention")
"""Layer types of a Hugging Face config that cache K and V per head, and nothing else."""

# The fields of a Hugging Face config that change K or V. A list of what counts, not of what does not: engines add
# and patch fields of their own, and none of those may turn a right cartridge into a refused one.
_KV_FIELDS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "vocab_size", "hidden_act", "hidden_activation", "rms_norm_eps", "layer_norm_eps",
    "attention_bias", "mlp_bias", "query_pre_attn_scalar", "attn_logit_softcapping", "sliding_window", "layer_types",
    "embedding_multiplier", "residual_multiplier", "attention_multiplier", "num_experts", "num_local_experts",
    "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "no_rope_layers", "rotary_dim", "alibi",
    "multi_query", "new_decoder_architecture", "parallel_attn", "use_qk_norm",
)  # fmt: skip


class Rope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rotary position embedding: everything needed to rotate stored keys to other positions."""

    kind: str
    """One of `STATIC_ROPE`."""
    rotary_dim: int
    """Leading dimensions of a head that rotate; `2 * len(inv_freq)`."""
    inv_freq: tuple[float, ...]
    """Radians per position of each rotated pair, after scaling."""
    attention_factor: float
    """Factor on cos and sin (yarn); 1.0 elsewhere."""
    parameters: dict[str, float | int | str | bool | None]
    """The config's own RoPE parameters, defaults filled in."""
    pairing: Literal["half", "interleaved"] | None = None
    """Which dimensions rotate together: i with i + rotary_dim / 2, or 2i with 2i + 1; None where nobody found out."""
    layers: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    """The layers that rotate their keys, ascending; the others leave them as they are. Unset where nobody found out."""


class Fingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model a cartridge was made for. Equal fingerprints mean that the KV may be injected."""

    architecture: str
    layers: int
    kv_heads: int
    """KV heads of the whole model, not of one tensor-parallel rank."""
    head_size: int
    dtype: str
    """dtype of K and V: a key of `DTYPE_BYTES`."""
    vocab_size: int
    rope: Rope | None
    """None for models without rotary embeddings."""
    config_digest: str
    """blake3 over the config fields that change K or V."""
    weights_digest: str | None = None
    """Sampled blake3 of the safetensors weights (`weights_digest`); None where there were none to read."""
    lora: str | None = None
    """`lora.adapter_digest` of the LoRA adapter that the KV was computed with; None for the base model's."""

    @property
    def base(self) -> Fingerprint:
        """The same of the model without its adapter."""
        return msgspec.structs.replace(self, lora=None)

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one position, all layers and heads."""
        return 2 * self.layers * self.kv_heads * self.head_size * DTYPE_BYTES[self.dtype]

    def differences(self, other: Fingerprint) -> list[str]:
        """Return one line for each field that differs, `name: self's value, not other's`; empty when compatible.

        Frequencies may differ by rounding (1e-5 relative). A weights digest, and the layers that rotate, count where
        both sides know them.
        """
        lines = []
        for name in self.__struct_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if name == "rope":
                lines += _rope_differences(mine, theirs)
            elif name == "weights_digest" and None in (mine, theirs):
                continue
            elif mine != theirs:
                lines.append(f"{name}: {mine}, not {theirs}")
        return lines


def _rope_differences(mine: Rope | None, theirs: Rope | None) -> list[str]:
    if mine is None or theirs is None:
        return [] if mine is theirs else [f"rope: {mine and mine.kind}, not {theirs and theirs.kind}"]
    lines = [
        f"rope {name}: {getattr(mine, name)}, not {getattr(theirs, name)}"
        for name in ("kind", "rotary_dim", "attention_factor")
        if getattr(mine, name) != getattr(theirs, name)
    ]
    unset = msgspec.UNSET
    if mine.layers is not unset and theirs.layers is not unset and mine.layers != theirs.layers:
        lines.append(f"rope layers: {list(mine.layers)}, not {list(theirs.layers)}")
    same_length = len(mine.inv_freq) == len(theirs.inv_freq)
    if not same_length or not all(
        math.isclose(a, b, rel_tol=1e-5) for a, b in zip(mine.inv_freq, theirs.inv_freq, strict=False)
    ):
        lines.append(f"rope frequencies: {mine.parameters}, not {theirs.parameters}")
    return lines


def check_shift(rope: Rope | None) -> None:
    """Raise `UnsupportedModel` where keys cannot be moved exactly: they do not rotate, or it is not known how."""
    if rope is None or rope.layers == ():
        raise UnsupportedModel("the model has no rotary embedding, so its keys cannot be moved to other positions")
    if rope.layers is msgspec.UNSET:
        raise UnsupportedModel(
            "it is not known which layers of the model rotate their keys; build the cartridge again with this release"
        )
    if rope.pairing is None:
        raise UnsupportedModel("it is not known which dimensions of this model's keys rotate together")


def config_fields(config: Any) -> dict[str, Any]:
    """Return a Hugging Face config as plain fields, by their standard names where the model spells them otherwise."""
    standard = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    return config.to_dict() | {name: getattr(config, name) for name in standard if hasattr(config, name)}


def of_config(
    config: Mapping[str, Any],
    *,
    dtype: str,
    inv_freq: Sequence[float] | None,
    attention_factor: float = 1.0,
    pairing: Literal["half", "interleaved"] | None = None,
    weights: str | None = None,
) -> Fingerprint:
    """Return the fingerprint of a decoder described by the `config_fields` of a Hugging Face config.

    `inv_freq` are the frequencies that the caller's model really uses, None when it has no rotary embedding.
    Raises `UnsupportedModel` for KV that is no plain K and V per head (MLA, state-space layers) or whose RoPE
    changes with the sequence length.
    """
    if config.get("kv_lora_rank"):
        raise UnsupportedModel("multi-head latent attention stores one latent vector, not K and V per head")
    if strange := sorted(set(config.get("layer_types") or ()) - set(_PLAIN_LAYERS)):
        raise UnsupportedModel(f"layers that do not cache plain K and V: {', '.join(strange)}")
    if dtype not in DTYPE_BYTES:
        raise UnsupportedModel(f"KV dtype {dtype} is not one of {', '.join(DTYPE_BYTES)}; use --dtype")
    if missing := [name for name in ("num_hidden_layers", "num_attention_heads", "vocab_size") if name not in config]:
        raise UnsupportedModel(f"its config has no {', '.join(missing)}")
    rope_parameters(config)
    rope = None if inv_freq is None else _rope(config, inv_freq, attention_factor, pairing)
    fields = {name: config[name] for name in _KV_FIELDS if config.get(name) is not None}
    if not fields.get("sliding_window"):
        fields.pop("sliding_window", None)  # transformers says 0 where vLLM says None: no window
    return Fingerprint(
        architecture=(config.get("architectures") or [config["model_type"]])[0],
        layers=config["num_hidden_layers"],
        kv_heads=_kv_heads(config),
        head_size=head_size(config),
        dtype=dtype,
        vocab_size=config["vocab_size"],
        rope=rope,
        config_digest=blake3(json.dumps(fields, sort_keys=True).encode()).hexdigest(),
        weights_digest=weights,
    )


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the RoPE parameters of a config by their standard names, defaults filled in; empty where it has none.

    Raises `UnsupportedModel` where layers have parameters of their own.
    """
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if kinds := sorted(name for name, value in parameters.items() if isinstance(value, dict)):
        raise UnsupportedModel(
            f"each kind of its layers has RoPE parameters of its own ({', '.join(kinds)}), and this release serves no "
            "cartridges of such models, Gemma 3 among them"
        )
    if rotary_dim := None if parameters else config.get("rotary_dim"):  # GPT-J
        parameters["partial_rotary_factor"] = rotary_dim / head_size(config)
    if not parameters and config.get("rope_theta") is None:
        return {}
    parameters.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
    parameters.setdefault("rope_type", parameters.pop("type", "default"))
    return parameters


def _rope(
    config: Mapping[str, Any],
    inv_freq: Sequence[float],
    attention_factor: float,
    pairing: Literal["half", "interleaved"] | None,
) -> Rope:
    parameters = rope_parameters(config) or {"rope_theta": 10000.0, "rope_type": "default"}
    kind = parameters["rope_type"]
    if kind not in STATIC_ROPE:
        raise UnsupportedModel(
            f"RoPE type {kind!r} changes its frequencies with the sequence length, so stored keys would be wrong "
            f"under a longer prompt; supported: {', '.join(STATIC_ROPE)}"
        )
    return Rope(
        kind=kind,
        rotary_dim=2 * len(inv_freq),
        inv_freq=tuple(float(f) for f in inv_freq),
        attention_factor=float(attention_factor),
        parameters={k: v for k, v in sorted(parameters.items()) if not isinstance(v, list | dict)},
        pairing=pairing,
        layers=_rotating_layers(config),
    )


def _rotating_layers(config: Mapping[str, Any]) -> tuple[int, ...] | msgspec.UnsetType:
    """Return the layers that rotate their keys where a config says so; most do not say, and rotate all."""
    if flags := config.get("no_rope_layers"):  # 1 for a layer that rotates, whatever the name says
        return tuple(layer for layer, rotates in enumerate(flags) if rotates)
    kinds = config.get("layer_types") or ()
    if config.get("model_type") in _LOCAL_ROTATES and "sliding_attention" in kinds:
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")
    return msgspec.UNSET


def head_size(config: Mapping[str, Any]) -> int:
    """Return the elements of a KV head."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _kv_heads(config: Mapping[str, Any]) -> int:
    """Return the KV heads that engines cache. Falcon has fields of its own for it."""
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    return config.get("num_key_value_heads") or config.get("num_kv_heads") or config["num_attention_heads"]


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


def tensor_digests(path: Path, *, sampled: bool = False) -> dict[str, tuple[str, list[int], str]]:
    """Return dtype, shape and blake3 of every tensor of a safetensors file: of 4 KiB from its middle where `sampled`."""
    found = {}
    with path.open("rb") as file:
        base = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(base - 8))
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            start, end = tensor["data_offsets"]
            if sampled:
                start, end = (start + end) // 2, min(end, (start + end) // 2 + 4096)
            file.seek(base + start)
            found[name] = tensor["dtype"], tensor["shape"], blake3(file.read(end - start)).hexdigest()
    return found
