"""Target: a server that is measured, and what it can do."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ...errors import CartridgeError, SourceError
from ..server import Server

PREFILL_S = 3600.0
"""The longest wait for a token."""
ASK_S = 60.0
"""The longest wait for any other reply."""
_PROBE = {"max_tokens": 2, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
_EXTRAS = {"ignore_eos": True}
"""Of vLLM's own, which other servers may refuse: answers of equal length."""


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


class Target:
    """A server. Safe from any thread; a context manager, or close it."""

    def __init__(self, url: str, model: str | None = None) -> None:
        """Ask the server what it is. Raises `SourceError` where it does not answer, or answers no prompt."""
        self.server = Server(url, model, ASK_S)
        self.url, self.model = self.server.url, self.server.model
        try:
            self.path, self.extras, self.overhead = self._probe()
            row = self._model()
            self.max_model_len: int | None = row.get("max_model_len")
            self.version = self._get("/version", lambda body: str(body["version"]))
            self.tokenizes = self.path == _COMPLETIONS and bool(self.tokens("x"))
            self.has_cartridges = self._get("/v1/cartridges", lambda body: isinstance(body["data"], list)) or False
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self.server.close()

    @property
    def chats(self) -> bool:
        """Whether it takes no plain completions, so that prompts are a user's messages."""
        return self.path == _CHAT

    @property
    def is_local(self) -> bool:
        """Whether it is asked through this machine's loopback interface."""
        host = urlsplit(self.url).hostname or ""
        try:
            return socket.gethostbyname(host).startswith("127.") or host == "::1"
        except OSError:
            return host == "::1"

    @property
    def port(self) -> int:
        """Where it listens."""
        parts = urlsplit(self.url)
        return parts.port or (443 if parts.scheme == "https" else 80)

    def body(self, prompt: str | Sequence[int], tokens: int, **fields: Any) -> bytes:
        """Return a request for a greedy stream of so many tokens, as JSON."""
        asked: dict[str, Any] = {"model": self.model, **_PROBE, "max_tokens": tokens, **fields}
        if self.chats:
            asked["messages"] = [{"role": "user", "content": prompt}]
        else:
            asked["prompt"] = prompt if isinstance(prompt, str) else list(prompt)
        if self.extras:
            asked |= _EXTRAS
        return json.dumps(asked).encode()

    def events(self, body: bytes) -> Iterator[tuple[Mapping[str, str], dict[str, Any]]]:
        """Send a request of `body` and yield the events of its answer, as `Server.events` does."""
        return self.server.events(self.path, body, PREFILL_S)

    def tokens(self, text: str, *, special: bool = False) -> list[int] | None:
        """Return a text's token ids as the server makes them; None where it has no route `/tokenize`."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": special}
        reply = self.server.send("POST", "/tokenize", json=body)
        if not reply.is_success:
            return None
        try:
            return [int(token) for token in reply.json()["tokens"]]
        except (ValueError, KeyError, TypeError):
            return None

    def cartridge(self, name: str) -> Cartridge:
        """Return a cartridge as it is now. Raises `CartridgeError` for one that is not served."""
        reply = self.server.send("GET", f"/v1/cartridges/{name}")
        if not reply.is_success:
            raise CartridgeError(f"{self.url} has no cartridge {name!r}: it answered {reply.status_code}")
        return _cartridge(reply.json())

    def cartridges(self) -> list[Cartridge]:
        """Return those that ids stand for and that can be served, the shortest first; none where it has no such route."""
        if not self.has_cartridges:
            return []
        rows = self.server.send("GET", "/v1/cartridges").json()["data"]
        found = [_cartridge(row) for row in rows if row["current"] and row["state"] not in ("quarantined", "refused")]
        return sorted((each for each in found if each.chunks), key=lambda each: (each.positions, each.name))

    def evict(self, name: str) -> str | None:
        """Have a cartridge dropped from memory and from disk copies; return why that cannot be, or None."""
        reply = self.server.send("POST", f"/v1/cartridges/{name}/evict")
        if reply.is_success:
            return None
        if reply.status_code == 403:
            return "its setting `admin` is off, so nothing can be evicted; start it with --set admin=true"
        return f"it answered {reply.status_code} to /v1/cartridges/{name}/evict"

    def metrics(self) -> str | None:
        """Return `/metrics`; None where there is none."""
        try:
            reply = self.server.send("GET", "/metrics")
        except SourceError:
            return None
        return reply.text if reply.is_success else None

    def _probe(self) -> tuple[str, bool, int]:
        """Return the path that answers prompts, whether with vLLM's fields, and tokens of a prompt of one letter."""
        refused = ""
        for path, extras in ((_COMPLETIONS, True), (_COMPLETIONS, False), (_CHAT, True), (_CHAT, False)):
            self.path, self.extras = path, extras
            try:
                events = [event for _, event in self.events(self.body("x", 2))]
            except SourceError as error:
                refused = refused or str(error)
                continue
            usage: dict[str, Any] = next((event["usage"] for event in reversed(events) if event.get("usage")), {})
            return path, extras, int(usage.get("prompt_tokens") or 0)
        raise SourceError(f"no prompt is answered there: {refused}")

    def _model(self) -> dict[str, Any]:
        rows = self._get("/v1/models", lambda body: body["data"]) or []
        return next((row for row in rows if row.get("id") == self.model), {})

    def _get(self, path: str, read: Callable[[Any], Any]) -> Any:
        """Return what `read` takes out of a reply; None where there is no such route, or it sends something else."""
        reply = self.server.send("GET", path)
        try:
            return read(reply.json()) if reply.is_success else None
        except (ValueError, KeyError, TypeError, AttributeError):
            return None


def _cartridge(row: dict[str, Any]) -> Cartridge:
    tiers = {tier: (of["resident_chunks"], of["chunks"]) for tier, of in row["tiers"].items()}
    return Cartridge(f"{row['id']}@{row['version']}", row["kind"], row["positions"], row["state"], tiers)
