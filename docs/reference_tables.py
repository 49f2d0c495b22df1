"""The figures that the reference systems publish beside ours, for `reference-tables.md`: read from `benchmarks/`, none typed."""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import sizes  # noqa: E402

NONE = "not measured"
Table = Callable[[Sequence[str], Iterable[Sequence[str]]], str]

PREFILL = {
    256: (0.037, 0.038, 1.0), 512: (0.050, 0.040, 1.3), 1024: (0.072, 0.041, 1.8), 2048: (0.138, 0.048, 2.9),
    4096: (0.312, 0.071, 4.4), 8192: (0.758, 0.110, 6.9), 16_384: (2.027, 0.192, 10.6),
}  # fmt: skip
"""By p: seconds in context, with a cartridge, and their ratio."""
SERVING = {4096: (31, 43, 75, 166), 8192: (41, 69, 127, 163), 16_384: (78, 127, 245, 158), 32_768: (56, 136, 261, 158)}
"""By p: TTFT in ms at c = 1, 4 and 16, and output tokens/s at c = 1."""
SIZES = {
    ("Qwen2.5-7B", 256): 15, ("Qwen2.5-1.5B", 256): 7, ("Llama-2-7B", 256): 128,
    ("Qwen2.5-7B", 8192): 470, ("Qwen2.5-1.5B", 8192): 224, ("Llama-2-7B", 8192): 4856,
}  # fmt: skip
"""MB, as printed."""
QUALITY: dict[str, tuple[float, float | None, float, float, float]] = {
    "ML research, 8K tokens": (1.2, 4.5, 3.3, 3.4, 3.1), "Llama 2 paper, 20K": (2.7, 3.7, 2.9, 2.1, 2.5),
    "GPL v3, 7K": (2.9, 3.8, 2.8, 2.3, 2.4), "clinical, 12K": (2.5, 3.9, 4.1, 3.7, 3.3),
    "RFC 9110, 49K": (2.5, None, 4.1, 3.9, 3.7), "Wikipedia, 2K": (3.6, 4.4, 3.8, 4.0, 3.7),
}  # fmt: skip
"""Judged 0 to 5: no prefix, full document, 4x, 16x, p = 256."""
INITS = {256: (661, 682, 59.5, 60.0), 4096: (1144, 1131, 56.5, 55.9), 16_384: (2684, 2610, 44.5, 44.2)}
"""By p: seconds of training from First-k and SCI, tokens/s of each."""
HITS = 57

Cell = dict[str, str]


class Run(NamedTuple):
    """One run of a benchmark, as RESULTS.md has it."""

    about: str
    """Form, date, hardware and versions."""
    rows: list[Cell]


class Results:
    """The runs in RESULTS.md, by benchmark. Where one was taken twice the first that has a row counts: it stands on top."""

    def __init__(self, text: str) -> None:
        self.runs: dict[str, list[Run]] = {}
        for name, about, lines in re.findall(r"^`(\w+)\.py`, (.*)\n\n((?:\|.*\n?)+)", text, re.M):
            heading, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines.splitlines())
            cells = [dict(zip(heading, row, strict=True)) for row in rows]
            self.runs.setdefault(name, []).append(Run(about, cells))

    def side_by_side(self, name: str, *wanted: Cell) -> tuple[Run, list[Cell]] | None:
        """Return the rows with these cells, all of one run; None where no run has them all."""
        for run in self.runs.get(name, []):
            found = [next((row for row in run.rows if one.items() <= row.items()), None) for one in wanted]
            if None not in found:
                return run, [row for row in found if row is not None]
        return None


class Page:
    """What is measured, and what was measured on."""

    def __init__(self, table: Table, results: str, quality: dict[str, Any]) -> None:
        """`results` is the text of RESULTS.md, `quality` what `quality.json` holds."""
        self._table, self._results, self._quality = table, Results(results), quality

    def text(self) -> str:
        """Return the generated part of the page."""
        chapters = {
            "Prefill": self.prefill, "End to end": self.end_to_end, "Time to first token": self.serving, "Sizes": self.sizes,
            "Quality": self.quality, "Where training starts": self.inits, "Hits, memory for 5 of 20": self.hits,
        }  # fmt: skip
        return "\n\n".join(f"## {title}\n\n{chapter()}" for title, chapter in chapters.items())

    def prefill(self) -> str:
        """Return seconds in context and with a cartridge, at all p that are published."""
        rows, runs, missing = [], [], []
        for p, (dense_s, warm_s, ratio) in PREFILL.items():
            published = [f"{p:,}", f"{dense_s:g}", f"{warm_s:g}", f"**{ratio:g}**"]
            if found := self._ttft(p, (1, "dense"), (1, "warm")):
                run, (dense, warm) = found
                runs.append(run)
                rows.append([*published, f"{dense:,.0f}", f"{warm:,.0f}", f"**{dense / warm:.1f}**"])
            else:
                missing.append(p)
                rows.append([*published, *3 * [NONE]])
        heading = [
            "p",
            "published: in context, s",
            "cartridge, s",
            "speed-up",
            "ours: dense, ms",
            "warm cartridge, ms",
            "speed-up",
        ]
        return self._told(
            "Published: Llama-3.2-1B-Instruct on an AMD W7900, FlexAttention and torch.compile. Where computing is slow, as on a "
            "CPU, what is not computed saves more, so our speed-ups are larger.",
            heading, rows, runs, self._command(missing, "1", "dense,warm"),
        )  # fmt: skip

    def end_to_end(self) -> str:
        """Return tokens/s of a whole answer at p = 16,384, and what a load of several sees."""
        rows, runs = [], []
        at = 16_384
        for what, published, p, c, column, digits in (
            ("tokens/s, p = 16,384: cartridge / in context", "44.5 / 27.4 = **1.62**", at, 1, "tokens/s in all", 3),
            ("tokens/s while decoding, the same", "**1.0** (\"the same\")", at, 1, "decode tokens/s", 3),
            ("TTFT p50 while serving: in context / cartridge", "**7.0**, p and load not told", 1024, 16, "TTFT ms, p50", 0),
        ):  # fmt: skip
            found = self._cells(p, [(c, "warm"), (c, "dense")], column)
            if found is None:
                rows.append([what, published, NONE])
                continue
            run, (warm, dense) = found
            runs.append(run)
            if column.startswith("TTFT"):
                ours = f"{dense:,.0f} / {warm:,.0f} ms = **{dense / warm:.1f}**, p = {p:,}, c = {c}"
            else:
                ours = f"{warm:.{digits}g} / {dense:.{digits}g} = **{warm / dense:.2f}**"
            rows.append([what, published, ours])
        return self._told(
            "Published beside the table above, on the same card; the answers' length is not told. An answer here has 16 tokens "
            "behind minutes of prefill, so its ratio end to end is that of the prefill. What is dense is one answer at p = 16,384.",
            ["", "published", "ours"], rows, runs, None,
        )  # fmt: skip

    def serving(self) -> str:
        """Return TTFT at 1, 4 and 16 requests at once, and tokens/s at one."""
        rows, runs, missing = [], [], []
        for p, (*published, rate) in SERVING.items():
            row = [f"{p:,}", " / ".join(map(str, published)), f"**{published[2] / published[0]:.1f}**", str(rate)]
            for way in ("warm", "prefix"):
                cells = [self._ttft(p, (c, way)) for c in (1, 4, 16)]
                if None in cells:
                    missing.append(p)
                runs += [cell[0] for cell in cells if cell]
                told = [f"{cell[1][0]:,.0f}" if cell else NONE for cell in cells]
                row.append(" / ".join(told) if any(cells) else NONE)
                both = self._ttft(p, (16, way), (1, way))
                row.append(f"**{both[1][0] / both[1][1]:.1f}**" if both else NONE)
            decode = self._cells(p, [(1, "warm")], "decode tokens/s")
            row.append(f"{decode[1][0]:g}" if decode else NONE)
            rows.append(row)
        heading = [
            "p", "published: c = 1 / 4 / 16, ms", "c = 16 / c = 1", "tokens/s, c = 1", "ours, warm: c = 1 / 4 / 16, ms",
            "c = 16 / c = 1", "vLLM's prefix cache: c = 1 / 4 / 16, ms", "c = 16 / c = 1", "warm: decode tokens/s, c = 1",
        ]  # fmt: skip
        return self._told(
            "Published on an H100, the model not told. Sixteen requests share a GPU's cores and divide a CPU's, so compare "
            "c = 16 / c = 1 with that of vLLM's own prefix cache beside it, which loads nothing.",
            heading, rows, runs, self._command(missing, "1,4,16", "prefix,warm"),
        )  # fmt: skip

    def sizes(self) -> str:
        """Return the bytes of a cartridge, computed."""
        rows = []
        for (name, p), printed in SIZES.items():
            taken = p * sizes.SHAPES[name].token_bytes
            as_printed = [unit for unit, size in (("MB", 1e6), ("MiB", 2**20)) if abs(taken / size - printed) < 0.5]
            note = f"as published, in {as_printed[0]}" if as_printed else "does not follow from the shape"
            rows.append([name, f"{p:,}", f"{printed:,}", f"{taken / 1e6:,.1f}", f"{taken / 2**20:,.0f}", note])
        a_position = sizes.SHAPES["Llama-2-7B"].token_bytes
        return (
            "Computed from each model's shape, exact in the artefact but for a header (`python benchmarks/sizes.py`).\n\n"
            + self._table(["model", "p", "published, MB", "ours, MB (10^6)", "MiB (2^20)", ""], rows)
            + f"\n\nA position of Llama-2-7B takes {a_position // 1024} KiB, so 8,192 take "
            f"{8192 * a_position / 1e6:,.0f} MB; the published 4,856 MB is {4856e6 / 8192 / 1024:.0f} KiB a position."
        )

    def quality(self) -> str:
        """Return published judgements and our exact answers, and what each keeps of what the document adds."""
        rows = []
        for document, (none, full, *short) in QUALITY.items():
            kept = [self._kept(none, full, one) for one in short]
            rows.append(
                [
                    f"published: {document}",
                    f"{none:g}",
                    "-" if full is None else f"{full:g}",
                    *map("{:g}".format, short),
                    *kept,
                ]
            )
        ways = {
            "ours: ward sheets, 1K, `compact`": ("4x, compact", "16x, compact"),
            "the same, `train --init compact`": ("4x, compact, 100 steps", "16x, compact, 280 steps"),
            "the same, `train`": ("4x, train, 1,000 steps", "16x, train, 1,400 steps"),
        }
        none, full = self._exact("no prefix"), self._exact("full document")
        for name, (four, sixteen) in ways.items():
            short = [self._exact(four), self._exact(sixteen), self._exact(four)]
            kept = [self._kept(none, full, one) for one in short]
            rows.append([name, f"{none:.1%}", f"{full:.1%}", *map("{:.1%}".format, short), *kept])
        heading = ["", "no prefix", "full", "4x", "16x", "p = 256", "kept at 4x", "at 16x", "at p = 256"]
        return (
            "Published: judged by a model from 0 to 5, ten questions a document, several language models. Ours: exact answers of "
            f"the shipped model of 1.2 M parameters on {len(self._quality)} unseen lists of facts, where p = 256 is 4x "
            "([QUALITY.md](../benchmarks/QUALITY.md) says what that does not show). *Kept* is the share of what the full document "
            "adds to no prefix. Neither a judge's points nor two models' documents compare; our quality with a language "
            "model is not measured: `lmcache-cartridge evaluate --judge-url` judges from 0 to 5.\n\n"
            + self._table(heading, rows)
        )  # fmt: skip

    def inits(self) -> str:
        """Return seconds of training by start, and tokens/s by p."""
        rows, runs, missing = [], [], []
        for p, (first_s, sci_s, first_rate, sci_rate) in INITS.items():
            published = [
                f"{p:,}",
                f"{first_s:,} / {sci_s:,} = **{first_s / sci_s:.2f}**",
                f"{first_rate:g} / {sci_rate:g}",
            ]
            ours, rate = NONE, NONE
            wanted: list[Cell] = [{"size": "4x", "start": f"{start}, 200 steps"} for start in ("first-k", "sci")]
            if p == 256 and (found := self._results.side_by_side("inits", *wanted)):
                run, (first, sci) = found
                runs.append(run)
                seconds = [float(one["seconds"]) for one in (first, sci)]
                ours = f"{seconds[0]:g} / {seconds[1]:g} = **{seconds[0] / seconds[1]:.2f}**"
            elif p != 256:
                ours = f"{NONE}: needs a model that reads such documents"
            if cells := self._cells(p, [(1, "warm")], "tokens/s in all"):
                runs.append(cells[0])
                rate = f"{cells[1][0]:g}"
            else:
                missing.append(p)
            rows.append([*published, ours, rate])
        needs = [self._command(missing, "1", "warm")] if missing else []
        if not self._results.runs.get("inits"):
            needs.append("`python benchmarks/inits.py --size 4x`")
        heading = [
            "p", "published: seconds from First-k / SCI", "tokens/s of each", "ours: seconds of 200 steps from `first-k` / `sci`",
            "tokens/s in all, warm",
        ]  # fmt: skip
        return self._told(
"Published on the W7900. How good each start is after the same seconds is in [inits.png](../benchmarks/inits.png). At "
            "p = 4,096 and 16,384 `lmcache-cartridge train --init first-k` with a language model says its seconds.",
            heading, rows, runs, " and ".join(filter(None, needs)) or None,
        )  # fmt: skip

    def hits(self) -> str:
        """Return the share of requests whose cartridge was in memory."""
        published = ["R1's residency, the load not told", f"**{HITS}%**", "", ""]
        rows, runs = [published], []
        for run in self._results.runs.get("mix", [])[:1]:
            for row in run.rows:
                if (row["cartridges"], row["fit"]) == ("20", "5"):
                    rows.append([row["load"], f"**{row['hits, ours']}**", row["LRU"], row["optimum"]])
                    runs.append(run)
        is_old = all(row[1].strip("*") == row[2] for row in rows[1:])
        return self._told(
            "Requests for 20 cartridges of one size with memory for 5. The optimum knows every request to come."
            + (" **This run is older than [what goes first](memory.md#what-goes-first) and was with LRU.**" if is_old else ""),
            ["load", "hits", "LRU", "optimum"], rows, runs, "`python benchmarks/mix.py`" if is_old else None,
        )  # fmt: skip

    def _told(
        self, on: str, heading: Sequence[str], rows: Sequence[Sequence[str]], runs: Sequence[Run], needed: str | None
    ) -> str:
        """Return a table between what the published figures were measured on and what ours were."""
        parts = [on, self._table(heading, rows)]
        parts += [f"Ours, of which only ratios compare: {about}" for about in dict.fromkeys(run.about for run in runs)]
        if needed:
            parts.append(f"What is not measured yet is measured by {needed}.")
        return "\n\n".join(parts)

    def _command(self, positions: Sequence[int], concurrency: str, ways: str) -> str | None:
        if not positions:
            return None
        wanted = ",".join(str(p) for p in dict.fromkeys(positions))
        return f"`python benchmarks/ttft.py --positions {wanted} --concurrency {concurrency} --ways {ways}`"

    def _ttft(self, p: int, *of: tuple[int, str]) -> tuple[Run, list[float]] | None:
        return self._cells(p, of, "TTFT ms, p50")

    def _cells(self, p: int, of: Sequence[tuple[int, str]], column: str) -> tuple[Run, list[float]] | None:
        """Return a column's values at p of each number of requests at once and way, of one run."""
        found = self._results.side_by_side("ttft", *({"p": str(p), "c": str(c), "way": way} for c, way in of))
        return found and (found[0], [float(row[column].partition(" ")[0]) for row in found[1]])

    def _exact(self, what: str) -> float:
        return statistics.mean(sheet[what]["exact"] for sheet in self._quality.values())

    def _kept(self, none: float, full: float | None, one: float) -> str:
        return "-" if full is None else f"{(one - none) / (full - none):.0%}"


def text(table: Table) -> str:
    """Return the generated part of `reference-tables.md`; `table` renders a heading and rows."""
    results = (BENCHMARKS / "RESULTS.md").read_text(encoding="utf-8")
    return Page(table, results, json.loads((BENCHMARKS / "quality.json").read_text())).text()
