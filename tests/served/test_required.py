"""A server that answers with cartridges only: no route of it generates without one."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from serving import SERVER_ARGS
from test_api import TAKING, UNAWARE
from wards import MODEL, patients, register, write_ward

from lmcache_cartridge.fleet.affinity import Naming, affinity_key
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.serve.launch import plan
from lmcache_cartridge.serve.processes import ServerProcess
from lmcache_cartridge.settings import from_mapping

HARMLESS = ("/tokenize", "/v1/completions/render", "/v1/chat/completions/render", "/v1/messages/count_tokens")

_NAMES: dict[str, Any] = {"model_aliases": {"ward": ["a"]}}


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    settings, model = from_mapping({"home": home, "cpu_bytes": 64 << 20, "required": True} | _NAMES), CausalModel(MODEL)
    register(model, settings, write_ward(model, patients(0, 4), "a").ids, name="a")
    Registry(settings.registry_path).label("current", "a")
    launch = plan(MODEL, settings, vllm_args=[*SERVER_ARGS, "--enable-scale-out"])
    with ServerProcess(launch, home / "log") as server, httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", TAKING)
def test_a_route_that_takes_cartridges_answers_with_one_and_refuses_without(http, path, stream):
    body = TAKING[path] | {"stream": stream}
    reply = http.post(path, json=body)
    assert (reply.status_code, "`required`" in json.dumps(reply.json())) == (400, True), reply.text
    ways: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({"cartridges": ["a"]}, {}), ({}, {"X-Cartridges": "a"}), ({"model": f"{MODEL}:a"}, {}), ({"model": "ward"}, {}),
        ({"model": f"{MODEL}:a", "cartridges": ["a"]}, {"X-Cartridges": "a"}), ({"model": f"{MODEL}:current"}, {}),
        ({"kv_transfer_params": {"cartridge_id": "a"}}, {}),
    ]  # fmt: skip
    for fields, headers in ways:
        reply = http.post(path, json=body | fields, headers=headers)
        assert reply.status_code == 200, reply.text
        model = (body | fields)["model"]
        assert set(re.findall(r'"model": ?"([^"]*)"', reply.text)) <= {model, MODEL}, reply.text
        positions, *found = (int(part.partition("=")[2]) for part in reply.headers["x-cartridges"].split(";")[1:])
        assert sum(found) >= positions // 256 * 256 > 0, "injected, and what vLLM still has"


@pytest.mark.parametrize("path", UNAWARE)
def test_other_routes_that_generate_refuse_and_those_that_do_not_answer(http, path):
    reply = http.post(path, json=UNAWARE[path])
    if path in HARMLESS:
        assert reply.status_code == 200
    else:
        assert (reply.status_code, "`required`" in reply.text) == (400, True)
    for model in (f"{MODEL}:a", "ward"):
        reply = http.post(path, json=UNAWARE[path] | {"model": model})
        assert 400 <= reply.status_code < 500, "it is answered without the cartridge"


@pytest.mark.parametrize("path", TAKING)
def test_a_model_that_names_no_cartridge_or_another_is_refused(http, path):
    for model, fields, headers, status in (
        ("a", {}, {}, 404), (f"{MODEL}:nope", {}, {}, 404), (f"{MODEL}:a@7", {}, {}, 404), (f"{MODEL}:", {}, {}, 400),
        (f"{MODEL}:a,,a", {}, {}, 400), (f"{MODEL}:a", {"cartridges": ["b"]}, {}, 400), ("no:a", {}, {}, 404),
        (f"{MODEL}:a", {}, {"X-Cartridges": "a@1"}, 400), ("ward", {}, {"X-Cartridges": "b"}, 400),
        (MODEL, {"cartridges": ["a"]}, {"X-Cartridges": "b"}, 400), (MODEL, {}, {"X-Cartridge": "a"}, 400),
        (MODEL, {"kv_transfer_params": {"cartridge_id": "b"}}, {"X-Cartridges": "a"}, 400),
    ):  # fmt: skip
        reply = http.post(path, json=TAKING[path] | {"model": model} | fields, headers=headers)
        assert reply.status_code == status, (model, reply.text)


@pytest.mark.parametrize(
    "extra", [{"cartridges": None}, {"cartridges": False}, {"cartridges": ["nope"]}, {"kv_transfer_params": {}}]
)
def test_naming_none_is_not_naming_one(http, extra):
    assert http.post("/v1/completions", json=TAKING["/v1/completions"] | extra).status_code in (400, 404)


_NAMED = st.sampled_from(
    ["a", "a@1", "current", "a@2", "nope", "s3://b/k", "/etc", "a:b", "", "A", "a@", "a@01", "x" * 1025]
)
_BYTES = st.binary(max_size=8).filter(lambda raw: not set(raw) & {*range(9), *range(10, 32), 127})
_HEADER = st.lists(_NAMED.map(str.encode) | _BYTES, max_size=3).map(b",".join) | _BYTES.map(bytes.strip)


def test_odd_headers_and_model_names_get_an_error_of_their_own_or_the_cartridges_they_name(
    http,
):
    statuses: Counter[int] = Counter()
    newest = {"current": "a", "ward": "a"}

    @examples(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
    @given(
        values=st.lists(_HEADER, max_size=2),
        model=st.sampled_from([MODEL, MODEL, "ward"]) | _NAMED.map(lambda name: f"{MODEL}:{name}"),
        named=st.none() | st.lists(_NAMED, max_size=2),
        required=st.sampled_from([None, None, b"true", b"false", b"2", b"\xff"]),
        path=st.sampled_from(sorted(TAKING)),
    )
    def one(values: list[bytes], model: str, named: list[str] | None, required: bytes | None, path: str) -> None:
        headers = [(b"X-Cartridges", value.strip(b" \t")) for value in values]
        headers += [] if required is None else [(b"X-Cartridges-Required", required)]
        body = TAKING[path] | {"model": model} | ({} if named is None else {"cartridges": named})
        reply = http.post(path, json=body, headers=headers)
        statuses[reply.status_code] += 1
        assert reply.status_code == 200 or 400 <= reply.status_code < 500, reply.text
        if reply.status_code == 200:
            used = [part.partition("@")[0] for part in reply.headers["x-cartridges"].split(", ")]
            naming = Naming(models=[MODEL], model_aliases=_NAMES["model_aliases"])
            key = affinity_key(body, [value.decode("latin-1") for value in values], naming=naming)
            assert used == [newest.get(one, one) for one in key.split(",")]
        else:
            assert "x-cartridges" not in reply.headers

    one()
    assert sum(statuses.values()) >= 600
    assert min(statuses[200], statuses[400], statuses[404]) > 20, f"only one kind proves little: {statuses}"
