"""How far a long step is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done and how much there is: `prefill`, 512, 1024."""


Bar = Callable[..., Any]
"""tqdm, or what looks like it."""


def silent(what: str, done: int, total: int) -> None:
    """Tell nobody."""


class Bars:
    """A `Progress` that shows one bar at a time, made by `bar`. A context manager: the last bar ends with it."""

    def __init__(self, bar: Bar) -> None:
        self._bar, self._what = bar, ""
        self._shown: Any = None

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()

    def __call__(self, what: str, done: int, total: int) -> None:
        if what != self._what:
            self._close()
            self._what, self._shown = what, self._bar(desc=what, total=total)
        self._shown.total = total
        self._shown.update(done - self._shown.n)

    def _close(self) -> None:
        if self._shown is not None:
            self._shown.close()
            self._what, self._shown = "", None
