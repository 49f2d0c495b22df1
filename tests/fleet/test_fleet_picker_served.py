"""Cartridges that were placed past the router are found by it: Envoy asks the fleet's service, before real servers."""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

import httpx
import pytest
from picking import service
from recall.ward import Fact, ask, write_document
from routers import envoy
from serving import SERVER_ARGS
from waiting import until
from wards import MODEL, patients, prefill, register, sure, write_ward

from lmcache_cartridge.fleet.config import of_mapping
from lmcache_cartridge.fleet.service import Fleet
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.serve.launch import free_port, plan
from lmcache_cartridge.serve.processes import ServerProcess
from lmcache_cartridge.settings import from_mapping

COUNT = 6
"""Of each group."""
LETTERHEAD = 256
"""Tokens that documents of one group begin with."""


class Servers(NamedTuple):
    """Two servers over one home, each of which calls the model by a name of its own in its answers."""

    urls: list[str]
    pods: list[dict[str, Any]]
    facts: dict[str, list[Fact]]
    """What the model answers right, by cartridge."""

    def place(self, group: str) -> dict[str, str]:
        """Preload a group's cartridges at servers in turn, shuffled; return where each is."""
        names = random.Random(group).sample(sorted(self.facts), len(self.facts))
        placed = {name: f"s{n % 2}" for n, name in enumerate(name for name in names if name.startswith(group))}
        for name, server in placed.items():
            url = f"{self.urls[int(server[1:])]}/v1/cartridges/{name}/preload"
            until(lambda url=url: httpx.post(url, timeout=60).raise_for_status().status_code == 200)
        return placed

    def step(self) -> None:
        """Have each engine make a step: events go with one."""
        for url in self.urls:
            body = {"model": "m", "prompt": "x", "max_tokens": 1, "cartridges": ["step"]}
            httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    settings = from_mapping({"home": home, "cpu_bytes": 256 << 20, "required": True, "admin": True, "kv_events": True})
    model, facts = CausalModel(MODEL), {}
    for name in ["step"] + [f"picked-{number}" for number in range(COUNT)]:
        ward = write_ward(model, patients(len(facts) % 4, 4), name, tokens=300)
        register(model, settings, ward.ids, name=name)
        facts[name] = ward.facts
    head = write_ward(model, patients(0, 4), "letterhead", tokens=300).ids[:LETTERHEAD]
    for name in (f"shared-{number}" for number in range(COUNT)):
        document = write_document(random.Random(name), 700, patients(1, 4))
        ids = head + model.encode(document.text, special=False)
        register(model, settings, ids, name=name)
        facts[name] = sure(model, prefill(model, ids), document.facts)
    with ExitStack() as stack:
        pods, started = [], []
        for number in range(2):
            events, replay = free_port(), free_port()
            told = {
                "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{events}",
                "replay_endpoint": f"tcp://*:{replay}",
            }  # fmt: skip
            args = [
                *SERVER_ARGS,
                *f"--enable-scale-out --served-model-name s{number} m --kv-events-config".split(),
                json.dumps(told),
            ]
            started.append(ServerProcess(plan(MODEL, settings, vllm_args=args), home / f"{number}.log"))
            pods.append({
                "name": f"s{number}", "events": f"tcp://127.0.0.1:{events}", "replay": f"tcp://127.0.0.1:{replay}",
            })  # fmt: skip
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(stack.enter_context, started))
        urls = [server.url for server in started]
        yield Servers(urls, [pod | {"url": url} for pod, url in zip(pods, urls, strict=True)], facts)


@pytest.fixture
def routed(servers, tmp_path):
    """The addresses of a fleet's service and of the Envoy that asks it."""
    fleet = Fleet(of_mapping({"pods": servers.pods, "poll_s": 0.2}))
    with service(fleet) as running, envoy(servers.urls, tmp_path, picker=running.url) as url:
        yield running.url, url


def _answers(servers: Servers, url: str, group: str) -> dict[str, str]:
    """Ask for each cartridge of a group, shuffled, every other one as a stream; return who answered. All are right."""
    answered = {}
    names = [name for name in servers.facts if name.startswith(group)]
    with httpx.Client(base_url=url, timeout=120) as http:
        for number, name in enumerate(random.Random(7).sample(names, len(names))):
            fact = servers.facts[name][0]
            body = {"model": "m", "prompt": ask(fact, 0), "max_tokens": 1, "temperature": 0, "stream": number % 2 == 1}
            way = [{"cartridges": [name]}, {"cartridges": [{"id": f"{name}@1"}]}, {}][number % 3]
            reply = http.post("/v1/completions", json=body | way, headers={} if way else {"X-Cartridges": name})
            assert reply.headers["x-cartridges"].startswith(f"{name}@1;"), reply.text
            answered[name], text = re.search(r'"model": ?"(.*?)".*?"text": ?" *(.*?)"', reply.text).groups()
            assert text == fact.value
    return answered


def _scored(url: str, placed: dict[str, str]) -> int:
    """Return how many cartridges score highest where they are, by all of their whole blocks, two of 128 tokens."""
    right = 0
    for name, home in placed.items():
        told = httpx.post(f"{url}/score", json={"cartridges": [name], "model": "m"}, timeout=60)
        if told.status_code == 200:  # else it has not asked the servers yet
            scores = told.json()["receipt"]["scores"]
            best = max(scores, key=lambda server: scores[server]["total"])
            right += best == home and max(scores[home]["matched"].values(), default=0) == 256
    return right


def test_each_is_answered_by_the_server_that_it_was_placed_at(servers, routed):
    placed = servers.place("picked")

    def is_told() -> bool:
        servers.step()
        return _scored(routed[0], placed) == COUNT

    until(is_told, timeout_s=120)  # the tiers are looked at now and then, and what is seen goes with a step
    assert _answers(servers, routed[1], "picked") == placed


def test_cartridges_that_begin_alike_are_loaded_once_each(servers, routed):
    """Whoever has one of them has the first blocks of all."""
    answered: list[dict[str, str]] = []
    for _ in range(3):
        answered.append(_answers(servers, routed[1], "shared"))
        servers.step()
    told = httpx.post(f"{routed[0]}/score", json={"cartridges": ["shared-0"], "model": "m"}, timeout=60).json()
    shares = sorted(one["share"] for one in told["receipt"]["scores"].values())
    assert 0 < shares[0] < 0.5 <= shares[1], f"the control: both have its beginning, one has it: {shares}"
    held: dict[str, set[str]] = {}
    for number, server in enumerate(servers.urls):
        for entry in httpx.get(f"{server}/v1/cartridges", params={"active": "true"}, timeout=60).json()["data"]:
            held.setdefault(entry["id"], set()).add(f"s{number}")
    assert {name: held[name] for name in answered[0]} == {name: {server} for name, server in answered[0].items()}
    assert answered[1] == answered[2] == answered[0]
    assert set(answered[0].values()) == {"s0", "s1"}
