"""How many bytes a cartridge has, by model and positions, computed from each model's shape: what docs/operations.md has.

A position takes 2 planes x layers x KV heads x head size x 2 bytes of bfloat16; nothing else grows with p but checksums.
"""

from __future__ import annotations

from typing import NamedTuple

from lmcache_cartridge.artifact.model import Fingerprint
from lmcache_cartridge.cli.show import size

POSITIONS = (1024, 4096, 16_384)


class Shape(NamedTuple):
    """The shape of a model, as its published config says; no weights are needed."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int
    family: str = "qwen2"

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one position in bfloat16."""
        return self.fingerprint().token_bytes

    def fingerprint(self) -> Fingerprint:
        """Return a fingerprint of this geometry."""
        return Fingerprint(
            "benchmark", self.layers, self.kv_heads, self.head_size, "bfloat16", self.vocabulary, (), "00" * 32
        )

    def config(self) -> dict[str, object]:
        """Return a Hugging Face config of this geometry."""
        return {
            "architectures": ["Qwen2ForCausalLM" if self.family == "qwen2" else "LlamaForCausalLM"],
            "model_type": self.family,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 65_536,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "torch_dtype": "bfloat16",
        }


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("Qwen2.5-0.5B", 24, 896, 14, 2, 64, 4864, 151_936),
        Shape("Qwen2.5-1.5B", 28, 1536, 12, 2, 128, 8960, 151_936),
        Shape("Qwen2.5-7B", 28, 3584, 28, 4, 128, 18_944, 152_064),
        Shape("Llama-3.2-1B", 16, 2048, 32, 8, 64, 8192, 128_256, "llama"),
        Shape("Llama-2-7B", 32, 4096, 32, 32, 128, 11_008, 32_000, "llama"),
    )
}


TINY = Shape("tiny", 2, 256, 4, 2, 64, 512, 2000)
"""For the smallest form of a benchmark."""


def rows() -> list[dict[str, str]]:
    """Return one row for each model: bytes of a position, and of cartridges of some sizes."""
    return [
        {
            "model": shape.name,
            "bytes a position": f"{shape.token_bytes:,}",
            **{f"p = {p:,}": size(p * shape.token_bytes) for p in POSITIONS},
        }
        for shape in SHAPES.values()
    ]


def markdown(made: list[dict[str, str]]) -> str:
    """Return rows as a Markdown table."""
    heading = list(made[0])
    lines = [heading, ["---"] + ["---:"] * (len(heading) - 1), *([row[h] for h in heading] for row in made)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
