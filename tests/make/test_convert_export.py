"""A cartridge written for others: PEFT and HazyResearch's loader take it, and coming back it is the same cartridge."""

from __future__ import annotations

import shutil

import foreign
import pytest
import torch
from making import files_under, flip_bit, make_artifact
from serving import stored_kv
from wards import MODEL, prefill, save

from lmcache_cartridge.errors import ArtifactError, CartridgeExists
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make.foreign.convert import import_
from lmcache_cartridge.make.foreign.export import export
from lmcache_cartridge.make.foreign.recognise import recognise
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.make.payload import read_kv

P = 128


@pytest.mark.parametrize("form", ["peft", "hazy"])
@pytest.mark.parametrize(
    "kind, document, positions, chunk",
    [("prefill", False, 1, 16), ("trained", False, 100, 64), ("trained", True, P, 64)],
)
def test_what_is_exported_and_imported_is_the_same_cartridge(
    model, ids, tmp_path, form, kind, document, positions, chunk
):
    made = save(model, tmp_path / "in", ids[:positions], name="it", kind=kind, chunk_tokens=chunk,
                document_ids=ids if document else None)  # fmt: skip
    export(tmp_path / "in", form, tmp_path / "out")
    found, compare = recognise(tmp_path / "out"), kind == "prefill"
    back = import_(
        model, found, tmp_path / "back", cartridge_id="back", version=7, chunk_tokens=chunk, compare=compare
    ).manifest
    assert back.digest == made.digest
    assert torch.equal(stored_kv(tmp_path / "back"), stored_kv(tmp_path / "in"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_peft_loads_it_and_gives_the_same_logits(ids, tmp_path, dtype):
    model = CausalModel(MODEL, dtype=dtype)
    save(model, tmp_path / "in", ids[:P], name="it")
    export(tmp_path / "in", "peft", tmp_path / "out")
    question = model.encode("Q: blood of Tehor? A:", special=False)
    found = foreign.peft_logits(tmp_path / "out", question, getattr(torch, dtype))
    assert torch.equal(found, model.logits_after(stored_kv(tmp_path / "in"), question))


def test_the_checkpoint_has_the_form_that_the_published_loader_takes(model, ids, tmp_path):
    save(model, tmp_path / "in", ids[:P], name="it")
    export(tmp_path / "in", "hazy", tmp_path / "out")
    theirs = foreign.quiet_load(foreign.hazy(stored_kv(tmp_path / "in"), tmp_path / "theirs.pt"))
    ours = foreign.quiet_load(tmp_path / "out" / "cartridge.pt")
    assert ours.keys() == theirs.keys()
    for name, part in theirs.items():
        assert type(ours[name]) is type(part) and all(map(torch.equal, ours[name], part)), name


def test_what_is_there_is_not_overwritten(model, ids, tmp_path):
    save(model, tmp_path / "in", ids[:P], name="it")
    export(tmp_path / "in", "peft", tmp_path / "out")
    before = files_under(tmp_path / "out")
    with pytest.raises(CartridgeExists, match="not empty"):
        export(tmp_path / "in", "peft", tmp_path / "out")
    assert files_under(tmp_path / "out") == before


def test_a_corrupt_cartridge_is_not_exported(model, ids, tmp_path):
    made = save(model, tmp_path / "in", ids[:P], name="it")
    flip_bit(tmp_path / "in" / "payload.safetensors", made.payload.data_offset_bytes + 99)
    with pytest.raises(ArtifactError, match="checksum"):
        export(tmp_path / "in", "peft", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_cartridge_without_kv_is_not_exported(model, tmp_path):
    (tmp_path / "a.json").write_text("[5, 6, 7]")
    import_(model, recognise(tmp_path / "a.json"), tmp_path / "in", cartridge_id="ids", version=1)
    with pytest.raises(ArtifactError, match="has no KV"):
        export(tmp_path / "in", "peft", tmp_path / "out")


def test_the_command_exports_what_is_served_of_int8(model, ids, tmp_path, cli):
    root, registry = cli.home / "cartridges" / "it", Registry(cli.home / "registry.sqlite")
    made = make_artifact(root, positions=P, cartridge_id="it", fingerprint=model.fingerprint, token_ids=ids[:P],
                         kv=prefill(model, ids[:P]), encoding="int8").manifest  # fmt: skip
    registry.register(root)
    for form in ("peft", "hazy"):
        out = tmp_path / form
        assert cli.json("export", "it", "--to", form, "--output", out)["format"] == form
        import_(model, recognise(out), tmp_path / f"of-{form}", cartridge_id="back", version=1)
        assert torch.equal(stored_kv(tmp_path / f"of-{form}"), read_kv(made, root))
    shutil.rmtree(root)
    save(model, root, ids[1 : P + 1], name="it")
    for name, said in (("it", "was replaced"), ("gone", "'gone'")):
        assert said in cli.refused("export", name, "--to", "hazy", "--output", tmp_path / "none")
    assert not (tmp_path / "none").exists()
