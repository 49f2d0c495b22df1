"""Target: a vLLM server that is measured, and what it can do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ...errors import CartridgeError, SourceError
from ..server import Server

_ASK_S = 60.0
"""The longest wait for a reply; answers are waited for by vLLM's own client."""


class Cartridge(NamedTuple):
    """One of a server's cartridges, as `/v1/cartridges` has it."""

    name: str
    """`id@version`."""
    kind: str
    positions: int
    state: str
    tiers: dict[str, tuple[int, int]]
    """Chunks that a tier of memory holds, and all that there are."""

    @property
    def chunks(self) -> int:
        """Whole chunks, which are injected."""
        return max((whole for _, whole in self.tiers.values()), default=0)

    @property
    def where(self) -> str | None:
        """The fastest tier of memory that holds all of it; None where none does."""
        return next((tier for tier, (held, whole) in self.tiers.items() if whole and held >= whole), None)


class Target(Server):
    """A server. Safe from any thread; a context manager, or close it."""

    def __init__(self, url: str, model: str | None = None) -> None:
        """Ask the server what it is. Raises `SourceError` where it does not answer, or makes no tokens of a text."""
        super().__init__(url, model, _ASK_S)
        try:
            self.context = self.max_model_len()
            self.version = self._get("/version", lambda body: str(body["version"]))
            self.has_cartridges = self._get("/v1/cartridges", lambda body: isinstance(body["data"], list)) or False
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

    @property
    def is_local(self) -> bool:
        """Whether it is asked through this machine's loopback interface."""
        return urlsplit(self.url).hostname in ("localhost", "127.0.0.1", "::1")

    @property
    def port(self) -> int:
        """Where it listens."""
        return urlsplit(self.url).port or 80

    def cartridge(self, name: str) -> Cartridge:
        """Return a cartridge as it is now. Raises `CartridgeError` for one that is not served."""
        reply = self.send("GET", f"/v1/cartridges/{name}")
        if not reply.is_success:
            raise CartridgeError(f"{self.url} has no cartridge {name!r}: it answered {reply.status_code}")
        return _cartridge(reply.json())

    def cartridges(self) -> list[Cartridge]:
        """Return those that ids stand for and that can be served, the shortest first; none where it has no such route."""
        rows = self._get("/v1/cartridges", lambda body: body["data"]) or []
        found = [_cartridge(row) for row in rows if row["current"] and row["state"] not in ("quarantined", "refused")]
        return sorted((each for each in found if each.chunks), key=lambda each: (each.positions, each.name))

    def evict(self, name: str) -> str | None:
        """Have a cartridge dropped from memory and from disk copies; return why that cannot be, or None."""
        reply = self.send("POST", f"/v1/cartridges/{name}/evict")
        if reply.is_success:
            return None
        if reply.status_code == 403:
            return "its setting `admin` is off, so nothing can be evicted; start it with --set admin=true"
        return f"it answered {reply.status_code} to /v1/cartridges/{name}/evict"

    def _get(self, path: str, read: Callable[[Any], Any]) -> Any:
        """Return what `read` takes out of a reply; None where there is no such route, or it sends something else."""
        reply = self.send("GET", path)
        try:
            return read(reply.json()) if reply.is_success else None
        except (ValueError, KeyError, TypeError, AttributeError):
            return None


def _cartridge(row: dict[str, Any]) -> Cartridge:
    tiers = {tier: (of["resident_chunks"], of["chunks"]) for tier, of in row["tiers"].items()}
    return Cartridge(f"{row['id']}@{row['version']}", row["kind"], row["positions"], row["state"], tiers)
