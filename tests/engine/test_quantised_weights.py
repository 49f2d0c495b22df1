"""A quantised model is told from its original and from one quantised otherwise, and its cartridges from theirs."""

from __future__ import annotations

import msgspec
import pytest
from homes import assert_served, prompt_for
from making import VOCABULARY
from quantising import FORMS, quantised

from lmcache_cartridge.artifact.model import Fingerprint
from lmcache_cartridge.cli.main import main
from lmcache_cartridge.cli.recall import MODEL_DIR, SHEETS_DIR
from lmcache_cartridge.make.model import CausalModel

NAMES = {
    "W8A8": "compressed-tensors int-quantized", "W4A16": "compressed-tensors pack-quantized", "GPTQ": "gptq 4", "AWQ": "awq 4",
}  # fmt: skip
NEEDS = {"GPTQ": "optimum", "AWQ": "gptqmodel"}
"""What transformers wants installed beside it."""


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """The fingerprints of the shipped model, `none`, and of its quantised copies."""
    root = tmp_path_factory.mktemp("models")
    found = {form: CausalModel(str(quantised(form, root / form)), weights=False).fingerprint for form in FORMS}
    return found | {"none": CausalModel(str(MODEL_DIR), weights=False).fingerprint}


@pytest.mark.parametrize("mine, theirs", [("none", "W8A8"), ("GPTQ", "none"), ("W4A16", "AWQ")])
def test_the_quantisation_alone_decides_where_weights_have_no_digest(shapes, home, monkeypatch, mine, theirs):
    """As of weights that are no safetensors. The control drops the comparison: the wrong cartridge is served then."""
    cartridges, engine = (
        msgspec.structs.replace(shapes[form], weights_digest=None, vocab_size=VOCABULARY) for form in (mine, theirs)
    )
    made = home.make(fingerprint=cartridges)
    prompt = prompt_for(home, made)
    store = home.open(fingerprint=engine)
    said = store.refused()["doc@1"]
    assert f"quantisation: {NAMES.get(mine, 'none')}, not {NAMES.get(theirs, 'none')}. Only the weights differ" in said
    assert store.lookup(prompt.hashes, prompt.tag) == 0
    assert_served(home.open(fingerprint=engine, settings={"accept_weights": True}), made, prompt)

    monkeypatch.setattr(Fingerprint, "differences", lambda mine, theirs, weights=True: [])
    assert_served(home.open(fingerprint=engine), made, prompt)


@pytest.mark.parametrize("form", ["GPTQ", "AWQ"])
def test_a_model_that_transformers_cannot_compute_is_refused_with_the_way_to_build_it(tmp_path, capsys, form):
    model, sheet = str(quantised(form, tmp_path / form)), str(SHEETS_DIR / "ward-a.txt")
    assert main(["build", "--home", str(tmp_path), "--model", model, "--document", sheet, "--id", "a"])
    said = capsys.readouterr().err
    assert all(part in said for part in (NAMES[form], NEEDS[form], "`build --url URL`"))
    assert not (tmp_path / "cartridges").exists()


@pytest.mark.parametrize("form", ["W8A8", "W4A16"])
def test_what_transformers_computes_of_a_quantised_model_is_near_its_originals_and_not_the_same(tmp_path, form):
    """So the checkpoints are what they say; the bounds are ten times and a tenth of what was measured."""
    ids = [5, 100, 101, 102, 103]
    own, original = (CausalModel(str(path)).logits(ids, 1) for path in (quantised(form, tmp_path / form), MODEL_DIR))
    assert 0.005 < float((own - original).abs().max()) < 5
