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


@pytest.mark.parametrize(
    ("chunk_tokens", "replaced", "lmcache", "reason"),
    [
        (64, (), [], "must be a multiple of 128"),
        (256, ("/lmcache-cartridge-", "/nobody-"), [], "no cartridge adapter listens"),
        (256, ("kv_both", "kv_producer"), [], "kv_role is kv_producer"),
        (256, (), ["--hash-algorithm", "sha256_cbor"], "names chunks by another algorithm than blake3"),
    ],
    ids=["chunks of half a block", "no adapter", "an engine that loads nothing", "another hash"],
)
def test_a_server_that_could_not_serve_cartridges_does_not_start_and_says_why(
    settings: Settings,  # noqa: F811
    tmp_path: Path,
    chunk_tokens: int,
    replaced: tuple[str, ...],
    lmcache: list[str],
    reason: str,
) -> None:
    launch = plan(str(MODEL_DIR), settings, chunk_tokens=chunk_tokens, vllm_args=SERVER_ARGS, mode="multiprocess")
    command = [a.replace(*replaced) if replaced else a for a in launch.command]
    assert (command != launch.command) == bool(replaced)
    launch = launch._replace(command=command, lmcache=[*launch.lmcache, *lmcache])
    with pytest.raises(UnsupportedEngine), ServerProcess(launch, tmp_path / "log"):
        pass
    assert reason in (tmp_path / "log").read_text(errors="replace")
