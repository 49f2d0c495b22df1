"""Target: a vLLM server that is measured, and what it can do."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from ...errors import SourceError
from ..server import Server

UNFIT = ("quarantined", "refused")
_ASK_S = 60.0
"""The longest wait for a reply; answers are waited for by vLLM's own client."""


class Target(Server):
    """A server. Safe from any thread; a context manager, or close it."""

    def __init__(self, url: str, model: str | None = None) -> None:
        """Ask the server what it is. Raises `SourceError` where it does not answer, or makes no tokens of a text."""
        super().__init__(url, model, _ASK_S)
        try:
            self.context = self.max_model_len()
            self.version = self._told("/version").get("version")
            self.has_cartridges = "data" in self._told("/v1/cartridges")
            try:
                self.tokenize(prompt="x")
            except SourceError as error:
                raise SourceError(
                    f"{error}; bench asks vLLM's servers by token ids, so what forwards /v1 has to forward /tokenize too; any "
                    "other server is measured by `vllm bench serve` itself"
                ) from None
        except BaseException:
            self.close()
            raise

    def cartridge(self, name: str) -> dict[str, Any]:
        """Return a cartridge as `/v1/cartridges` has it now. Raises `SourceError` for one that is not served."""
        return self.request("GET", f"/v1/cartridges/{name}").json()

    def cartridges(self) -> list[dict[str, Any]]:
        """Return those that ids stand for and that can be served, the shortest first; none where it has no such route."""
        rows = self._told("/v1/cartridges").get("data", ())
        found = [row for row in rows if row["current"] and row["state"] not in UNFIT and most(row, "chunks")]
        return sorted(found, key=lambda row: (row["positions"], row["id"]))

    def _told(self, path: str) -> dict[str, Any]:
        """Return the fields of a reply; none where there is no such route, or it sends something else."""
        reply = self.send("GET", path)
        with suppress(ValueError):
            if reply.is_success and isinstance(found := reply.json(), dict):
                return found
        return {}


def most(row: dict[str, Any], what: str) -> int:
    """Return how many whole `chunks` a cartridge has, which are injected, or `resident_chunks` the tier that holds most."""
    return max((tier[what] for tier in row["tiers"].values()), default=0)
