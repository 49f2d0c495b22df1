"""The errors are the tree that is drawn, each the builtin it says, with messages that read as sentences."""

from __future__ import annotations

import builtins
import re

import pytest

from lmcache_cartridge import errors
from lmcache_cartridge.errors import CartridgeError

DRAWN = re.findall(r"[├└]── (\w+)(?: +\((\w+)\))?", errors.__doc__)
"""Name and builtin of every error in the drawing; those one level down may have none of their own."""
DEFINED = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, CartridgeError) and value is not CartridgeError
}


def test_every_error_is_drawn_and_every_drawn_one_is_there() -> None:
    assert len(DRAWN) > 10
    assert {name for name, _ in DRAWN} == set(DEFINED)


@pytest.mark.parametrize(("name", "builtin"), [pair for pair in DRAWN if pair[1]])
def test_an_error_is_also_the_builtin_in_brackets(name: str, builtin: str) -> None:
    assert issubclass(DEFINED[name], getattr(builtins, builtin))
    assert issubclass(DEFINED[name].__bases__[0], CartridgeError)


@pytest.mark.parametrize("name", DEFINED)
def test_a_message_is_shown_as_it_was_written(name: str) -> None:
    message = "cartridge 'doc@1' is not there; what now?"
    assert str(DEFINED[name](message)) == message
