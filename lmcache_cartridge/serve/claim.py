"""Claim: by this one object a request holds its KV in every worker, from admission until the engine has it."""

from __future__ import annotations

import asyncio
from typing import Any

from ..engine.client import ControlClient, Held
from ..engine.contract import COMPUTED, GRANT, TAG
from ..engine.salts import adapter_name
from ..settings import Settings
from . import http
from .request import Refusal
from .resolve import Selection

_ANSWER_S = 0.5
"""How long the workers may take to answer once a claim's time is up."""


class Claim(Held):
    """A request's claim on what it selected.

    Leaving `async with` releases it, unless it was granted to the engine. One that was granted is released when the
    engine has what it needs of it, at the latest when nobody refers to the request any more.
    """

    def __init__(self, client: ControlClient, selection: Selection) -> None:
        super().__init__(client)
        self.selection = selection
        self.is_text = False
        """Whether the documents' own text takes the place of the KV; then nothing is held."""
        self.is_whole = False
        """Whether all of the KV was in every worker's memory when it was waited for."""
        self._prompts = 0
        self._cached: int | None = None

    async def __aenter__(self) -> Claim:
        return self

    async def __aexit__(self, *error: object) -> None:
        if not self._prompts:
            self.release()

    async def wait(self, settings: Settings) -> bool:
        """Wait until the KV may be used, or the documents' text has to take its place: then return False.

        Waits `ready_timeout_s` at most. What can be computed is not waited for where memory is short or its source
        fails. Raises `Refusal` where there is no text, or the settings do not allow it.
        """
        selection, may_compute = self.selection, self.selection.must_inject == 0
        if selection.tag is None:
            return True
        try:
            async with asyncio.timeout(settings.ready_timeout_s + _ANSWER_S):
                asked = self.begin("claim", selection.tag, selection.located, settings.ready_timeout_s, may_compute)
                ranks = await asyncio.wrap_future(asked)
        except TimeoutError:
            ranks = []  # not told in time
        refused = next((rank for rank in ranks if rank["refused"]), None)
        if refused is not None and refused["mismatch"]:
            raise selection.refused(refused)
        self.is_whole = bool(ranks) and all(rank["ready"] for rank in ranks)
        if self.is_whole or may_compute:
            return True  # what is missing is computed, from the documents' own tokens
        if settings.on_miss == "document" and selection.document_ids is not None:
            self.use_text()
            return False
        if refused is not None:
            raise selection.refused(refused)
        raise Refusal(503, f"{selection.names} is still being loaded", retry_after_s=5)

    def use_text(self) -> None:
        """Put the documents' own text in the place of the KV, which is let go."""
        self.is_text = True
        self.release()

    def grant(
        self, params: dict[str, Any] | None, prompts: int, client_salt: str | None = None
    ) -> dict[str, Any] | None:
        """Return `kv_transfer_params` by which the engine finds the KV for so many prompts, or is kept from it.

        `params` are the client's own, which stay but for the names of cartridges, and `client_salt` its `cache_salt`.
        """
        own = {k: v for k, v in (params or {}).items() if k != "cartridge_id"}
        if self.selection.tag is None:
            return own or None
        if self.is_text:
            return Computed(own)
        self._prompts = prompts
        return Grant(own, self, client_salt)

    def note(self, cached_tokens: int) -> None:
        """Tell the client how many leading positions of a prompt were not computed; of several prompts the least."""
        if self._cached is None or cached_tokens < self._cached:
            self._cached = cached_tokens
            http.note(self.selection.used(cached_tokens))

    def end_prompt(self) -> None:
        """Note that the engine needs the KV for one prompt less; after the last it is let go."""
        self._prompts -= 1
        if self._prompts <= 0:
            self.release()


class Grant(dict):
    """`kv_transfer_params` as this server makes them for a claim: no client can send one."""

    def __init__(self, own: dict[str, Any], claim: Claim, client_salt: str | None = None) -> None:
        """`own` are the client's own parameters, and `client_salt` its `cache_salt`."""
        selection = claim.selection
        resident = selection.positions if claim.is_whole else selection.must_inject
        granted = {
            "must_inject": selection.must_inject, "resident": resident, "salt": client_salt or "",
            "adapter": adapter_name(selection.adapter), "positions": selection.positions,
        }  # fmt: skip
        super().__init__(own | {TAG: selection.tag, GRANT: granted})
        self.claim = claim


class Computed(dict):
    """`kv_transfer_params` as this server makes them for a prompt that no cartridge may answer, nor a part of it."""

    def __init__(self, own: dict[str, Any]) -> None:
        """`own` are the client's own parameters."""
        super().__init__(own | {TAG: COMPUTED})
        self.own = own or None
