"""Context: what each check stands on: a server, its cartridges, questions, and the noise of its answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import pytest

from ..errors import CartridgeError
from ..make.progress import Progress, silent
from ..make.server import Reply, Server
from ..make.trial import texts
from ..make.trial.maker import Held, Maker, parts
from ..make.trial.own import OwnServer
from .compare import TELLING, Difference, Noise, compare_logprobs

if TYPE_CHECKING:
    import torch

    from ..artifact.manifest import Manifest

_QUESTIONS = 6
"""Questions of each cartridge that are asked, of those that tell it from the others."""
_AT_ONCE = 8
_DRAWS = 3
"""Times that rounding is drawn; `make/canary.py` draws as often at the model's own coarseness."""
Tell = Callable[[str], None]


def wrong(what: str) -> NoReturn:
    """End a check: something does not hold."""
    pytest.fail(what, pytrace=False)


def unchecked(why: str) -> NoReturn:
    """End a check that cannot be tried here."""
    pytest.skip(why)


class Judged(NamedTuple):
    """An answer that was as it should."""

    apart: Difference
    bound: float


class Context:
    """A server, what it holds, and how its answers are judged. Safe from any thread."""

    def __init__(
        self, client: Server, held: Sequence[Held], *, maker: Maker | None = None, own: OwnServer | None = None,
        static: Callable[[], str] | None = None,
    ) -> None:  # fmt: skip
        """`static` checks this machine, where the server is on it."""
        self.client, self.maker, self.own, self.static = client, maker, own, static
        self.held = list(held)
        self.noise = Noise()
        self._rounding: dict[tuple[str, tuple[int, ...]], float] = {}
        self._telling: dict[str, list[tuple[int, ...]]] = {}
        self._computed = lru_cache(maxsize=None)(client.computed)
        self._model = threading.Lock()

    def measure(self, progress: Progress = silent) -> None:
        """Measure the noise of dense answers, and which questions tell the documents apart.

        Raises `CartridgeError` where there is no cartridge to ask about.
        """
        if not self.held:
            raise CartridgeError("there is no cartridge to ask about")
        prompts = [(*one.ids, *question) for one in self.held for question in one.questions[:2]]
        first = [self._computed(prompt) for prompt in prompts]
        again = [self.client.computed(prompt) for prompt in prompts]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            many = list(pool.map(self.client.computed, [*prompts, *prompts]))
        for _ in range(2):  # the second time from the cache
            cached = [self.client.computed(prompt, salt=f"validate {prompt[0]} {len(prompt)}") for prompt in prompts]

        def most(found: Sequence[Reply]) -> float:
            return max(compare_logprobs(first[n % len(first)], each).mean for n, each in enumerate(found))

        self.noise = self.noise._replace(twice=most(again), neighbours=most(many), cached=most(cached))
        for done, one in enumerate(self.held, 1):
            telling = (question for question in one.questions if self.tells(one, question) >= TELLING)
            self._telling[one.name] = list(islice(telling, _QUESTIONS))
            progress("dense answers", done, len(self.held))

    def bound(self, one: Held, question: Sequence[int]) -> float:
        """Return the largest mean difference that is taken for noise in the answer to a question after a cartridge."""
        if self.maker is None or one.manifest is None:
            return self.noise.bound(None, encoding=one.manifest.stored.encoding if one.manifest else "plain")
        key, right = (one.name, tuple(question)), self.dense(one, question)
        with self._model:
            if key not in self._rounding:
                self._rounding[key] = rounding(self.maker, self.maker.kv(one), question, right)
            return self.noise.bound(self._rounding[key], one.manifest.fingerprint.dtype)

    def tells(self, one: Held, question: Sequence[int]) -> float:
        """Return how many bounds the dense answer after `one` is from the nearest after another document, or none."""
        others = [self.dense(other, question) for other in self.held if other.ids != one.ids]
        right = self.dense(one, question)
        nearest = min(compare_logprobs(right, each).mean for each in others or [self.dense(None, question)])
        return nearest / self.bound(one, question)

    def questions(self, one: Held) -> Iterator[tuple[int, ...]]:
        """Yield questions whose answers the document decides, over and over; the check is not made where none is known."""
        if not self._telling[one.name]:
            unchecked(
                f"of {len(one.questions)} questions none is answered otherwise without {one.name} by "
                "much more than noise, so its answers cannot tell"
            )
        while True:
            yield from self._telling[one.name]

    def some(self, one: Held, count: int) -> list[tuple[int, ...]]:
        """Return so many of `questions`."""
        return list(islice(self.questions(one), count))

    def several(self, count: int) -> list[Held]:
        """Return so many cartridges; the check is not made where there are fewer."""
        if len(self.held) < count:
            unchecked(f"needs {count} cartridges, and {len(self.held)} can be asked about")
        return self.held[:count]

    def needs_maker(self, why: str) -> Maker:
        """Return what makes cartridges; the check is not made without."""
        if self.maker is None:
            unchecked(f"needs --model: {why}")
        return self.maker

    def dense(self, one: Held | None, question: Sequence[int]) -> Reply:
        """Return the answer to a question after a document that the server computes; computed once."""
        return self._computed((*(one.ids if one else ()), *question))

    def ask(self, one: Held, question: Sequence[int], *, salt: str | None = "") -> Judged:
        """Ask behind a cartridge and judge the answer by the dense one."""
        return self.judge(one, question, self.client.ask(question, [one.name], salt=salt))

    def judge(self, one: Held, question: Sequence[int], given: Reply, expected: Reply | None = None) -> Judged:
        """Return how far an answer behind one cartridge is from the one expected.

        The check fails where it was refused, answered without the cartridge or otherwise than expected.
        """
        used_as(one.name, given, whole=one.whole)
        return self.like(one.name, given, expected or self.dense(one, question), self.bound(one, question))

    def like(
        self, name: str, given: Reply, expected: Reply, bound: float, problem: str = "is not that of its dense prompt"
    ) -> Judged:  # fmt: skip
        """Return how far an answer is from the one expected; the check fails where noise does not explain it.

        Where the cache is fp8 it is not made: what is computed there is further from the exact than noise.
        """
        found = compare_logprobs(expected, given)
        if not found.within(bound):
            if self.client.caches_in_fp8():
                unchecked(f"a KV cache in fp8 rounds more than is known here; `validate {name}` asks what is known")
            differ = f"logprobs differ by {found.mean:.3g} on average, of which {bound:.2g} may be noise"
            wrong(f"the answer with {name} {problem}: {differ}")
        return Judged(found, bound)

    def alive(self, when: str) -> None:
        """See that the server says that it is well."""
        if not self.client.healthy():
            wrong(f"the server is not healthy after {when}")


def used_as(name: str, given: Reply, *, whole: int | None = None) -> None:
    """See that an answer came with this cartridge, so many positions where `whole` says: injected, or had by vLLM already."""
    if given.status != 200:
        wrong(f"a request with {name} was answered {given.status}: {given.message[:160]}")
    if given.header is None:
        wrong(
            f"an answer to a request with {name} has no header X-Cartridges: it was made without, or a proxy drops it"
        )
    if [each.name for each in given.used] != [name]:
        wrong(f"a request with {name} was answered with {given.header!r}")
    [used] = given.used
    if (had := used.injected + used.cached) < (whole or 1):
        wrong(f"of {name} {had} positions were injected, not {whole or 'any'}: the server computed the rest")


def summary(found: Sequence[Judged]) -> str:
    """Return what a row says of answers that were as they should."""
    worst = max(found, key=lambda each: each.apart.mean / each.bound)
    return f"{len(found)} of {len(found)}; mean difference at most {worst.apart.mean:.3f} of {worst.bound:.3f}"


def by_model(maker: Maker, kv: torch.Tensor | None, ids: Sequence[int], given: Reply) -> Reply:
    """Return the logprobs of transformers along the tokens of `given`, which answered `ids` after canonical KV."""
    count, fed = len(given.tokens), [*ids, *given.tokens[:-1]]
    logits = maker.model.logits(fed, count) if kv is None else maker.model.logits_after(kv, fed)[-count:]
    best = logits[:, : maker.model.fingerprint.vocab_size].log_softmax(-1).topk(20)
    rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    top = tuple(dict(zip(*row, strict=True)) for row in rows)
    return Reply(200, "", tuple(best.indices[:, 0].tolist()), top)


def rounding(maker: Maker, kv: torch.Tensor, ids: Sequence[int], given: Reply) -> float:
    """Return how far rounding every product at random moves the logprobs of `given`, an answer to `ids` after KV."""
    from ..make.canary import rounding

    plain, most = by_model(maker, kv, ids, given), 0.0
    with rounding(maker.model) as again:
        for draw in range(_DRAWS):
            again(draw, 1.0)
            most = max(most, compare_logprobs(plain, by_model(maker, kv, ids, given)).mean)
    return most


def existing(
    client: Server, names: Sequence[str], known: Callable[[str], Manifest | None] = lambda digest: None
) -> list[Held]:
    """Return prefill cartridges that a server has already: those named, or the first three that can be asked about.

    `known` returns the manifest of what has a digest, where that is here too. Raises `CartridgeError` for a name that is not served, or is no prefill cartridge.
    """
    listed = client.send("GET", "/v1/cartridges").json().get("data") or []
    rows = {
        f"{row['id']}@{row['version']}": row for row in listed
        if row["kind"] == "prefill" and row["state"] not in ("quarantined", "refused")
    }  # fmt: skip
    current = {row["id"]: name for name, row in rows.items() if row["current"]}
    chosen = [current.get(name, name) for name in names]
    if missing := [name for name in chosen if name not in rows]:
        raise CartridgeError(f"{', '.join(missing)}: no prefill cartridge of this name is served at {client.url}")
    found = []
    for name in chosen or sorted(current.values(), key=lambda name: (rows[name]["positions"], name))[:3]:
        ids, asked = client.cartridge_ids(name), texts.write(name, 0).questions
        behind = (f"\nQuestion: {text}\nAnswer:" for text in asked[:10])
        questions = (*parts(ids), *(tuple(client.tokenize(prompt=text, add_special_tokens=False)) for text in behind))
        found.append(Held(name, tuple(ids), questions, asked, manifest=known(rows[name]["digest"])))
    return found
