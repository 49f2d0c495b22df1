"""Models whose layers treat positions in their own ways: what is built of them, and what a chain of it holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import torch
from families import FAMILIES, ROTATING, chain, make_model, write
from transformers import DynamicCache

from lmcache_cartridge.artifact import fingerprint
from lmcache_cartridge.artifact.cartridge import Cartridge
from lmcache_cartridge.artifact.fingerprint import Fingerprint, check_shift
from lmcache_cartridge.errors import UnsupportedModel
from lmcache_cartridge.make.model import CausalModel

torch.set_num_threads(1)  # tiny models; more threads only contend

NOISE = 1e-4
"""Relative error of float32 keys. Measured: at most 2e-5; of keys of a layer rotated that should not be, or not rotated:
0.3 and more."""
DOCUMENTS = [list(range(5, 105)), list(range(250, 330))]


class Family(NamedTuple):
    name: str
    directory: Path
    model: CausalModel
    cartridges: list[Cartridge]
    """Of `DOCUMENTS`."""


@pytest.fixture(scope="module", params=ROTATING)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    root = tmp_path_factory.mktemp("family")
    model = CausalModel(str(make_model(root / "model", FAMILIES[request.param]())))
    cartridges = [write(model, root / str(i), ids) for i, ids in enumerate(DOCUMENTS)]
    return Family(request.param, root / "model", model, cartridges)


@torch.inference_mode()
def _own(model: CausalModel, ids: list[int], start: int) -> torch.Tensor:
    """Return the canonical KV that transformers makes of a document that stands at `start` by itself."""
    cache, at = DynamicCache(), start + torch.arange(len(ids))[None]
    model.model(input_ids=torch.tensor([ids]), position_ids=at, past_key_values=cache, use_cache=True)
    heads = model.fingerprint.kv_heads
    planes = [torch.stack([getattr(layer, name)[0] for layer in cache.layers]) for name in ("keys", "values")]
    return torch.stack(planes)[:, :, :: planes[0].shape[1] // heads].transpose(2, 3)


def _errors(found: torch.Tensor, expected: torch.Tensor) -> list[float]:
    """Return the relative error of each layer `[L, T, H, D]`."""
    return [float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]


def test_a_chain_holds_the_keys_and_values_that_each_layer_makes_at_those_places(family: Family) -> None:
    first, second = DOCUMENTS
    expected = torch.cat([_own(family.model, first, 0), _own(family.model, second, len(first))], dim=2)
    keys, values = chain(family.cartridges)
    print(family.name, _errors(keys, expected[0]))
    assert max(_errors(keys, expected[0])) < NOISE
    assert max(_errors(values, expected[1])) < NOISE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_layers_that_rotate_are_found_by_trying(family: Family, dtype: str) -> None:
    model = family.model if dtype == "float32" else CausalModel(str(family.directory), dtype=dtype)
    assert model.fingerprint.rope.layers == ROTATING[family.name]


def test_a_layer_rotated_wrongly_is_far_off(family: Family) -> None:
    expected = _own(family.model, DOCUMENTS[1], len(DOCUMENTS[0]))[0]
    every = tuple(range(family.model.fingerprint.layers))
    for layer in every:
        wrong = tuple(sorted({*ROTATING[family.name]} ^ {layer}))
        keys = chain(family.cartridges, wrong or (layer,))[0][:, len(DOCUMENTS[0]) :]
        errors = _errors(keys, expected)
        assert errors[layer] > 0.1
        assert max(errors[:layer] + errors[layer + 1 :], default=0) < NOISE


@pytest.mark.parametrize("name", ["gpt2", "falcon alibi"])
def test_keys_of_a_family_without_rope_cannot_be_moved(tmp_path: Path, name: str) -> None:
    model = CausalModel(str(make_model(tmp_path / "model", FAMILIES[name]())))
    cartridge = write(model, tmp_path / "doc", DOCUMENTS[0])
    assert torch.equal(chain([cartridge]), torch.cat(list(model.prefill(DOCUMENTS[0], 32)), dim=2))
    with pytest.raises(UnsupportedModel, match="no rotary embedding"):
        check_shift(model.fingerprint.rope)


def test_layers_whose_keys_are_neither_rotated_nor_left_alone_are_not_known(tmp_path: Path) -> None:
    """A model that adds positions to what its last layer reads, beside RoPE: no single rule moves its keys."""
    model = CausalModel(str(make_model(tmp_path / "model", FAMILIES["llama"]())))
    learned = torch.nn.Embedding(4096, model.model.config.hidden_size)

    def add(layer: torch.nn.Module, given: tuple, named: dict) -> tuple[tuple, dict]:
        return (given[0] + 100 * learned(named["position_ids"]), *given[1:]), named

    model.model.model.layers[3].register_forward_pre_hook(add, with_kwargs=True)
    assert model.rotation(model.fingerprint.rope) == (None, msgspec.UNSET)


def _misread(monkeypatch: pytest.MonkeyPatch, change: Callable[[Fingerprint], Fingerprint]) -> None:
    """Have configs read as they were not meant."""
    read = fingerprint.of_config
    monkeypatch.setattr(fingerprint, "of_config", lambda *config, **known: change(read(*config, **known)))


def test_layers_that_the_config_says_rotate_otherwise_are_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = msgspec.structs.replace
    _misread(monkeypatch, lambda shape: replace(shape, rope=shape.rope and replace(shape.rope, layers=(0, 1, 2, 3))))
    model = CausalModel(str(make_model(tmp_path / "model", FAMILIES["smollm3"]())))
    assert model.fingerprint.rope.layers is msgspec.UNSET


def test_a_family_whose_layers_have_rope_of_their_own_kinds_is_refused_before_its_weights_are_read(
    tmp_path: Path,
) -> None:
    directory = make_model(tmp_path / "model", FAMILIES["gemma3"]())
    (directory / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match="serves no cartridges of such models, Gemma 3 among them"):
        CausalModel(str(directory))


def test_a_family_that_caches_heads_its_config_does_not_say_is_refused_when_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _misread(monkeypatch, lambda shape: msgspec.structs.replace(shape, kv_heads=4))  # as it was once read for Falcon
    with pytest.raises(UnsupportedModel, match=r"caches 4 layers of \[\(1, 32\)\].*config says 4 of \(4, 32\)"):
        CausalModel(str(make_model(tmp_path / "model", FAMILIES["falcon multi-query"]())))


@pytest.mark.parametrize("name", ["falcon multi-query", "falcon grouped", "gptj", "smollm3"])
def test_what_is_built_answers_as_its_document_does(tmp_path: Path, name: str) -> None:
    model = CausalModel(str(make_model(tmp_path / "model", FAMILIES[name]())))
    question = list(range(400, 410))
    after = model.logits_after(chain([write(model, tmp_path / "doc", DOCUMENTS[0])]), question)
    plain = model.logits(DOCUMENTS[0] + question, len(question))
    assert float((after - plain).abs().max()) < 1e-3
    assert float((after - model.logits(question, len(question))).abs().max()) > 0.1, "the document makes no difference"
