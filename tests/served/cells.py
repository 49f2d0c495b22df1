"""The servers that the suite serves cartridges on, one line each.

What stands in a line is had together there. The shipped model knows right answers; the others treat positions, heads or blocks
each its own way, with random weights in float32.
"""

from __future__ import annotations

import json
from typing import Literal, NamedTuple

from processor import noise

from lmcache_cartridge.cli.recall import MODEL_DIR
from lmcache_cartridge.engine.refusals import ONE_GROUP

TP = ("--tensor-parallel-size", "2")
PP = ("--no-enforce-eager", "--compilation-config", '{"backend": "eager"}', "--pipeline-parallel-size", "2")
"""vLLM 0.32 on CPU runs no eager pipeline; for one that is traced and not compiled the C++ compiler has not to run."""
SMALL_STEPS = ("--max-num-batched-tokens", "256", "--max-num-seqs", "4")
NO_PREFIXES = ("--no-enable-prefix-caching",)
TRANSFER = {"kv_connector_extra_config": {"lmcache.mp.mp_transfer_mode": "lmcache_driven"}}
GROUPS = (f"--no-{ONE_GROUP}", "--kv-transfer-config", json.dumps(TRANSFER))
"""Each kind of layer with blocks of its own, which LMCache's server moves."""
MLA = ("--attention-backend", "CPU_MLA")
"""With AMX vLLM would take a backend for latent vectors that has no float32."""


class Cell(NamedTuple):
    """One server."""

    mode: Literal["in-process", "multiprocess"]
    model: str
    start: str
    """How it is started: what `plan` makes, or as one of `matrix.STARTS`."""
    chunk: int
    block: int
    saves: bool
    """Whether LMCache saves what vLLM computes."""
    options: tuple[str, ...] = ()
    source: str = "directory"
    """Where the cartridges are: in a directory, on S3, or in a published library."""
    noise: float = 1e-3
    """How far logprobs of equal prompts may be apart, in nats: by default for float32."""

    @property
    def has_groups(self) -> bool:
        """Whether kinds of layer have blocks of their own, where no trained cartridge is served."""
        return self.options == GROUPS

    @property
    def in_fp8(self) -> bool:
        """Whether the KV cache is in fp8: computed in it, a document may be further from its cartridge than `noise`."""
        return "--kv-cache-dtype" in self.options


BFLOAT16 = noise(0.25)
"""Two bfloat16 steps of a logit between 16 and 32; damaged KV gives 10 and more."""
IN_FP8 = {"fp8_e4m3": 0.6, "fp8_e5m2": 0.9}
"""Twice what fp8 itself does to the logprobs of such prompts: computed in bfloat16 and in fp8 they differ by up to 0.34, 0.59."""


def fp8(dtype: str) -> tuple[str, ...]:
    """Return the options for a KV cache of a dtype."""
    return "--kv-cache-dtype", dtype


NGRAM = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}')
DRAFT = (
    "--speculative-config",
    json.dumps({"method": "draft_model", "model": str(MODEL_DIR), "num_speculative_tokens": 2}),
)
DP = ("--data-parallel-size", "2")
CELLS = {
    # name                       mode            model                 start        chunk block saves  engine
    "layers without RoPE":  Cell("in-process",   "smollm3",            "plan",         64,  32, True,  NO_PREFIXES),
    "as it is shipped":     Cell("in-process",   "llama",              "yaml",        256, 128, False),
    "partly rotated":       Cell("in-process",   "gptj",               "variables",   256,  32, False),
    "windows and sinks":    Cell("in-process",   "gpt-oss",            "connector",   256, 128, False),
    "long RoPE":            Cell("in-process",   "phi3 long",          "plan",         64,  32, True,  SMALL_STEPS),
    "two kinds of layer":   Cell("multiprocess", "gemma3",             "plan",         64,  32, True,  NO_PREFIXES),
    "groups":               Cell("multiprocess", "gemma3",             "plan",         64,  32, False, GROUPS),
    "latent vectors":       Cell("multiprocess", "deepseek-v3",        "plan",         64,  16, True,  (*MLA, *SMALL_STEPS)),
    "stages of one size":   Cell("multiprocess", "llama",              "plan",        128, 128, True,  PP),
    "ranks with one head":  Cell("multiprocess", "falcon multi-query", "plan",         64,  64, True,  TP),
    "chunks of half a block": Cell("in-process", "shipped",            "plan",         64, 128, False, (), "library", BFLOAT16),
    "stages":               Cell("in-process",   "shipped",            "plan",        256, 128, False, PP, "s3", BFLOAT16),
    "ranks":                Cell("in-process",   "shipped",            "plan",        256, 128, True,  TP, "directory", BFLOAT16),
    "fp8 and a draft":      Cell("in-process",   "shipped",            "plan",        256, 128, True,
                                 (*fp8("fp8_e4m3"), *DRAFT), "library", IN_FP8["fp8_e4m3"]),
    "speculation":          Cell("multiprocess", "shipped",            "plan",        256, 128, True,  NGRAM, "library", BFLOAT16),
    "two engines":          Cell("multiprocess", "shipped",            "plan",        256, 128, False, DP, "s3", BFLOAT16),
    "fp8":                  Cell("multiprocess", "shipped",            "plan",        256, 128, True,
                                 fp8("fp8_e5m2"), "directory", IN_FP8["fp8_e5m2"]),
}  # fmt: skip
