"""Every error is one of ours and a builtin one, with a message that reads as a sentence."""

from __future__ import annotations

import builtins

import pytest

from lmcache_cartridge import errors
from lmcache_cartridge.errors import CartridgeError, FleetError

DEFINED = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, CartridgeError)]
BUILTIN = tuple(e for e in vars(builtins).values() if isinstance(e, type) and issubclass(e, Exception))


@pytest.mark.parametrize("error", DEFINED)
def test_an_error_is_also_a_builtin_one_and_its_message_is_shown_as_it_was_written(error):
    assert error in (CartridgeError, FleetError) or {*error.__mro__} & {*BUILTIN} - {Exception}
    message = "cartridge 'doc@1' is not there; what now?"
    assert str(error(message)) == message
