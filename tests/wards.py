"""Helpers of the request tests: invented ward sheets with the facts the model is sure of, cartridges of them, a client."""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import openai
import torch
from making import make_artifact
from recall.ward import NAMES, VOCABULARY, Document, Fact, ask, encode, write_document
from transformers import DynamicCache
from waiting import until

from lmcache_cartridge.artifact.identity import Identity
from lmcache_cartridge.artifact.manifest import Manifest
from lmcache_cartridge.cli.recall import MODEL_DIR
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.serve.launch import Launch
from lmcache_cartridge.serve.processes import ServerProcess
from lmcache_cartridge.settings import Settings

MODEL = str(MODEL_DIR)
SURE = 2.0
"""Logits by which a right answer must lead in transformers to be expected of vLLM, whose bfloat16 rounds otherwise."""


class Ward(NamedTuple):
    """A sheet and what the model knows after reading it."""

    document: Document
    ids: list[int]
    """With `<s>`."""
    facts: list[Fact]
    """Those answered right with certainty."""


def patients(share: int, of: int) -> tuple[str, ...]:
    """Return every `of`-th patient from number `share` on; shares have no patient in common."""
    return NAMES[share::of]


def write_ward(
    model: CausalModel, names: Sequence[str], seed: str, *, tokens: int = 1040, positions: int | None = None,
    facts: int | None = None,
) -> Ward:  # fmt: skip
    """Return a sheet of at least `tokens` tokens about some of `names`, cut to `positions`; of its `facts` first the known ones."""
    document = write_document(random.Random(seed), tokens, names)
    ids = model.encode(document.text, special=True)[:positions]
    return Ward(document, ids, sure(model, prefill(model, ids), document.facts[:facts]))


def prefill(model: CausalModel, ids: list[int]) -> torch.Tensor:
    """Return canonical KV `[2, L, T, H, D]` of some ids."""
    return torch.cat(list(model.prefill(ids, len(ids))), dim=2)


@torch.inference_mode()
def margins(model: CausalModel, kv: torch.Tensor, facts: Sequence[Fact]) -> torch.Tensor:
    """Return by how many logits the right answer to each fact leads the best wrong one after canonical KV."""
    questions = torch.tensor([[*encode(ask(fact, 0)), VOCABULARY[fact.value]] for fact in facts])
    keys, values = kv.transpose(2, 3)
    found = []
    for rows in questions.split(16):
        cache = DynamicCache()
        for layer in range(keys.shape[0]):
            shape = (len(rows), -1, -1, -1)
            cache.update(keys[layer : layer + 1].expand(shape), values[layer : layer + 1].expand(shape), layer)
        logits = model.model(rows[:, :-1], past_key_values=cache, logits_to_keep=1).logits[:, -1].float()
        right = logits.gather(1, rows[:, -1:])
        found.append((right - logits.scatter(1, rows[:, -1:], -torch.inf).max(1, keepdim=True).values)[:, 0])
    return torch.cat(found)


def sure(model: CausalModel, kv: torch.Tensor, facts: Sequence[Fact]) -> list[Fact]:
    """Return the facts that the model answers right with certainty after canonical KV."""
    return [fact for fact, margin in zip(facts, margins(model, kv, facts).tolist(), strict=True) if margin > SURE]


def save(
    model: CausalModel,
    root: Path,
    ids: Sequence[int],
    *,
    name: str,
    version: int = 1,
    kind: str = "prefill",
    document_ids: Sequence[int] | None = None,
    chunk_tokens: int = 256,
    **fingerprint: Any,
) -> Manifest:
    """Write the KV of `ids` as an artefact, a trained one under identity tokens; `fingerprint` changes its model."""
    token_ids = Identity(len(ids), model.ordinary_ids()) if kind == "trained" else ids
    return make_artifact(
        root, positions=len(ids), cartridge_id=name, version=version, kind=kind, chunk_tokens=chunk_tokens,
        fingerprint=msgspec.structs.replace(model.fingerprint, **fingerprint), token_ids=token_ids,
        kv=prefill(model, list(ids)), document_ids=document_ids,
    ).manifest  # fmt: skip


def register(model: CausalModel, settings: Settings, ids: Sequence[int], *, name: str, **options: Any) -> Manifest:
    """Write an artefact as `save` does and register it."""
    root = settings.cartridges_dir / name / str(options.get("version", 1))
    save(model, root, ids, name=name, **options)
    return Registry(settings.registry_path).register(root)


class Answer(NamedTuple):
    """What a request came back with."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    used: str | None = None
    """The header `X-Cartridges`, less what it says was injected and what vLLM had."""
    injected: int | None = None
    """What it says was injected, of all cartridges together."""
    had: int | None = None
    """What it says vLLM had in its prefix cache, of all cartridges together."""
    logprobs: list[dict[str, float]] = []
    """Those most likely at each generated position, by token, where they were asked for."""


class Asker:
    """The stock OpenAI client, and a plain one, on one server, asked greedily. Safe from any thread."""

    server: ServerProcess
    """Where `serving` started it, as `launch` says."""
    launch: Launch

    def __init__(self, url: str, key: str = "none", model: str = MODEL) -> None:
        self.url, self._model = url, model
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120)
        self.http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=120)

    def __enter__(self) -> Asker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.openai.close()
        self.http.close()

    def complete(self, prompt: str | list[int], cartridges: Any = None, tokens: int = 1, **extra: Any) -> Answer:
        """Complete a prompt."""
        # As `prompt` itself the client would look at each id: 300 ms for 16,384 of them, where the server parses in 2.
        raw = self.openai.completions.with_raw_response.create(
            model=self._model, prompt="", max_tokens=tokens, temperature=0,
            extra_body={"prompt": prompt} | _named(cartridges) | extra,
        )  # fmt: skip
        choice = raw.parse().choices[0]
        return _answer(raw, raw.parse().usage, choice.text, choice.logprobs)

    def chat(self, content: str, cartridges: Any = None, tokens: int = 1, **extra: Any) -> Answer:
        """Answer one message."""
        raw = self.openai.chat.completions.with_raw_response.create(
            model=self._model, messages=[{"role": "user", "content": content}], max_tokens=tokens, temperature=0,
            extra_body=_named(cartridges) | extra,
        )  # fmt: skip
        return _answer(raw, raw.parse().usage, raw.parse().choices[0].message.content)

    def stream(self, prompt: str, cartridges: Any = None, tokens: int = 4, **extra: Any) -> Answer:
        """Complete as a stream; return what it came to."""
        with self.openai.completions.with_streaming_response.create(
            model=self._model, prompt=prompt, max_tokens=tokens, temperature=0, stream=True,
            stream_options={"include_usage": True}, extra_body=_named(cartridges) | extra,
        ) as raw:  # fmt: skip
            events = list(raw.parse())
        return _answer(raw, events[-1].usage, "".join(event.choices[0].text for event in events if event.choices))

    def ask(self, ids: list[int], *names: Any, tokens: int = 4, **fields: Any) -> Answer:
        """Complete behind cartridges with the 20 most likely of each position, for a tenant that never asked before."""
        named = {"cartridges": list(names)} if names else {}
        given = {"logprobs": 20, "cache_salt": uuid.uuid4().hex} | named | fields
        return self.complete(ids, tokens=tokens, **given)

    def computed(self, ids: list[int], **fields: Any) -> Answer:
        """Return the answer to a prompt of which every token is computed, and nothing saved."""
        answer = self.ask(ids, cartridges=False, kv_transfer_params={"lmcache.skip_save": True}, **fields)
        assert answer.cached_tokens == 0
        return answer

    def right(self, fact: Fact, cartridges: Any, **extra: Any) -> bool:
        """Whether a fact is answered right."""
        return self.complete(ask(fact, 0), cartridges, **extra).text.strip() == fact.value

    def post(self, **body: Any) -> httpx.Response:
        """Return what comes of a completion, whatever that is; its tenant never asked before."""
        return self.http.post("/v1/completions", json={"model": self._model, "cache_salt": uuid.uuid4().hex} | body)

    def forget(self) -> None:
        """Have vLLM forget its own blocks, so that what is cached comes from LMCache."""
        until(lambda: self.http.post("/reset_prefix_cache").is_success)

    def state(self, name: str) -> dict[str, Any]:
        """Return what the server says of a cartridge."""
        return self.http.get(f"/v1/cartridges/{name}").json()

    def metric(self, name: str) -> float:
        """Return the sum of the samples whose name and labels begin so."""
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def content(fact: Fact) -> str:
    """Return the question for a fact as a chat message."""
    return ask(fact, 0).removeprefix("Q: ").removesuffix(" A:")


def _named(cartridges: Any) -> dict[str, Any]:
    return {} if cartridges is None else {"cartridges": [cartridges] if isinstance(cartridges, str) else cartridges}


def _answer(raw: Any, usage: Any, text: str, logprobs: Any = None) -> Answer:
    details = usage.prompt_tokens_details
    cached = details.cached_tokens or 0 if details else 0
    return Answer(text, usage.prompt_tokens, cached, *_used(raw), logprobs.top_logprobs if logprobs else [])


def _used(raw: Any) -> tuple[str | None, int | None, int | None]:
    header = raw.headers.get("x-cartridges")
    if header is None:
        return None, None, None
    injected, had = (re.findall(rf";{what}=(\d+)", header) for what in ("injected", "cached"))
    assert len(injected) == len(header.split(", ")), header
    return re.sub(r";(injected|cached)=\d+", "", header), sum(map(int, injected)), sum(map(int, had))
