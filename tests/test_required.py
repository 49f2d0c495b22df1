"""A server that answers with cartridges only: no route of it generates without one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serving import SERVER_ARGS
from test_api import TAKING, UNAWARE
from wards import MODEL, patients, register, write_ward

from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.serve.launch import plan
from lmcache_cartridge.serve.processes import ServerProcess
from lmcache_cartridge.settings import from_mapping

HARMLESS = ("/tokenize", "/v1/completions/render", "/v1/chat/completions/render", "/v1/messages/count_tokens")


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    home = tmp_path_factory.mktemp("home")
    settings, model = from_mapping({"home": home, "cpu_bytes": 64 << 20, "required": True}), CausalModel(MODEL)
    register(model, settings, write_ward(model, patients(0, 4), "a").ids, name="a")
    launch = plan(MODEL, settings, vllm_args=[*SERVER_ARGS, "--enable-scale-out"])
    with ServerProcess(launch, home / "log") as server, httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", TAKING)
def test_a_route_that_takes_cartridges_answers_with_one_and_refuses_without(
    http: httpx.Client, path: str, stream: bool
) -> None:
    body = TAKING[path] | {"stream": stream}
    reply = http.post(path, json=body)
    assert (reply.status_code, "`required`" in json.dumps(reply.json())) == (400, True), reply.text
    for fields, headers in (({"cartridges": ["a"]}, {}), ({}, {"X-Cartridges": "a"})):
        reply = http.post(path, json=body | fields, headers=headers)
        assert reply.status_code == 200, reply.text
        positions, injected = (int(part.partition("=")[2]) for part in reply.headers["x-cartridges"].split(";")[1:])
        assert injected >= positions // 256 * 256 > 0


@pytest.mark.parametrize("path", UNAWARE)
def test_other_routes_that_generate_refuse_and_those_that_do_not_answer(http: httpx.Client, path: str) -> None:
    reply = http.post(path, json=UNAWARE[path])
    if path in HARMLESS:
        assert reply.status_code == 200
    else:
        assert (reply.status_code, "`required`" in reply.text) == (400, True)


@pytest.mark.parametrize("extra", [{"cartridges": None}, {"cartridges": ["nope"]}, {"kv_transfer_params": {}}])
def test_naming_none_is_not_naming_one(http: httpx.Client, extra: dict[str, Any]) -> None:
    assert http.post("/v1/completions", json=TAKING["/v1/completions"] | extra).status_code in (400, 404)
