"""Canaries in multiprocess mode: every test of `test_canary_served`, on vLLM beside LMCache's server."""

from __future__ import annotations

import pytest
from test_canary_served import ARGS, CHUNK, CanaryTests, broken, served  # noqa: F401

from lmcache_cartridge.serve.launch import Launch, plan
from lmcache_cartridge.settings import Settings


@pytest.fixture(scope="module")
def faulty_launch():
    def launch(model: str, settings: Settings) -> Launch:
        launch = plan(
            model, settings, chunk_tokens=CHUNK, on_load_failure="fail", mode="multiprocess",
            vllm_args=ARGS,
        )  # fmt: skip
        faulty = [argument.replace("lmcache_cartridge.engine.l2", "faulty_l2") for argument in launch.lmcache]
        return launch._replace(lmcache=faulty)

    return launch


class TestCanary(CanaryTests):
    pass
