"""Cartridges that are not in memory yet, behind routers: which answer is tried again, and which shuts a server out."""

from __future__ import annotations

import random
import re
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import httpx
import openai
import pytest
from faulty_proxy import FaultyProxy
from recall.ward import Fact, ask, write_document
from routers import Reply, Request, envoy, stubs, vllm_router
from test_s3_served import CHUNK, POSITIONS, Gate
from waiting import until
from wards import MODEL, patients, prefill, save, sure

from lmcache_cartridge.fleet.affinity import session_headers
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.serve.launch import plan
from lmcache_cartridge.serve.processes import ServerProcess
from lmcache_cartridge.settings import from_mapping

ASKED = 15


@pytest.mark.parametrize(
    "router, status, shut_out",
    [(vllm_router, 425, 0), (vllm_router, 503, 10), (envoy, 425, 0), (envoy, 503, 0)],
)
def test_who_is_not_ready_is_shut_out_by_no_router_where_it_says_425(tmp_path, router, status, shut_out):
    """With 503 vllm-router shuts out healthy servers: it may be the default, if the router has learned better."""
    state = {"status": 200}

    def answer(request: Request) -> Reply:
        return Reply(state["status"], {} if state["status"] == 200 else {"Retry-After": "3"})

    with (
        stubs(2, answer) as servers,
        router([server.url for server in servers], tmp_path) as url,
        httpx.Client(base_url=url, timeout=60) as http,
    ):

        def ask(name: str) -> httpx.Response:
            return http.post("/v1/completions", json={"model": "m", "prompt": "x"}, headers=session_headers(name))

        homes = {name: ask(name).json()["stub"] for name in (f"doc-{number}" for number in range(10))}
        before = sum(len(server.requests) for server in servers)
        state["status"] = status
        replies = [ask("doc-0") for _ in range(ASKED)]
        attempts = sum(len(server.requests) for server in servers) - before
        state["status"] = 200
        now = {name: ask(name) for name in homes}
        lost = sum(reply.status_code != 200 or reply.json()["stub"] != homes[name] for name, reply in now.items())
    assert lost == shut_out
    if not shut_out:
        assert {(reply.status_code, reply.headers["retry-after"]) for reply in replies} == {(status, "3")}
        assert attempts == ASKED, "each is passed on once"


# A real server.


class Cold(NamedTuple):
    url: str
    fact: Fact
    gate: Gate

    def refused(self) -> int:
        """Return how many requests were answered 425."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        found = re.findall(r'^lmcache_cartridge_requests_total\{.*outcome="refused_425".* (\d+)\.0$', text, re.M)
        return sum(map(int, found))


@pytest.fixture(scope="module")
def cold(moto_server, tmp_path_factory):
    """A server of a trained cartridge on an S3 server that keeps its payload back until a gate opens."""
    home, model, gate = tmp_path_factory.mktemp("home"), CausalModel(MODEL), Gate()
    moto_server.client.create_bucket(Bucket="cold")
    with FaultyProxy(moto_server.port) as proxy, pytest.MonkeyPatch.context() as environment:
        for name, value in (moto_server.environment | {"AWS_ENDPOINT_URL_S3": proxy.endpoint}).items():
            environment.setenv(name, value)
        settings = from_mapping({"home": home, "cpu_bytes": 16 << 20, "disk_bytes": 0, "ready_timeout_s": 0.3,
                                 "retry_status": 425, "s3_timeout_s": 600})  # fmt: skip
        document = write_document(random.Random("slow"), POSITIONS, patients(0, 2))
        ids = model.encode(document.text, special=True)[:POSITIONS]
        root = settings.cartridges_dir / "slow"
        save(model, root, ids, name="slow", kind="trained", chunk_tokens=CHUNK)
        for path in root.iterdir():
            moto_server.client.upload_file(str(path), "cold", f"slow/{path.name}")
        Registry(settings.registry_path).register(root, "s3://cold/slow")
        args = ["--max-model-len", "2304", "--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20),
                "--served-model-name", "m"]  # fmt: skip
        launch = plan(MODEL, settings, chunk_tokens=CHUNK, vllm_args=args)
        proxy.always = gate
        with ServerProcess(launch, home / "log") as server:
            yield Cold(server.url, sure(model, prefill(model, ids), document.facts[:40])[0], gate)
        gate.open.set()


def test_a_cold_trained_cartridge_behind_vllm_router_is_loaded_once_and_everybody_answered(cold, tmp_path):
    """By the stock client, which asks again by itself when it is told to."""
    clients = 8

    def answer(url: str, retries: int) -> str:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120, max_retries=retries) as client:
            reply = client.completions.create(
                model="m", prompt=ask(cold.fact, 0), max_tokens=1, temperature=0,
                extra_body={"cartridges": ["slow"]}, extra_headers=session_headers("slow"),
            )  # fmt: skip
        return reply.choices[0].text.split()[-1]

    with vllm_router([cold.url], tmp_path) as url, ThreadPoolExecutor(clients) as pool:
        waiting = [pool.submit(answer, url, 50) for _ in range(clients)]
        until(lambda: cold.refused() >= 2 * clients, timeout_s=200)
        with pytest.raises(openai.APIStatusError) as caught:
            answer(url, 0)
        told = caught.value.response
        assert (told.status_code, told.headers["x-should-retry"]) == (425, "true")
        assert 1 <= int(told.headers["retry-after"]) <= 60
        cold.gate.open.set()
        assert [future.result(timeout=200) for future in waiting] == [cold.fact.value] * clients
    ranges = cold.gate.sent
    assert len(ranges) == len(set(ranges)) > 0, "its bytes were read more than once"
    assert "circuit_breaker" not in (tmp_path / "router.log").read_text(errors="replace")
