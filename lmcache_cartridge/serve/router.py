"""Router: which cartridges a request gets, as the settings say."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from ..settings import Settings
from .request import MAX_CHAIN, Reference, Refusal, read


class Router:
    """Chooses cartridges for requests: those they name, or those that `settings.router` gives to the others."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def choose(
        self, fields: Mapping[str, Any], kv_params: Mapping[str, Any] | None, model: str | None, api_key: str | None
    ) -> list[Reference]:
        """Return the references of a request, with composites taken apart; empty if it gets no cartridge.

        `fields` are the request fields that vLLM does not know. Raises `Refusal` for malformed ones.
        """
        named = read(fields, kv_params) or self._default(fields, model, api_key)
        chain = [part for reference in named for part in self._parts(reference)]
        if len(chain) > MAX_CHAIN:
            raise Refusal(400, f"{len(chain)} cartridges in one request; at most {MAX_CHAIN}")
        return chain

    def _default(self, fields: Mapping[str, Any], model: str | None, api_key: str | None) -> list[Reference]:
        settings = self._settings
        if settings.router in ("label", "composite"):
            label = fields.get(settings.label_field)
            if label is None:
                return []
            if not isinstance(label, str) or not 1 <= len(label) <= 128 or not label.isprintable():
                raise Refusal(400, f"{settings.label_field} must be a string of 1 to 128 printable characters")
            if settings.router == "composite" and label not in settings.composites:
                raise Refusal(404, f"no composite is called {label!r}")
            return [Reference(id=label, source="registry")]
        if settings.router == "static":
            hashed = "" if api_key is None else hashlib.sha256(api_key.encode()).hexdigest()
            for key in (f"key:{hashed}", f"model:{model}", "*"):
                if key in settings.static:
                    return [Reference(id=settings.static[key], source="registry")]
        return []

    def _parts(self, reference: Reference) -> list[Reference]:
        names = self._settings.composites.get(reference.id) if reference.where() == "registry" else None
        return [reference] if names is None else [reference.model_copy(update={"id": name}) for name in names]
