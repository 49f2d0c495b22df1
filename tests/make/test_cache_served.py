"""A cache that a compression left of a document is a cartridge: its answers are transformers' own after that cache."""

from __future__ import annotations

import foreign
import pytest
import torch
from wards import MODEL, patients, write_ward

from lmcache_cartridge import from_cache
from lmcache_cartridge.errors import ArtifactError
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.make.payload import read_kv

TOKENS, KEPT = 192, 96


@pytest.fixture(scope="module")
def model():
    return CausalModel(MODEL, dtype="float32")


@pytest.fixture(scope="module")
def ids(model):
    return write_ward(model, patients(0, 2), "ward", tokens=TOKENS + 32).ids[: TOKENS + 12]


def test_answers_are_those_after_the_cache_with_its_keys_where_they_were(model, ids, tmp_path):
    cache, question = foreign.pressed(model, ids[:TOKENS], KEPT), ids[TOKENS:]
    manifest = from_cache(model, cache, tmp_path / "a", cartridge_id="a", version=1, next_position=TOKENS,
                          document_ids=ids[:TOKENS], chunk_tokens=32)  # fmt: skip
    assert (manifest.kind, manifest.positions) == ("trained", KEPT) and manifest.canary is not None
    assert cache.layers[0].keys.shape[2] == KEPT, "it is as it was"
    expected = foreign.logits_behind(model, cache, question, TOKENS)
    found = model.logits_after(read_kv(manifest, tmp_path / "a"), question)
    assert (found - expected).abs().max() < 1e-2
    from_cache(model, foreign.pressed(model, ids[:TOKENS], KEPT), tmp_path / "b", cartridge_id="b", version=1)
    unmoved = model.logits_after(read_kv(manifest, tmp_path / "b"), question)
    assert (unmoved - expected).abs().max() > 0.5, "the control: by keys that were not moved it can be told"


@pytest.mark.parametrize("spoil, told", [
    (lambda cache: vars(cache.layers[1]).update(keys=cache.layers[1].keys[:, :, 1:]), "as many positions in every layer and head: stack"),
    (lambda cache: vars(cache.layers[0]).update(keys=list(cache.layers[0].keys[0])), "has no attribute 'shape'"),
    (lambda cache: cache.batch_repeat_interleave(2), "with {(2, "),
    (lambda cache: cache.layers[0].values[0, 0, 3].fill_(torch.nan), "not finite"),
    (lambda cache: cache.layers.pop(), "a cache of "),
], ids=["layers of other lengths", "ragged heads", "two documents", "NaN", "a layer less"])  # fmt: skip
def test_what_does_not_fit_is_refused_and_nothing_left(model, ids, tmp_path, spoil, told):
    cache = foreign.pressed(model, ids[:TOKENS], KEPT)
    spoil(cache)
    with pytest.raises(ArtifactError) as refused:
        from_cache(model, cache, tmp_path / "a", cartridge_id="a", version=1, next_position=TOKENS)
    assert told in str(refused.value) and not list(tmp_path.iterdir())
