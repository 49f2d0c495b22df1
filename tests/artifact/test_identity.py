"""Identity tokens: the same for the same digest, others for another, and nothing a server gives a meaning to."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_cartridge.artifact.identity import DISTINCT, Identity

ORDINARY = np.setdiff1d(np.arange(640), [0, 1, 2, 3, 50, 639])


@settings(max_examples=200, deadline=None)
@given(
    digest=st.binary(min_size=32, max_size=32).map(bytes.hex),
    positions=st.sampled_from([1, 2, 15, 16, 17, 256, 16384]),
    pool=st.sampled_from([ORDINARY, ORDINARY[: 2 * DISTINCT]]),
)
def test_ids_are_as_many_as_asked_ordinary_the_same_again_and_the_first_sixteen_all_different(digest, positions, pool):
    ids = Identity(positions, pool).tokens(digest)
    assert (ids.dtype, ids.shape) == (np.dtype("<u4"), (positions,))
    assert np.isin(ids, pool).all()
    assert np.array_equal(ids, Identity(positions, pool).tokens(digest))
    assert len(np.unique(ids[:DISTINCT])) == min(positions, DISTINCT)


def test_the_ids_of_release_one_never_change():
    """Artefacts carry their ids, but a digest covers them: other ids would be another cartridge."""
    assert Identity(20, np.arange(10, 640)).tokens("00" * 32).tolist() == [
        54, 330, 50, 318, 10, 59, 391, 615, 316, 194, 387, 119, 417, 618, 25, 207, 461, 203, 76, 185,
    ]  # fmt: skip
