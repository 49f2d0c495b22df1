"""Identity tokens: the same for the same digest, others for another, and nothing a server gives a meaning to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_cartridge.artifact.identity import DISTINCT, Identity
from lmcache_cartridge.errors import UnsupportedModel

DIGESTS = st.binary(min_size=32, max_size=32).map(bytes.hex)
SPECIAL = {0, 1, 2, 3, 50, 639}
ORDINARY = np.array([i for i in range(640) if i not in SPECIAL])


@settings(max_examples=200, deadline=None)
@given(digest=DIGESTS, positions=st.sampled_from([1, 2, 15, 16, 17, 64, 256, 1024, 16384]))
def test_ids_are_as_many_as_asked_ordinary_and_the_same_again(digest, positions):
    ids = Identity(positions, ORDINARY).tokens(digest)
    assert ids.dtype == np.dtype("<u4")
    assert ids.shape == (positions,)
    assert not SPECIAL & set(ids.tolist())
    assert np.array_equal(ids, Identity(positions, ORDINARY).tokens(digest))


@settings(max_examples=200, deadline=None)
@given(digest=DIGESTS, positions=st.integers(1, 300))
def test_the_first_sixteen_are_all_different(digest, positions):
    for pool in (ORDINARY, ORDINARY[: 2 * DISTINCT]):
        head = Identity(positions, pool).tokens(digest)[:DISTINCT]
        assert len(set(head.tolist())) == len(head) == min(positions, DISTINCT)


def test_the_ids_of_release_one_never_change():
    """Artefacts carry their ids, but a digest covers them: other ids would be another cartridge."""
    assert Identity(20, np.arange(10, 640)).tokens("00" * 32).tolist() == [
        54, 330, 50, 318, 10, 59, 391, 615, 316, 194, 387, 119, 417, 618, 25, 207, 461, 203, 76, 185,
    ]  # fmt: skip


@pytest.mark.parametrize("count", [0, 1, 2 * DISTINCT - 1])
def test_a_vocabulary_with_too_few_ordinary_ids_is_refused(count):
    with pytest.raises(UnsupportedModel, match=f"{count} ordinary token ids are too few"):
        Identity(4, np.arange(count)).tokens("00" * 32)


def test_the_smallest_vocabulary_allowed_still_tells_cartridges_apart():
    pool = np.arange(100, 100 + 2 * DISTINCT)
    heads = {tuple(Identity(16, pool).tokens(f"{i:064x}").tolist()) for i in range(500)}
    assert len(heads) == 500
