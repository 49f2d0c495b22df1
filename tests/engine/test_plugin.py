"""The plugin does not start a server on which a request's cartridges would not reach us."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
from blocks import quietly
from fastapi import FastAPI
from serving import stale_installation

from lmcache_cartridge.errors import SettingsError, UnsupportedEngine

with quietly():
    from vllm.exceptions import GracefulHTTPError

    from lmcache_cartridge.engine.contract import REQUEST_API
    from lmcache_cartridge.engine.describe import check_api
    from lmcache_cartridge.engine.host_api import check_handlers, extend_models
    from lmcache_cartridge.serve.plugin import CartridgePlugin


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


def test_a_server_whose_settings_are_wrong_does_not_start_without_the_plugin(monkeypatch):
    monkeypatch.delenv("LMCACHE_CONFIG_FILE", raising=False)
    plugin = CartridgePlugin()
    plugin.attach_router(FastAPI())
    with pytest.raises(SettingsError, match="LMCACHE_CONFIG_FILE"):
        asyncio.run(plugin.init_state(None, _state(), SimpleNamespace()))


def _models() -> Any:
    names = ["m", "m:7b"]
    return SimpleNamespace(
        base_model_paths=[SimpleNamespace(name=name) for name in names], is_base_model=names.__contains__,
        model_name=lambda adapter=None: "adapter" if adapter else "m",
    )  # fmt: skip


def test_a_server_whose_handlers_ask_elsewhere_for_models_does_not_start():
    state = SimpleNamespace(openai_serving_models=_models(), openai_serving_chat=SimpleNamespace(models=_models()))
    with pytest.raises(UnsupportedEngine, match="openai_serving_chat"):
        extend_models(state, lambda name: True, lambda: None)


def _config(extra: dict[str, str]) -> Any:
    return SimpleNamespace(kv_transfer_config=SimpleNamespace(get_from_extra_config=extra.get))


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
        check_api(_config(extra))


@pytest.mark.parametrize("entry", ["lmcache_cartridge.endpoint:Gone", "lmcache_cartridge.serve.plugin:Gone", None])
def test_an_installation_whose_request_api_cannot_be_loaded_does_not_start(tmp_path, monkeypatch, entry):
    monkeypatch.setenv("VLLM_PLUGINS", "cartridges")
    monkeypatch.syspath_prepend(stale_installation(tmp_path, entry))
    with pytest.raises(UnsupportedEngine, match="install lmcache-cartridge again"):
        check_api(_config({}))
