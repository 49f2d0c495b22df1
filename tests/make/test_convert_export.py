"""A cartridge written for others: PEFT and HazyResearch's loader take it, and coming back it is the same cartridge."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import foreign
import msgspec
import pytest
import torch
from foreign import TrainableCache
from huggingface_hub import ModelCard
from making import files_under, flip_bit
from serving import stored_kv
from wards import MODEL, save

from lmcache_cartridge.artifact.manifest import Manifest
from lmcache_cartridge.artifact.reading import MANIFEST
from lmcache_cartridge.cli.recall import load_sheet
from lmcache_cartridge.errors import ArtifactError, CartridgeExists
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make.foreign.convert import import_
from lmcache_cartridge.make.foreign.export import export
from lmcache_cartridge.make.foreign.recognise import recognise
from lmcache_cartridge.make.model import CausalModel

P = 128
QUESTION = "Q: blood of Tehor? A:"
FORMS = ("peft", "hazy")


@pytest.fixture(scope="module")
def model():
    return CausalModel(MODEL)


@pytest.fixture(scope="module")
def ids(model):
    return model.encode(load_sheet("ward-a").text, special=True)


def _back(model: CausalModel, directory: Path, root: Path, **options: Any) -> Manifest:
    found = recognise(directory)
    return import_(model, found, root, cartridge_id="back", version=7, **options).manifest


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("kind", "document", "positions", "chunk"),
    [("prefill", False, P, 64), ("prefill", False, 1, 16), ("trained", False, 100, 64), ("trained", True, P, 64)],
)
def test_what_is_exported_and_imported_is_the_same_cartridge(
    model, ids, tmp_path, form, kind, document, positions, chunk
):
    made = save(model, tmp_path / "in", ids[:positions], name="it", kind=kind, chunk_tokens=chunk,
                document_ids=ids if document else None)  # fmt: skip
    export(tmp_path / "in", form, tmp_path / "out")
    back = _back(model, tmp_path / "out", tmp_path / "back", chunk_tokens=chunk, compare=kind == "prefill")
    assert back.digest == made.digest
    assert torch.equal(stored_kv(tmp_path / "back"), stored_kv(tmp_path / "in"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_peft_loads_it_and_gives_the_same_logits(ids, tmp_path, dtype):
    model = CausalModel(MODEL, dtype=dtype)
    save(model, tmp_path / "in", ids[:P], name="it")
    export(tmp_path / "in", "peft", tmp_path / "out")
    question = model.encode(QUESTION, special=False)
    found = foreign.peft_logits(tmp_path / "out", question, getattr(torch, dtype))
    assert torch.equal(found, model.logits_after(stored_kv(tmp_path / "in"), question))


def test_the_published_loader_takes_the_checkpoint(model, ids, tmp_path):
    save(model, tmp_path / "in", ids[:P], name="it")
    export(tmp_path / "in", "hazy", tmp_path / "out")
    loaded = TrainableCache.from_pretrained(tmp_path / "out" / "cartridge.pt")
    keys, values = foreign.htd(stored_kv(tmp_path / "in"))
    assert loaded.frozen == 1
    assert all(torch.equal(a, b) for a, b in zip(loaded.keys + loaded.values, keys + values, strict=True))


def test_the_card_has_what_the_hub_looks_for(model, ids, tmp_path):
    made = save(model, tmp_path / "in", ids[:P], name="it", kind="trained")
    of_the_hub = msgspec.structs.replace(made.provenance, model="org/base-model")
    (tmp_path / "in" / MANIFEST).write_bytes(msgspec.structs.replace(made, provenance=of_the_hub).encode())
    export(tmp_path / "in", "peft", tmp_path / "out")
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert (card.data.library_name, card.data.base_model, card.data.pipeline_tag) == (
        "peft", "org/base-model", "text-generation")  # fmt: skip
    assert {"cartridge", "base_model:adapter:org/base-model"} <= set(card.data.tags)
    assert made.digest in card.text
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["base_model_name_or_path"]) == ("CARTRIDGE", "org/base-model")
    assert (config["num_virtual_tokens"], config["num_frozen_tokens"]) == (P, 1)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_there_is_not_overwritten(model, ids, tmp_path, form):
    save(model, tmp_path / "in", ids[:P], name="it")
    output = tmp_path / "out"
    output.mkdir()
    export(tmp_path / "in", form, output)
    before = files_under(output)
    with pytest.raises(CartridgeExists, match="not empty"):
        export(tmp_path / "in", form, output)
    assert files_under(output) == before
    with pytest.raises(CartridgeExists):
        export(tmp_path / "in", form, output / "meta.json" if form == "hazy" else output / "README.md")


def test_a_corrupt_cartridge_is_not_exported(model, ids, tmp_path):
    made = save(model, tmp_path / "in", ids[:P], name="it")
    flip_bit(tmp_path / "in" / "payload.safetensors", made.payload.data_offset_bytes + 99)
    with pytest.raises(ArtifactError, match="checksum"):
        export(tmp_path / "in", "peft", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_cartridge_without_kv_is_not_exported(model, tmp_path):
    (tmp_path / "a.json").write_text("[5, 6, 7]")
    _back(model, tmp_path / "a.json", tmp_path / "in")
    with pytest.raises(ArtifactError, match="no KV to export"):
        export(tmp_path / "in", "peft", tmp_path / "out")


def test_the_command_exports(model, ids, tmp_path, cli):
    far, root, said = cli.home / "cartridges" / "far", cli.home / "cartridges" / "it", []
    registry = Registry(cli.home / "registry.sqlite")
    save(model, far, ids[:P], name="far")
    registry.register(far, "s3://bucket/far")
    save(model, root, ids[:P], name="it")
    registry.register(root)
    for form in ("json", "text"):
        status, out, _ = cli("export", "it", "--to", "peft", "--output", tmp_path / form, "--format", form)
        assert status == 0 and recognise(tmp_path / form).token_ids == ids[:P]
        said.append(out)
    assert json.loads(said[0]) == {"name": "it@1", "format": "peft", "output": str(tmp_path / "json")}
    assert said[1] == f"it@1 as peft in {tmp_path / 'text'}\n"
    shutil.rmtree(root)
    save(model, root, ids[1 : P + 1], name="it")
    for name, form, status, message in (
        ("far", "hazy", 1, "lmcache-cartridge pull s3://bucket/far"), ("it", "hazy", 1, "was replaced"),
        ("gone", "peft", 1, ""), ("it", "json", 2, ""),
    ):  # fmt: skip
        ran = cli("export", name, "--to", form, "--output", tmp_path / "out")
        assert ran.status == status and message in ran.err
        assert not (tmp_path / "out").exists()
