"""Models whose layers treat positions in their own ways: what is built of them, and what a chain of it holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from families import FAMILIES, MAX_MODEL_LEN, ROTATING, chain, make_model, write
from quantising import quantised
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    FalconH1Config,
    MambaConfig,
    Mistral3Config,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
)

from lmcache_cartridge.artifact.hf_config import config_fields, of_config
from lmcache_cartridge.artifact.model import check_shift
from lmcache_cartridge.artifact.reading import load_manifest
from lmcache_cartridge.cli.main import main
from lmcache_cartridge.cli.making import load_for
from lmcache_cartridge.errors import ArtifactError, UnsupportedModel
from lmcache_cartridge.make import model as make_model_module
from lmcache_cartridge.make.document import check_fits
from lmcache_cartridge.make.model import CausalModel

NOISE = 1e-4
"""Relative error of float32 keys. Measured: at most 2e-5; of keys of a layer rotated that should not be, or not rotated:
0.3 and more."""
DOCUMENTS = [list(range(5, 105)), list(range(250, 330))]


def _model(root: Path, name: str, **given: Any) -> CausalModel:
    """Return a family's model, written at `root / "model"`."""
    return CausalModel(str(make_model(root / "model", FAMILIES[name]())), **given)


@pytest.fixture(scope="module", params=ROTATING)
def family(request, tmp_path_factory):
    """A model, and cartridges of `DOCUMENTS`."""
    root = tmp_path_factory.mktemp("family")
    model = _model(root, request.param, max_model_len=MAX_MODEL_LEN)
    return model, [write(model, root / str(i), ids) for i, ids in enumerate(DOCUMENTS)]


@torch.inference_mode()
def _own(model: CausalModel, ids: list[int], start: int) -> torch.Tensor:
    """Return the canonical KV that transformers makes of a document that stands at `start` by itself."""
    cache, at = DynamicCache(), start + torch.arange(len(ids))[None]
    model.model(input_ids=torch.tensor([ids]), position_ids=at, past_key_values=cache, use_cache=True)
    copies = cache.layers[0].keys.shape[1] // model.fingerprint.kv_heads
    found = [torch.stack([getattr(layer, name)[0] for layer in cache.layers]) for name in ("keys", "values")]
    return model.planes(*(each[:, ::copies].transpose(1, 2) for each in found))


def _errors(found: torch.Tensor, expected: torch.Tensor) -> list[float]:
    """Return the relative error of each layer `[L, T, H, D]`."""
    return [float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]


def test_a_chain_holds_the_keys_and_values_that_each_layer_makes_at_those_places(family):
    (first, second), (model, cartridges) = DOCUMENTS, family
    expected = torch.cat([_own(model, first, 0), _own(model, second, len(first))], dim=2)
    found = chain(cartridges)
    assert len(found) == model.fingerprint.planes
    assert all(max(_errors(*planes)) < NOISE for planes in zip(found, expected, strict=True))


@torch.inference_mode()
def _plain(directory: Path, ids: list[int]) -> torch.Tensor:
    """Return what transformers itself, which goes by the prompt's length, has as logits after a prompt."""
    return AutoModelForCausalLM.from_pretrained(directory)(input_ids=torch.tensor([ids])).logits[0, -1]


def test_longrope_takes_the_factors_that_the_engine_takes_whatever_the_length(tmp_path):
    directory = make_model(tmp_path / "model", FAMILIES["phi3 long"]())  # made for 512 tokens
    few, many = [5 + i % 600 for i in range(300)], [5 + i % 600 for i in range(600)]
    short, long = (CausalModel(str(directory), max_model_len=length) for length in (512, 513))
    for model, ids, is_near in ((short, few, True), (long, many, True), (long, few, False)):
        apart = float((model.logits(ids, 1)[0] - _plain(directory, ids)).abs().max())
        assert apart < 1e-3 if is_near else apart > 0.1
    (said,) = long.fingerprint.differences(short.fingerprint)
    assert said.startswith("rope factors: long, not short; ") and "--max-model-len" in said


def test_import_and_what_is_made_for_a_server_take_the_factors_that_the_engine_takes(tmp_path):
    expected = _model(tmp_path, "phi3 long", max_model_len=513).fingerprint
    directory, given = str(tmp_path / "model"), ["--max-model-len", "513"]
    (tmp_path / "ids.json").write_text(str([5 + i for i in range(300)]))
    words = ["import", str(tmp_path / "ids.json"), "--model", directory, "--id", "x", "--home", str(tmp_path), *given]
    assert main(words) == 0
    assert not load_manifest(tmp_path / "cartridges" / "x" / "1").fingerprint.differences(expected)
    assert load_for(" ".join(given), directory)[0].fingerprint == expected
    assert expected.rope[0].parameters["factors"] == "long"


def test_a_document_ends_where_the_short_factors_or_an_attention_that_engines_share_do(tmp_path):
    llama4 = FAMILIES["llama4"]()
    llama4.max_position_embeddings = 16384
    for model, tokens, reason in (
        (_model(tmp_path, "phi3 long"), 600, "context is 512, .* longrope's short .* --max-model-len"),
        (CausalModel(str(make_model(tmp_path / "llama4", llama4))), 9000, "context is 8192, "),
    ):
        with pytest.raises(ArtifactError, match=reason):
            check_fits(model, Path("document"), [5] * tokens)


@pytest.mark.parametrize("more", [{"factor": 3.0}, {"attention_factor": 1.5}])
def test_longrope_whose_attention_engines_scale_otherwise_is_refused(more):
    config = FAMILIES["phi3 long"]()
    with pytest.raises(UnsupportedModel, match="longrope with a"):
        of_config(config_fields(config) | {"rope_parameters": config.rope_parameters | more}, dtype="float32")


@pytest.mark.parametrize("name", ["gpt2", "falcon alibi"])
def test_keys_of_a_family_without_rope_cannot_be_moved(tmp_path, name):
    model = _model(tmp_path, name)
    cartridge = write(model, tmp_path / "doc", DOCUMENTS[0])
    assert torch.equal(chain([cartridge]), torch.cat(list(model.prefill(DOCUMENTS[0], 32)), dim=2))
    with pytest.raises(UnsupportedModel, match="no rotary embedding"):
        check_shift(model.fingerprint.rope)


def test_layers_whose_keys_are_neither_rotated_nor_left_alone_are_not_known(tmp_path):
    """A model that adds positions to what its last layer reads, beside RoPE: no single rule moves its keys."""
    model = _model(tmp_path, "llama")
    learned = torch.nn.Embedding(4096, model.model.config.hidden_size)

    def add(layer: torch.nn.Module, given: tuple, named: dict) -> tuple[tuple, dict]:
        return (given[0] + 100 * learned(named["position_ids"]), *given[1:]), named

    model.model.model.layers[3].register_forward_pre_hook(add, with_kwargs=True)
    assert model.rotation(model.fingerprint.rope) == (None, None)
    with pytest.raises(UnsupportedModel, match="rotate together"):
        check_shift((msgspec.structs.replace(*model.fingerprint.rope, pairing=None),))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        *((config, "but a state of the whole prompt, which no cartridge can hold") for config in (
            Qwen3NextConfig, MambaConfig, FalconH1Config, RecurrentGemmaConfig)),
        (Mistral3Config, "mistral3 is none of the models that read images .* those are gemma3, "),
    ],
)  # fmt: skip
def test_a_model_that_keeps_a_state_or_reads_images_is_refused_before_its_weights_are_read(tmp_path, config, reason):
    config().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=reason):
        CausalModel(str(tmp_path))


def test_a_kimi_k2_is_a_deepseek_v3(tmp_path):
    """Its experts too, which transformers would make up for a model type that it does not know."""
    expected = _model(tmp_path, "deepseek-v3")
    kept = tmp_path / "model" / "config.json"
    kept.write_text(kept.read_text().replace('"model_type": "deepseek_v3"', '"model_type": "kimi_k2"'))
    model = CausalModel(str(tmp_path / "model"))
    assert model.fingerprint == expected.fingerprint
    assert torch.equal(model.logits([5, 6, 7], 1), expected.logits([5, 6, 7], 1))


def test_no_code_of_a_models_own_is_run_or_asked_about(tmp_path):
    left = tmp_path / "was run"
    code = f"import pathlib\npathlib.Path({str(left)!r}).touch()\nclass Own: pass\n"
    (tmp_path / "own.py").write_text(code)
    given = {"model_type": "somebodys_own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(given))
    with pytest.raises(UnsupportedModel, match="by code of the model's own alone, and no such code is run"):
        CausalModel(str(tmp_path))
    assert not left.exists()


def test_a_family_that_caches_heads_its_config_does_not_say_is_refused_when_it_is_loaded(tmp_path, monkeypatch):
    """As Falcon's was once read."""
    read = of_config
    misread = lambda *config, **known: msgspec.structs.replace(read(*config, **known), kv_heads=4)  # noqa: E731
    monkeypatch.setattr(make_model_module, "of_config", misread)
    with pytest.raises(UnsupportedModel, match=r"caches 4 layers of \[\(1, 32\)\].*config says 4 of \(4, 32\)"):
        _model(tmp_path, "falcon multi-query")


@torch.inference_mode()
def test_soft_caps_on_attention_are_not_left_out(tmp_path):
    """PyTorch's attention knows none, and transformers takes it unless it is told otherwise."""
    plain = FAMILIES["gemma2"]()
    plain.attn_logit_softcapping = None
    models = _model(tmp_path, "gemma2"), CausalModel(str(make_model(tmp_path / "plain", plain)))
    capped, uncapped = (each.model(torch.tensor([DOCUMENTS[0]])).logits for each in models)
    assert float((capped - uncapped).abs().max()) > 0.1


def test_a_checkpoint_without_some_weights_is_refused(tmp_path):
    """Transformers draws what is missing at random and warns, and a cartridge of that answers at random."""
    directory = make_model(tmp_path / "model", FAMILIES["llama"]())
    file = directory / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match="lacks 1 of .* weights, model.layers.1.mlp.up_proj.weight"):
        CausalModel(str(directory))


@pytest.mark.parametrize(("form", "name", "needs"), [("GPTQ", "gptq 4", "optimum"), ("AWQ", "awq 4", "gptqmodel")])
def test_a_model_that_transformers_cannot_compute_is_refused_with_the_way_to_build_it(tmp_path, form, name, needs):
    with pytest.raises(UnsupportedModel) as refused:
        CausalModel(str(quantised(form, tmp_path / form)))
    assert all(part in str(refused.value) for part in (name, needs, "`build --url URL`"))
