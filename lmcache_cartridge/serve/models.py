"""Models: cartridges addressed as `model`, `MODEL:handbook`, for clients and routers that know of no other field."""

from __future__ import annotations

from typing import Any

from ..engine import host_api
from . import http
from .request import Refusal, Router


class CartridgeModels:
    """Model names that stand for cartridges."""

    def __init__(self, router: Router, state: Any) -> None:
        """Let the handlers in the app's `state` accept such names on routes that take cartridges; others know no such model.

        Raises `UnsupportedEngine` where vLLM is not as expected.
        """
        self._router = router
        router.models = host_api.extend_models(state, self._takes, http.model)

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
