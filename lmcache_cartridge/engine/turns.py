"""Turns: who may have LMCache's server look a prefix up that it has no copy of."""

from __future__ import annotations

from collections.abc import Hashable

from ..artifact.lru import Lru

_MAX_SEEN = 1 << 14
"""Prefixes of which LMCache is known to have had its copy."""


class Turns:
    """Lets one request at a time ask for a prefix of which LMCache has no copy; the others find the copy of the first.

    LMCache 0.5.6 stages a copy for each request that asks while none is there, and has no memory for many: what has no
    room is computed. For the scheduler's thread only.
    """

    def __init__(self) -> None:
        self._seen: Lru[Hashable, None] = Lru(_MAX_SEEN)
        self._asking: dict[Hashable, str] = {}
        """Which request asks for a prefix."""
        self._waiting: dict[str, tuple[Hashable, Hashable]] = {}
        """Key and prefix of each request that asks or wants to."""

    def may_ask(self, request_id: str, key: Hashable, prefix: Hashable) -> bool:
        """Whether a request may ask now for what LMCache has under a `key`. One that may not tries again later.

        Requests with one `prefix` ask one after the other while their key is not known to have a copy.
        """
        self._waiting[request_id] = key, prefix
        return key in self._seen or self._asking.setdefault(prefix, request_id) == request_id

    def answered(self, request_id: str, *, found: bool) -> None:
        """Let the others ask. Whether all was `found`: else those with this key ask one after the other again.

        A request that has not asked, or was answered before, changes nothing.
        """
        if (names := self._waiting.pop(request_id, None)) is None:
            return
        key, prefix = names
        if found:
            self._seen.put(key, None)
        else:
            self._seen.pop(key)
        if self._asking.get(prefix) == request_id:
            del self._asking[prefix]
