"""Misnamed: fields by which somebody meant cartridges, and that this server would not read."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

HEADERS = ("x-cartridges", "x-cartridges-required")
_WORDS = ("cartridge", "cartridges")
_CLOSE = 0.81
"""Share of letters, as difflib counts them, that a slip has of the word: with two wrong ones of eleven."""
_LONGEST = 64
"""Characters of a name that can be a slip."""
_INNER = {"cartridge", "cartridges", "cartridgeid", "cartridgeids", "cartridgelabel"}
_CONTAINERS = ("extra_body", "extra_args", "metadata", "vllm_xargs", "sampling_params")
"""Objects in a request that are for something else, where clients put fields that they know no place for."""


def find_header(names: Iterable[str]) -> str | None:
    """Return the first of a request's headers that was meant to be one of `HEADERS` and is not; None without one."""
    return next((name for name in names if len(name) <= _LONGEST and _is_slip(name)), None)


@lru_cache(maxsize=4096)
def _is_slip(name: str) -> bool:
    return name.lower() not in HEADERS and bool(
        get_close_matches(_letters(name), map(_letters, HEADERS), cutoff=_CLOSE)
    )


def find(fields: Mapping[str, Any], read: Collection[str]) -> str | None:
    """Return the path of the first field of a request that is meant for us and is none of `read`; None without one.

    A field that is null counts as not given.
    """
    for name, value in fields.items():
        if value is not None and name not in read and _resembles(name):
            return name
    for name in ("messages", "input"):
        if isinstance(items := fields.get(name), list):
            for item in items:
                if isinstance(item, Mapping) and (inner := _inner(item)):
                    return f"{name}[].{inner}"
    return _in_containers(fields, "")


def _in_containers(fields: Mapping[str, Any], place: str) -> str | None:
    for name in (*_CONTAINERS, "kv_transfer_params") if place else _CONTAINERS:
        if isinstance(inside := fields.get(name), Mapping):
            path = f"{place}{name}."
            if inner := _inner(inside):
                return path + inner
            if (deeper := _in_containers(inside, path)) is not None:
                return deeper
    return None


def _inner(fields: Mapping[str, Any]) -> str | None:
    """Return the field of an inner object that can only be ours; such objects may have fields of any name."""
    return next((n for n, value in fields.items() if value is not None and _letters(n) in _INNER), None)


def _letters(name: str) -> str:
    return re.sub("[^a-z]", "", name.casefold())


def _resembles(name: str) -> bool:
    return len(name) <= _LONGEST and _sounds_like_us(name)


@lru_cache(maxsize=4096)
def _sounds_like_us(name: str) -> bool:
    letters = _letters(name)
    return "cartridge" in letters or bool(get_close_matches(letters, _WORDS, cutoff=_CLOSE))
