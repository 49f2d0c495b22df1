"""Suite: how the checks of this room are run by pytest, on one server, and what came of each."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from ..errors import CartridgeError
from .context import Context, Tell

TIERS = ["-1", "0", "0.5", "1", "1b", "2", "3", "3cross", "4", "5", "6", "7", "7b", "8", "9", "10", "11", "12"]
"""By name, from the bottom."""
NOISE = "noise"
"""The tier that is always asked for: beyond the server's noise no answer can be judged."""
_ASKED = ("0", "0.5", "1", "1b", "2", "3", "3cross", "5")
_MADE, _OWN = ("7", "10", "11"), ("7b",)
"""Tiers that need a model to make cartridges with, and those that need a server that is ours."""
PASS, FAIL, NOT_CHECKED = "pass", "FAIL", "NOT CHECKED"
_RESULTS = {"passed": PASS, "failed": FAIL, "skipped": NOT_CHECKED}
_OPTIONS = [
    "--import-mode=importlib",
    "--capture=no",
    "-p",
    "no:asyncio",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:terminal",
]


class Row(NamedTuple):
    """What came of a check."""

    tier: str
    what: str
    result: str
    """`PASS`, `FAIL` or `NOT_CHECKED`."""
    found: str
    seconds: float


def read_tiers(text: str) -> list[str]:
    """Return the tiers in `0,0.5,3cross` or `all`, from the bottom. Raises `CartridgeError` for another word."""
    wanted = TIERS if text == "all" else [part.replace(" ", "").lower() for part in text.split(",") if part.strip()]
    if unknown := [part for part in wanted if part not in TIERS]:
        raise CartridgeError(f"there is no tier {', '.join(unknown)}; there are {', '.join(TIERS)}, or all")
    return [tier for tier in TIERS if tier in wanted]


def default(*, model: bool, own: bool) -> list[str]:
    """Return what two minutes tell: the tiers that can be checked on one server, with a `model`, and if it is our `own`."""
    return [TIERS[0]] * model + [*_ASKED] + [*_MADE] * model + [*_OWN] * own


class Suite:
    """A plugin of pytest: it has the checks of some tiers run on a context, and keeps what came of them."""

    def __init__(self, context: Context, tiers: Sequence[str], say: Callable[[str], object]) -> None:
        """`say` is told of each check when it is done."""
        self._context, self._tiers, self._say = context, [NOISE, *tiers], say
        self.rows: list[Row] = []

    def run(self) -> list[Row]:
        """Run the checks, by the options in pytest's own variable `$PYTEST_ADDOPTS`; return what came of each, from the bottom.

        Raises `CartridgeError` where pytest does not run, as for an option that it does not know.
        """
        here = str(Path(__file__).parent)
        status = pytest.main([here, "--rootdir", here, "-c", "/dev/null", *_OPTIONS], plugins=[self])
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            raise CartridgeError(f"pytest ended with {status!s}; nothing is said of the server")
        return sorted(self.rows, key=lambda row: self._tiers.index(row.tier))

    def pytest_configure(self, config: pytest.Config) -> None:
        """Make the mark of the checks known."""
        config.addinivalue_line("markers", "tier(name, what, turn=0): checks with a later turn stop the first server")

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None, None, None]:
        """Leave the checks of the tiers that are wanted, by turns. What `-k` leaves out is not checked; noise always is."""

        def place(item: pytest.Item) -> tuple[int, int]:
            return item_tier(item).kwargs.get("turn", 0), self._tiers.index(item_tier(item).args[0])

        wanted = sorted((item for item in items if item_tier(item).args[0] in self._tiers), key=place)
        items[:] = wanted
        yield
        chosen = [item for item in wanted if item in items or item_tier(item).args[0] == NOISE]
        left = [item_tier(item).args for item in wanted if item not in chosen]
        self.rows += [Row(tier, what, NOT_CHECKED, "left out by pytest's options", 0.0) for tier, what in left]
        items[:] = chosen

    @pytest.fixture(scope="session")
    def context(self) -> Context:
        """What the checks stand on."""
        return self._context

    @pytest.fixture
    def tell(self, request: pytest.FixtureRequest) -> Tell:
        """What a check tells of what it found."""
        return lambda found: request.node.user_properties.append(("found", found))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Keep what came of a check."""
        report = yield
        if call.when == "call" or not report.passed:
            found = "; ".join(str(value) for name, value in item.user_properties if name == "found")
            if call.excinfo is not None:
                error = call.excinfo.value
                ours = isinstance(error, pytest.fail.Exception | pytest.skip.Exception)
                found = str(error) if ours else f"{type(error).__name__}: {error}"
            tier, what = item_tier(item).args
            self.rows.append(Row(tier, what, _RESULTS[report.outcome], found, round(call.duration, 1)))
            why = f": {found}" if report.failed else ""
            self._say(f"tier {tier}, {what}: {self.rows[-1].result}, {call.duration:.1f} s{why}")
        return report


def item_tier(item: pytest.Item) -> pytest.Mark:
    """Return the mark of a check."""
    mark = item.get_closest_marker("tier")
    assert mark is not None, f"{item.name} has no tier"
    return mark


def status(rows: Sequence[Row], *, allow_unchecked: bool = False) -> int:
    """Return the exit status: 0 where all passed, 1 where something did not, 2 where nothing of serving could be checked.

    A row that was not checked did not pass, unless `allow_unchecked`.
    """
    results = {row.result for row in rows if row.tier not in (TIERS[0], NOISE)}
    if FAIL in (row.result for row in rows):
        return 1
    if PASS not in results:
        return 2
    return 1 if NOT_CHECKED in results and not allow_unchecked else 0
