"""The request API in multiprocess mode: every test of `test_api`, on vLLM beside LMCache's server."""

from __future__ import annotations

import pytest
import test_api
from again import cases_of

globals().update(cases_of(test_api, without=("mode",)))


@pytest.fixture(scope="module")
def mode() -> str:
    return "multiprocess"
