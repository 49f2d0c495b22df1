"""Ways: how a document is put before a question, and whether an answer came of what its way means."""

from __future__ import annotations

import os
import random
import re
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ...errors import CartridgeError, SourceError
from .places import Place, Questions
from .target import Target

Way = Literal["dense", "prefix", "warm", "cold"]
WAYS: tuple[Way, ...] = ("dense", "prefix", "warm", "cold")
_COMPUTED = {"kv_transfer_params": {"lmcache.tag.bench": "computed"}}
"""A tag that no cartridge has, so that LMCache has none for the request."""
_USED = re.compile(r"([^;,\s]+);positions=(\d+);injected=(\d+)")
_HEAD = 12
"""Tokens by which prompts are told apart."""
_NEAR = 0.8
"""Share of p that a document of text must be: its tokens are estimated."""
_IDLE_S, _POLL_S = 10.0, 0.05
"""How long an evicted cartridge may be held by requests that have just ended."""


class Answer(NamedTuple):
    """One streamed answer. Times are of a monotonic clock, in seconds."""

    way: Way
    p: int
    c: int
    turn: int
    question: int
    asked_s: float = 0.0
    first_s: float | None = None
    """When the first token came."""
    last_s: float | None = None
    tokens: int = 0
    """Of the answer, as the server counts them; the events where it does not tell."""
    prompt_tokens: int | None = None
    cached: int | None = None
    """Prompt tokens that were not computed; None where the server does not tell."""
    text: str = ""
    error: str | None = None
    """Why there is no answer."""
    not_so: str | None = None
    """Why it is none of its way, so that its times are in no figure."""


class Asked(NamedTuple):
    """A request that is ready to be sent."""

    answer: Answer
    body: bytes
    chunks: int
    """Of the cartridge."""
    before: str | None
    """Why it cannot be of its way, known before it is sent."""
    least: int = 0
    """Prompt tokens that the server must count."""


class Ways:
    """Makes the requests of each way to one server. `prepare` and `asked` are for one thread at a time, `send` for any."""

    def __init__(self, target: Target, questions: Questions, tokens: int) -> None:
        self._target, self._questions, self._tokens = target, questions, tokens
        self._kept: dict[int, str] = {}
        self._before: str | None = None
        self.warm: set[str] = set()
        """Which tiers of memory warm cartridges were in."""

    def without(self, way: Way, place: Place) -> str | None:
        """Return why a way is not to be had at a place; None where it is."""
        if way in ("dense", "prefix"):
            return None
        if not self._target.has_cartridges:
            return "no cartridges: the server has no route /v1/cartridges"
        return None if place.cartridge else f"p = {place.p}: no cartridge of this length"

    def warm_up(self, way: Way, place: Place) -> str | None:
        """Have a way's first request at a place be over, so that a cartridge is tried. Return why the way cannot be had.

        Whatever else goes wrong, the requests that count will tell.
        """
        if way == "dense":
            return None
        try:
            if way == "cold" and (refused := self._target.evict(place.cartridge or "")):
                return refused
        except CartridgeError as error:
            return str(error)
        self.send(self.asked(place, Answer(way, place.p, 1, -1, 0)))
        return None

    def prepare(self, way: Way, place: Place) -> None:
        """Bring the server to where requests of a way begin, untimed. Blocks, for a prefix as long as it takes to compute."""
        self._before = None
        if way == "prefix":  # again, since the dense prompts between may have taken its blocks
            self.send(self.asked(place, Answer(way, place.p, 1, -1, 0)))
        if place.cartridge is None or way not in ("warm", "cold"):
            return
        try:
            if way == "cold":
                self._before = self._cold(place.cartridge, place.files)
            elif (where := self._target.cartridge(place.cartridge).where) is None:
                self._before = f"{place.cartridge} was not in memory before"
            else:
                self.warm.add(where)
        except CartridgeError as error:
            self._before = str(error)

    def _cold(self, name: str, files: Sequence[Path]) -> str | None:
        until = time.monotonic() + _IDLE_S
        while True:
            if refused := self._target.evict(name):
                return refused
            if not any(held for held, _ in self._target.cartridge(name).tiers.values()):
                for file in files:
                    drop(file)
                return None
            if time.monotonic() > until:
                return f"{name} stays in memory: it is pinned, or others ask for it"
            time.sleep(_POLL_S)  # a request that has just ended lets go of it

    def asked(self, place: Place, answer: Answer) -> Asked:
        """Return the request that `answer` is to be the answer of."""
        way, own = answer.way, uuid.uuid4().hex
        question: Any = self._questions[answer.question]
        fields: dict[str, Any] = {}
        prompt, least = question, 0
        if way in ("warm", "cold"):
            fields = {"cartridges": [place.cartridge], "cache_salt": own}
        else:
            kept = self._kept.setdefault(place.p, own) if way == "prefix" else own
            if self._target.has_cartridges:
                fields, document = {"cache_salt": kept, **_COMPUTED}, place.document
            else:
                document = _apart(place.document, kept)
            prompt = document + question if isinstance(document, str) else [*document, *question]
            least = int(place.p * _NEAR) if isinstance(document, str) else place.p
        return Asked(answer, self._target.body(prompt, self._tokens, **fields), place.chunks, self._before, least)

    def send(self, asked: Asked) -> Answer:
        """Send a request and return its answer, or with why there is none. Blocks to its end."""
        answer, used, usage, text = asked.answer, "", {}, []
        first = last = None
        events = 0
        started = time.perf_counter()
        try:
            for headers, event in self._target.events(asked.body):
                if said := _said(event):
                    last = time.perf_counter()
                    first = first or last
                    events += 1
                    text.append(said[0])
                if event.get("usage"):
                    usage = event["usage"]
                used = headers.get("x-cartridges") or used
        except SourceError as error:
            return answer._replace(asked_s=started, error=str(error))
        if first is None:
            return answer._replace(asked_s=started, error="the stream ended without a token")
        found = answer._replace(
            asked_s=started, first_s=first, last_s=last, tokens=usage.get("completion_tokens") or events,
            prompt_tokens=usage.get("prompt_tokens"), cached=_cached(usage), text="".join(text),
        )  # fmt: skip
        return found._replace(not_so=asked.before or _not_so(found, used, asked, self._target))


def _said(event: dict[str, Any]) -> tuple[str] | None:
    """Return the text of an event that brings a token, which may be empty; None for another event."""
    if not event.get("choices"):
        return None
    choice = event["choices"][0]
    if "delta" not in choice:
        return (choice.get("text") or "",)
    delta = choice["delta"] or {}  # of a chat, whose first event has the role alone
    said = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
    return (said,) if said else None


def _apart(document: Any, salt: str) -> Any:
    """Return a document of the same length that begins as no other does, for servers that know no `cache_salt`."""
    if isinstance(document, str):
        return f"{salt} {document[len(salt) + 1 :]}"
    head = random.Random(salt).choices(document[1:], k=min(_HEAD, len(document) - 1))
    return [document[0], *head, *document[1 + len(head) :]]


def _cached(usage: dict[str, Any]) -> int | None:
    """Return the cached tokens; None where the server tells nothing of them."""
    details = usage.get("prompt_tokens_details")
    return None if details is None else int(details.get("cached_tokens") or 0)


def _not_so(answer: Answer, used: str, asked: Asked, target: Target) -> str | None:
    """Return why an answer is none of its way, by what the server says that it did not compute."""
    if answer.way in ("warm", "cold"):
        found = _USED.findall(used)
        if len(found) != 1:
            return f"answered without its cartridge: X-Cartridges says {used!r}"
        positions, injected = int(found[0][1]), int(found[0][2])
        chunk = injected // max(asked.chunks, 1)
        if not injected or chunk * asked.chunks != injected or positions - injected >= chunk:
            return f"{injected} of {positions} positions were injected; the server computed the others"
        return None
    if answer.prompt_tokens is not None and answer.prompt_tokens < asked.least:
        return f"the server counted {answer.prompt_tokens} prompt tokens, fewer than the document's {answer.p}"
    if answer.cached is None:
        return None
    if answer.way == "dense" and answer.cached > target.overhead * target.chats:
        return f"{answer.cached} tokens came from a cache"
    if answer.way == "prefix" and 2 * answer.cached < answer.p:
        return f"{answer.cached} of {answer.p} tokens came from the cache"
    return None


def drop(file: Path) -> None:
    """Have the system forget what it keeps of a file; no change where it cannot."""
    with suppress(OSError, AttributeError):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
