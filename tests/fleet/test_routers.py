"""Which server a router chooses, before stubs."""

from __future__ import annotations

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from routers import Named, Reply, Request, envoy, stubs, vllm_router

from lmcache_cartridge.fleet.affinity import affinity_key, session_headers


def _ways(name: str) -> list[Named]:
    """Return requests for one cartridge, named in all the ways that Envoy is told of."""
    return [
        ({"model": "m"}, {"X-Cartridges": f"{name}@3"}), ({"model": "m", "cartridges": [name]}, {}),
        ({"model": "m", "cartridges": [{"id": f"{name}@2"}]}, {}), ({"model": f"org/m:7b:{name}@4"}, {}),
        ({"model": "m", "cartridges": [name]}, {"X-Cartridges": f"{name}@12", "x-affinity": "a lie"}),
        ({"kv_transfer_params": {"cartridge_id": name}, "model": "m", "prompt": '"cartridges": ["other"]'}, {}),
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
def three():
    with stubs(3) as running:
        yield running


def test_envoy_sends_all_ways_of_naming_a_cartridge_to_one_server(three, tmp_path_factory):
    names = [f"doc-{number}" for number in range(30)] + ["a,b", "b,a", "s3://bucket/a/key/of/more/than/32/bytes"]
    urls = [stub.url for stub in three]
    with envoy(urls, tmp_path_factory.mktemp("envoy")) as url, httpx.Client(base_url=url, timeout=60) as http:
        chains = [({"model": "m", "cartridges": ["a", {"id": "b@2"}]}, {}), ({"model": "m:b,a@1"}, {})]
        headers = [({"model": "m"}, {"X-Cartridges": "a@9 ,  b"}), ({"model": "m"}, {"X-Cartridges": "b@1,a"})]
        requests = [way for name in names if "," not in name for way in _ways(name)] + chains + headers
        chosen = _chosen(http, requests)
        assert set(chosen) == set(names)
        assert all(len(servers) == 1 for servers in chosen.values()), chosen
        shares = [sum(servers == {stub.name} for servers in chosen.values()) for stub in three]
        assert min(shares) >= 4, f"one server has hardly any of {len(names)}: {shares}"
        plain = _chosen(http, [({"model": "m", "prompt": "x"}, {})] * 40)
        assert plain == {"": {"0", "1", "2"}}, "requests without a cartridge go anywhere"


def test_a_hot_cartridge_spills_to_the_next_server_and_no_further_and_nothing_else_moves(tmp_path):
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

        homes, held = {name: ask_for(name) for name in names}, []
        for _ in range(24):  # one after the other, each of them in flight before the next
            held.append(pool.submit(ask_for, "hot", **{"x-hold": "1"}))
            assert holding.acquire(timeout=60)
        go_on.set()
        shares = Counter(future.result(timeout=60) for future in held)
        # Of 24 a server may have 1.5 times 6, and the one that comes last one more.
        assert max(shares.values()) <= 10 and len(shares) == 3, shares
        assert {name: ask_for(name) for name in names} == homes


def test_vllm_router_sends_a_session_to_one_server(three, tmp_path_factory):
    names, urls = [f"doc-{number}" for number in range(24)], [stub.url for stub in three]
    requests = [
        ({"model": "m", "prompt": f"{name}{version}", "cartridges": [name]}, session_headers(name + version))
        for name in names
        for version in ("", "@1", "@2")
    ]
    with (
        vllm_router(urls, tmp_path_factory.mktemp("router")) as url,
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        chosen = _chosen(http, requests)
        assert chosen == _chosen(http, requests, "/v1/responses")
        assert set(chosen) == set(names) and {*map(len, chosen.values())} == {1}, chosen
        assert set.union(*chosen.values()) == {"0", "1", "2"}


@pytest.mark.parametrize("router, status", [(vllm_router, 425), (envoy, 425), (envoy, 503)])
def test_who_is_not_ready_is_shut_out_by_no_router_where_it_says_425(tmp_path, router, status):
    """With 503 vllm-router shuts out healthy servers."""
    says = [Reply()]
    with (
        stubs(2, lambda request: says[-1]) as servers,
        router([server.url for server in servers], tmp_path) as url,
        httpx.Client(base_url=url, timeout=60) as http,
    ):

        def ask(name: str) -> httpx.Response:
            return http.post("/v1/completions", json={"model": "m", "prompt": "x"}, headers=session_headers(name))

        homes = {name: ask(name).content for name in (f"doc-{number}" for number in range(10))}
        before = sum(len(server.requests) for server in servers)
        says.append(Reply(status, {"Retry-After": "3"}))
        replies = [ask("doc-0") for _ in range(15)]
        attempts = sum(len(server.requests) for server in servers) - before
        says.append(Reply())
        assert {name: ask(name).content for name in homes} == homes
    assert {(reply.status_code, reply.headers["retry-after"]) for reply in replies} == {(status, "3")}
    assert attempts == 15, "each is passed on once"
