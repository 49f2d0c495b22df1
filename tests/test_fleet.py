"""Cartridges behind the routers that people run: each meets its requests on one server, no loss on the way is silent."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from recall.ward import ask
from routers import Reply, Request, Stub, envoy, stubs, vllm_router
from serving import SERVER_ARGS
from waiting import until
from wards import MODEL, patients, register, write_ward

from lmcache_cartridge.fleet.affinity import affinity_key, session_headers
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.serve.launch import plan
from lmcache_cartridge.serve.processes import ServerProcess
from lmcache_cartridge.settings import from_mapping

# Which server a router chooses, before stubs.

Named = tuple[dict[str, Any], dict[str, str]]
"""A request's body and headers."""


def _ways(name: str) -> list[Named]:
    """Return requests for one cartridge, named in all the ways that Envoy is told of."""
    return [
        ({"model": "m"}, {"X-Cartridges": name}), ({"model": "m"}, {"X-Cartridges": f"{name}@3"}),
        ({"model": "m", "cartridges": [name]}, {}), ({"model": "m", "cartridges": [{"id": f"{name}@2"}]}, {}),
        ({"model": "m", "cartridges": [name]}, {"X-Cartridges": f"{name}@12"}), ({"model": f"m:{name}"}, {}),
        ({"kv_transfer_params": {"cartridge_id": name}, "model": "m", "prompt": '"cartridges": ["other"]'}, {}),
        ({"model": f"org/m:7b:{name}@4"}, {}), ({"model": "m", "cartridges": [name]}, {"x-affinity": "a lie"}),
    ]  # fmt: skip


def _chosen(http: httpx.Client, requests: list[Named], path: str = "/v1/completions") -> dict[str, set[str]]:
    """Send shuffled requests; return by affinity key which stubs answered."""
    chosen: dict[str, set[str]] = {}
    for body, headers in random.Random(7).sample(requests, len(requests)):
        reply = http.post(path, json=body, headers=headers)
        assert reply.status_code == 200, reply.text
        header = [value for name, value in headers.items() if name == "X-Cartridges"]
        chosen.setdefault(affinity_key(body, header), set()).add(reply.json()["stub"])
    return chosen


@pytest.fixture(scope="module")
def three() -> Iterator[list[Stub]]:
    with stubs(3) as running:
        yield running


def test_envoy_sends_all_ways_of_naming_a_cartridge_to_one_server(
    three: list[Stub], tmp_path_factory: pytest.TempPathFactory
) -> None:
    names = [f"doc-{number}" for number in range(60)] + ["a,b", "b,a", "s3://bucket/k"]
    urls = [stub.url for stub in three]
    with envoy(urls, tmp_path_factory.mktemp("envoy")) as url, httpx.Client(base_url=url, timeout=60) as http:
        chains = [({"model": "m", "cartridges": ["a", {"id": "b@2"}]}, {}), ({"model": "m:b,a@1"}, {})]
        headers = [({"model": "m"}, {"X-Cartridges": "a@9 ,  b"}), ({"model": "m"}, {"X-Cartridges": "b@1,a"})]
        requests = [way for name in names if "," not in name for way in _ways(name)] + chains + headers
        chosen = _chosen(http, requests)
        assert set(chosen) == set(names)
        assert all(len(servers) == 1 for servers in chosen.values()), chosen
        shares = [sum(servers == {stub.name} for servers in chosen.values()) for stub in three]
        assert min(shares) >= 5, f"one server has hardly any of {len(names)}: {shares}"
        plain = _chosen(http, [({"model": "m", "prompt": "x"}, {})] * 40)
        assert plain == {"": {"0", "1", "2"}}, "requests without a cartridge go anywhere"
    with (
        envoy(urls, tmp_path_factory.mktemp("control"), lb_policy="ROUND_ROBIN") as url,
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        spread = _chosen(http, [way for name in names[:10] for way in _ways(name)])
        assert all(len(servers) > 1 for servers in spread.values()), "the control: without the hash they scatter"


def test_a_hot_cartridge_spills_to_the_next_server_and_no_further_and_nothing_else_moves(tmp_path: Path) -> None:
    """The stubs keep answers back, so that what is in flight adds up."""
    go_on, holding = threading.Event(), threading.Semaphore(0)

    def answer(request: Request) -> Reply:
        if request.headers.get("x-hold"):
            holding.release()
            go_on.wait(60)
        return Reply()

    names = [f"doc-{number}" for number in range(12)]
    with (
        stubs(4, answer) as servers,
        envoy([stub.url for stub in servers], tmp_path) as url,
        httpx.Client(base_url=url, timeout=60) as http,
        ThreadPoolExecutor(24) as pool,
    ):

        def ask_for(name: str, **headers: str) -> str:
            reply = http.post("/v1/completions", json={"model": "m"}, headers={"X-Cartridges": name} | headers)
            return str(reply.json()["stub"])

        homes = {name: ask_for(name) for name in names}
        held = []
        for _ in range(24):  # one after the other, each of them in flight before the next
            held.append(pool.submit(ask_for, "hot", **{"x-hold": "1"}))
            assert holding.acquire(timeout=60)
        go_on.set()
        order = [future.result(timeout=60) for future in held]
        assert order[0] == order[1] == order[2] != order[3], "a quiet fleet spills early"
        shares = Counter(order)
        # Of 24 a server may have 1.5 times 6, and the one that comes last one more.
        assert max(shares.values()) <= 10
        assert len(shares) == 3, f"three servers are needed, and no fourth: {shares}"
        assert {name: ask_for(name) for name in names} == homes
        assert len({ask_for("hot") for _ in range(8)}) == 1, "alone it fits on its own server"


def test_a_server_that_dies_loses_its_cartridges_to_others_and_gets_them_back(tmp_path: Path) -> None:
    names = [f"doc-{number}" for number in range(30)]
    with (
        ExitStack() as stack,
        stubs(2) as others,
        envoy([*(stub.url for stub in others), (dead := stack.enter_context(Stub("2"))).url], tmp_path) as url,
        httpx.Client(base_url=url, timeout=60) as http,
    ):

        def answered() -> dict[str, str]:
            replies = {
                name: http.post("/v1/completions", json={"model": "m"}, headers={"X-Cartridges": name})
                for name in names
            }
            assert {reply.status_code for reply in replies.values()} == {200}
            return {name: reply.json()["stub"] for name, reply in replies.items()}

        homes = answered()
        dead.close()
        after = answered()  # at once: the router may not know yet, and tries the next server
        assert "2" not in after.values()
        assert all(after[name] == home for name, home in homes.items() if home != "2"), "others moved too"
        stack.enter_context(Stub("2", port=dead.port))
        until(lambda: answered() == homes)


def test_vllm_router_sends_a_session_to_one_server(three: list[Stub], tmp_path_factory: pytest.TempPathFactory) -> None:
    names = [f"doc-{number}" for number in range(40)]
    urls = [stub.url for stub in three]
    with (
        vllm_router(urls, tmp_path_factory.mktemp("router")) as url,
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        requests = [
            ({"model": "m", "prompt": f"{name}, {turn}", "cartridges": [name]}, session_headers(name + version))
            for name in names
            for turn, version in enumerate(("", "@1", "@2"))
        ]
        chosen = _chosen(http, requests)
        assert chosen == _chosen(http, requests[:30], "/v1/responses") | _chosen(http, requests[30:], "/v1/messages")
        assert set(chosen) == set(names)
        assert all(len(servers) == 1 for servers in chosen.values()), chosen
        assert {server for servers in chosen.values() for server in servers} == {"0", "1", "2"}
        scattered = _chosen(http, [(body, {}) for body, _ in requests])
        assert any(len(servers) > 1 for servers in scattered.values()), "the control: without the session they scatter"


# Real servers: where cartridges come to lie.

SERVERS = int(os.environ.get("FLEET_SERVERS", "2"))
PER_ROUTER = int(os.environ.get("FLEET_CARTRIDGES", "12"))
"""Both larger by hand for the figures in docs/fleet.md, which says how."""
TURNS = 5


class Fleet(NamedTuple):
    """Servers over one home, each of which calls the model by a name of its own in its answers."""

    urls: list[str]
    questions: dict[str, str]
    """One that the model answers right, by cartridge."""
    values: dict[str, str]

    def held(self) -> dict[str, set[str]]:
        """Return which servers have each cartridge in memory."""
        held: dict[str, set[str]] = {}
        for number, url in enumerate(self.urls):
            for entry in httpx.get(f"{url}/v1/cartridges", params={"active": "true"}, timeout=60).json()["data"]:
                held.setdefault(entry["id"], set()).add(f"s{number}")
        return held


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    home = tmp_path_factory.mktemp("home")
    settings = from_mapping({"home": home, "cpu_bytes": 256 << 20, "required": True})
    model, wards = CausalModel(MODEL), {}
    for name in [f"{group}-{number}" for group in ("envoy", "router", "control") for number in range(PER_ROUTER)]:
        wards[name] = write_ward(model, patients(len(wards) % 4, 4), name, tokens=300)
        register(model, settings, wards[name].ids, name=name)
    with ExitStack() as stack:

        def start(number: int) -> ServerProcess:
            args = [*SERVER_ARGS, "--served-model-name", f"s{number}", "m"]
            return ServerProcess(plan(MODEL, settings, vllm_args=args), home / f"{number}.log")

        servers = [start(number) for number in range(SERVERS)]
        with ThreadPoolExecutor(SERVERS) as pool:
            list(pool.map(stack.enter_context, servers))
        asked = {name: ward.facts[0] for name, ward in wards.items()}
        yield Fleet(
            [server.url for server in servers], {name: ask(fact, 0) for name, fact in asked.items()},
            {name: fact.value for name, fact in asked.items()},
        )  # fmt: skip


def _placed(fleet: Fleet, group: str, url: str, head: Callable[[str, int], Named]) -> float:
    """Ask for each cartridge of a group, shuffled; return the share of repeats answered by who answered first."""
    turns = [(f"{group}-{number}", turn) for number in range(PER_ROUTER) for turn in range(TURNS)]
    answered: dict[str, list[str]] = {}
    with httpx.Client(base_url=url, timeout=120) as http:
        for name, turn in random.Random(group).sample(turns, len(turns)):
            fields, headers = head(name, turn)
            body = {"model": "m", "prompt": fleet.questions[name], "max_tokens": 1, "temperature": 0} | fields
            reply = http.post("/v1/completions", json=body, headers=headers)
            assert reply.status_code == 200, reply.text
            assert reply.headers["x-cartridges"].startswith(f"{name}@1;")
            assert reply.json()["choices"][0]["text"].split()[-1] == fleet.values[name]
            answered.setdefault(name, []).append(reply.json()["model"])
    held = fleet.held()
    assert all(set(servers) == held[name] for name, servers in answered.items()), "who answered has it, and nobody else"
    same = [server == servers[0] for servers in answered.values() for server in servers[1:]]
    print(f"{group}: {sum(same)} of {len(same)} repeats by who answered first")
    return sum(same) / len(same)


def test_behind_envoy_each_cartridge_lies_on_one_server(fleet: Fleet, tmp_path: Path) -> None:
    def head(name: str, turn: int) -> Named:
        return [({}, {"X-Cartridges": name}), ({"cartridges": [name]}, {}), ({}, {"X-Cartridges": f"{name}@1"})][
            turn % 3
        ]

    with envoy(fleet.urls, tmp_path / "envoy") as url:
        assert _placed(fleet, "envoy", url, head) >= 0.98
    held = [servers for name, servers in fleet.held().items() if name.startswith("envoy")]
    assert sorted(map(len, held)) == [1] * PER_ROUTER
    assert len(set(map(frozenset, held))) == SERVERS, "one server has all of them"


def test_behind_vllm_router_each_cartridge_lies_on_one_server(fleet: Fleet, tmp_path: Path) -> None:
    with vllm_router(fleet.urls, tmp_path / "router") as url:
        share = _placed(fleet, "router", url, lambda name, turn: ({"cartridges": [name]}, session_headers(name)))
    held = [servers for name, servers in fleet.held().items() if name.startswith("router")]
    assert (share >= 0.98, sorted(map(len, held))) == (True, [1] * PER_ROUTER)
    assert len(set(map(frozenset, held))) == SERVERS, "one server has all of them"


def test_the_control_round_robin_loads_everything_everywhere(fleet: Fleet, tmp_path: Path) -> None:
    with envoy(fleet.urls, tmp_path / "envoy", lb_policy="ROUND_ROBIN") as url:
        assert 0.2 < _placed(fleet, "control", url, lambda name, turn: ({"cartridges": [name]}, {})) < 0.8


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_what_vllm_router_drops_on_the_way_is_never_answered_without(fleet: Fleet, tmp_path: Path, path: str) -> None:
    """It drops the headers of requests to these two routes."""
    text = fleet.questions["router-0"]
    body: dict[str, Any] = {"model": "m", "temperature": 0}
    body |= {"input": text, "max_output_tokens": 4} if path == "/v1/responses" else {
        "messages": [{"role": "user", "content": text}], "max_tokens": 4}  # fmt: skip
    ways: list[tuple[Named, bool]] = [
        (({"cartridges": ["router-0"]}, session_headers("router-0")), True), (({"cartridges": ["router-0"]}, {}), True),
        (({"model": "m:router-0"}, {}), True), (({}, session_headers("router-0")), False),
    ]  # fmt: skip
    with vllm_router(fleet.urls, tmp_path / "router") as url, httpx.Client(base_url=url, timeout=120) as http:
        for (fields, headers), is_answered in ways:
            reply = http.post(path, json=body | fields, headers=headers)
            if is_answered:
                direct = httpx.post(fleet.urls[0] + path, json=body | fields, headers=headers, timeout=120)
                assert reply.status_code == direct.status_code == 200, reply.text
                assert _said(reply) == _said(direct), "the answer is another than the server's own"
            else:
                assert (reply.status_code, "`required`" in reply.text) == (400, True)


def _said(reply: httpx.Response) -> Any:
    body = reply.json()
    return [part["text"] for piece in body.get("output") or [body] for part in piece["content"]]
