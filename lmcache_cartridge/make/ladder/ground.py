"""Ground: what each rung of the ladder stands on: a server, its cartridges, questions, and the noise of its answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from ...errors import CartridgeError, SourceError
from ..progress import Progress, silent
from ..server import Reply, Server
from . import texts
from .held import Held, parts
from .likeness import TELLING, Apart, Noise, apart

if TYPE_CHECKING:
    from .maker import Maker
    from .own import OwnServer

_QUESTIONS = 6
"""Questions of each cartridge that are asked, of those that tell it from the others."""
_AT_ONCE = 8


class Wrong(Exception):
    """A rung does not hold; the message says what was found."""


class Unchecked(Exception):
    """A rung cannot be tried here; the message says why."""


class Judged(NamedTuple):
    """An answer that was as it should."""

    apart: Apart
    bound: float


class Ground:
    """A server, what it holds, and how its answers are judged. Safe from any thread."""

    def __init__(
        self, client: Server, held: Sequence[Held], *, maker: Maker | None = None, own: OwnServer | None = None
    ) -> None:
        self.client, self.maker, self.own = client, maker, own
        self.held = list(held)
        self.noise = Noise()
        self._rounding: dict[tuple[str, tuple[int, ...]], float] = {}
        self._dense: dict[tuple[int, ...], Reply] = {}
        self._telling: dict[str, list[tuple[int, ...]]] = {}
        self._lock, self._model = threading.Lock(), threading.Lock()

    def measure(self, progress: Progress = silent) -> None:
        """Measure the noise of dense answers, and which questions tell the documents apart.

        Raises `CartridgeError` where there is no cartridge to ask about.
        """
        if not self.held:
            raise CartridgeError("there is no cartridge to ask about")
        prompts = [[*one.ids, *question] for one in self.held for question in one.questions[:2]]
        first = [self._computed(prompt) for prompt in prompts]
        again = [self.client.computed(prompt) for prompt in prompts]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            many = list(pool.map(self.client.computed, [*prompts, *prompts]))
        for prompt in prompts:
            self.client.computed(prompt, salt=f"validate {prompt[0]} {len(prompt)}")
        cached = [self.client.computed(prompt, salt=f"validate {prompt[0]} {len(prompt)}") for prompt in prompts]

        def most(found: Sequence[Reply]) -> float:
            return max(apart(first[n % len(first)], each).mean for n, each in enumerate(found))

        self.noise = self.noise._replace(twice=most(again), neighbours=most(many), cached=most(cached))
        for done, one in enumerate(self.held, 1):
            telling = (question for question in one.questions if self.tells(one, question) >= TELLING)
            self._telling[one.name] = list(islice(telling, _QUESTIONS))
            progress("dense answers", done, len(self.held))

    def bound(self, one: Held, question: Sequence[int]) -> float:
        """Return the largest mean difference that is taken for noise in the answer to a question after a cartridge."""
        if self.maker is None or one.manifest is None:
            return self.noise.bound(None)
        key, right = (one.name, tuple(question)), self.dense(one, question)
        with self._model:
            if key not in self._rounding:
                self._rounding[key] = self.maker.rounding(self.maker.kv(one), question, right)
            return self.noise.bound(self._rounding[key], one.manifest.fingerprint.dtype)

    def tells(self, one: Held, question: Sequence[int]) -> float:
        """Return how many bounds the dense answer after `one` is from the nearest after another document, or none."""
        others = [self.dense(other, question) for other in self.held if other.ids != one.ids]
        right = self.dense(one, question)
        nearest = min(apart(right, each).mean for each in others or [self.dense(None, question)])
        return nearest / self.bound(one, question)

    def questions(self, one: Held) -> Iterator[tuple[int, ...]]:
        """Yield questions whose answers the document decides, over and over. Raises `Unchecked` where none is known."""
        found = self._telling[one.name]
        if not found:
            raise Unchecked(
                f"of {len(one.questions)} questions none is answered otherwise without {one.name} by "
                "much more than noise, so its answers cannot tell"
            )
        while True:
            yield from found

    def some(self, one: Held, count: int) -> list[tuple[int, ...]]:
        """Return so many of `questions`."""
        found = self.questions(one)
        return [next(found) for _ in range(count)]

    def dense(self, one: Held | None, question: Sequence[int]) -> Reply:
        """Return the answer to a question after a document that the server computes; computed once."""
        return self._computed([*(one.ids if one else ()), *question])

    def _computed(self, prompt: Sequence[int]) -> Reply:
        key = tuple(prompt)
        with self._lock:
            known = self._dense.get(key)
        if known is None:
            known = self.client.computed(key)
            with self._lock:
                self._dense[key] = known
        return known

    def ask(self, one: Held, question: Sequence[int], *, salt: str | None = "") -> Judged:
        """Ask behind a cartridge and judge the answer by the dense one.

        Raises `Wrong` where it was refused, answered without the cartridge or otherwise than by the dense prompt.
        """
        return self.judge(one, question, self.client.ask(question, [one.name], salt=salt))

    def judge(self, one: Held, question: Sequence[int], given: Reply, expected: Reply | None = None) -> Judged:
        """Return how far an answer behind one cartridge is from the one expected; raise `Wrong` as `ask` does."""
        used_as(one.name, given, whole=one.whole)
        return self.like(one.name, given, expected or self.dense(one, question), self.bound(one, question))

    def like(self, name: str, given: Reply, expected: Reply, bound: float) -> Judged:
        """Return how far an answer is from the one expected. Raises `Wrong` where noise does not explain it."""
        found = apart(expected, given)
        if not found.within(bound):
            raise Wrong(
                f"the answer with {name} is not that of its dense prompt: logprobs differ by {found.mean:.3g} on "
                f"average, {found.largest:.3g} at most, of which {bound:.2g} may be noise"
            )
        return Judged(found, bound)

    def at_once(self, threads: int, tasks: Sequence[Callable[[], Judged]]) -> list[Judged]:
        """Run tasks on threads and return what they return; raises the first `Wrong`, after all have ended."""
        with ThreadPoolExecutor(threads) as pool:
            return [future.result() for future in [pool.submit(task) for task in tasks]]


def used_as(name: str, given: Reply, *, whole: int | None = None) -> None:
    """Raise `Wrong` unless the answer came with this cartridge, injected: so many positions where `whole` says."""
    if given.status != 200:
        raise Wrong(f"a request with {name} was answered {given.status}: {given.message[:160]}")
    if given.header is None:
        raise Wrong(
            f"an answer to a request with {name} has no header X-Cartridges: it was made without, or a proxy drops it"
        )
    if [each.name for each in given.used] != [name]:
        raise Wrong(f"a request with {name} was answered with {given.header!r}")
    [used] = given.used
    if used.injected == 0 or (whole is not None and used.injected < whole):
        raise Wrong(
            f"of {name} {used.injected} positions were injected, not {whole or 'any'}: the server computed the rest"
        )


def summary(found: Sequence[Judged]) -> str:
    """Return what a row says of answers that were as they should."""
    worst = max(found, key=lambda each: each.apart.mean / each.bound)
    return (
        f"{len(found)} of {len(found)}; mean difference at most {worst.apart.mean:.3f} of {worst.bound:.3f}, one "
        f"logprob's {max(each.apart.largest for each in found):.2f}"
    )


def existing(client: Server, names: Sequence[str]) -> list[Held]:
    """Return prefill cartridges that a server has already: those named, or the first three that can be asked about.

    Raises `CartridgeError` for a name that is not served, or is no prefill cartridge.
    """
    listed = client.send("GET", "/v1/cartridges").json()
    rows = listed.get("data") or [] if isinstance(listed, dict) else []
    rows = [row for row in rows if row["kind"] == "prefill" and row["state"] not in ("quarantined", "refused")]
    by_name = {
        name: row for row in rows for name in (f"{row['id']}@{row['version']}", row["id"] if row["current"] else "")
    }
    if missing := [name for name in names if name not in by_name]:
        raise CartridgeError(f"{', '.join(missing)}: no prefill cartridge of this name is served at {client.url}")
    chosen = [by_name[name] for name in names] or sorted(
        (row for row in rows if row["current"]), key=lambda row: (row["positions"], row["id"])
    )[:3]
    found = []
    for row in chosen:
        name = f"{row['id']}@{row['version']}"
        ids = client.cartridge_ids(name)
        asked = texts.write(name, 0).questions
        found.append(Held(name, tuple(ids), (*parts(ids), *question_ids(client, asked)), asked))
    return found


def question_ids(client: Server, asked: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the token ids of questions as they follow a document. Raises `SourceError`."""
    try:
        return [
            tuple(client.tokenize(prompt=f"\nQuestion: {text}\nAnswer:", add_special_tokens=False))
            for text in asked[:10]
        ]
    except SourceError as error:
        raise SourceError(f"{error}; the ladder needs the server's route /tokenize") from None
