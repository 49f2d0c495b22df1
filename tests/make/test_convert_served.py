"""Imported and int8 cartridges on a real vLLM server: tokens are as likely as transformers says after the same KV."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import foreign
import httpx
import numpy as np
import pytest
import torch
from processor import noise
from recall.ward import Fact, ask, encode
from safetensors import safe_open
from serving import SERVER_ARGS
from transformers import DynamicCache
from wards import MODEL, Ward, patients, prefill, sure, write_ward

from lmcache_cartridge import from_cache
from lmcache_cartridge.artifact import reading
from lmcache_cartridge.artifact.int8 import record
from lmcache_cartridge.artifact.writing import ArtifactWriter
from lmcache_cartridge.cli.main import main
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.make.payload import read_kv
from lmcache_cartridge.serve.launch import plan
from lmcache_cartridge.serve.processes import ServerProcess
from lmcache_cartridge.settings import Settings, from_mapping

CHUNK = 64
P, KEPT = 512, 256
NOISE = noise(0.2)
"""Largest logprob difference taken for rounding; measured: 0.063 whatever the format, 10 and more for damaged KV."""
QUESTIONS = 12

# Of each other format test_convert shows that it gives the same bits.
MAKERS: dict[str, Callable[[torch.Tensor, Path], Path]] = {
    "peft": lambda kv, p: foreign.peft_adapter(kv, p),
    "hazy": lambda kv, p: foreign.hazy(kv, p.with_suffix(".pt"), prefix="fixed", frozen=1),
    "rounded": lambda kv, p: foreign.peft_adapter(kv.float() * (1 + 2**-12), p),
    "swapped": lambda kv, p: foreign.peft_adapter(kv.flip(0), p),
    "heads": lambda kv, p: foreign.hazy(kv.flip(3), p.with_suffix(".pt")),
    "values-late": lambda kv, p: foreign.hazy(torch.stack([kv[0], kv[1].roll(1, 1)]), p.with_suffix(".pt")),
}
DAMAGED = ("swapped", "heads", "values-late")
ROUNDED_NOISE = 0.4
"""Largest logprob difference that int8 may make between two cartridges of the same KV; measured: 0.13 for a trained one,
0.03 for a prefilled one, 0.16 for a chain of both, and 10 or none of the same tokens for wrong steps."""
WRONG_STEPS: dict[str, Callable[[np.ndarray], object]] = {
    "no-middle": lambda heads: heads["key_middle"].fill(0),
    "no-key-steps": lambda heads: heads["key_step"].fill(0),
    "steps-of-next-layer": lambda heads: heads["key_step"].__setitem__(..., np.roll(heads["key_step"], 1, 1)),
    "no-value-steps": lambda heads: heads["value_step"].fill(0),
    "heads-swapped": lambda heads: heads.__setitem__(..., heads[::-1].copy()),
}
"""Damage to the steps of int8, checksums made to fit."""


class Pressed(NamedTuple):
    """What kvpress's KeyDiffPress kept of a sheet, a quarter, as `benchmarks/press.py --asked 12` wrote it."""

    cache: DynamicCache
    tokens: int
    """Of the sheet."""
    asked: list[tuple[list[int], dict[str, float]]]
    """Questions, and the top 20 log probabilities behind the cache, in float32 by transformers in kvpress's environment."""

    @classmethod
    def read(cls) -> Pressed:
        with safe_open(Path(__file__).parents[1] / "data" / "pressed.safetensors", "pt") as kept:
            about, layers = kept.metadata(), range(len(kept.keys()) // 2)
            cache = DynamicCache([(kept.get_tensor(f"keys.{n}"), kept.get_tensor(f"values.{n}")) for n in layers])
        return cls(cache, int(about["document_tokens"]), json.loads(about["asked"]))


class Served(NamedTuple):
    http: httpx.Client
    model: CausalModel
    ward: Ward
    kv: torch.Tensor
    """What every checkpoint holds but the damaged ones: P positions of a ward sheet, and small changes of training."""
    settings: Settings

    def logprobs(self, fact: Fact, *names: str) -> tuple[dict[int, float], int]:
        """Return the top 20 of the next token by id, and how many prompt tokens came from a cache."""
        return self.after(encode(ask(fact, 0)), *names)

    def after(self, prompt: list[int], *names: str) -> tuple[dict[int, float], int]:
        """Return the same after a prompt of these ids."""
        body = {"model": MODEL, "prompt": prompt, "cartridges": names, "max_tokens": 1, "temperature": 0,
                "logprobs": 20, "return_tokens_as_token_ids": True}  # fmt: skip
        reply = self.http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        top = reply.json()["choices"][0]["logprobs"]["top_logprobs"][0]
        cached = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return {int(token.removeprefix("token_id:")): value for token, value in top.items()}, cached


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    model = CausalModel(MODEL)
    ward = write_ward(model, patients(0, 4), "imported")
    kv = prefill(model, ward.ids[:P]).float()
    kv = (kv + 0.02 * kv.std() * torch.randn(kv.shape, generator=torch.Generator().manual_seed(1))).bfloat16()
    ward = Ward(ward.document, ward.ids[:P], sure(model, kv, ward.facts))
    for name, make in MAKERS.items():
        path = make(kv, home / name)
        assert main(["import", str(path), "--model", MODEL, "--id", name, "--home", str(home), "--format", "json",
                         "--chunk-size", str(CHUNK), *(["--round"] if name == "rounded" else [])]) == 0  # fmt: skip
    sheet = home / "sheet.txt"
    sheet.write_text(ward.document.text)
    common = ("--model", MODEL, "--home", str(home), "--format", "json", "--chunk-size", str(CHUNK))
    for name, *command in (
        ("int8", "import", str(home / "peft")), ("sheet", "build", "--document", str(sheet)),
        ("sheet-int8", "build", "--document", str(sheet)),
    ):  # fmt: skip
        assert main([*command, *common, "--id", name, *(["--payload", "int8"] if "int8" in name else [])]) == 0
    settings = from_mapping({"home": home, "cpu_bytes": 64 << 20})
    for name, moved in (("pressed", P), ("unmoved", None)):
        from_cache(model, foreign.pressed(model, ward.ids, KEPT), home / name, cartridge_id=name, version=1,
                   next_position=moved, chunk_tokens=CHUNK)  # fmt: skip
        Registry(settings.registry_path).register(home / name)
    pressed = Pressed.read()
    from_cache(model, pressed.cache, home / "kvpress", cartridge_id="kvpress", version=1,
               next_position=pressed.tokens, chunk_tokens=CHUNK)  # fmt: skip
    Registry(settings.registry_path).register(home / "kvpress")
    for name, damage in WRONG_STEPS.items():
        _damage_steps(settings, name, damage)
    launch = plan(MODEL, settings, chunk_tokens=CHUNK, on_load_failure="fail", vllm_args=SERVER_ARGS)
    with ServerProcess(launch, home / "server.log") as server, httpx.Client(base_url=server.url, timeout=120) as http:
        yield Served(http, model, ward, kv, settings)


def _damage_steps(settings: Settings, name: str, damage: Callable[[np.ndarray], object]) -> None:
    """Register the int8 cartridge again with records that were changed before their checksums were taken."""
    registry = Registry(settings.registry_path)
    root = Path(registry.find("int8").location)
    manifest = reading.load_manifest(root)
    ids = reading.load_token_ids(manifest, root)
    writer = ArtifactWriter(
        settings.home / name, cartridge_id=name, version=1, kind="trained", fingerprint=manifest.fingerprint,
        token_ids=ids, chunk_tokens=CHUNK, encoding="int8",
    )  # fmt: skip
    data = (root / reading.PAYLOAD).read_bytes()
    with writer:
        for chunk in range(manifest.chunks):
            start, end = reading.chunk_range(manifest, chunk, range(manifest.fingerprint.kv_heads))
            heads = np.frombuffer(bytearray(data[start:end]), record(manifest.fingerprint, CHUNK))
            damage(heads)
            writer.write(memoryview(heads.view("u1")))
        writer.commit(manifest.provenance)
    registry.register(settings.home / name)


def _stored(served: Served, name: str) -> torch.Tensor:
    root = Path(Registry(served.settings.registry_path).find(name).location)
    return read_kv(reading.load_manifest(root), root)


def _worst(served: Served, first: tuple[str, ...], second: tuple[str, ...]) -> float:
    """Return by how much the likelihoods of tokens differ at most after two chains, over some questions."""
    worst = 0.0
    for fact in served.ward.facts[:QUESTIONS]:
        (one, cached), (other, others_cached) = served.logprobs(fact, *first), served.logprobs(fact, *second)
        assert cached == others_cached >= P * len(first), "all of the KV came from the cartridges"
        top = sorted(one, key=one.get)[-5:]
        worst = max(worst, *(abs(one[token] - other[token]) if token in other else float("inf") for token in top))
    return worst


def _apart(found: dict[int, float], expected: torch.Tensor) -> float:
    """Return the largest difference between a top 20 and logits of the same position."""
    logprobs = expected.log_softmax(-1)
    return max(abs(value - float(logprobs[token])) for token, value in found.items())


def test_a_compressed_cache_is_answered_from_as_by_transformers(served):
    """Half of the positions, others of each head; where keys were not moved the answers are others."""
    apart = {"pressed": 0.0, "unmoved": 0.0}
    for fact in served.ward.facts[:QUESTIONS]:
        cache = foreign.pressed(served.model, served.ward.ids, KEPT)
        expected = foreign.logits_behind(served.model, cache, encode(ask(fact, 0)), P)[-1]
        for name in apart:
            found, cached = served.logprobs(fact, name)
            assert cached == KEPT
            apart[name] = max(apart[name], _apart(found, expected))
    print(apart)
    assert apart["pressed"] <= NOISE < 1 < apart["unmoved"]


def test_what_kvpress_kept_answers_as_with_kvpress(served):
    pressed, worst = Pressed.read(), 0.0
    for prompt, expected in pressed.asked:
        found, cached = served.after(prompt, "kvpress")
        assert cached == pressed.cache.get_seq_length() < pressed.tokens / 3.9
        top = sorted(expected, key=expected.__getitem__)[-5:]
        worst = max(worst, *(abs(expected[token] - found.get(int(token), -99.0)) for token in top))
        assert max(found, key=found.get) == int(top[-1])
    print(f"{len(pressed.asked)} questions, {worst:.3f}")
    assert len(pressed.asked) == QUESTIONS and worst < NOISE


@pytest.mark.parametrize("name", sorted(set(MAKERS) - set(DAMAGED)))
def test_the_server_says_what_transformers_says_after_the_same_kv(served, name):
    assert len(served.ward.facts) >= QUESTIONS
    worst = 0.0
    for fact in served.ward.facts[:QUESTIONS]:
        found, cached = served.logprobs(fact, name)
        assert cached >= P, "all of the KV came from the cartridge"
        expected = served.model.logits_after(served.kv, encode(ask(fact, 0)))[-1]
        worst = max(worst, _apart(found, expected))
        assert max(found, key=found.get) == int(expected.argmax())
    print(f"{name}: {worst:.3f}")
    assert worst < NOISE


@pytest.mark.parametrize("name", DAMAGED)
def test_kv_in_a_wrong_place_would_be_noticed(served, name):
    facts = served.ward.facts[:QUESTIONS]
    expected = [served.model.logits_after(served.kv, encode(ask(fact, 0)))[-1] for fact in facts]
    apart = [_apart(served.logprobs(fact, name)[0], logits) for fact, logits in zip(facts, expected, strict=True)]
    print(f"{name}: {max(apart):.3f}, at least {min(apart):.3f}")
    assert max(apart) > 10 * NOISE


@pytest.mark.parametrize(
    ("plain", "small"),
    [(("peft",), ("int8",)), (("sheet",), ("sheet-int8",)), (("peft", "sheet"), ("int8", "sheet-int8"))],
    ids=["trained", "prefill", "chain, rotated"],
)
def test_int8_makes_little_difference_to_what_is_served(served, plain, small):
    worst = _worst(served, plain, small)
    print(f"{' '.join(small)}: {worst:.3f}")
    assert 0 < worst < ROUNDED_NOISE


@pytest.mark.parametrize("name", ["int8", "sheet-int8"])
def test_the_server_says_of_int8_what_transformers_says_after_what_it_is_decoded_to(served, name):
    kv = _stored(served, name)
    for fact in served.ward.facts[:QUESTIONS]:
        found, _ = served.logprobs(fact, name)
        assert _apart(found, served.model.logits_after(kv, encode(ask(fact, 0)))[-1]) < NOISE


@pytest.mark.parametrize("name", WRONG_STEPS)
def test_wrong_steps_would_be_noticed(served, name):
    worst = _worst(served, ("peft",), (name,))
    print(f"{name}: {worst:.3f}")
    assert worst > 5 * ROUNDED_NOISE
