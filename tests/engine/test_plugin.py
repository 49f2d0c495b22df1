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
    from lmcache_cartridge.engine.host_api import check_handlers, extend_models, wrap_handlers


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
_EMBEDS = {"runner": "pooling", "convert": "embed"}
_SEEN = GracefulHTTPError("cartridges.0.id: too short", HTTPStatus.BAD_REQUEST)


@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize("reply", ["an answer", GracefulHTTPError("no such model", HTTPStatus.NOT_FOUND)])
def test_a_server_with_a_handler_that_does_not_show_us_the_field_does_not_start(name, reply):
    handlers = {other: _handler(_SEEN) for other in _NAMES}
    asyncio.run(check_handlers(_state(**handlers)))
    with pytest.raises(UnsupportedEngine, match=name):
        asyncio.run(check_handlers(_state(**handlers | {name: _handler(reply)})))


@pytest.mark.parametrize(
    ("environment", "extra", "given", "reason"),
    [
        ({"VLLM_PLUGINS": "other,cartridges", "VLLM_USE_RUST_FRONTEND": "0"}, {REQUEST_API: "on"}, {}, None),
        ({}, {}, {}, "VLLM_PLUGINS=cartridges"),
        ({"VLLM_PLUGINS": "cartridges", "VLLM_USE_RUST_FRONTEND": "1"}, {}, {}, "VLLM_USE_RUST_FRONTEND: .* unset it"),
        ({"VLLM_PLUGINS": "cartridges"}, {}, _EMBEDS, "generates nothing"),
        ({"VLLM_PLUGINS": "other"}, {REQUEST_API: "off"}, _EMBEDS, None),
    ],
)  # fmt: skip
def test_an_engine_whose_api_server_would_ignore_cartridges_does_not_start(
    monkeypatch, environment, extra, given, reason
):
    """Nor does LMCache start in its workers: its threads would outlive the failure. The server in Rust has no request API, and
    vLLM leaves it out where nothing is generated."""
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UnsupportedEngine, match=reason) if reason else nullcontext():
        check_api(vllm_config(transfer={"kv_connector_extra_config": extra}, **given))


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ({"openai_serving_chat": SimpleNamespace(online_renderer=1, engine_client=object())}, "openai_serving_chat"),
        ({}, "_state"), ({"serving_render": object()}, "online_renderer"),
    ],
)  # fmt: skip
def test_handlers_that_cannot_be_wrapped_or_ask_elsewhere_for_models_are_refused(broken, named):
    with pytest.raises(UnsupportedEngine, match=named):
        wrap_handlers(SimpleNamespace(**broken), object(), list, list, list)
    models = SimpleNamespace(base_model_paths=[], is_base_model=bool)
    state = SimpleNamespace(openai_serving_models=models, openai_serving_chat=SimpleNamespace(models=object()))
    with pytest.raises(UnsupportedEngine, match="openai_serving_chat"):
        extend_models(state, bool)
