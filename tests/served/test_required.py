"""A server that answers with cartridges only: no route of it generates without one."""

from __future__ import annotations

import re
from typing import Any

import pytest
from serving import serving
from test_api import TAKING, UNAWARE
from wards import MODEL, patients, register, write_ward

from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.settings import from_mapping

HARMLESS = ("/tokenize", "/v1/completions/render", "/v1/chat/completions/render", "/v1/messages/count_tokens")

_NAMES: dict[str, Any] = {"model_aliases": {"ward": ["a"]}}


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    settings, model = from_mapping({"home": home, "cpu_bytes": 64 << 20, "required": True} | _NAMES), CausalModel(MODEL)
    register(model, settings, write_ward(model, patients(0, 4), "a").ids, name="a")
    Registry(settings.registry_path).label("current", "a")
    with serving(settings, home / "log", MODEL, "--enable-scale-out") as asker:
        yield asker.http


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", TAKING)
def test_a_route_that_takes_cartridges_answers_with_one_and_refuses_without(http, path, stream):
    body = TAKING[path] | {"stream": stream}
    for none in ({}, {"cartridges": None}, {"cartridges": False}, {"kv_transfer_params": {}}):
        reply = http.post(path, json=body | none)
        assert (reply.status_code, "required" in reply.text) == (400, True), reply.text
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
        (MODEL, {"cartridges": ["nope"]}, {}, 404), (MODEL, {"cartridges": ["a"]}, {"X-Cartridges": "b"}, 400), (MODEL, {}, {"X-Cartridge": "a"}, 400),
        (MODEL, {"kv_transfer_params": {"cartridge_id": "b"}}, {"X-Cartridges": "a"}, 400),
    ):  # fmt: skip
        reply = http.post(path, json=TAKING[path] | {"model": model} | fields, headers=headers)
        assert reply.status_code == status, (model, reply.text)
