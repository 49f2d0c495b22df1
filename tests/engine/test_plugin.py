"""The plugin does not start a server on which a request's cartridges would not reach us."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
from blocks import quietly, vllm_config

from lmcache_cartridge.errors import UnsupportedEngine

with quietly():
    from vllm.exceptions import GracefulHTTPError

    from lmcache_cartridge.engine.contract import REQUEST_API
    from lmcache_cartridge.engine.describe import check_api
    from lmcache_cartridge.engine.host_api import check_handlers, extend_models


def _state(**handlers: Any) -> Any:
    models = SimpleNamespace(base_model_paths=[SimpleNamespace(name="m")])
    return SimpleNamespace(openai_serving_models=models, **handlers)


def _handler(reply: Any) -> Any:
    async def create(request: Any) -> Any:
        if isinstance(reply, Exception):
            raise reply
        return reply

    return SimpleNamespace(create_completion=create, create_chat_completion=create, create_responses=create,
                           create_messages=create)  # fmt: skip


_NAMES = ["openai_serving_completion", "openai_serving_chat", "openai_serving_responses", "anthropic_serving_messages"]
_SEEN = GracefulHTTPError("cartridges.0.id: too short", HTTPStatus.BAD_REQUEST)


@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize("reply", ["an answer", GracefulHTTPError("no such model", HTTPStatus.NOT_FOUND)])
def test_a_server_with_a_handler_that_does_not_show_us_the_field_does_not_start(name, reply):
    handlers = {other: _handler(_SEEN) for other in _NAMES}
    asyncio.run(check_handlers(_state(**handlers)))
    with pytest.raises(UnsupportedEngine, match=name):
        asyncio.run(check_handlers(_state(**handlers | {name: _handler(reply)})))


def _models() -> Any:
    return SimpleNamespace(
        base_model_paths=[SimpleNamespace(name="m")], is_base_model="m".__eq__, model_name=lambda: "m"
    )


def test_a_server_whose_handlers_ask_elsewhere_for_models_does_not_start():
    state = SimpleNamespace(openai_serving_models=_models(), openai_serving_chat=SimpleNamespace(models=_models()))
    with pytest.raises(UnsupportedEngine, match="openai_serving_chat"):
        extend_models(state, lambda name: True)


@pytest.mark.parametrize(
    ("environment", "extra", "reason"),
    [
        ({"VLLM_PLUGINS": "other,cartridges"}, {REQUEST_API: "on"}, None),
        ({"VLLM_PLUGINS": "other"}, {}, "VLLM_PLUGINS=cartridges"), ({}, {}, "VLLM_PLUGINS=cartridges"),
        ({"VLLM_USE_RUST_FRONTEND": "1"}, {REQUEST_API: "off"}, None),
        ({"VLLM_PLUGINS": "cartridges", "VLLM_USE_RUST_FRONTEND": "1"}, {}, "VLLM_USE_RUST_FRONTEND: .* unset it"),
        ({"VLLM_PLUGINS": "cartridges", "VLLM_USE_RUST_FRONTEND": "0"}, {}, None),
    ],
)  # fmt: skip
def test_an_engine_whose_api_server_would_ignore_cartridges_does_not_start(monkeypatch, environment, extra, reason):
    """Nor does LMCache start in its workers: its threads would outlive the failure. The server in Rust has no request API."""
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UnsupportedEngine, match=reason) if reason else nullcontext():
        check_api(vllm_config(transfer={"kv_connector_extra_config": extra}))


@pytest.mark.parametrize("extra, refused", [({}, True), ({REQUEST_API: "off"}, False)])
def test_an_engine_that_generates_nothing_does_not_start_with_cartridges(monkeypatch, extra, refused):
    """vLLM leaves our request API out, and its routes of embeddings would ignore the cartridges that requests name."""
    monkeypatch.setenv("VLLM_PLUGINS", "cartridges")
    config = vllm_config(transfer={"kv_connector_extra_config": extra}, runner="pooling", convert="embed")
    with pytest.raises(UnsupportedEngine, match="generates nothing") if refused else nullcontext():
        check_api(config)
