"""The plugin does not start a server on which a request's cartridges would not reach us."""

from __future__ import annotations

import asyncio
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


def test_a_server_whose_handlers_all_show_us_the_field_starts():
    asyncio.run(check_handlers(_state(**{name: _handler(_SEEN) for name in _NAMES})))


@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize("reply", ["an answer", GracefulHTTPError("no such model", HTTPStatus.NOT_FOUND)])
def test_a_server_with_a_handler_that_does_not_show_us_the_field_does_not_start(name, reply):
    handlers = {other: _handler(_SEEN) for other in _NAMES} | {name: _handler(reply)}
    with pytest.raises(UnsupportedEngine, match=name):
        asyncio.run(check_handlers(_state(**handlers)))


def test_a_server_whose_settings_are_wrong_does_not_start_without_the_plugin(monkeypatch):
    monkeypatch.delenv("LMCACHE_CONFIG_FILE", raising=False)
    plugin = CartridgePlugin()
    plugin.attach_router(FastAPI())
    with pytest.raises(SettingsError, match="LMCACHE_CONFIG_FILE"):
        asyncio.run(plugin.init_state(None, _state(), SimpleNamespace()))


class _Models:
    """As vLLM's own."""

    base_model_paths = (SimpleNamespace(name="m"), SimpleNamespace(name="m:7b"))

    def is_base_model(self, name: str) -> bool:
        return name in ("m", "m:7b")

    def model_name(self, lora_request: Any = None) -> str:
        return "adapter" if lora_request else "m"

    async def show_available_models(self) -> Any:
        return SimpleNamespace(data=["m"])


def test_model_names_are_taken_beside_those_of_the_server():
    models, answered = _Models(), ["m:a"]

    state = SimpleNamespace(openai_serving_models=models)
    names = extend_models(state, lambda name: name == "m:a", lambda: answered[-1])
    assert names == ["m", "m:7b"]
    assert [models.is_base_model(name) for name in ("m", "m:7b", "m:a", "m:b")] == [True, True, True, False]
    assert (models.model_name(), models.model_name("x")) == ("m:a", "adapter")
    answered.append("")
    assert models.model_name() == "m"


def test_a_server_whose_handlers_ask_elsewhere_for_models_does_not_start():
    state = SimpleNamespace(openai_serving_models=_Models(), openai_serving_chat=SimpleNamespace(models=_Models()))
    with pytest.raises(UnsupportedEngine, match="openai_serving_chat"):
        extend_models(state, lambda name: True, lambda: None)


def _config(extra: dict[str, str]) -> Any:
    transfer = SimpleNamespace(get_from_extra_config=lambda key, default: extra.get(key, default))
    return SimpleNamespace(kv_transfer_config=transfer)


@pytest.mark.parametrize(
    ("plugins", "extra", "reason"),
    [
        ("cartridges", {}, None),
        ("other,cartridges", {REQUEST_API: "on"}, None),
        ("other", {}, "VLLM_PLUGINS=cartridges"),
        ("", {}, "VLLM_PLUGINS=cartridges"),
        (None, {}, "VLLM_PLUGINS=cartridges"),
        (None, {REQUEST_API: "off"}, None),
    ],
)
def test_an_engine_whose_api_server_would_ignore_cartridges_does_not_start(
    monkeypatch,
    plugins,
    extra,
    reason,
):
    """Nor does LMCache start in its workers: its threads would outlive the failure."""
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if plugins is not None:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    if reason is None:
        check_api(_config(extra))
    else:
        with pytest.raises(UnsupportedEngine, match=reason):
            check_api(_config(extra))


@pytest.mark.parametrize("entry", ["lmcache_cartridge.endpoint:Gone", "lmcache_cartridge.serve.plugin:Gone", None])
def test_an_installation_whose_request_api_cannot_be_loaded_does_not_start(tmp_path, monkeypatch, entry):
    monkeypatch.setenv("VLLM_PLUGINS", "cartridges")
    monkeypatch.syspath_prepend(stale_installation(tmp_path, entry))
    with pytest.raises(UnsupportedEngine, match="install lmcache-cartridge again"):
        check_api(_config({}))
