"""Models: cartridges addressed as `model`, `MODEL:handbook`, for clients and routers that know of no other field."""

from __future__ import annotations

import asyncio
from typing import Any

from vllm.logger import init_logger

from ..engine import host_api
from ..errors import RegistryError
from ..library.registry import Registry
from ..settings import Settings
from . import http
from .request import Refusal, Router

logger = init_logger("vllm.lmcache_cartridge.serve.models")


class CartridgeModels:
    """Model names that stand for cartridges, in vLLM's own list of models."""

    def __init__(self, settings: Settings, router: Router, state: Any) -> None:
        """Let the handlers in the app's `state` accept such names on routes that take cartridges; others know no such model.

        Raises `UnsupportedEngine` where vLLM is not as expected.
        """
        self._settings, self._router = settings, router
        self._registry = Registry(settings.registry_path, read_only=True)
        router.models = host_api.extend_models(state, self._takes, http.model, self._cards)

    def _takes(self, model: str) -> bool:
        if http.path() not in (*http.TAKES, *http.SHOWS):
            return False
        try:
            if not self._router.named_by(model):
                return False
        except Refusal:
            pass  # the renderer says what is wrong with it
        http.note_model(model)
        return True

    async def _cards(self) -> dict[str, str]:
        """Return the names of the newest cartridges and all aliases, with what they stand for.

        Without those of cartridges while the registry cannot be read.
        """
        limit, base = self._settings.listed_models, self._router.models[0]
        if not limit:
            return {}
        cards = {name: ", ".join(ids) for name, ids in self._settings.model_aliases.items()}
        try:
            newest = await asyncio.to_thread(self._registry.newest, limit)
            cards |= {f"{base}:{entry.id}": entry.name for entry in newest}
        except RegistryError as error:
            logger.warning_once(f"cartridges are not listed as models: {error}")
        return cards
