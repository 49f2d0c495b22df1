"""A cartridge can be stored in int8 when it is built, trained, imported or later; every command says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import foreign
import pytest
import torch
from lessons import write_questions
from making import files_under, flip_bit, make_artifact
from serving import stored_kv
from wards import MODEL, patients, write_ward

from lmcache_cartridge.artifact import reading
from lmcache_cartridge.artifact.manifest import Measured, Origin
from lmcache_cartridge.artifact.reading import PAYLOAD, chunk_range
from lmcache_cartridge.cli.recall import load_sheet
from lmcache_cartridge.errors import ArtifactError, CorruptChunk
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make import gate
from lmcache_cartridge.make.foreign.convert import import_
from lmcache_cartridge.make.foreign.recognise import recognise
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.make.payload import read_kv
from lmcache_cartridge.make.write import compress

CLOSE = 0.02
"""Largest error of int8 on this model's KV, relative to the norm of K or V of a layer; 0.007 measured."""


@pytest.fixture
def sheet(tmp_path):
    path = tmp_path / "sheet.txt"
    path.write_text(load_sheet("ward-a").text[:1500])
    return str(path)


def _apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference of K or V of a layer, relative to its norm."""
    found, expected = found.double().flatten(2), expected.double().flatten(2)
    return float(((found - expected).norm(dim=2) / expected.norm(dim=2)).max())


def test_build_stores_int8_and_the_canary_runs_on_what_will_be_served(cli, sheet):
    common = ("build", "--model", MODEL, "--document", sheet, "--chunk-size", "64")
    plain = cli.json(*common, "--id", "plain")
    small = cli.json(*common, "--id", "small", "--payload", "int8")
    assert small["canary_top1_equal"]
    assert small["canary_max_abs_logit_difference"] != plain["canary_max_abs_logit_difference"]
    assert 0.5 < small["bytes"] / plain["bytes"] < 0.6
    (one, at_one), (two, at_two) = cli.artefact("plain"), cli.artefact("small")
    assert two.payload.encoding == "int8" and one.tokens == two.tokens
    assert 0 < _apart(read_kv(two, at_two), stored_kv(at_one)) < CLOSE
    assert cli.json("verify", "small")[0]["sound"]
    assert cli.json("show", "small")["payload"]["encoding"] == "int8"
    assert cli.json("show", "plain")["payload"]["encoding"] == "plain"


@pytest.mark.parametrize("text", ["", " \n\t "])
def test_an_empty_document_is_refused(cli, tmp_path, text):
    (tmp_path / "empty.txt").write_text(text)
    refused = cli.refused("build", "--model", MODEL, "--document", tmp_path / "empty.txt", "--id", "doc")
    assert refused.endswith("empty.txt is empty; a cartridge needs a document\n")
    assert cli.json("list") == []


def test_a_document_that_servers_would_not_inject_is_built_with_a_warning(cli, tmp_path, sheet):
    warnings = {}
    for size in (60, 600, 1500):
        (tmp_path / "short.txt").write_text(Path(sheet).read_text()[:size])
        made = cli.json("build", "--model", MODEL, "--document", tmp_path / "short.txt", "--id", "short")
        warnings[made["positions"]] = made["warnings"]
    few, some, many = sorted(warnings)
    assert few < some < 256 <= many
    assert f"{few} positions fill no chunk of 256" in warnings[few][0] and f"{some} positions" in warnings[some][0]
    assert warnings[many] == []


def test_a_canary_that_fails_on_int8_alone_leaves_nothing(cli, sheet, monkeypatch):
    from lmcache_cartridge.memory import codec

    decode = codec.decode
    monkeypatch.setattr(codec, "decode", lambda *a: (decode(*a), a[1].zero_()))
    common = ("build", "--model", MODEL, "--document", sheet, "--id", "small")
    assert "after the stored KV the model's next token differs" in cli.refused(*common, "--payload", "int8")
    cli.json(*common)


def test_train_stores_int8_and_measures_what_is_served(cli, tmp_path, monkeypatch):
    ward = write_ward(CausalModel(MODEL), patients(1, 8), "int8", tokens=128)
    (tmp_path / "ward.txt").write_text(ward.document.text)
    measure, asked = gate.measure, []

    def measured(model: CausalModel, document: torch.Tensor, kv: torch.Tensor, *rest: Any, **more: Any) -> Measured:
        asked.append(kv)
        return measure(model, document, kv, *rest, **more)

    monkeypatch.setattr(gate, "measure", measured)
    common = ("train", "--model", MODEL, "--document", tmp_path / "ward.txt", "--compress", "32", "--chunk-size",
              "16", "--questions", str(write_questions(tmp_path / "questions.jsonl", ward.document)), "--steps", "4",
              "--set", "rate=0.02", "--accept", "0")  # fmt: skip
    plain, made = cli.json(*common, "--id", "plain"), cli.json(*common, "--id", "small", "--payload", "int8")
    assert made["loss"] == plain["loss"], "the training is the same"
    manifest, root = cli.artefact("small")
    assert torch.equal(asked[-1], read_kv(manifest, root)) and not torch.equal(asked[-1], asked[-3])
    assert (manifest.kind, manifest.payload.encoding, made["bytes"]) == ("trained", "int8", manifest.payload_bytes)
    assert len(list(reading.verify(root))) == 2


def test_import_stores_int8(cli, tmp_path):
    kv = foreign.random_kv(64)
    foreign.peft_adapter(kv, tmp_path / "adapter")
    common = ("import", tmp_path / "adapter", "--model", MODEL, "--round", "--chunk-size", "16")
    cli.json(*common, "--id", "small", "--payload", "int8")
    manifest, root = cli.artefact("small")
    assert manifest.payload.encoding == "int8"
    assert 0 < _apart(read_kv(manifest, root), kv) < CLOSE


@pytest.mark.parametrize("kind", ["prefill", "trained"])
def test_compress_makes_the_same_of_a_registered_cartridge(cli, tmp_path, kind):
    made = make_artifact(tmp_path / "doc", positions=80, kind=kind)
    Registry(cli.home / "registry.sqlite").register(tmp_path / "doc")
    before = files_under(tmp_path / "doc")
    result = cli.json("build", "--from", "doc", "--payload", "int8", "--id", "small")
    manifest, root = cli.artefact("small")
    direct = make_artifact(tmp_path / "direct", positions=80, kind=kind, encoding="int8").manifest
    assert manifest.digest == direct.digest
    assert manifest.provenance.origin == Origin("cartridge", "doc@1", made.manifest.digest)
    assert (result["name"], result["bytes"]) == ("small@1", manifest.payload_bytes)
    assert manifest.payload_bytes < made.manifest.payload_bytes
    assert reading.load_token_ids(manifest, root).tolist() == reading.load_token_ids(
        made.manifest, tmp_path / "doc").tolist()  # fmt: skip
    assert files_under(tmp_path / "doc") == before
    assert cli.json("verify", "small")[0]["sound"]
    assert cli.json("build", "--from", "doc", "--payload", "int8", "--id", "doc")["name"] == "doc@2"
    assert "doc@2 is in int8 already" in cli.refused("build", "--from", "doc", "--payload", "int8", "--id", "again")


def test_with_no_promote_an_id_stays_where_it_is(cli, tmp_path, sheet):
    of_model = ("--model", MODEL, "--chunk-size", "16", "--id", "doc", "--no-promote")
    foreign.peft_adapter(foreign.random_kv(64), tmp_path / "adapter")
    made = [
        cli.json("build", "--document", sheet, *of_model),
        cli.json("import", tmp_path / "adapter", "--round", *of_model),
        cli.json("build", "--from", "doc@1", "--payload", "int8", "--id", "doc", "--no-promote"),
    ]
    assert [(each["name"], each["promoted"]) for each in made] == [(f"doc@{n}", False) for n in (1, 2, 3)]
    assert not any(row["current"] for row in cli.json("list"))
    assert "`lmcache-cartridge label doc doc@3`" in cli.refused("show", "doc")
    cli.json("label", "doc", "doc@2")
    assert [row["current"] for row in cli.json("list")] == [False, True, False]


def test_a_corrupt_cartridge_is_not_compressed(tmp_path):
    made = make_artifact(tmp_path / "doc", positions=80)
    flip_bit(tmp_path / "doc" / PAYLOAD, chunk_range(made.manifest, 4, range(1)).start)
    with pytest.raises(CorruptChunk, match="chunk 4"):
        compress(tmp_path / "doc", tmp_path / "new", cartridge_id="new", version=1)
    assert [path.name for path in tmp_path.iterdir()] == ["doc"]


def test_numbers_that_int8_cannot_hold_leave_nothing(tmp_path):
    made = make_artifact(tmp_path / "a", positions=80)
    made.kv[1, 0, 40, 1, 3] = torch.finfo(torch.bfloat16).max
    make_artifact(tmp_path / "doc", positions=80, kv=made.kv)
    with pytest.raises(ArtifactError, match="too near to the largest bfloat16"):
        compress(tmp_path / "doc", tmp_path / "new", cartridge_id="new", version=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "doc"]


def test_export_writes_what_is_served_and_says_so(cli, tmp_path, sheet):
    cli.json("build", "--model", MODEL, "--document", sheet, "--id", "small", "--payload", "int8", "--chunk-size", "64")
    manifest, root = cli.artefact("small")
    model = CausalModel(MODEL)
    for form in ("peft", "hazy"):
        assert cli.json("export", "small", "--to", form, "--output", tmp_path / form)["encoding"] == "int8"
        import_(
            model, recognise(tmp_path / form), tmp_path / f"of-{form}", cartridge_id="back", version=1, chunk_tokens=64
        )
        plain = reading.load_manifest(tmp_path / f"of-{form}")
        assert (plain.kind, plain.payload.encoding) == ("prefill", "plain")
        assert torch.equal(stored_kv(tmp_path / f"of-{form}"), read_kv(manifest, root))
    assert "| dtype | bfloat16, exported from int8 |" in (tmp_path / "peft" / "README.md").read_text()


def test_text_for_people_says_what_export_did(cli, tmp_path):
    shape = CausalModel(MODEL).fingerprint
    make_artifact(tmp_path / "doc", positions=80, fingerprint=shape, encoding="int8", token_ids=[7] * 80)
    Registry(cli.home / "registry.sqlite").register(tmp_path / "doc")
    ran = cli("export", "doc", "--to", "hazy", "--output", tmp_path / "out")
    assert ran.status == 0 and ran.out.rstrip().endswith("/out, from int8 to bfloat16")
