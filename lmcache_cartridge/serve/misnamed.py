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
        if value is not None and name not in read and len(name) <= _LONGEST and _sounds_like_us(name):
            return name
    return _inside(fields, "", _CONTAINERS)


def _inside(fields: Mapping[str, Any], place: str, containers: Iterable[str]) -> str | None:
    """Return the path of a field that can only be ours in an inner object, of which others may have fields of any name."""
    for name in containers:
        if not isinstance(inside := fields.get(name), Mapping):
            continue
        path = f"{place}{name}."
        for inner, value in inside.items():
            if value is not None and _letters(inner) in _INNER:
                return path + inner
        if (deeper := _inside(inside, path, (*_CONTAINERS, "kv_transfer_params"))) is not None:
            return deeper
    return None


def _letters(name: str) -> str:
    return re.sub("[^a-z]", "", name.casefold())


@lru_cache(maxsize=4096)
def _sounds_like_us(name: str) -> bool:
    letters = _letters(name)
    return "cartridge" in letters or bool(get_close_matches(letters, _WORDS, cutoff=_CLOSE))
