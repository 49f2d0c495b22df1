"""ConfigModel: what is known of a model without its weights in memory, for KV that nobody compares with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..artifact import fingerprint
from ..artifact.caches import engine_pairing
from ..artifact.fingerprint import Fingerprint
from ..artifact.lora import adapter_digest
from ..artifact.rope import rope_kinds, rope_parameters
from ..errors import UnsupportedModel
from ..memory.rope import default_frequencies
from .checkpoint import read_config, read_tokenizer
from .model import CausalModel

_HALF = ("llama", "mistral", "qwen2", "qwen3")
"""Model types all of whose layers rotate their keys, dimension i with i + rotary_dim / 2 (transformers 5)."""


class ConfigModel(CausalModel):
    """A model's config, tokenizer and fingerprint. It computes nothing: `prefill`, `logits` and the like are not to be had.

    Of the model types in `_HALF` it is known how keys rotate; a cartridge of any other stands first in a chain.
    """

    def __init__(self, name: str, *, dtype: str = "auto", lora: Path | None = None) -> None:
        """Reads the config, the tokenizer and a few MiB of the weights' file. Raises `UnsupportedModel` as `CausalModel`."""
        directory = fingerprint.model_directory(name)
        if directory is None:
            raise UnsupportedModel(
                f"{name} is neither a directory nor a model in the local Hub cache; download it first"
            )
        self.name = directory.name if Path(name).is_dir() else name
        self._config: Any = read_config(directory)
        self.tokenizer: Any = read_tokenizer(directory)
        self.lora = lora
        found = self._described(directory, dtype)
        self.fingerprint = msgspec.structs.replace(found, lora=None if lora is None else adapter_digest(lora))

    @property
    def reorders(self) -> bool:
        """Whether engines have the elements of a key in another order than transformers, by the model's type."""
        return engine_pairing(fingerprint.config_fields(self._config.get_text_config())) is not None

    @property
    def context_tokens(self) -> int | None:
        """Positions the model was made for; None where its config does not say."""
        return getattr(self._config.get_text_config(), "max_position_embeddings", None)

    def _described(self, directory: Path, dtype: str) -> Fingerprint:
        text = self._config.get_text_config()
        fields = fingerprint.config_fields(text) | {"architectures": self._config.architectures}
        if rope_kinds(fields):
            raise UnsupportedModel("its kinds of layers have RoPE of their own, which only the model itself tells")
        saved = str(getattr(text, "dtype", None) or "float32").removeprefix("torch.")
        inv_freq, factor, kind = None, 1.0, rope_parameters(fields).get("rope_type")
        if kind == "default":
            inv_freq = default_frequencies(fields)
        elif kind is not None:
            inverse, factor = ROPE_INIT_FUNCTIONS[kind](text, device="cpu")
            inv_freq = inverse.tolist()
        found = fingerprint.of_config(
            fields, dtype=saved if dtype == "auto" else dtype, inv_freq=inv_freq, attention_factor=factor,
            weights=fingerprint.weights_digest(directory),
        )  # fmt: skip
        if found.rope is None or fields.get("model_type") not in _HALF:
            return found
        rope = msgspec.structs.replace(found.rope, pairing="half", layers=tuple(range(found.layers)))
        return msgspec.structs.replace(found, rope=rope)
