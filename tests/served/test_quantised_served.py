"""Cartridges on servers whose KV cache is fp8: answers are right, and near to those of the same server's own prompt.

Not the same: a server that computes a document in fp8 computes each layer from what fp8 made of the one before, a cartridge
is quantised once. Of two prompts that a server computes itself the logprobs are equal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from processor import needs_avx512
from serving import (
    Client,
    Reply,
    build_sheet,
    difference,
    question_ids,
    register_trained,
    serving,
)
from waiting import until

from lmcache_cartridge.cli.recall import MODEL_DIR, load_sheet
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.serve.processes import SMALL
from lmcache_cartridge.settings import from_mapping

pytestmark = needs_avx512
NOISE = {"fp8_e4m3": 0.6, "fp8_e5m2": 0.9}
"""Twice what fp8 itself does to the logprobs of these prompts: computed in bfloat16 and in fp8 they differ by up to 0.34
and 0.59."""
INJECTED = 1024
"""Four chunks of the default size."""


class Served(NamedTuple):
    client: Client
    model: CausalModel
    dtype: str
    log: Path

    def right(self, *names: str) -> int:
        """Return how many of ward-a's first 12 questions are answered right behind cartridges; all of them injected."""
        count = 0
        for question in load_sheet("ward-a").questions[:12]:
            own = question_ids(self.model, question.text)
            reply = self.client.post({"prompt": own, "cartridges": names, "max_tokens": 6, "temperature": 0})
            body = reply.json()
            assert reply.status_code == 200, body
            assert body["usage"]["prompt_tokens_details"]["cached_tokens"] // INJECTED == len(names)
            count += body["choices"][0]["text"].strip().startswith(question.answer)
        return count

    def tried(self) -> list[tuple[str, str]]:
        """Return what the canary said of each cartridge."""
        return re.findall(r"(\S+)@1(?: behind itself)?: the engine answers (\w+)", self.log.read_text())


@pytest.fixture(scope="module", params=[("in-process", "fp8_e4m3"), ("multiprocess", "fp8_e5m2")], ids="-".join)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`ward-a`, `ward-b` by prefill, one in int8; `other`: by identity tokens with the KV of another sheet."""
    mode, dtype = request.param
    home = tmp_path_factory.mktemp("home")
    settings = from_mapping({"home": home, "cpu_bytes": 64 << 20, "lookup_timeout_s": 10, "plain_prompts": "all"})
    model, log = CausalModel(str(MODEL_DIR)), home / "log"
    built, kv = build_sheet(settings, model, "ward-a")
    build_sheet(settings, model, "ward-b", encoding="int8")
    register_trained(settings, "tailed", kv, built)
    register_trained(settings, "cut", kv[:, :, :INJECTED], built)
    _, kv = build_sheet(settings, model, "ward-c")
    Registry(settings.registry_path).remove("ward-c")
    register_trained(settings, "other", kv[:, :, :INJECTED], built)
    own = ["--kv-cache-dtype", dtype]
    if mode == "in-process":
        method = {"method": "draft_model", "model": str(MODEL_DIR), "num_speculative_tokens": 2}
        own += ["--speculative-config", json.dumps(method)]
    given = {"environment": SMALL | {"VLLM_SERVER_DEV_MODE": "1"}, "mode": mode, "l1_bytes": 64 << 20}
    with serving(settings, log, str(MODEL_DIR), *own, **given) as client:
        yield Served(client, model, dtype, log)


def test_answers_are_right_and_near_those_of_the_servers_own_fp8(served: Served) -> None:
    sheet, client, found, of_other = load_sheet("ward-a"), served.client, [], []
    document = served.model.encode(sheet.text, special=True)
    assert served.right("ward-a") == 12
    assert served.right("other") <= 4, "answers do not come from the cartridge"
    for question in sheet.questions[:6]:
        own = question_ids(served.model, question.text)
        reply, computed = client.ask(document + own), client.computed(document + own)
        assert (reply.cached_tokens, reply.text.strip()) == (INJECTED, question.answer)
        assert difference(client.computed(document + own), computed) == 0
        found.append(difference(reply, computed))
        of_other.append(difference(client.ask_with(["other"], own), computed))
    assert max(found) < NOISE[served.dtype]
    assert min(of_other) > NOISE[served.dtype]


def test_int8_and_rotated_cartridges_are_quantised_too(served: Served) -> None:
    """ward-b is int8; behind it ward-a's keys are rotated, and only then quantised."""
    assert served.right("ward-b", "ward-a") >= 11


def test_the_end_of_a_trained_cartridge_is_quantised_too(served: Served) -> None:
    """What is asked stands behind the last whole chunk; the control does not have it."""
    sheet, client = load_sheet("ward-a"), served.client
    document = served.model.encode(sheet.text, special=True)
    question = next(each for each in sheet.questions if each.text == "Q: what is the diagnosis of patient Vehe? A:")
    own = question_ids(served.model, question.text)
    computed, (whole, cut) = client.computed(document + own), (client.ask_with([n], own) for n in ("tailed", "cut"))
    assert (whole.cached_tokens, cut.cached_tokens) == (len(document), INJECTED)
    assert whole.text.strip() == question.answer != cut.text.strip()
    assert difference(whole, computed) < NOISE[served.dtype] < difference(cut, computed)


def test_the_engine_is_tried_with_a_bound_for_fp8_and_a_chunk_has_a_byte_for_each_number(served: Served) -> None:
    served.client.ask_with(["ward-a"], [5])
    served.client.ask_with(["ward-b", "ward-a"], [5])
    assert {name for name, _ in served.tried()} == {"ward-a", "ward-b"}
    assert {verdict for _, verdict in served.tried()} == {"as"}
    sizes = set(map(int, re.findall(r"chunk 256 tokens of (\d+) bytes", served.log.read_text())))
    assert sizes == {256 * served.model.fingerprint.token_bytes // 2}


@pytest.mark.parametrize("name", [None, "ward-a", "other"])
def test_what_lmcache_saves_of_fp8_comes_back_as_it_was_to_its_tenant(served: Served, name: str | None) -> None:
    client, before = served.client, 0 if name is None else INJECTED
    ids = served.model.encode(load_sheet("ward-c").text, special=name is None)[: INJECTED + 16]
    named = {} if name is None else {"cartridges": [name]}

    def ask(tenant: str) -> Reply:
        client.forget()
        return client.ask(ids, cache_salt=tenant, **named)

    def saved(tenant: str, cached: int) -> Reply:
        replies: list[Reply] = []
        until(lambda: replies.append(ask(tenant)) or replies[-1].cached_tokens == cached)
        return replies[-1]

    for tenant in (f"here {name}", f"there {name}"):
        first = ask(tenant)
        assert first.cached_tokens == before, "another tenant's"
        again = saved(tenant, before + len(ids) // 256 * 256)
        assert (again.text, difference(again, first)) == (first.text, 0)
