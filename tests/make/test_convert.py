"""Foreign KV in, a cartridge out: the same values bit for bit, the same logits, or a refusal that says why."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import foreign
import pytest
import torch
from blake3 import blake3
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from serving import stored_kv
from wards import prefill

from lmcache_cartridge.artifact import reading
from lmcache_cartridge.artifact.manifest import Origin
from lmcache_cartridge.cli.recall import MODEL_DIR, SHEETS_DIR
from lmcache_cartridge.errors import CartridgeError, ForeignFormatError
from lmcache_cartridge.make.foreign.convert import Imported, import_
from lmcache_cartridge.make.foreign.recognise import recognise
from lmcache_cartridge.make.model import CausalModel

P = 64
ALL = slice(None)


def bring(model: CausalModel, path: Path, root: Path, *, drop_frozen: bool = False, **options: Any) -> Imported:
    """Import a path without a registry, and without a canary unless it is to be compared with the model."""
    found, given = recognise(path, drop_frozen=drop_frozen), {"chunk_tokens": 16, "compare": False} | options
    return import_(model, found, root, cartridge_id="it", version=1, **given)


def _saved(directory: Path, content: Any) -> Path:
    torch.save(content, directory / "a.pt")
    return directory / "a.pt"


def _pairs(kv: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(*foreign.htd(kv), strict=True))


FORMS: dict[str, Callable[[torch.Tensor, Path], Path]] = {
    "peft cartridge, .bin": lambda kv, p: foreign.peft_adapter(kv, p / "a", safe=False),
    "hazy, fixed": lambda kv, p: foreign.hazy(kv, p / "a.pt", prefix="fixed"),
    # As many frozen positions as heads: that tensor alone fits two readings, the trainable ones tell.
    "hazy, two frozen": lambda kv, p: foreign.hazy(kv, p / "a.pt", frozen=2),
    "knlp, frozen is None": lambda kv, p: foreign.hazy(kv, p / "a.pt", frozen=0, plain=True),
    "pairs in dicts": lambda kv, p: foreign.pairs(kv, p / "a.pt", names=("k", "v")),
    "pairs without batch axis": lambda kv, p: _saved(p, [(k[0], v[0]) for k, v in _pairs(kv)]),
    "flat": lambda kv, p: _saved(p, foreign.flat(kv)),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_a_format_is_recognised_and_its_kv_written_bit_for_bit(model, tmp_path, name):
    kv = foreign.random_kv(P)
    done = bring(model, FORMS[name](kv, tmp_path), tmp_path / "out")
    assert (done.manifest.kind, done.manifest.positions) == ("trained", P)
    assert torch.equal(stored_kv(tmp_path / "out"), kv)


def test_no_special_added_or_mark_like_token_is_ordinary():
    model = CausalModel(str(MODEL_DIR))
    before = set(model.ordinary_ids().tolist())
    assert not before & {*model.tokenizer.all_special_ids}
    special, added = sorted(before)[100:102]
    model.tokenizer.add_special_tokens({"pad_token": model.tokenizer.convert_ids_to_tokens(special)})
    model.tokenizer.add_tokens([model.tokenizer.convert_ids_to_tokens(added), "<tool>", "beyond the vocabulary"])
    assert before - set(model.ordinary_ids().tolist()) == {special, added}
    assert max(model.ordinary_ids()) < model.fingerprint.vocab_size


# What the ids are decides the kind.


def test_ids_whose_forward_pass_gives_the_kv_make_a_prefill_cartridge(model, ids, tmp_path):
    """Whether they lie beside it or within; and rounding is no training."""
    exact = prefill(CausalModel(str(MODEL_DIR), dtype="float32"), ids[:P])
    content = {"token_ids": torch.tensor(ids[:P]), "kv_cache": foreign.flat(prefill(model, ids[:P])), "metadata": None}
    (tmp_path / "beside").mkdir()
    foreign.write_ids(tmp_path / "beside", ids[:P])
    for path in (_saved(tmp_path, content), foreign.pairs(exact.bfloat16(), tmp_path / "beside" / "cartridge.pt")):
        done = bring(model, path, tmp_path / f"out-{path.stem}", compare=True)
        assert (done.manifest.kind, done.warnings) == ("prefill", ()), done.evidence
        assert reading.load_token_ids(done.manifest, tmp_path / f"out-{path.stem}").tolist() == ids[:P]


@pytest.mark.parametrize("layer, position, share", [(ALL, P - 1, 1.0), (0, ALL, 0.05), (2, ALL, 0.2)])
def test_ids_that_do_not_give_the_kv_are_not_its_tokens(model, ids, tmp_path, layer, position, share):
    """One position of another token is enough, or one layer that was trained a little."""
    foreign.write_ids(tmp_path, ids[:P])
    kv, other = (prefill(model, each).float() for each in (ids[:P], [639 - token for token in ids[:P]]))
    kv[:, layer, position] = kv[:, layer, position].lerp(other[:, layer, position], share)
    done = bring(model, foreign.pairs(kv.bfloat16(), tmp_path / "a.pt"), tmp_path / "out", compare=True)
    assert done.manifest.kind == "trained" and "the ids are not its tokens" in done.evidence
    assert reading.load_token_ids(done.manifest, tmp_path / "out").tolist() != ids[:P]


@pytest.mark.parametrize("where", ["pt", "directory"])
def test_ids_alone_make_a_cartridge_of_tokens(model, ids, tmp_path, where):
    (tmp_path / "prefix_token_ids.json").write_text(json.dumps({"token_ids": ids[:50]}))
    content = {"token_ids": torch.tensor([ids[:50]]), "kv_cache": None, "metadata": {"a": [1]}}
    done = bring(model, _saved(tmp_path, content) if where == "pt" else tmp_path, tmp_path / "out")
    assert (done.manifest.kind, done.manifest.payload) == ("tokens", None)
    assert reading.load_token_ids(done.manifest, tmp_path / "out").tolist() == ids[:50]


# Refusals, each with what was expected and what was found.


def _kv(path: Path, **shape: Any) -> Path:
    return foreign.pairs(foreign.random_kv(P, **shape), path / "a.pt")


def _nan(path: Path) -> Path:
    kv = foreign.random_kv(P)
    kv[1, 2, 17, 1, 3] = torch.nan
    return foreign.pairs(kv, path / "a.pt")


def _ids(path: Path, ids: list[int]) -> Path:
    foreign.write_ids(path, ids)
    return _kv(path)


def _peft(path: Path, **fields: Any) -> Path:
    return foreign.edit_config(foreign.peft_adapter(foreign.random_kv(P), path / "a"), **fields)


def _two_tensors(path: Path) -> Path:
    weights = _peft(path) / "adapter_model.safetensors"
    save_file(load_file(weights) | {"lora_A": torch.ones(2)}, weights)
    return weights.parent


REFUSED: list[tuple[Callable[[Path], Path], str]] = [
    (lambda p: foreign.pairs(foreign.random_kv(foreign.HEADS), p / "a.pt"), "fits heads before positions and positions before heads"),
    (partial(_kv, layers=4), "KV of 4 layers .*; the model has 3"),
    (partial(_kv, head_size=32), r"layers of \[\(2, 64, 32\)\].*of \(2, p, 64\) or \(p, 2, 64\)"),
    (lambda p: _saved(p, [(k, v[:, :, n // 2 :]) for n, (k, v) in enumerate(_pairs(foreign.random_kv(P)))]), r"\[\(2, 63, 64\), \(2, 64, 64\)\].* p the same in all"),
    (lambda p: foreign.pairs(foreign.random_kv(8192), p / "a.pt"), "8192 tokens; the model's context"),
    (partial(_kv, dtype=torch.int8), "dtype int8; expected bfloat16, float16, float32 or float64"),
    (partial(_kv, dtype=torch.float32), "without rounding.*--round"),
    (_nan, "values of layer 2 are not finite"),
    (lambda p: _ids(p, [5] * 63), "63 token ids for KV of 64 positions"),
    (lambda p: _ids(p, [5] * 63 + [640]), "token id 640 is outside the model's vocabulary of 640"),
    (
        lambda p: _saved(p, {k: v for k, v in foreign.flat(foreign.random_kv(P)).items() if ".1." not in k}),
        "KV is not a tensor of keys and one of values"),
    (partial(_peft, peft_type="LORA"), "Invalid enum value .LORA."),
    (
        lambda p: foreign.peft_adapter(foreign.random_kv(P), p / "a", kind="PREFIX_TUNING", prefix_projection=True,
                                       encoder_hidden_size=8), "prefix_projection is on.*set prefix_projection to false"),
    (partial(_peft, num_virtual_tokens=65), r"shape \(64, 768\).*says \(65, 768\)"),
    (_two_tensors, "the one tensor prompt_embeddings was expected"),
    (lambda p: foreign.pairs(foreign.random_kv(P), _kv(p).with_name("b.pt")).parent, "one other .pt file.*it has 2"),
]  # fmt: skip


@pytest.mark.parametrize("make, message", REFUSED)
def test_it_is_refused_with_the_reason_and_nothing_is_left(model, tmp_path, make, message):
    (tmp_path / "in").mkdir()
    with pytest.raises(CartridgeError, match=message):
        bring(model, make(tmp_path / "in"), tmp_path / "out" / "1", compare=True)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_a_frozen_prefix_of_distractors_is_left_out_on_request(model, tmp_path):
    """As many positions as the trainable ones."""
    kv = foreign.random_kv(P)
    path = foreign.hazy(kv, tmp_path / "a.pt", frozen=P // 2)
    assert "32 frozen positions stay in front" in str(bring(model, path, tmp_path / "kept").warnings)
    assert bring(model, path, tmp_path / "dropped", drop_frozen=True).warnings == ()
    assert torch.equal(stored_kv(tmp_path / "dropped"), kv[:, :, P // 2 :])


# dtypes.


def test_rounding_is_done_on_request_and_the_logits_are_those_of_peft_itself(model, tmp_path):
    path = foreign.peft_adapter(foreign.random_kv(P, dtype=torch.float32), tmp_path / "a", kind="PREFIX_TUNING")
    bring(model, path, tmp_path / "out", rounding=True)
    question = model.encode("Q: blood of Tehor? A:", special=False)
    right, kv = foreign.peft_logits(path, question), stored_kv(tmp_path / "out")
    assert torch.equal(right, model.logits_after(kv, question)), "at position p for both; keys are rotated already"


# Documents, warnings, chunk sizes, provenance.


def test_beside_a_kv_cache_in_no_known_form_the_token_ids_are_used_and_it_is_said(model, ids, tmp_path):
    kv = {"model.layers.0.self_attn.attn": torch.zeros(2, 2, 16, 64)}
    done = bring(model, _saved(tmp_path, {"token_ids": ids[:P], "kv_cache": kv, "metadata": {}}), tmp_path / "out")
    assert (done.manifest.kind, done.manifest.positions) == ("tokens", P)
    assert "without KV in a known form" in done.evidence
    with pytest.raises(ForeignFormatError, match="no known form of KV; it has kv_cache"):
        bring(model, _saved(tmp_path, {"kv_cache": kv}), tmp_path / "none")


def test_provenance_says_what_was_imported_and_no_path_of_another_machine(model, tmp_path):
    path = _peft(tmp_path, base_model_name_or_path="/home/me/secret/llama")
    done = bring(model, path, tmp_path / "out")
    digest = blake3((path / "adapter_model.safetensors").read_bytes()).hexdigest()
    assert done.manifest.provenance.origin == Origin("PEFT CARTRIDGE adapter", "adapter_model.safetensors", digest)
    assert "made for /home/me/secret/llama" in str(done.warnings)
    written = (tmp_path / "out" / "manifest.json").read_text()
    assert "secret" not in written and str(tmp_path) not in written


# The command line.


def test_the_command_imports_and_registers(ids, tmp_path, cli):
    base = ("import", foreign.peft_adapter(foreign.random_kv(256), tmp_path / "a"), "--model", MODEL_DIR, "--id", "it",
            "--document", SHEETS_DIR / "ward-a.txt")  # fmt: skip
    for _ in range(2):  # what is there already is no new version
        result = cli.json(*base, "--payload", "int8")
        assert (result["name"], result["kind"], result["positions"]) == ("it@1", "trained", 256)
        assert result["warnings"] == []
    manifest, root = cli.artefact("it")
    assert manifest.payload.encoding == "int8" and cli.json("verify", "it")[0]["sound"] is True
    assert reading.load_document_ids(manifest, root).tolist() == ids


def test_a_hub_id_is_taken_from_the_local_cache_and_a_path_is_none(tmp_path, cli, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    kept = tmp_path / "cache" / "models--org--notes"
    foreign.peft_adapter(foreign.random_kv(16), kept / "snapshots" / ("0" * 40))
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("0" * 40)
    common = ("--model", MODEL_DIR, "--id", "it")
    cli.json("import", "org/notes", *common)
    assert cli.artefact("it")[0].provenance.origin.name == "org/notes"
    assert "org/other: no such file here, and the Hub gave none" in cli.refused("import", "org/other", *common)
    assert "no such file or directory" in cli.refused("import", "./org/notes", *common)
