"""Client: asks one server greedily, with cartridges or with everything computed, and returns all that it said."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import httpx

from ...errors import SourceError
from ..server import Server, cached_tokens

TOKENS = 6
"""Tokens of an answer."""
_TOP = 20
_PREFIX = "token_id:"
"""What vLLM writes before a token's id where it is asked for ids."""
_GREEDY = {
    "temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0,
    "frequency_penalty": 0, "ignore_eos": True, "return_tokens_as_token_ids": True,
}  # fmt: skip
"""With what the model's generation config may have set otherwise."""
_WAIT_S = 120.0
"""How long a cartridge may take to be in memory and tried, where the server says when to ask again."""
_USED = re.compile(r"([^;,\s]+);positions=(\d+);injected=(\d+)")


class Used(NamedTuple):
    """A cartridge in the header `X-Cartridges` of an answer."""

    name: str
    positions: int
    injected: int


class Reply(NamedTuple):
    """What a request came back with."""

    status: int
    message: str
    """Of an error."""
    tokens: tuple[int, ...] = ()
    top: tuple[Mapping[int, float], ...] = ()
    """The likeliest tokens at each position with their logprobs."""
    cached: int = 0
    """Prompt tokens that were not computed."""
    used: tuple[Used, ...] = ()
    header: str | None = None
    """`X-Cartridges`; None where there was none."""


class Client:
    """Asks a server. Safe from any thread; a context manager, or close it."""

    def __init__(self, url: str, model: str | None = None, timeout_s: float = 600.0) -> None:
        """As `Server`. Raises `SourceError` where it does not answer."""
        self._timeout_s = timeout_s
        self._server = Server(url, model, timeout_s)
        self.url, self.model = self._server.url, self._server.model

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._server.close()

    @property
    def server(self) -> Server:
        """For what else is asked of it."""
        return self._server

    def move(self, url: str) -> None:
        """Go on with the same model at another URL: the server was started again."""
        old, self._server = self._server, Server(url, self.model, self._timeout_s)
        self.url = self._server.url
        old.close()

    def computed(self, ids: Sequence[int], *, tokens: int = TOKENS, salt: str | None = None) -> Reply:
        """Return the answer to a prompt that is computed whole; with an earlier one's `salt`, from vLLM's own cache.

        Raises `SourceError` where the server refuses, or did not compute it though it had no salt.
        """
        reply = self.ask(ids, False, tokens=tokens, salt=salt or uuid.uuid4().hex)
        if reply.status != 200:
            raise SourceError(f"{self.url} answered {reply.status} to a dense prompt: {reply.message}")
        if salt is None and reply.cached:
            raise SourceError(
                f"{self.url} took {reply.cached} tokens of a dense prompt from a cache, so nothing can be compared"
            )
        return reply

    def ask(
        self, ids: Sequence[int], cartridges: Sequence[str] | Literal[False] = (), *, tokens: int = TOKENS,
        salt: str | None = "",
        headers: Mapping[str, str] | None = None, **fields: Any,
    ) -> Reply:  # fmt: skip
        """Return the reply to a prompt behind cartridges, computed with False. A `salt` that is empty is a new one, None is none.

        Waits where the server says when to ask again. Raises `SourceError` where it cannot be reached or sends
        something else than an answer.
        """
        body: dict[str, Any] = {"model": self.model, "prompt": list(ids), "max_tokens": tokens, "logprobs": _TOP,
                                "add_special_tokens": False, **_GREEDY, **fields}  # fmt: skip
        if cartridges or cartridges is False:
            body["cartridges"] = cartridges and list(cartridges)
        if salt is not None:
            body["cache_salt"] = salt or uuid.uuid4().hex
        return self.post("/v1/completions", body, headers)

    def chat(self, text: str, cartridges: Sequence[str], *, tokens: int = TOKENS) -> Reply:
        """Return the reply to a user's message behind cartridges."""
        body = {"model": self.model, "messages": [{"role": "user", "content": text}], "max_tokens": tokens,
                "logprobs": True, "top_logprobs": _TOP, "cartridges": list(cartridges), "cache_salt": uuid.uuid4().hex,
                **_GREEDY}  # fmt: skip
        return self.post("/v1/chat/completions", body)

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Reply:
        """Return the reply to any body, as `ask` does."""
        until = time.monotonic() + _WAIT_S
        while True:
            response = self._server.send("POST", path, json=body, headers=headers)
            wait_s = response.headers.get("retry-after", "")
            if response.status_code not in (425, 503) or not wait_s.isdecimal() or time.monotonic() > until:
                return _read(response)
            time.sleep(min(float(wait_s), 2.0))

    def tokenize(self, **body: Any) -> list[int]:
        """Return token ids as the server makes them of a `prompt` or of `messages`. Raises `SourceError`."""
        body = {"model": self.model, **body}
        return self._server.post("/tokenize", body, lambda reply: [int(token) for token in reply["tokens"]])

    def get(self, path: str) -> httpx.Response:
        """Return what the server says at `path`, whatever its status."""
        return self._server.send("GET", path)

    def healthy(self) -> bool:
        """Whether the server says that it is well."""
        try:
            return self.get("/health").is_success
        except SourceError:
            return False


def _read(response: httpx.Response) -> Reply:
    header = response.headers.get("x-cartridges")
    used = tuple(Used(name, int(p), int(injected)) for name, p, injected in _USED.findall(header or ""))
    if not response.is_success:
        return Reply(response.status_code, response.text[:300], used=used, header=header)
    try:
        found = response.json()
        logprobs = found["choices"][0]["logprobs"]
        if "content" in logprobs:  # of a chat
            rows = [{_id(e["token"]): e["logprob"] for e in each["top_logprobs"]} for each in logprobs["content"]]
            tokens = [_id(each["token"]) for each in logprobs["content"]]
        else:
            rows = [{_id(token): value for token, value in row.items()} for row in logprobs["top_logprobs"]]
            tokens = [_id(token) for token in logprobs["tokens"]]
        cached = cached_tokens(found)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise SourceError(
            f"{response.url.path} sent something else than was asked for: {response.text:.200}"
        ) from error
    return Reply(response.status_code, "", tuple(tokens), tuple(rows), cached, used, header)


def _id(token: str) -> int:
    return int(token.removeprefix(_PREFIX))
