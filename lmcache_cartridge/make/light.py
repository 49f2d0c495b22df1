"""ConfigModel: what is known of a model without its weights in memory, for KV that nobody compares with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..artifact.hf_config import (
    config_fields,
    engine_pairing,
    of_config,
    rope_kinds,
    rope_parameters,
    takes_long_factors,
)
from ..artifact.model import Fingerprint
from ..artifact.weights import adapter_digest, weights_digest
from ..errors import UnsupportedModel
from ..memory.rope import default_frequencies
from .checkpoint import locate_model, read_config, read_tokenizer
from .model import CausalModel

_HALF = ("llama", "mistral", "qwen2", "qwen3")
"""Model types all of whose layers rotate their keys, dimension i with i + rotary_dim / 2 (transformers 5)."""


class ConfigModel(CausalModel):
    """A model's config, tokenizer and fingerprint. It computes nothing: `prefill`, `logits` and the like are not to be had.

    Of the model types in `_HALF` it is known how keys rotate; a cartridge of any other stands first in a chain.
    """

    def __init__(
        self, name: str, *, dtype: str = "auto", lora: Path | None = None, max_model_len: int | None = None
    ) -> None:
        """Reads the config, the tokenizer and a few MiB of the weights' file. Raises `UnsupportedModel` as `CausalModel`."""
        directory, self.name = locate_model(name)
        self._config: Any = read_config(directory)
        self.tokenizer: Any = read_tokenizer(directory)
        self.lora, self.max_model_len = lora, max_model_len
        found = self._described(directory, dtype)
        self.fingerprint = msgspec.structs.replace(found, lora=None if lora is None else adapter_digest(lora))

    @property
    def reorders(self) -> bool:
        """Whether engines have the elements of a key in another order than transformers, by the model's type."""
        return engine_pairing(config_fields(self._config.get_text_config())) is not None

    @property
    def context_tokens(self) -> int | None:
        """Positions the model was made for; None where its config does not say."""
        return getattr(self._config.get_text_config(), "max_position_embeddings", None)

    def _described(self, directory: Path, dtype: str) -> Fingerprint:
        text = self._config.get_text_config()
        fields = config_fields(text) | {"architectures": self._config.architectures}
        if any(kinds := rope_kinds(fields)):
            raise UnsupportedModel("its kinds of layers have RoPE of their own, which only the model itself tells")
        saved = str(getattr(text, "dtype", None) or "float32").removeprefix("torch.")
        frequencies: dict[str | None, tuple[list[float], float]] = {}
        if kinds:
            kind, frequencies[None] = rope_parameters(fields)["rope_type"], (default_frequencies(fields), 1.0)
            if kind != "default":
                tokens = self.max_model_len if takes_long_factors(fields, self.max_model_len) else None
                inverse, factor = ROPE_INIT_FUNCTIONS[kind](text, device="cpu", seq_len=tokens)
                frequencies[None] = inverse.tolist(), factor
        found = of_config(
            fields, dtype=saved if dtype == "auto" else dtype, frequencies=frequencies,
            weights=weights_digest(directory), max_model_len=self.max_model_len,
        )  # fmt: skip
        replace, every = msgspec.structs.replace, tuple(range(found.layers))
        if fields.get("model_type") not in _HALF:
            return found
        return replace(found, rope=tuple(replace(each, pairing="half", layers=every) for each in found.rope))
