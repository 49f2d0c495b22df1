"""Full and sliding layers with blocks of their own: vLLM's hybrid KV cache manager on, and LMCache's server moving the blocks."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor

import torch
from families import FAMILIES, make_model, write
from families import chain as joined
from serving import build_sheet, difference, register_trained, serving
from wards import Answer

from lmcache_cartridge.cli.recall import load_sheet
from lmcache_cartridge.engine.refusals import ONE_GROUP
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.serve.launch import Launch
from lmcache_cartridge.settings import from_mapping

NOISE = 1e-3
"""Nats, in float32."""
CHUNK = WINDOW = 64
DOCUMENTS = {"a": range(5, 205), "b": range(240, 360)}
QUESTION = list(range(400, 410))
TRANSFER = {"kv_connector_extra_config": {"lmcache.mp.mp_transfer_mode": "lmcache_driven"}}
HYBRID = ["--dtype", "float32", "--max-model-len", "2048", "--block-size", "32", f"--no-{ONE_GROUP}",
          "--kv-transfer-config", json.dumps(TRANSFER), "--kv-cache-memory-bytes", str(32 << 20)]  # fmt: skip


def _apart(reply: Answer, logits: torch.Tensor) -> float:
    """Return how far a reply's first logprobs are from those of transformers."""
    expected = logits[-1].log_softmax(-1)
    return max(abs(found - float(expected[int(token[9:])])) for token, found in reply.logprobs[0].items())


def test_layers_with_blocks_of_their_own_answer_as_transformers_does_after_the_same_kv(tmp_path):
    """A cartridge, a chain, one with a canary, and many at once; a trained one is refused."""
    config = FAMILIES["gemma3"]()
    config.sliding_window = WINDOW
    directory = make_model(tmp_path / "model", config)
    model = CausalModel(str(directory))
    settings = from_mapping({"home": tmp_path / "home", "cpu_bytes": 64 << 20, "lookup_timeout_s": 20})
    registry, cartridges = Registry(settings.registry_path), {}
    for document, ids in DOCUMENTS.items():
        cartridges[document] = write(model, settings.cartridges_dir / document, list(ids))
        registry.register(settings.cartridges_dir / document)
    build_sheet(settings, model, "ward-a")
    sheet = model.encode(load_sheet("ward-a").text, special=True)
    register_trained(settings, "trained", joined([cartridges["a"]])[:, :, :192], cartridges["a"].manifest)

    def driven(launch: Launch) -> Launch:
        launch.lmcache[launch.lmcache.index("engine_driven")] = "lmcache_driven"
        return launch

    log, planned = tmp_path / "log", {"saves": False, "chunk_tokens": CHUNK, "l1_bytes": 128 << 20}
    with serving(settings, log, str(directory), *HYBRID, change=driven, mode="multiprocess", **planned) as client:
        assert len(re.findall("KernelGroupInfo.*sw_size_tokens=64", log.read_text())) == 3, "sliding layers"
        assert len(re.findall("KernelGroupInfo.*sw_size_tokens=-1", log.read_text())) == 1, "a full one"

        def ask(ids: list[int], **fields: object) -> Answer:
            return client.ask(ids, return_tokens_as_token_ids=True, **fields)

        def check(question: list[int], salt: str) -> tuple[int, float, float]:
            reply = ask(question, cartridges=["a"], cache_salt=salt)
            dense = ask([*DOCUMENTS["a"], *question], cartridges=False)
            assert dense.cached_tokens == 0
            expected = model.logits([*DOCUMENTS["a"], *question], 1)
            return reply.cached_tokens, difference(reply, dense), _apart(reply, expected)

        questions = [[*range(400 + n, 410 + n)] for n in range(6)]
        with ThreadPoolExecutor(len(questions)) as pool:
            at_once = list(pool.map(check, questions, ["mine", "yours"] * 3))
        again = check(QUESTION, "mine")  # of which vLLM has the blocks
        assert [cached for cached, *_ in (*at_once, again)] == [192] * 7
        assert max(apart for _, *both in (*at_once, again) for apart in both) < NOISE
        reply = ask(QUESTION, cartridges=["a", "b"])
        assert reply.cached_tokens == 320
        expected = model.logits_after(joined([cartridges["a"], cartridges["b"]]), QUESTION)
        assert _apart(reply, expected) < NOISE
        for reply in (ask(QUESTION, cartridges=["ward-a"]), ask([*sheet, *QUESTION])):  # which has a canary
            assert reply.cached_tokens == len(sheet) // CHUNK * CHUNK
            assert difference(reply, ask([*sheet, *QUESTION], cartridges=False)) < NOISE
        refused = client.post(prompt=QUESTION, max_tokens=1, cartridges=["trained"])
        assert refused.status_code == 422 and f"--{ONE_GROUP}" in refused.text
