"""Canaries in multiprocess mode: every test of `test_canary_served`, on vLLM beside LMCache's server."""

from __future__ import annotations

import pytest
from test_canary_served import CanaryTests, broken, served  # noqa: F401


@pytest.fixture(scope="module")
def mode():
    return "multiprocess"


class TestCanary(CanaryTests):
    pass
