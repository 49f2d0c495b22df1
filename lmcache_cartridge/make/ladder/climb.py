"""Climb: the rungs of the ladder by tier, and running them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from ...errors import CartridgeError
from . import answers, changes, faults, known, others
from .ground import Ground, Unchecked, Wrong
from .held import Held
from .maker import Maker
from .own import MODES, Mode, OwnServer

logger = logging.getLogger(__name__)

PASS, FAIL, NOT_CHECKED = "pass", "FAIL", "NOT CHECKED"
STATIC = "-1"
_ASKED = ("0", "0.5", "1", "1b", "2", "3", "3cross", "5")
_MADE, _OWN = ("7", "10", "11"), ("7b",)
"""Tiers that need a model to make cartridges with, and those that need a server that is ours."""
Another = Callable[[], tuple[OwnServer, Maker, list[Held]]]
"""Makes a server that is not started yet, and its cartridges."""


class Rung(NamedTuple):
    """One thing that is tried."""

    tier: str
    what: str
    check: Callable[[Ground], str]
    """Returns what was found; raises `Wrong` or `Unchecked`."""
    turn: int = 0
    """Which come first: 0 those on the first server; 1 what may have to stop it; 2 what does, for another one."""


class Row(NamedTuple):
    """What came of a rung."""

    tier: str
    what: str
    result: str
    """`PASS`, `FAIL` or `NOT_CHECKED`."""
    found: str
    seconds: float


def rungs(
    *, static: Callable[[], str], in_bfloat16: Another | None = None, second: Another | None = None,
    modes: Sequence[Mode] = MODES,
) -> list[Rung]:  # fmt: skip
    """Return the whole ladder. `static` is tier -1, as `Rung.check`."""
    return [
        Rung(STATIC, "versions, hashing, plugin and engine's names", lambda ground: static()),
        Rung("0", "one cartridge, ten requests", answers.ten),
        Rung("0.5", "canary: the model's own forward pass", known.canary),
        Rung("1", "ten questions through the chat API", answers.chat),
        Rung("1b", "logprobs of generated tokens", answers.logprobs),
        Rung("2", "16 requests from 8 threads", answers.sixteen),
        Rung("3", "three cartridges, by request", answers.three),
        Rung("3cross", "asked about another's document", answers.cross),
        Rung("3b", "another model", partial(others.second_model, make=second), 2),
        Rung("4", "fifty in a row, alive", answers.fifty),
        Rung("5", "bad input", answers.bad_input),
        Rung("6", "two ranks (TP = 2)", others.tensor_parallel, 2),
        Rung("6", "bfloat16", partial(others.bfloat16, again=in_bfloat16), 1),
        Rung("7", "register, new version, label, promote, remove", changes.lifecycle),
        Rung("7b", "restart", changes.restart),
        Rung("8", "200 requests by 16 threads, three cartridges", answers.contamination),
        Rung("9", "corrupt bytes", faults.corrupt),
        Rung("9", "missing bytes", faults.missing),
        Rung("10", "chains", known.chains),
        Rung("11", "a trained cartridge", known.trained),
        *(Rung("12", f"{mode}", partial(others.mode, other=mode), 2) for mode in modes[1:]),
        *(Rung("12", f"saving on, {mode}", partial(others.saving, where=mode), 2) for mode in modes),
    ]


NOISE = Rung("noise", "equal dense prompts are answered alike", answers.quiet)
"""Belongs to every ladder: beyond it no answer can be judged."""
TIERS = tuple(dict.fromkeys(rung.tier for rung in rungs(static=str)))
"""By name, from the bottom."""


def read_tiers(text: str) -> list[str]:
    """Return the tiers in `0,0.5,3cross` or `all`, in the ladder's order. Raises `CartridgeError` for another word."""
    if text == "all":
        return list(TIERS)
    wanted = [part.strip().replace(" ", "").lower() for part in text.split(",") if part.strip()]
    if unknown := [part for part in wanted if part not in TIERS]:
        raise CartridgeError(f"there is no tier {', '.join(unknown)}; there are {', '.join(TIERS)}, or all")
    return [tier for tier in TIERS if tier in wanted]


def default(*, model: bool, own: bool) -> list[str]:
    """Return what two minutes tell: the tiers that can be checked on one server, with a `model`, and if it is our `own`."""
    return [STATIC] * model + [*_ASKED] + [*_MADE] * model + [*_OWN] * own


def climb(ladder: Iterable[Rung], ground: Ground) -> Iterator[Row]:
    """Run rungs and yield what came of each when it is done, by turns. Never raises for a rung."""
    for rung in sorted(ladder, key=lambda rung: rung.turn):
        yield run(rung, ground)


def run(rung: Rung, ground: Ground) -> Row:
    """Run one rung and return what came of it."""
    start = time.monotonic()
    try:
        result, found = PASS, rung.check(ground)
    except Unchecked as reason:
        result, found = NOT_CHECKED, str(reason)
    except Wrong as reason:
        result, found = FAIL, str(reason)
    except Exception as error:  # what a rung did not expect of a server is no reason to lose what the others found
        logger.debug("tier %s", rung.tier, exc_info=True)
        result, found = FAIL, f"{type(error).__name__}: {error}"
    return Row(rung.tier, rung.what, result, found, round(time.monotonic() - start, 1))


def status(rows: Sequence[Row], *, allow_unchecked: bool = False) -> int:
    """Return the exit status: 0 where all passed, 1 where something did not, 2 where nothing of serving could be checked.

    A row that was not checked did not pass, unless `allow_unchecked`.
    """
    results = {row.result for row in rows if row.tier not in (STATIC, NOISE.tier)}
    if FAIL in (row.result for row in rows):
        return 1
    if PASS not in results:
        return 2
    return 1 if NOT_CHECKED in results and not allow_unchecked else 0
