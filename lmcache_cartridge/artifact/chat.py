"""Chat: how a server goes on with a cartridge whose tokens are the first messages of a chat template's prompt.

The messages themselves are long, and a server has no use for them. So the manifest has a stand-in of each, its end. The
template renders stand-ins and a request's messages together; what comes behind the stand-ins' tokens comes behind the
cartridge's. `build` tries that it is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from .canary import TokenId

MAX_MESSAGES = 256


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: str
    content: str


class Chat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A conversation's beginning, as short as a server needs it."""

    messages: Annotated[tuple[Message, ...], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    """For each message of the cartridge the end of its text."""
    prefix: Annotated[tuple[TokenId, ...], msgspec.Meta(min_length=1, max_length=1 << 16)]
    """The ids that a prompt of `messages` and others begins with, in the place of the cartridge's."""
    arguments: dict[str, Any] = {}
    """Of the template, as `chat_template_kwargs` of a request are."""

    def behind(self, ids: Sequence[int], bos: int | None = None) -> list[int] | None:
        """Return what a prompt of `messages` and others has behind them; None for a prompt that begins otherwise.

        A second `bos`, put before what the template made, is left out.
        """
        size = len(self.prefix)
        if bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos and self.prefix[:2] != (bos, bos):
            ids = ids[1:]
        return list(ids[size:]) if tuple(ids[:size]) == self.prefix else None
