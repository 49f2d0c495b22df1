"""vLLM's answers after a chain are those of transformers after the same KV, for models that treat positions their own way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import FAMILIES, MAX_MODEL_LEN, ROTATING, chain, make_model, write
from serving import Reply, difference, register_trained, serving

from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.serve.processes import SMALL
from lmcache_cartridge.settings import Settings, from_mapping

NOISE = 1e-3
"""Nats, in float32. Measured: up to 1.2e-4; of a chain of SmolLM3 with every layer rotated: 1.8."""
DOCUMENTS = {"a": range(5, 205), "b": range(240, 360)}
"""320 tokens, five chunks of the engine, of which the fourth holds some of both."""
QUESTION = list(range(400, 410))


def _ask(
    home: Path, model: Path, chains: list[list[str]], wrong_from: int, question: list[int] = QUESTION,
    script: str = "chains_offline.py",
) -> list[tuple[torch.Tensor, int]]:  # fmt: skip
    """Return of each chain the log probability of every token after the question, and how many were not computed.

    The last is of the document `a` and the question, computed by the engine.
    """
    script = Path(__file__).parents[1] / script
    asked = json.dumps([*([names, question] for names in chains), [[], [*DOCUMENTS["a"], *question]]])
    done = subprocess.run(
        [sys.executable, script, home, model, asked, str(wrong_from)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[[")))
    return [(torch.tensor(logprobs), cached) for logprobs, cached in answers]


@pytest.mark.parametrize(
    "name",
    ["smollm3", "gptj", "falcon multi-query", "gemma3", "gpt-oss", "phi3 long"],
)
def test_a_chain_is_answered_as_transformers_answers_after_the_same_kv(tmp_path: Path, name: str) -> None:
    """One model of each kind of layer, cache and rotation; `engine/test_families` has the others against transformers."""
    model = CausalModel(str(make_model(tmp_path / "model", FAMILIES[name]())), max_model_len=MAX_MODEL_LEN)
    settings = Settings(home=tmp_path / "home")
    cartridges = {}
    for document, ids in DOCUMENTS.items():
        root = settings.cartridges_dir / document
        cartridges[document] = write(model, root, list(ids))
        Registry(settings.registry_path).register(root)
    chains = [["a"], ["a", "b"], ["b", "a"]]
    *answers, (dense, computed) = _ask(settings.home, tmp_path / "model", chains, 2)
    apart = []
    for names, (found, cached) in zip(chains, answers, strict=True):
        expected = model.logits_after(chain([cartridges[n] for n in names]), QUESTION)[-1].log_softmax(-1)
        apart.append(float((found - expected).abs().max()))
        assert cached == (192 if len(names) == 1 else 320)
    plain = model.logits([*DOCUMENTS["a"], *QUESTION], 1)[-1].log_softmax(-1)
    noise, from_dense = float((dense - plain).abs().max()), float((answers[0][0] - dense).abs().max())
    print(name, apart, "cartridge and dense:", from_dense, "dense and transformers:", noise)
    assert computed == 0
    assert from_dense < NOISE
    assert max(apart[:2]) < NOISE
    alike = len(ROTATING[name]) == model.fingerprint.layers and len(model.fingerprint.rope) == 1
    if alike and model.fingerprint.planes == 2:
        assert apart[2] < NOISE
    else:
        assert apart[2] > 100 * NOISE, "keys were rotated wrongly, and nobody could tell"


def test_a_step_that_is_replayed_as_one_cuda_graph_loads_before_it(tmp_path: Path) -> None:
    """As vLLM on a GPU has it where a single token of the prompt is not in a cartridge."""
    model = CausalModel(str(make_model(tmp_path / "model", FAMILIES["smollm3"]())), max_model_len=MAX_MODEL_LEN)
    settings = Settings(home=tmp_path / "home")
    cartridges = [write(model, settings.cartridges_dir / name, list(ids)) for name, ids in DOCUMENTS.items()]
    for name in DOCUMENTS:
        Registry(settings.registry_path).register(settings.cartridges_dir / name)
    question, asked = [400], [["a"], ["a", "b"]]
    *answers, _ = _ask(settings.home, tmp_path / "model", asked, 1000, question, "replayed_offline.py")
    assert [cached for _, cached in answers] == [192, 320], "of the chain all but the question"
    for names, (found, _) in zip(asked, answers, strict=True):
        expected = model.logits_after(chain(cartridges[: len(names)]), question)[-1].log_softmax(-1)
        assert float((found - expected).abs().max()) < NOISE


def _apart(reply: Reply, logits: torch.Tensor) -> float:
    """Return how far a reply's first logprobs are from those of transformers."""
    expected = logits[-1].log_softmax(-1)
    return max(abs(found - float(expected[int(token[9:])])) for token, found in reply.logprobs[0].items())


@pytest.mark.parametrize(("name", "block"), [("gemma3", 32), ("deepseek-v3", 16)])
def test_layers_of_two_kinds_and_latent_vectors_are_served_in_multiprocess_mode(
    tmp_path: Path, name: str, block: int
) -> None:
    """A cartridge, a chain, a trained one, and what LMCache saves beside. Gemma 3's window is shorter than a chunk."""
    directory = make_model(tmp_path / "model", FAMILIES[name]())
    model = CausalModel(str(directory))
    settings = from_mapping({"home": tmp_path / "home", "cpu_bytes": 64 << 20, "lookup_timeout_s": 20})
    registry, cartridges = Registry(settings.registry_path), {}
    for document, ids in DOCUMENTS.items():
        cartridges[document] = write(model, settings.cartridges_dir / document, list(ids))
        registry.register(settings.cartridges_dir / document)
    first, kv = list(DOCUMENTS["a"])[:192], chain([cartridges["a"]])[:, :, :192]
    register_trained(settings, "trained", kv, cartridges["a"].manifest)
    options = ["--dtype", "float32", "--max-model-len", "1024", "--block-size", str(block),
               "--kv-cache-memory-bytes", str(32 << 20),
               # with AMX vLLM would take a backend for them that has no float32
               *(["--attention-backend", "CPU_MLA"] if "deepseek" in name else [])]  # fmt: skip
    given = {"environment": SMALL | {"VLLM_SERVER_DEV_MODE": "1"}, "chunk_tokens": 64, "mode": "multiprocess"}
    with serving(settings, tmp_path / "log", str(directory), *options, **given, l1_bytes=128 << 20) as client:

        def ask(ids: list[int], **fields: object) -> Reply:
            return client.ask(ids, tokens=1, return_tokens_as_token_ids=True, **fields)

        for name, ids in (("a", list(DOCUMENTS["a"])), ("trained", first)):
            reply, dense = ask(QUESTION, cartridges=[name]), ask([*ids, *QUESTION], cartridges=False)
            assert (reply.cached_tokens, dense.cached_tokens) == (192, 0)
            assert difference(reply, dense) < NOISE
            assert _apart(reply, model.logits([*ids, *QUESTION], 1)) < NOISE
        reply = ask(QUESTION, cartridges=["a", "b"])
        assert reply.cached_tokens == 320
        assert _apart(reply, model.logits_after(chain([cartridges["a"], cartridges["b"]]), QUESTION)) < NOISE
        prompt = [*range(500, 640), *DOCUMENTS["b"], *QUESTION]
        dense = ask(prompt, cartridges=False)
        for cached in (0, 256):
            client.forget()
            reply = ask(prompt, cache_salt="one tenant's")
            assert reply.cached_tokens == cached
            assert difference(reply, dense) < NOISE
