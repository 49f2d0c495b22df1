"""Run: asks a server in all ways by turns, within a budget of time, and keeps every answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from ..progress import Progress, silent
from .places import Place
from .ways import WAYS, Answer, Way, Ways

T = TypeVar("T")
R = TypeVar("R")
_LOOK_S = 0.1
"""How often a wait looks at the time, and can be interrupted."""


class Plan(NamedTuple):
    """What is asked."""

    places: Sequence[Place]
    concurrency: Sequence[int]
    repeat: int
    ways: Sequence[Way] = WAYS
    budget_s: float = float("inf")

    @property
    def questions(self) -> int:
        """How many questions it takes: each is asked once in each way, or a prefix cache would have the question too."""
        return self.repeat * sum(self.concurrency) + 1

    def question(self, c: int, turn: int) -> int:
        """Return the first question of a batch; 0 is kept for warming up."""
        return 1 + self.repeat * sum(self.concurrency[: list(self.concurrency).index(c)]) + turn * c

    @property
    def batches(self) -> int:
        """How many times requests are sent together, at most."""
        return len(self.places) * len(self.concurrency) * self.repeat * len(self.ways)


class Measured:
    """What came of it so far."""

    def __init__(self, started_s: float) -> None:
        self.answers: list[Answer] = []
        self.left_out: dict[str, None] = {}
        """Why ways are not there; in order, each once."""
        self.stopped: str | None = None
        """Why it ended before its end."""
        self.was_interrupted = False
        self.started_s = started_s
        self.seconds = 0.0


class OutOfTime(Exception):
    """The budget is used up."""


def run(
    plan: Plan,
    ways: Ways,
    *,
    between: Callable[[int], None] = lambda answers: None,
    progress: Progress = silent,
    clock: Callable[[], float] = time.perf_counter,
) -> Measured:
    """Ask in all ways and return the answers. `between` is called with how many there are, when none is on its way.

    The ways take turns, so that all meet the same disturbances. Out of time or interrupted, it returns what there is:
    requests that are still on their way are in no figure. Never raises for a request.
    """
    found, done = Measured(clock()), 0
    deadline = found.started_s + plan.budget_s
    try:
        _first(plan, ways, deadline, clock)
        for place in plan.places:
            here = [way for way in plan.ways if _is_to_be_had(ways, way, place, found, deadline, clock)]
            for c in plan.concurrency:
                for turn in range(plan.repeat):
                    for way in here:
                        _prepare(ways, way, place, deadline, clock)
                        wanted = [Answer(way, place.p, c, turn, plan.question(c, turn) + n) for n in range(c)]
                        asked = [ways.asked(place, answer) for answer in wanted]
                        found.answers += together(ways.send, asked, deadline, clock)
                        between(len(found.answers))
                        done += 1
                        progress(f"p {place.p}, c {c}, {way}", done, plan.batches)
                    done += len(plan.ways) - len(here)
    except OutOfTime:
        found.stopped = f"the budget of {plan.budget_s:g} s was used up; what is missing was not measured"
    except KeyboardInterrupt:
        found.stopped, found.was_interrupted = "interrupted; what is missing was not measured", True
    found.seconds = clock() - found.started_s
    return found


def _first(plan: Plan, ways: Ways, deadline: float, clock: Callable[[], float]) -> None:
    """Have the server's first requests be over, as many at once as there will be."""
    if plan.places:
        place, count = plan.places[0], max(plan.concurrency)
        asked = [ways.asked(place, Answer("dense", place.p, count, -1, 0)) for _ in range(count)]
        together(ways.send, asked, deadline, clock)


def _prepare(ways: Ways, way: Way, place: Place, deadline: float, clock: Callable[[], float]) -> None:
    """Prepare a way by the deadline: it computes a prefix, and waits until an evicted cartridge is let go."""
    together(lambda _: ways.prepare(way, place), [None], deadline, clock)


def _is_to_be_had(
    ways: Ways, way: Way, place: Place, found: Measured, deadline: float, clock: Callable[[], float]
) -> bool:
    """Whether a way can be measured at a place. It is warmed up then; what went wrong is noted."""
    why = ways.without(way, place)
    if why is None:
        [why] = together(lambda _: ways.warm_up(way, place), [None], deadline, clock)
        why = why and f"{way}, p = {place.p}: {why}"
    else:
        why = f"{way}: {why}"
    if why is not None:
        found.left_out[why] = None
    return why is None


def together(
    call: Callable[[T], R], items: Sequence[T], deadline: float, clock: Callable[[], float] = time.perf_counter
) -> list[R]:
    """Return what `call` returns for each item, all begun at the same moment. Raises `OutOfTime`, and leaves them then."""
    start = threading.Barrier(len(items))
    results: dict[int, R] = {}
    errors: list[BaseException] = []
    ended = threading.Semaphore(0)

    def one(number: int, item: T) -> None:
        try:
            start.wait()
            results[number] = call(item)
        except BaseException as error:
            errors.append(error)
        finally:
            ended.release()

    # Not of a pool, which would wait for them when the program ends.
    for number, item in enumerate(items):
        threading.Thread(target=one, args=(number, item), daemon=True).start()
    for _ in items:
        while not ended.acquire(timeout=_LOOK_S):
            if clock() > deadline:
                raise OutOfTime
    if clock() > deadline:
        raise OutOfTime
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(items))]
