"""How well cartridges answer: no prefix, full document, prefilled, compacted and trained ones, served by real vLLM servers.

    python benchmarks/quality.py [--documents 5] [--processes 2] [--full] [--home DIR]

Ward sheets that the shipped model never saw are drawn; for each, cartridges are built,
compacted and trained by the command line, registered in one home, served by one server in LMCache's in-process mode and
one in its multiprocess mode, and asked for every fact of their sheet in a wording that none was made with; each also in
int8, compressed from what is stored. Writes QUALITY.md, quality.json and quality.png beside this file. `--home` keeps the cartridges, and a second run goes
on from those that are there.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
from quality_page import PAGE
from recall.train import hardware
from recall.ward import QUESTIONS, Document, write_document
from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

from lmcache_cartridge import __version__
from lmcache_cartridge.artifact import reading
from lmcache_cartridge.cli.main import main as command
from lmcache_cartridge.cli.recall import MODEL_DIR
from lmcache_cartridge.cli.show import size
from lmcache_cartridge.errors import CartridgeNotFound
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make import evaluate, plot
from lmcache_cartridge.make.ask import WAYS, ModelAsker, ServerAsker
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.make.payload import read_kv
from lmcache_cartridge.make.questions import Question, save
from lmcache_cartridge.make.server import Server
from lmcache_cartridge.serve.launch import plan
from lmcache_cartridge.serve.processes import SMALL, ServerProcess
from lmcache_cartridge.settings import Settings, from_mapping

HERE = Path(__file__).parent
MODEL = str(MODEL_DIR)
CHUNK = 32
"""Tokens a chunk, in the artefacts and in LMCache: 64 positions are 16x of these sheets, and 32 less than that."""
TOKENS = 1024
TRAINED = (QUESTIONS[0], "Patient {patient}: {attribute}?")
"""Wordings to train on. The second is new to the model, which answers it all the same."""
ASKED = (QUESTIONS[1], QUESTIONS[2])
"""Wordings that are asked, fact by fact in turn."""
HELD_OUT = "the {attribute} of {patient}?"
"""Wording that the manifest's own figure is measured by."""
SERVER_ARGS = ["--max-model-len", "2048", "--enforce-eager", "--kv-cache-memory-bytes", str(256 << 20),
               "--block-size", str(CHUNK)]  # fmt: skip
NO_PREFIX, FULL, PREFILL = "no prefix", "full document", "prefilled cartridge"
GOAL_POINTS = 2.0
SHORT = {"4x": 100, "16x": 280}
"""Steps of the short training that starts from a compaction."""
RATE = 0.3
"""Peak learning rate: right for this tiny model, and far above what a real one wants. `train` finds it by itself too."""


class Variant(NamedTuple):
    """One way to make a cartridge much shorter than its document."""

    name: str
    factor: str
    """By which it is shorter, as `4x`."""
    init: str | None
    """Where training starts; None for a compaction without any."""
    how: tuple[str, ...]
    """Options for steps and rates."""


@dataclass
class Sheet:
    """One document, and what was measured on it."""

    name: str
    document: Document
    path: Path
    questions: list[Question]
    results: dict[str, dict[str, float]] = field(default_factory=dict)
    """By row of the table: `exact`, and where it applies `bytes`, `positions`, `seconds`, `hf`, `int8`, `int8_bytes`."""


def variants(effort: float, defaults: bool) -> list[Variant]:
    """Return what is made for each sheet; `effort` multiplies the steps, unless all is left to `train`'s defaults."""

    def how(steps: int, *rate: str) -> tuple[str, ...]:
        given = ("--steps", str(max(1, int(steps * effort))), *rate, "--schedule", "cosine", "--warmup",
                 str(min(20, steps // 10)), "--patience", "0", "--check-every", "50")  # fmt: skip
        return () if defaults else given

    found = []
    for factor, short, long in (("4x", SHORT["4x"], 1000), ("16x", SHORT["16x"], 1400)):
        found += [
            Variant(f"{factor}, compact", factor, None, ()),
            Variant(f"{factor}, compact, {short} steps", factor, "compact", how(short)),
            Variant(f"{factor}, train, {long:,} steps", factor, "sci", how(long, "--rate", str(RATE))),
        ]
    return found


def draw_sheets(numbers: Iterable[int], directory: Path) -> list[Sheet]:
    """Write sheets, their evaluation questions and those to train on into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    sheets = []
    for number in numbers:
        document = write_document(random.Random(f"quality {number}"), TOKENS)
        asked = [
            Question(ASKED[i % len(ASKED)].format(**fact._asdict()), fact.value)
            for i, fact in enumerate(document.facts)
        ]
        sheet = Sheet(f"sheet-{number}", document, directory / f"sheet-{number}.txt", asked)
        sheet.path.write_text(document.text, encoding="utf-8")
        save(asked, directory / f"sheet-{number}.questions.jsonl")
        held_out = [Question(HELD_OUT.format(**fact._asdict())) for fact in document.facts[::4]]
        save(held_out, directory / f"sheet-{number}.held_out.jsonl")
        given = [Question(text.format(**fact._asdict())) for fact in document.facts for text in TRAINED]
        save(given, directory / f"sheet-{number}.given.jsonl")
        sheets.append(sheet)
    return sheets


def run_cli(*argv: str) -> dict[str, Any]:
    """Run one command of the command line in this process and return what it tells programs."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = command([*argv, "--format", "json"])
    if status:
        raise SystemExit(status)
    return json.loads(out.getvalue())


def make(sheets: Sequence[Sheet], settings: Settings, wanted: Sequence[Variant], processes: int) -> None:
    """Build and train all cartridges, noting seconds and bytes; those noted before are left as they are.

    One sheet is one process's, since its cartridges share what the teacher said.
    """
    jobs = [(sheet, row) for sheet in sheets for row in [PREFILL, *wanted]]
    with (
        ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool,
        tqdm(total=len(jobs), desc="make", unit=" cartridges") as bar,
    ):
        Registry(settings.registry_path)
        for done in as_completed([pool.submit(make_sheet, sheet, settings, wanted) for sheet in sheets]):
            sheet = next(sheet for sheet in sheets if sheet.name == done.result()[0])
            sheet.results |= done.result()[1]
            bar.update(1 + len(wanted))


def make_sheet(sheet: Sheet, settings: Settings, wanted: Sequence[Variant]) -> tuple[str, dict[str, dict[str, float]]]:
    """Make what is not there yet of one sheet's cartridges; return its name and what was noted of all of them."""
    torch.set_num_threads(1)  # the model is tiny: two processes do twice as much as two threads
    disable_progress_bar()
    found = {}
    for row in [PREFILL, *wanted]:
        name = row if isinstance(row, str) else row.name
        note = settings.home / "notes" / f"{cartridge(sheet, name)}.json"
        if not note.exists():
            made = make_one(sheet, row, settings)
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(json.dumps(made))
        found[name] = json.loads(note.read_text())
    return sheet.name, found


def make_one(sheet: Sheet, row: str | Variant, settings: Settings) -> dict[str, float]:
    """Build or train one cartridge."""
    name = row if isinstance(row, str) else row.name
    start = time.monotonic()
    common = ("--home", str(settings.home), "--model", MODEL, "--document", str(sheet.path),
              "--id", cartridge(sheet, name), "--chunk-size", str(CHUNK))  # fmt: skip
    given = ("--questions", str(sheet.path.with_suffix(".given.jsonl")), "--accept", "0")
    if isinstance(row, str):
        made = run_cli("build", *common)
    elif row.init is None:
        made = run_cli("build", *common, "--compact", row.factor, *given)
    else:
        made = run_cli(
            "train", *common, "--compress", row.factor, "--init", row.init, *given,
            "--held-out", str(sheet.path.with_suffix(".held_out.jsonl")),
            *row.how, "--batch", "32", "--top-k", "0", "--answer-tokens", "4", "--precision", "bfloat16",
        )  # fmt: skip
    return {"positions": made["positions"], "bytes": made["bytes"], "seconds": time.monotonic() - start}


def cartridge(sheet: Sheet, row: str) -> str:
    """Return the id of a cartridge."""
    return f"{sheet.name}-{''.join(c if c.isalnum() else '-' for c in row)}"


def compress(sheets: Sequence[Sheet], settings: Settings, rows: Sequence[str]) -> None:
    """Make the int8 twin of every cartridge that has none yet, of the newest version of it."""
    registry = Registry(settings.registry_path)
    for sheet, row in tqdm([(sheet, row) for sheet in sheets for row in rows], desc="compress", unit=" cartridges"):
        name = cartridge(sheet, row)
        try:
            found = registry.find(f"{name}-int8")
        except CartridgeNotFound:
            run_cli("compress", name, "--id", f"{name}-int8", "--home", str(settings.home))
            found = registry.find(f"{name}-int8")
        sheet.results[row]["int8_bytes"] = found.bytes


@contextlib.contextmanager
def serving(settings: Settings, mode: str) -> Iterator[Server]:
    """Serve the cartridges of `settings` in a mode of LMCache."""
    launch = plan(MODEL, settings, chunk_tokens=CHUNK, on_load_failure="fail", vllm_args=SERVER_ARGS, mode=mode)
    print(f"starting vLLM, {mode}", file=sys.stderr)
    with (
        ServerProcess(launch, settings.home / f"server-{mode}.log", environment=SMALL) as process,
        Server(process.url) as server,
    ):
        yield server


def serve_and_ask(sheets: Sequence[Sheet], settings: Settings, rows: Sequence[str], limit: int | None) -> None:
    """Ask one server every question every way."""
    total = sum(len(evaluate.pick(sheet.questions, limit)) for sheet in sheets) * (2 + 2 * len(rows))
    with serving(settings, "in-process") as server, tqdm(total=total, desc="ask vLLM", unit=" answers") as bar:
        for sheet in sheets:
            asked = evaluate.pick(sheet.questions, limit)
            for row in rows:
                asker = ServerAsker(server, cartridge(sheet, row), sheet.document.text, "chat")
                plain = row == rows[0]
                ways = WAYS if plain else ("cartridge",)
                for way, given in evaluate.ask_all(
                    asker, asked, 4, ways=ways, progress=lambda *_: bar.update()
                ).items():
                    name = {"no prefix": NO_PREFIX, "document": FULL}.get(way, row)
                    found = sheet.results.setdefault(name, {})
                    found["exact"] = share(given)
                    found |= by_wording(given)
                sheet.results[row]["int8"] = ask_one(server, sheet, f"{cartridge(sheet, row)}-int8", asked, bar)


def ask_multiprocess(sheets: Sequence[Sheet], settings: Settings, rows: Sequence[str], limit: int | None) -> None:
    """Ask a server with LMCache in a process of its own the same of `rows`."""
    total = sum(len(evaluate.pick(sheet.questions, limit)) for sheet in sheets) * len(rows)
    with serving(settings, "multiprocess") as server, tqdm(total=total, desc="ask vLLM", unit=" answers") as bar:
        for sheet in sheets:
            asked = evaluate.pick(sheet.questions, limit)
            for row in rows:
                sheet.results[row]["multiprocess"] = ask_one(server, sheet, cartridge(sheet, row), asked, bar)


def ask_one(server: Server, sheet: Sheet, name: str, asked: Sequence[Question], bar: tqdm) -> float:
    """Return the share of right answers after one cartridge."""
    asker = ServerAsker(server, name, sheet.document.text, "chat")
    found = evaluate.ask_all(asker, asked, 4, ways=("cartridge",), progress=lambda *_: bar.update())
    return share(found["cartridge"])


def share(answers: Sequence[evaluate.Answer]) -> float:
    """Return the share of right answers."""
    return sum(answer.exact for answer in answers) / len(answers)


def by_wording(answers: Sequence[evaluate.Answer]) -> dict[str, float]:
    """Return the share of right answers to each of the wordings in `ASKED`, told by how a question begins."""
    long = ASKED[1].partition("{")[0]
    parts = [[a.exact for a in answers if a.question.startswith(long) == bool(i)] for i in range(len(ASKED))]
    return {f"wording {i}": sum(part) / len(part) for i, part in enumerate(parts) if part}


def ask_offline(sheets: Sequence[Sheet], settings: Settings, rows: Sequence[str], limit: int | None) -> None:
    """Ask transformers the same after each cartridge's KV."""
    model, registry = CausalModel(MODEL), Registry(settings.registry_path, read_only=True)
    for sheet in tqdm(sheets, desc="ask transformers", unit=" sheets"):
        asked = evaluate.pick(sheet.questions, limit)
        for row in rows:
            root = Path(registry.find(cartridge(sheet, row)).location)
            kv = read_kv(reading.load_manifest(root), root)
            found = evaluate.ask_all(ModelAsker(model, [], kv, "chat"), asked, 4, ways=("cartridge",))
            sheet.results[row]["hf"] = share(found["cartridge"])


class Summary(NamedTuple):
    """Over the sheets: mean, spread (standard deviation) and least, as shares; means of the rest."""

    mean: float
    spread: float
    least: float
    hf: float | None
    multiprocess: float | None
    int8: float | None
    int8_bytes: float | None
    positions: float | None
    bytes: float | None
    seconds: float | None
    wordings: tuple[float, float]


def summarise(sheets: Sequence[Sheet], rows: Sequence[str]) -> dict[str, Summary]:
    """Return the table's numbers."""
    found = {}
    for row in rows:
        exact = [sheet.results[row]["exact"] for sheet in sheets]
        rest = {
            key: statistics.mean(values) if (values := [s.results[row][key] for s in sheets if key in s.results[row]])
            else None
            for key in ("hf", "multiprocess", "int8", "int8_bytes", "positions", "bytes", "seconds")
        }  # fmt: skip
        spread = statistics.stdev(exact) if len(exact) > 1 else 0.0
        wordings = tuple(statistics.mean(s.results[row][f"wording {i}"] for s in sheets) for i in range(len(ASKED)))
        found[row] = Summary(statistics.mean(exact), spread, min(exact), **rest, wordings=wordings)
    return found


def markdown(summary: Mapping[str, Summary], facts: Mapping[str, Any]) -> str:
    """Return the page QUALITY.md."""
    lines = [
        "| asked after | exact answers | spread | worst sheet | `X blood?` | `what is the blood of patient X?` | p | payload "
        "| seconds to make, under load | multiprocess | transformers | int8 | int8 payload |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row, s in summary.items():
        cells = [
            row, f"**{s.mean:.1%}**", f"± {100 * s.spread:.1f}", f"{s.least:.1%}", *(f"{share:.1%}" for share in s.wordings),
            f"{s.positions:,.0f}" if s.positions else "", size(int(s.bytes)) if s.bytes else "",
            f"{s.seconds:.0f} s" if s.seconds else "", f"{s.multiprocess:.1%}" if s.multiprocess is not None else "",
            f"{s.hf:.1%}" if s.hf is not None else "", f"{s.int8:.1%}" if s.int8 is not None else "",
            size(int(s.int8_bytes)) if s.int8_bytes else "",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return PAGE.format(table="\n".join(lines), verdict="\n".join(verdict(summary)), **facts)


def verdict(summary: Mapping[str, Summary]) -> Iterator[str]:
    """Yield what the numbers say about the goals, a line each."""
    full, chance = summary[FULL].mean, summary[NO_PREFIX].mean
    for size_name in ("4x", "16x"):
        short = {row: 100 * (full - s.mean) for row, s in summary.items() if row.startswith(f"{size_name},")}
        reach = [row for row, points in short.items() if points <= GOAL_POINTS]
        miss = [f"{row} ({points:.1f} points short)" for row, points in short.items() if points > GOAL_POINTS]
        yield f"- {size_name} within {GOAL_POINTS:g} points of the full document: {', '.join(reach) or 'none'}."
        if miss:
            yield f"- {size_name} further away: {', '.join(miss)}."
    rows = [s for s in summary.values() if s.seconds and s.hf is not None and s.positions < 1000]
    first, second = (statistics.mean(s.wordings[i] for s in rows) for i in range(2))
    yield (
        f"- Of the two wordings that nothing was made with, short cartridges answer the first {first:.1%} and the second "
        f"{second:.1%}, on average over the rows."
    )
    yield f"- Without a prefix {chance:.1%} are right; guessing a value of the right attribute gives about 5%."
    modes = max((abs(s.mean - s.multiprocess) for s in summary.values() if s.multiprocess is not None), default=0.0)
    yield f"- LMCache in the engine and in a process of its own differ by {100 * modes:.1f} points at most."
    served = max(abs(s.mean - s.hf) for s in summary.values() if s.hf is not None)
    yield (
        f"- vLLM and transformers differ by {100 * served:.1f} points at most: what was trained with one is served by "
        "the other."
    )
    lost = {row: 100 * (s.mean - s.int8) for row, s in summary.items() if s.int8 is not None}
    worst = max(lost, key=lost.get)
    ratio = sum(s.int8_bytes for s in summary.values() if s.int8_bytes) / sum(
        s.bytes for s in summary.values() if s.int8_bytes
    )
    yield (
        f"- int8, served, costs {lost[worst]:.1f} points at most ({worst}), {statistics.mean(lost.values()):.2f} on "
        f"average over the rows, at {ratio:.0%} of the bytes."
    )


def main() -> None:
    """Make, serve, ask, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--documents", type=int, default=5)
    add("--first", type=int, default=200, help="seed of the first of them; the settings were chosen on those from 0 on")
    add("--processes", type=int, default=2, help="that train at once, one thread each")
    add("--full", action="store_true", help="20 sheets, four times the steps: hours")
    add("--effort", type=float, help="multiply the steps by this (default 1, with --full 4)")
    add("--defaults", action="store_true", help="leave steps and rates to `train`; for another --out")
    add("--limit", type=int, help="ask only so many questions of a sheet")
    add("--home", type=Path, help="keep everything here, and go on from what is there")
    add("--out", type=Path, default=HERE, help="where the page goes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="quality-") as scratch:
        home = (options.home or Path(scratch)).absolute()
        settings = from_mapping({"home": home, "cpu_bytes": 512 << 20})
        numbers = range(options.first, options.first + (20 if options.full else options.documents))
        sheets = draw_sheets(numbers, home / "sheets")
        wanted = variants(options.effort or (4 if options.full else 1), options.defaults)
        rows = [PREFILL, *(variant.name for variant in wanted)]
        make(sheets, settings, wanted, options.processes)
        compress(sheets, settings, rows)
        serve_and_ask(sheets, settings, rows, options.limit)
        ask_multiprocess(sheets, settings, [row for row in rows if "compact" in row], options.limit)
        ask_offline(sheets, settings, rows, options.limit)
    summary = summarise(sheets, [NO_PREFIX, FULL, *rows])
    lengths = [len(CausalModel(MODEL).encode(sheet.document.text, special=True)) for sheet in sheets]
    page = markdown(summary, {
        "documents": len(sheets), "first": options.first, "tokens": f"{min(lengths):,} to {max(lengths):,}", "chunk": CHUNK,
        "questions": sum(len(evaluate.pick(sheet.questions, options.limit)) for sheet in sheets),
        "trained": "`, `".join(TRAINED), "held_out": HELD_OUT,
        "asked": "`, `".join(ASKED),
        "facts": ", ".join(str(len(sheet.document.facts)) for sheet in sheets), "rate": RATE,
        "trained_minutes": sum(f.get("seconds", 0) for sheet in sheets for f in sheet.results.values()) / 60,
        "hardware": hardware(), "processes": options.processes,
        "wall": (time.monotonic() - start) / 60, "date": date.today().isoformat(), "version": __version__,
        "torch": torch.__version__, "command": f"python benchmarks/quality.py {' '.join(sys.argv[1:])}".strip(),
    })  # fmt: skip
    (options.out / "QUALITY.md").write_text(page, encoding="utf-8")
    results = {sheet.name: sheet.results for sheet in sheets}
    (options.out / "quality.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    plot.shares({row: s.mean for row, s in summary.items()}, options.out / "quality.png",
                f"ward sheets of {TOKENS:,} tokens, served by vLLM", {row: s.spread for row, s in summary.items()})  # fmt: skip
    print(page)


if __name__ == "__main__":
    main()
