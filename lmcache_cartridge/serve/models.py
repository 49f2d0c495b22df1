"""Models: cartridges addressed as `model`, `MODEL:handbook`, for clients and routers that know of no other field."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from ..engine import host_api
from . import http
from .request import Refusal, Router


def accept_models(router: Router, state: Any) -> None:
    """Let the handlers in the app's `state` accept model names that stand for cartridges, on routes that take cartridges;
    others know no such model.

    Raises `UnsupportedEngine` where vLLM is not as expected.
    """

    def takes(model: str) -> bool:
        if http.current().path not in (*http.TAKES, *http.SHOWS):
            return False
        with suppress(Refusal):  # the renderer says what is wrong with it
            return bool(router.named_by(model))
        return True

    router.models = host_api.extend_models(state, takes)
