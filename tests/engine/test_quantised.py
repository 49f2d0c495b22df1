"""Chunks for an fp8 cache are, byte for byte, what the engine's own op writes when it is given the same KV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import Blocks, memory_object, vllm_config  # before anything that imports lmcache
from chunks import load
from making import make_artifact, make_fingerprint
from processor import needs_avx512
from test_l2_probe import _Layer

from lmcache_cartridge.artifact.cartridge import Cartridge, Segment
from lmcache_cartridge.engine.probe import written_rules
from lmcache_cartridge.errors import UnsupportedEngine
from lmcache_cartridge.make.payload import as_served
from lmcache_cartridge.memory.layout import ChunkShape
from lmcache_cartridge.memory.loader import ChunkLoader
from lmcache_cartridge.memory.quantise import Rule, quantiser
from lmcache_cartridge.sources.sources import Sources

FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
MODEL = make_fingerprint(pairing="half")
CHUNK = 128
SCALES = ((0.07, 0.013), (1.0, 1.0), (0.5, 3.1))
"""Of K and V, by layer."""


def _blocks(kind: str = "fp8", block: int = 32, scales: Any = SCALES, dtype: str = "bfloat16") -> Blocks:
    blocks = Blocks(vllm_config(block_size=block, kv_cache_dtype=kind, dtype=dtype), 4 * CHUNK // block)
    for layer, (keys, values) in zip(blocks.layers.values(), scales, strict=True):
        layer._k_scale_float, layer._v_scale_float = keys, values
    return blocks


def _rules(blocks: Blocks) -> list[Rule]:
    return [each.rule for each in written_rules(blocks.caches, blocks.layers, torch.bfloat16).values()]


def _segment(root: Path, encoding: str = "plain") -> tuple[Segment, torch.Tensor]:
    made = make_artifact(root, positions=CHUNK, chunk_tokens=64, fingerprint=MODEL, encoding=encoding)
    kv = as_served(made.kv, MODEL, "int8", 64) if encoding == "int8" else made.kv
    return Segment(Cartridge(made.manifest, root, str(root)), 0), kv


@needs_avx512
@pytest.mark.parametrize(
    ("kind", "encoding", "block", "isa", "cached"),
    [
        ("fp8_e4m3", "plain", 256, "vec", 0), ("fp8_e5m2", "plain", 32, "vec", 0), ("fp8_e5m2", "int8", 256, "vec", 0),
        ("fp8", "int8", 32, "amx", 0), ("fp8", "plain", 32, "vec", 32), ("fp8", "plain", 32, "vec", 45),
    ],
)  # fmt: skip
def test_injected_bytes_are_those_of_the_engines_op(tmp_path, kind, encoding, block, isa, cached):
    """Blocks that are copied and blocks that are written. The op writes for AMX too; no such machine has computed with it."""
    segment, kv = _segment(tmp_path / "a", encoding)
    slots = torch.arange(4 * CHUNK).view(-1, 32).flip(0).flatten()[:CHUNK] if block == 32 else torch.arange(CHUNK) + 99
    ours, theirs = _blocks(kind, block), _blocks(kind, block)
    for layer in [*ours.layers.values(), *theirs.layers.values()]:
        layer.isa = isa
    connector = ours.connector(CHUNK, computed=torch.bfloat16)
    assert connector.layout == ("heads" if block > CHUNK else f"{isa}/{block}/blocks")
    plain = ChunkShape(2, 3, CHUNK, 64, "bfloat16")
    loader = ChunkLoader(Sources(), plain, range(2), connector.layout, quantiser=connector.quantiser)
    raw = torch.empty(plain.size_bytes // 2, dtype=torch.uint8)
    load(loader, [segment], 0, raw)
    connector.to_gpu(memory_object(raw), 0, CHUNK, slot_mapping=slots, vllm_cached_tokens=cached)
    theirs.write(kv[:, :, cached:], slots[cached:])
    assert all(map(torch.equal, ours.caches.values(), theirs.caches.values()))


def _by_token(keys: torch.Tensor, values: torch.Tensor, blocks: torch.Tensor) -> None:
    kv = torch.cat([keys, values], -1).float().nan_to_num(0, 0, 0)
    kv /= kv.abs().amax(-1, keepdim=True).clamp_min(1e-9) / 448
    blocks.copy_(kv.to(torch.float8_e4m3fn).view(torch.uint8))


def test_what_is_not_one_rule_for_every_number_is_refused():
    cache, layer = {"a": torch.zeros(4, 2, 32, 128, dtype=torch.uint8)}, {"a": _Layer(_by_token)}
    with pytest.raises(UnsupportedEngine, match="scales that it finds as KV comes"):
        written_rules(cache, layer, torch.bfloat16)
    with pytest.raises(UnsupportedEngine, match="--dtype bfloat16"):
        written_rules(cache, layer, torch.float32)


@needs_avx512
def test_another_scale_has_another_name_in_the_keys():
    blocks = [_blocks(), _blocks(scales=[*SCALES[:2], (0.5, 3.2)]), _blocks("fp8_e5m2")]
    found = [quantiser(_rules(each)) for each in blocks]
    assert len({each.digest for each in found}) == 3 and quantiser(_rules(_blocks("fp8_e4m3"))) == found[0]


@needs_avx512
def test_a_rank_and_a_stage_have_their_own_heads_and_layers(tmp_path):
    (segment, kv), rules = _segment(tmp_path / "a"), _rules(_blocks())
    plain = ChunkShape(1, 2, CHUNK, 64, "bfloat16")
    loader = ChunkLoader(Sources(), plain, range(1, 2), "heads", layers=range(1, 3), quantiser=quantiser(rules[1:]))
    out = torch.empty(plain.size_bytes // 2, dtype=torch.uint8)
    load(loader, [segment], 0, out)
    expected = torch.stack([rule(kv[:, 1 + n, :, 1:]) for n, rule in enumerate(rules[1:])], dim=1)
    assert torch.equal(out.view(2, 2, CHUNK, 1, 64), expected)
