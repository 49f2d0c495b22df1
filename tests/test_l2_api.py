"""The request API in multiprocess mode: every test of `test_api`, on vLLM beside LMCache's server."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import test_api
from test_api import *  # noqa: F403

from lmcache_cartridge.serve.launch import plan


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[test_api.Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_api, "plan", partial(plan, mode="multiprocess"))
        yield from test_api.served.__wrapped__(tmp_path_factory)
