"""Affinity: the key that a router hashes, so that all requests for one cartridge meet on one server.

This file needs nothing but the standard library, so that a router's process can have it alone, from a ConfigMap. It reads
a request as `serve/request.py` does, and never raises: what a server would refuse has a key too, or none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

SESSION_HEADER = "x-session-id"
"""What vllm-router's policy `consistent_hash` hashes first; other routers read it too."""
_VERSION = re.compile(r"@[0-9]+\Z")
_ID = r"(?:s3://[^,]+|(?!//)[^,:]+)"
_MODEL = re.compile(rf"(.+?):({_ID}(?:,{_ID})*)", re.DOTALL)


class Naming(NamedTuple):
    """Those settings of the servers that give requests cartridges, and the model names that they serve."""

    router: str = "explicit"
    label_field: str = "cartridge_label"
    static: Mapping[str, str] = {}
    composites: Mapping[str, Sequence[str]] = {}
    model_aliases: Mapping[str, Sequence[str]] = {}
    models: Sequence[str] = ()
    """`--served-model-name`, or what stands for it. Without any, a colon in `model` is taken to begin cartridges."""


EXPLICIT = Naming()


def affinity_key(
    body: Mapping[str, Any] | None = None,
    header: str | Iterable[str] = (),
    *,
    naming: Naming = EXPLICIT,
) -> str:
    """Return the ids of a request's cartridges in order, with commas between them and no versions; "" without any.

    `body` is the parsed JSON, `header` what `X-Cartridges` says. A label is a key of its own:
    which cartridge it points at only the registry knows. So a label and the id that it stands for may be on two servers.
    """
    fields = body if isinstance(body, Mapping) else {}
    ids = _named(fields) or _of_header(header) or model_ids(fields.get("model"), naming) or _given(fields, naming)
    parts = [part for one in ids for part in naming.composites.get(one, (one,))]
    return ",".join(_VERSION.sub("", part) for part in parts)


def session_headers(*cartridges: str) -> dict[str, str]:
    """Return the headers by which a client of vllm-router sends a request to the server of these cartridges.

    They go with the request beside the body's `cartridges`; `X-Cartridges` says the same to routers that hash it.
    """
    names = ", ".join(cartridges)
    return {SESSION_HEADER: affinity_key(None, names), "X-Cartridges": names}


def model_ids(model: Any, naming: Naming = EXPLICIT) -> list[str]:
    """Return the cartridges in a model name such as `MODEL:handbook,legal@2`, or those that it is an alias of."""
    if not isinstance(model, str) or model in naming.models:
        return []
    if model in naming.model_aliases:
        return list(naming.model_aliases[model])
    if not naming.models:
        match = _MODEL.fullmatch(model)
        return [] if match is None else _of_header(match[2])
    bases = [base for base in naming.models if model.startswith(f"{base}:")]
    return _of_header(model[len(max(bases, key=len)) + 1 :]) if bases else []


def _named(fields: Mapping[str, Any]) -> list[str]:
    named, params = fields.get("cartridges"), fields.get("kv_transfer_params")
    if named is None and isinstance(params, Mapping):
        named = params.get("cartridge_id")
    items = named if isinstance(named, list | tuple) else [named]
    ids = [item.get("id") if isinstance(item, Mapping) else item for item in items]
    return [one for one in ids if isinstance(one, str) and one]


def _of_header(header: str | Iterable[str]) -> list[str]:
    values = [header] if isinstance(header, str) else header
    return [name for value in values for part in value.split(",") if (name := part.strip())]


def _given(fields: Mapping[str, Any], naming: Naming) -> list[str]:
    """Return the cartridge that the setting `router` gives to a request that names none."""
    if naming.router in ("label", "composite"):
        label = fields.get(naming.label_field)
        return [label] if isinstance(label, str) and label else []
    if naming.router != "static":
        return []
    keys = (f"model:{fields.get('model')}", "*")
    return next(([naming.static[key]] for key in keys if key in naming.static), [])
