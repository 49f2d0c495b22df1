"""Trained cartridges of any p: what fills no chunk of LMCache's is injected too, and the server says what transformers says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import foreign
import pytest
import torch
from processor import noise
from recall.ward import VOCABULARY, Fact, ask, encode
from serving import Client, serving
from wards import MODEL, Ward, patients, prefill, sure, write_ward

from lmcache_cartridge.cli.main import main
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.settings import from_mapping

CHUNK = 256
NOISE = noise(0.2)
"""As in test_convert_served: what rounding makes of logprobs."""
SHORT = 13
"""Positions of CartridgeConnector's own recipe."""


class Served(NamedTuple):
    client: Client
    model: CausalModel
    files: Path
    first: Ward
    second: Ward
    kv: torch.Tensor
    """Of the first sheet."""

    def ask(self, fact: Fact, cartridges: Sequence[str], **fields: object) -> tuple[dict[int, float], int, str]:
        """Return the top 20 of the next token by id, how many prompt tokens were not computed, and the header."""
        body = {"prompt": encode(ask(fact, 0)), "cartridges": list(cartridges), "max_tokens": 1, "temperature": 0,
                "logprobs": 20, "return_tokens_as_token_ids": True} | fields  # fmt: skip
        reply = self.client.post(body)
        assert reply.status_code == 200, reply.text
        top = reply.json()["choices"][0]["logprobs"]["top_logprobs"][0]
        cached = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] or 0
        found = {int(token.removeprefix("token_id:")): value for token, value in top.items()}
        return found, cached, reply.headers["x-cartridges"]

    def right(self, facts: Sequence[Fact], cartridges: Sequence[str], cached: int) -> int:
        """Return how many facts are answered right, each with so many positions injected."""
        count = 0
        for fact in facts:
            found, injected, _ = self.ask(fact, cartridges)
            assert injected == cached
            count += max(found, key=found.get) == VOCABULARY[fact.value]
        return count

    def apart(self, fact: Fact, cartridge: str, kv: torch.Tensor) -> float:
        """Return by how much the server's likelihoods differ at most from those of transformers after `kv`."""
        expected = self.model.logits_after(kv, encode(ask(fact, 0)))[-1].log_softmax(-1)
        found, _, _ = self.ask(fact, [cartridge])
        return max(abs(value - float(expected[token])) for token, value in found.items())


@pytest.fixture(scope="module", params=["in-process", "multiprocess"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home, files = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("files")
    model = CausalModel(MODEL)
    first, second = (write_ward(model, patients(n, 4), f"tails-{n}", tokens=600) for n in (0, 1))
    kvs = []
    for seed, ward in enumerate((first, second)):
        kv = prefill(model, ward.ids).float()
        noise = torch.randn(kv.shape, generator=torch.Generator().manual_seed(seed))
        kvs.append((kv + 0.02 * kv.std() * noise).bfloat16())
        assert kvs[-1].shape[2] % CHUNK > 20, "there is a tail"
    first, second = (
        Ward(w.document, w.ids, sure(model, kv, w.facts)) for w, kv in zip((first, second), kvs, strict=True)
    )
    foreign.hazy(kvs[0], files / "first.pt")
    keys, values = foreign.htd(kvs[0][:, :, :SHORT])
    trainable = {f"trainable_{name}": [torch.nn.Parameter(t) for t in plane]
                 for name, plane in (("keys", keys), ("values", values))}  # fmt: skip
    assert all(t.requires_grad for plane in trainable.values() for t in plane)
    torch.save(trainable | {"frozen_keys": [], "frozen_values": []}, files / "short.pt")
    foreign.hazy(kvs[1], files / "second.pt")
    for name, more in (("second", []), ("small", ["--payload", "int8"])):
        path = files / f"{'second' if name == 'second' else 'first'}.pt"
        assert (
            main(["import", str(path), "--model", MODEL, "--id", name, "--home", str(home), "--format", "json", *more])
            == 0
        )
    settings = from_mapping(
        {"home": home, "cpu_bytes": 64 << 20, "roots": [files], "ready_timeout_s": 300, "lookup_timeout_s": 10}
    )
    with serving(settings, home / "log", MODEL, mode=request.param, l1_bytes=64 << 20) as client:
        yield Served(client, model, files, first, second, kvs[0])


@pytest.mark.parametrize("name", ["first.pt", "short.pt"])
def test_the_server_says_what_transformers_says_after_all_of_the_kv(served: Served, name: str) -> None:
    kv = served.kv if name == "first.pt" else served.kv[:, :, :SHORT]
    path, facts = str(served.files / name), [*served.first.facts[:3], *served.first.facts[-3:]]
    assert max(served.apart(fact, path, kv) for fact in facts) < NOISE
    without = kv[:, :, : kv.shape[2] - kv.shape[2] % CHUNK or 1]
    assert max(served.apart(fact, path, without) for fact in facts) > 5 * NOISE, "the end of it would not be missed"
    _, cached, header = served.ask(facts[0], [path])
    assert (cached, f"positions={kv.shape[2]};injected={kv.shape[2]}" in header) == (kv.shape[2], True)


@pytest.mark.parametrize("name", ["first.pt", "small"])
def test_answers_that_stand_in_the_tail_are_right(served: Served, name: str) -> None:
    whole = served.kv.shape[2] // CHUNK * CHUNK
    known = sure(served.model, served.kv[:, :, :whole], served.first.facts)
    last = [fact for fact in served.first.facts if fact not in known]
    assert len(last) >= 2
    path = str(served.files / name) if name.endswith(".pt") else name
    p = served.kv.shape[2]
    assert served.right(last, [path], p) == len(last)
    assert served.right(served.first.facts[:12], [path], p) == min(12, len(served.first.facts))


def test_chains_have_a_tail_in_their_middle_and_at_their_end(served: Served) -> None:
    chain, p = [str(served.files / "first.pt"), "second"], len(served.first.ids) + len(served.second.ids)
    for facts in (served.first.facts[:8], served.second.facts[-8:]):
        assert served.right(facts, chain, p) >= len(facts) - 1
        assert served.right(facts, chain[::-1], p) >= len(facts) - 1


def test_requests_at_once_and_again_share_what_vllm_has_and_each_gets_its_tail(served: Served) -> None:
    path, facts = str(served.files / "first.pt"), served.first.facts[:8]
    expected = [VOCABULARY[fact.value] for fact in facts]
    for salts in ([f"salt-{i}" for i in range(8)], ["one"] * 8, ["one"] * 8):
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda pair: served.ask(pair[0], [path], cache_salt=pair[1])[0],
                                  zip(facts, salts, strict=True)))  # fmt: skip
        assert [max(each, key=each.get) for each in found] == expected


def test_what_is_saved_behind_a_tail_is_found_again_and_right(served: Served) -> None:
    path, fact = str(served.files / "first.pt"), served.first.facts[0]
    own = [*served.model.encode(served.second.document.text, special=False), *encode(ask(fact, 0))]
    seen = []
    for salt in ("tenant", "other", "tenant"):
        found, cached, _ = served.ask(fact, [path], prompt=own, cache_salt=salt)
        seen.append((max(found, key=found.get), cached))
    assert [token for token, _ in seen] == [VOCABULARY[fact.value]] * 3
    assert seen[1][1] == served.kv.shape[2] < seen[2][1], "one tenant's is not another's"
