"""Multi-head latent attention: what is stored of it, what is refused, and how it comes into an engine's blocks."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from blocks import quietly, vllm_config
from chunks import load
from families import FAMILIES, chain, make_model, write
from making import make_fingerprint
from safetensors import safe_open
from transformers import DynamicCache

from lmcache_cartridge.artifact import reading
from lmcache_cartridge.artifact.cartridge import Cartridge, Segment
from lmcache_cartridge.artifact.hf_config import config_fields, of_config
from lmcache_cartridge.artifact.manifest import decode
from lmcache_cartridge.errors import CartridgeError, ManifestError, UnsupportedEngine, UnsupportedModel
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.make.prefill import build
from lmcache_cartridge.memory.layout import VIEWS, ChunkShape
from lmcache_cartridge.memory.loader import ChunkLoader
from lmcache_cartridge.sources.disk_cache import DiskCache
from lmcache_cartridge.sources.s3 import S3Source
from lmcache_cartridge.sources.sources import Sources
from lmcache_cartridge.sources.transfer import push

with quietly():
    from lmcache_cartridge.engine.contract import CONTROL
    from lmcache_cartridge.engine.describe import check_vllm
    from lmcache_cartridge.engine.latent import check_latents

torch.set_num_threads(1)

IDS, MORE = list(range(5, 105)), list(range(250, 330))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalModel:
    return CausalModel(str(make_model(tmp_path_factory.mktemp("latent") / "model", FAMILIES["deepseek-v3"]())))


def test_a_document_is_built_as_one_plane_of_latent_vectors_and_rotary_keys(model: CausalModel, tmp_path: Path) -> None:
    document = tmp_path / "doc.txt"
    document.write_text("The depot in Alder has a red door and two keys. " * 8)
    manifest = build(model, document, tmp_path / "doc", cartridge_id="doc", version=1, chunk_tokens=32)
    assert (manifest.fingerprint.kv_heads, manifest.fingerprint.head_size, manifest.fingerprint.latent) == (1, 576, 512)
    assert list(reading.verify(tmp_path / "doc"))[-1] == (manifest.chunks, manifest.chunks)
    with safe_open(tmp_path / "doc" / "payload.safetensors", framework="pt") as file:
        assert file.get_slice("chunk.00000").get_shape() == [1, 1, 3, 32, 576]
    assert manifest.data_bytes == manifest.positions * 3 * 576 * 4
    assert manifest.canary is not None
    assert manifest.canary.sensitivity > 1, "KV in a wrong order would not be noticed"


def test_what_is_built_answers_as_its_document_does(model: CausalModel, tmp_path: Path) -> None:
    question = list(range(400, 410))
    after = model.logits_after(chain([write(model, tmp_path / "doc", IDS)]), question)
    plain = model.logits(IDS + question, len(question))
    assert float((after - plain).abs().max()) < 1e-3
    assert float((after - model.logits(question, len(question))).abs().max()) > 0.1, "the document makes no difference"


def test_manifests_of_keys_and_values_say_nothing_of_latent_vectors() -> None:
    assert "latent" not in json.loads(msgspec.json.encode(make_fingerprint()))


@pytest.mark.parametrize(
    ("latent", "heads", "reason"),
    [(576, 1, "a latent vector of 576 in 1 heads of 576 elements"), (512, 2, "512 in 2 heads")],
)
def test_a_manifest_that_contradicts_itself_is_refused(
    model: CausalModel, tmp_path: Path, latent: int, heads: int, reason: str
) -> None:
    manifest = write(model, tmp_path / "doc", IDS[:8]).manifest
    shape = msgspec.structs.replace(manifest.fingerprint, latent=latent, kv_heads=heads)
    wrong = msgspec.structs.replace(manifest, fingerprint=shape)
    with pytest.raises(ManifestError, match=reason):
        decode(wrong.encode(), "here")


def test_what_is_made_for_keys_and_values_is_refused(model: CausalModel, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="train: DeepseekV3ForCausalLM caches latent vectors"):
        model.need_values("train")
    document = tmp_path / "doc.txt"
    document.write_text("The depot in Alder has a red door. " * 8)
    with pytest.raises(CartridgeError, match="not stored in int8"):
        build(model, document, tmp_path / "doc", cartridge_id="doc", version=1, encoding="int8")
    assert not (tmp_path / "doc").exists()


@pytest.mark.parametrize("s3_kind", ["moto"])
def test_it_comes_from_s3_and_after_a_restart_from_the_disk_and_stands_where_it_is_moved(
    model: CausalModel, tmp_path: Path, s3_credentials: Any, bucket: str
) -> None:
    """A chain of two on S3: read, kept on disk, and read by the next server's loader while S3 answers nothing."""
    segments, location = [], f"s3://{bucket}/docs"
    source = S3Source(endpoint_url=s3_credentials.endpoint)
    for number, ids in enumerate((IDS, MORE)):
        made, at = write(model, tmp_path / f"doc{number}", ids), f"{location}/doc{number}"
        push(tmp_path / f"doc{number}", at, source, force=False, progress=lambda *_: None)
        segments.append(Segment(Cartridge(made.manifest, tmp_path / f"doc{number}", at), number * len(IDS)))
    shape = ChunkShape(1, 3, len(IDS) + len(MORE), 576, "float32", 1)
    found = []
    for sources in (Sources(source), Sources()):
        loader = ChunkLoader(sources, shape, range(1), "heads", DiskCache(tmp_path / "disk", 64 << 20))
        out = torch.empty(shape.size_bytes, dtype=torch.uint8)
        load(loader, segments, 0, out)
        found.append(out)
    source.close()
    kv = VIEWS["heads"](found[0], shape)
    assert torch.equal(found[1], found[0])
    question = list(range(400, 410))
    expected = model.logits_after(_side_by_side(model), question)
    assert float((model.logits_after(kv, question) - expected).abs().max()) < 1e-3
    unmoved = torch.cat([*model.prefill(IDS, 64), *model.prefill(MORE, 64)], dim=2)
    assert float((model.logits_after(unmoved, question) - expected).abs().max()) > 0.1, "nobody could tell"


@torch.inference_mode()
def _side_by_side(model: CausalModel) -> torch.Tensor:
    """Return the KV that transformers makes of two documents one after the other, of which neither sees the other."""
    cache, at = DynamicCache(), len(IDS) + torch.arange(len(MORE))[None]
    model.model(input_ids=torch.tensor([MORE]), position_ids=at, past_key_values=cache, use_cache=True)
    planes = (torch.stack([getattr(layer, name)[0] for layer in cache.layers]) for name in ("keys", "values"))
    return torch.cat([*model.prefill(IDS, 64), model.planes(*(each.transpose(1, 2) for each in planes))], dim=2)


def test_latent_attention_that_nobody_compared_is_refused_by_its_config() -> None:
    config = config_fields(FAMILIES["deepseek-v3"]())
    for change, reason in (
        ({"model_type": "minicpm3"}, "as in minicpm3, which was never compared"), ({"rope_interleave": False}, "interleaved"),
    ):  # fmt: skip
        with pytest.raises(UnsupportedModel, match=reason):
            of_config(config | change, dtype="float32")


BLOCK, LATENT, SIZE = 4, 6, 10
_SHAPE = msgspec.structs.replace(make_fingerprint(layers=2, kv_heads=1, dtype="float32"), head_size=SIZE, latent=LATENT)


class _Layer:
    """An attention layer that writes rows, in the order of `parts`."""

    kv_cache_dtype, _k_scale = "auto", torch.ones(1)

    def __init__(self, parts: tuple[int, int] = (0, 1)) -> None:
        def update(latents: Any, keys: Any, cache: torch.Tensor, slots: Any, kind: str, scale: Any) -> None:
            given = latents, keys[:, 0]
            cache.view(-1, SIZE)[slots] = torch.cat([given[part] for part in parts], dim=-1)

        self.impl = SimpleNamespace(kv_lora_rank=LATENT, do_kv_cache_update=update)


def _check(layer: Any, size: int = SIZE) -> None:
    """Have a layer of two looked at; `_SHAPE` is what they are said to write."""
    caches = {f"model.layers.{number}.attn": torch.zeros(6, 1, BLOCK, size) for number in range(2)}
    check_latents(caches, dict.fromkeys(caches, layer), _SHAPE)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (_Layer((1, 0)), "writes something else into its KV cache than rows"),
        (SimpleNamespace(impl=SimpleNamespace(do_kv_cache_update=print)), "no op to write latent vectors"),
        (
            SimpleNamespace(impl=SimpleNamespace(kv_lora_rank=6, do_kv_cache_update=print)),
            "cannot write to its KV cache",
        ),
    ],
)
def test_a_layer_that_does_not_write_rows_is_refused(layer: Any, reason: str) -> None:
    with pytest.raises(UnsupportedEngine, match=reason):
        _check(layer)


def test_in_multiprocess_mode_each_layer_is_seen_to_write_rows_at_start() -> None:
    shape = _SHAPE
    caches = {f"model.layers.{layer}.attn": torch.zeros(6, 1, BLOCK, SIZE) for layer in range(2)}
    check_latents(caches, dict.fromkeys(caches, _Layer()), shape)
    assert not any(cache.any() for cache in caches.values()), "the engine's own blocks were written to"
    swapped = dict(zip(caches, (_Layer(), _Layer((1, 0))), strict=True))
    with pytest.raises(UnsupportedEngine, match="layers.1.attn writes something else into its KV cache than rows"):
        check_latents(caches, swapped, shape)
    with pytest.raises(UnsupportedEngine, match="not bfloat16 rows of 10; remove --kv-cache-dtype"):
        check_latents(caches, dict.fromkeys(caches, _Layer()), msgspec.structs.replace(shape, dtype="bfloat16"))


def test_a_cache_of_other_rows_is_refused() -> None:
    with pytest.raises(UnsupportedEngine, match=r"not float32 rows of 10; remove --kv-cache-dtype"):
        _check(_Layer(), SIZE + 1)


def test_lmcache_inside_vllm_is_refused_with_the_mode_that_serves_them(tmp_path: Path) -> None:
    beside = {"kv_connector_extra_config": {CONTROL: "/nowhere"}}
    directory = make_model(tmp_path / "model", FAMILIES["deepseek-v3"]())
    with pytest.raises(UnsupportedEngine, match="multi-head latent attention: .*--mode multiprocess"):
        check_vllm(vllm_config(directory, block_size=16))
    check_vllm(vllm_config(directory, beside, block_size=16))
