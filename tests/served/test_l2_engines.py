"""Other engines in multiprocess mode: with tensor parallelism, and those that must not start."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving import SERVER_ARGS, assert_injected_to_its_end, serving
from test_engines import (  # noqa: F401 - two are fixtures
    PARALLEL,
    ask_for_what_was_saved,
    assert_documents_are_injected,
    model,
    settings,
)

from lmcache_cartridge.cli.recall import MODEL_DIR
from lmcache_cartridge.errors import UnsupportedEngine
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.serve.launch import plan
from lmcache_cartridge.serve.processes import ServerProcess
from lmcache_cartridge.settings import Settings


def test_each_tensor_parallel_rank_gets_its_own_heads(
    settings: Settings,  # noqa: F811
    model: CausalModel,  # noqa: F811
    tmp_path: Path,
) -> None:
    """The model has two KV heads, so of four ranks each two hold the same head. Blocks are vLLM's own: 128 tokens."""
    patient = settings.model_copy(update={"lookup_timeout_s": 20.0})
    four = "--tensor-parallel-size", "4"
    given = {"environment": PARALLEL, "mode": "multiprocess"}
    with serving(patient, tmp_path / "log", str(MODEL_DIR), *four, **given) as client:
        # The engine is tried with it, and from then on plain prompts are answered from it.
        client.post({"prompt": [5], "cartridges": ["ward-a"], "max_tokens": 1}).raise_for_status()
        assert_injected_to_its_end(client, model)
        ask_for_what_was_saved(client, model)
        assert_documents_are_injected(client, model)


def test_an_engine_that_no_adapter_listens_to_does_not_start_and_says_why(
    settings: Settings,  # noqa: F811
    tmp_path: Path,
) -> None:
    launch = plan(str(MODEL_DIR), settings, vllm_args=SERVER_ARGS, mode="multiprocess")
    command = [argument.replace("/lmcache-cartridge-", "/nobody-") for argument in launch.command]
    assert command != launch.command
    with pytest.raises(UnsupportedEngine), ServerProcess(launch._replace(command=command), tmp_path / "log"):
        pass
    assert "no cartridge adapter listens" in (tmp_path / "log").read_text(errors="replace")
