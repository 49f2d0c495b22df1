"""Tables of what was measured: from the result files of benchmarks whose code is today's, and from nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from report import RESULTS, Figure, Result, read  # noqa: E402

Case = Mapping[str, str | int | float]


class Peers(NamedTuple):
    """What stands beside what in a benchmark's results."""

    what: str
    """The figure that is compared."""
    key: str
    """The part of the case that tells the contenders apart."""
    pairs: Sequence[tuple[str, str]]
    """Ours, and what it is to be as good as."""
    lower_is_better: bool = True


PEERS = {
    "ttft": Peers(
        "first token", "way",
        [("warm", "dense"), ("warm", "prefix"), ("warm", "localcpu"), ("disk", "warm"), ("mp-warm", "mp-l1"), ("mp-warm", "warm")],
    ),
    "retrieval": Peers(
        "rate", "contender",
        [("cartridge", "LMCache LocalCPU"), ("cartridge", "LMCache LocalDisk"), ("cartridge", "preadv"), ("cartridge", "aiofiles")],
        lower_is_better=False,
    ),
    "inject": Peers("rate", "path", [("whole blocks", "memcpy")], lower_is_better=False),
    "saving": Peers("request", "server", [("with cartridges", "LMCache alone")]),
    "replacement": Peers("hits", "policy", [("ours", "LRU"), ("ours", "optimum")], lower_is_better=False),
}  # fmt: skip
"""By benchmark."""


class Results:
    """The results whose code is as it was when they were measured, the newest first."""

    def __init__(
        self, directory: Path = RESULTS, is_todays: Callable[[Result], bool] = Result.is_of_todays_code
    ) -> None:
        found = sorted(map(read, sorted(directory.glob("*.json"))), key=lambda result: result.when, reverse=True)
        self._all = [result for result in found if result.form != "smoke"]
        self._good = [result for result in self._all if is_todays(result)]

    def of(self, benchmark: str) -> list[Result]:
        """Return a benchmark's results of today's code; none where it has to be run again."""
        return [result for result in self._good if result.benchmark == benchmark]

    def side_by_side(self, benchmark: str, what: str, *cases: Case) -> tuple[Result, list[Figure]] | None:
        """Return figures of these cases, all of one run; None where no run of today's code has them all."""
        for result in self.of(benchmark):
            found = [figure(result, what, case) for case in cases]
            if None not in found:
                return result, [one for one in found if one is not None]
        return None

    def again(self, benchmark: str, command: str | None = None) -> str:
        """Return the sentence that stands where figures are missing."""
        known = [result.command for result in self._all if result.benchmark == benchmark]
        return f"To be measured again: `{command or (known or [f'python benchmarks/{benchmark}.py'])[0]}`."


def figure(result: Result, what: str, case: Case) -> Figure | None:
    """Return a result's figure of what was measured in a case, of which some parts may be named alone."""
    return next((one for one in result.figures if one.what == what and case.items() <= one.case.items()), None)


SCALE = {"s": (1000.0, " ms"), "bytes": (2.0**-20, " MiB"), "share": (100.0, "%"), "bytes/s": (1e-9, " GB/s")}
"""How units are shown that no person reads as they are."""


def number(value: float, unit: str = "") -> str:
    """Return a figure with its unit, of three digits."""
    scale, shown = SCALE.get(unit, (1.0, f" {unit}".rstrip()))
    return _digits(value * scale) + shown


def spread(one: Figure) -> str:
    """Return a figure without its unit, between its quartiles or the ends of its interval, and n where that is not 1."""
    scale = SCALE.get(one.unit, (1.0, ""))[0]
    value, low, high = (_digits(each * scale) for each in (one.value, one.low, one.high))
    ends = [] if low == high else [f"{low}-{high}"]
    about = [*ends, *([f"n {one.n:,}"] if one.n > 1 else [])]
    return f"{value} ({'; '.join(about)})" if about else value


def _digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [heading, ["---"] * len(heading), *([str(cell).replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |").replace("|  |", "| |") for line in lines)


def measured(result: Result) -> str:
    """Return a result's figures: a row for each case, requests at once side by side, and of sheets all together and the worst."""
    keys = list(dict.fromkeys(key for one in result.figures for key in one.case if key not in ("c", "sheet")))
    columns: dict[str, None] = {}
    rows: dict[tuple[tuple[str, str], ...], dict[str, Figure]] = {}
    for one in result.figures:
        title = f"{one.what}{',' * bool(one.unit)} {SCALE.get(one.unit, (1, one.unit))[1].strip()}".rstrip()
        if "c" in one.case:
            title += f", c = {one.case['c']}"
        if one.case.get("sheet", "all") != "all":
            title += ", worst sheet"
        columns[title] = None
        row = rows.setdefault(tuple((key, _shown(one.case[key])) for key in keys if key in one.case), {})
        if title not in row or one.value < row[title].value:
            row[title] = one
    cells = [
        [*(dict(case).get(key, "") for key in keys), *(spread(row[title]) if title in row else "" for title in columns)]
        for case, row in rows.items()
    ]
    return table([*keys, *columns], cells)


def _shown(value: str | int | float) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def compared(result: Result, peers: Peers) -> str:
    """Return ours over its peer in each case that has both; what is worse than its peer says so. Empty where none has."""
    cases = list(
        dict.fromkeys(
            tuple((key, value) for key, value in one.case.items() if key != peers.key)
            for one in result.figures
            if one.what == peers.what
        )
    )
    rows = [[_case(dict(case)), *(_ratio(result, peers, dict(case), *pair) for pair in peers.pairs)] for case in cases]
    heading = ["", *(f"{ours} / {peer}" for ours, peer in peers.pairs)]
    kept = [n for n in range(len(heading)) if not n or any(row[n] for row in rows)]
    cells = [[row[n] for n in kept] for row in [heading, *(row for row in rows if any(row[1:]))]]
    if len(cells) <= 8:  # numbers of requests at once side by side
        cells = list(map(list, zip(*cells, strict=True)))
    return table(cells[0], cells[1:]) if len(kept) > 1 else ""


def _case(case: Case) -> str:
    return ", ".join(f"{key} = {_shown(value)}" for key, value in case.items()) or "ratio"


def _ratio(result: Result, peers: Peers, case: Case, ours: str, peer: str) -> str:
    both = [figure(result, peers.what, {**case, peers.key: one}) for one in (ours, peer)]
    if None in both or not both[1].value:
        return ""
    ratio = both[0].value / both[1].value
    is_worse = ratio > 1 if peers.lower_is_better else ratio < 1
    return f"{ratio:.3g}" + (
        f", **{'slower' if peers.what != 'hits' else 'fewer'}**" if is_worse and f"{ratio:.3g}" != "1" else ""
    )


def families(result: Result) -> str:
    """Return which families of `benchmarks/models.py` are sound in every mode, how far off at most, and what is said of others."""
    told: dict[str, dict[str, None]] = {}
    for one in result.figures:
        if one.what == "sound":
            notes = told.setdefault(str(one.case["model"]), {})
            if one.case["sound"] != "yes" or "note" in one.case:
                why = one.case.get("note", "not the answers of the prompt")
                notes[f"{one.case['mode']}: {why}"] = None
    sound = [name for name, notes in told.items() if not notes]
    of = [one for one in result.figures if one.case["model"] in sound]
    most = {
        what: max(one.value for one in of if one.what == what)
        for what in ("noise", "cartridge", "chain", "trained")
        if any(one.what == what for one in of)
    }
    off = ", ".join(f"{what} {_digits(value)}" for what, value in most.items())
    alike = f"The prompt's answers in every mode: {', '.join(sound)}. Nats off at most: {off}."
    return "\n".join([alike, "", *(f"- {name}: {'; '.join(notes)}" for name, notes in told.items() if notes)]).rstrip()


def section(results: Results, benchmark: str) -> str:
    """Return all that was measured by a benchmark, or the command that measures it."""
    found = results.of(benchmark)
    if not found:
        return results.again(benchmark)
    parts = []
    for result in found:
        peers = PEERS.get(benchmark)
        parts += [
            f"`{result.command}`: {result.about()}.",
            *filter(None, [peers and compared(result, peers)]),
            families(result) if benchmark == "models" else measured(result),
        ]
    return "\n\n".join(parts)
