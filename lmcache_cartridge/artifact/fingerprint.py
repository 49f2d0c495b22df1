"""Fingerprint: which model a cartridge's KV belongs to, and how a difference is reported."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from blake3 import blake3

from ..errors import ModelMismatch, UnsupportedModel
from .caches import ALIKE, LATENT_FIELDS, check_state, head_size, kv_heads, latent_size
from .rope import Rope, read_rope, rope_differences

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

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


_MAX_HEADER_BYTES, _STEP_BYTES = 100_000_000, 1 << 20
"""The most that safetensors reads of a header, and what is read of a tensor at once."""
ONLINE = "online "
"""What the quantisation begins with where an engine quantises weights that the checkpoint has in full."""


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
    quantisation: str | msgspec.UnsetType = msgspec.UNSET
    """How the weights are quantised, `quantisation_of`; unset for weights in full, and where an older release did not look."""
    latent: int | msgspec.UnsetType = msgspec.UNSET
    """Of multi-head latent attention: how many elements of the one head are its latent vector. Its rotary key comes after
    them, and there are no values. Unset for K and V."""

    @property
    def planes(self) -> int:
        """Planes of a position's KV: K and V, or one of latent vectors with their rotary keys."""
        return 2 if self.latent is msgspec.UNSET else 1

    @property
    def base(self) -> Fingerprint:
        """The same of the model without its adapter."""
        return msgspec.structs.replace(self, lora=None)

    @property
    def token_bytes(self) -> int:
        """Bytes of the KV of one position, all layers and heads."""
        return self.planes * self.layers * self.kv_heads * self.head_size * DTYPE_BYTES[self.dtype]

    def differences(self, other: Fingerprint, *, weights: bool = True) -> list[str]:
        """Return one line for each field that differs, `name: self's value, not other's`; empty when compatible.

        Frequencies may differ by rounding (1e-5 relative). A weights digest, and the layers that rotate, count where
        both sides know them. Without `weights` neither those nor their quantisation count.
        """
        lines = []
        names = [n for n in self.__struct_fields__ if weights or n not in ("weights_digest", "quantisation")]
        for name in names:
            mine, theirs = getattr(self, name), getattr(other, name)
            if name == "rope":
                lines += rope_differences(mine, theirs, self.layers)
            elif name == "weights_digest" and None in (mine, theirs):
                continue
            elif name == "quantisation":
                lines += _quantisation_differences(self, other)
            elif mine != theirs:
                lines.append(f"{name}: {mine}, not {theirs}")
        return lines

    def check_fits(self, engine: Fingerprint, *, accept_weights: bool) -> None:
        """Raise `ModelMismatch` unless `engine` runs this model, with any adapter, or any weights where they are accepted."""
        # Which adapter computes is known of each request alone, and compared there.
        if differences := self.base.differences(engine, weights=not accept_weights):
            message = f"made for another model than the one served: {'; '.join(differences)}"
            if not self.base.differences(engine, weights=False):
                message += (
                    ". Only the weights differ: `serve --accept-weights` serves it, for who measured what that changes"
                )
            raise ModelMismatch(message)


# Here, as every decoder of ours is made where its type is: msgspec 0.22 looks at a type's fields when the type is first
# decoded, and a second thread that decodes it meanwhile ends the process with a segmentation fault.
msgspec.json.Decoder(Fingerprint)


def from_plain(plain: Any) -> Fingerprint:
    """Return the fingerprint that was sent as plain values. Raises `msgspec.ValidationError`."""
    return msgspec.convert(plain, Fingerprint)


def _quantisation_differences(mine: Fingerprint, theirs: Fingerprint) -> list[str]:
    said = [one.quantisation for one in (mine, theirs) if one.quantisation is not msgspec.UNSET]
    is_same_file = mine.weights_digest is not None and mine.weights_digest == theirs.weights_digest
    if len(said) == 1 and is_same_file and not str(said[0]).startswith(ONLINE):
        return []  # a cartridge of an older release, which did not look
    if mine.quantisation == theirs.quantisation:
        return []
    names = ["none" if one.quantisation is msgspec.UNSET else one.quantisation for one in (mine, theirs)]
    return [f"quantisation: {names[0]}, not {names[1]}"]


def config_fields(config: Any) -> dict[str, Any]:
    """Return a Hugging Face config as plain fields, by their standard names where the model spells them otherwise."""
    standard = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    fields = config.to_dict() | {name: getattr(config, name) for name in standard if hasattr(config, name)}
    return fields | {"model_type": ALIKE.get(kind := fields.get("model_type", ""), kind)}


def of_config(
    config: Mapping[str, Any],
    *,
    dtype: str,
    inv_freq: Sequence[float] | None,
    attention_factor: float = 1.0,
    pairing: Literal["half", "interleaved"] | None = None,
    weights: str | None = None,
    quantisation: str | None = None,
    of_kinds: Mapping[str, tuple[Sequence[float], float]] | None = None,
    max_model_len: int | None = None,
) -> Fingerprint:
    """Return the fingerprint of a decoder described by the `config_fields` of a Hugging Face config.

    `inv_freq` are the frequencies that the caller's model really uses, None when it has no rotary embedding. Where each
    kind of its layers has its own, `rope_kinds`, they and their attention factors are `of_kinds` instead.
    `max_model_len` are the tokens that it is run with at most, which counts for `takes_long_factors` alone.
    Raises `UnsupportedModel` for what is neither K and V per head nor a latent vector (state-space layers) or whose RoPE
    changes with the sequence length.
    """
    latent = latent_size(config)
    check_state(config, _PLAIN_LAYERS)
    if dtype not in DTYPE_BYTES:
        raise UnsupportedModel(f"KV dtype {dtype} is not one of {', '.join(DTYPE_BYTES)}; use --dtype")
    if missing := [name for name in ("num_hidden_layers", "num_attention_heads", "vocab_size") if name not in config]:
        raise UnsupportedModel(f"its config has no {', '.join(missing)}")
    rope = read_rope(config, inv_freq, attention_factor, pairing, of_kinds, max_model_len)
    names = _KV_FIELDS if latent is None else _KV_FIELDS + LATENT_FIELDS
    fields = {name: config[name] for name in names if config.get(name) is not None}
    if not fields.get("sliding_window"):
        fields.pop("sliding_window", None)  # transformers says 0 where vLLM says None: no window
    return Fingerprint(
        architecture=(config.get("architectures") or [config["model_type"]])[0],
        layers=config["num_hidden_layers"],
        kv_heads=kv_heads(config) if latent is None else 1,
        head_size=head_size(config) if latent is None else latent + config["qk_rope_head_dim"],
        dtype=dtype,
        vocab_size=config["vocab_size"],
        rope=rope,
        config_digest=blake3(json.dumps(fields, sort_keys=True).encode()).hexdigest(),
        weights_digest=weights,
        quantisation=quantisation or quantisation_of(config.get("quantization_config")) or msgspec.UNSET,
        latent=msgspec.UNSET if latent is None else latent,
    )


def quantisation_of(config: Mapping[str, Any] | None) -> str | None:
    """Return how the `quantization_config` of a Hugging Face config says that weights are quantised, None where there is none.

    The method, and of its options those that every reader of the checkpoint keeps; the weights digest tells the rest.
    """
    if not config:
        return None
    method = str(getattr(config.get("quant_method"), "value", config.get("quant_method") or "unknown"))
    return " ".join([method, *(str(config[name]) for name in ("bits", "format") if config.get(name))])


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
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


_decode_header = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_tensor = msgspec.json.Decoder(_Tensor).decode


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
            header = _decode_header(file.read(length))
            tensors = {name: _decode_tensor(raw) for name, raw in header.items() if name != "__metadata__"}
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"{path.name} has no header of tensors: {error}") from None
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
