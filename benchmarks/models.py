"""Every model family, served: how far an answer after a cartridge is from one after the prompt itself.

    python benchmarks/models.py [--families Llama,Gemma-2]

For a tiny random model of each family (zoo.py) two documents are built, one is trained to a cartridge shorter than it,
and a real server of each mode is asked a question after a cartridge, after a chain of two, after the trained one and
after the plain prompt. Figures are the largest difference of the log probability of any token, in nats: `noise` of the
server's plain prompt to transformers'; `cartridge` to the server's own plain prompt; `chain` and `trained` to
transformers after the same KV; `other` after another document, which is how large a wrong answer is. A family that
`build` or the server refuses has the reason in place of figures. Each family runs in a process of its own; what goes
wrong in one is its row's. `docs/generate.py` makes part of docs/compatibility.md of it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import report  # first: it makes the tests' helpers importable
import torch
from commands import Cli
from families import chain, make_model
from serving import serving
from zoo import CONTEXT, FAMILIES

from lmcache_cartridge.artifact.cartridge import Cartridge
from lmcache_cartridge.artifact.model import check_shift
from lmcache_cartridge.artifact.reading import load_manifest, load_token_ids
from lmcache_cartridge.cli.recall import load_sheet
from lmcache_cartridge.errors import CartridgeError, UnsupportedModel
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.settings import Settings

MODES = ("in-process", "multiprocess")
BOUND = 1e-3
"""Nats, in float32, between what a cartridge and its prompt answer. Rounding makes up to a third of that in these
models, whose weights are loud; a wrong layer 0.1 and more."""
QUESTION = "Q: blood of Tehor? A:"
_TIMEOUT_S = 900
_REASON = re.compile(r"UnsupportedEngine: (.+)")
_TRAINING = ("--steps", "4", "--set", "batch=4", "--set", "rate=0.02", "--accept", "0", "--set", "answer_tokens=4",
             "--compress", "256", "--set", "init=first-k", "--set", "ask_as=text")  # fmt: skip


class Row(NamedTuple):
    """One family in one mode, in float32; figures in nats, None where there is none."""

    family: str
    mode: str
    noise: float | None = None
    cartridge: float | None = None
    chain: float | None = None
    trained: float | None = None
    other: float | None = None
    note: str = ""

    @property
    def sound(self) -> bool:
        """Whether every figure is at the noise, or the family was refused with a reason."""
        if self.noise is None:
            return self.note.startswith("refused")
        limit = max(BOUND, 2 * self.noise)
        found = [figure for figure in (self.cartridge, self.chain, self.trained) if figure is not None]
        return bool(found) and all(figure <= limit for figure in found) and (self.other or 0) > 3 * limit


def one_family(name: str, scratch: Path) -> Iterator[Row]:
    """Make a family's model and cartridges, serve them in each mode, and yield a row for each."""
    directory = make_model(scratch / "model", FAMILIES[name]())
    try:
        family = Family(name, CausalModel(str(directory)), directory, Cli(scratch / "home"))
    except CartridgeError as error:
        yield Row(name, "build", note=f"refused: {error}")
        return
    notes = family.make()
    for mode in MODES:
        yield family.row(mode, notes)


class Family(NamedTuple):
    """A model, and a home with its cartridges: documents `a` and `b`, and `t`, which is trained of `a`."""

    name: str
    model: CausalModel
    directory: Path
    cli: Cli

    def make(self) -> list[str]:
        """Build and train; return why it could not be trained."""
        scratch, common = self.directory.parent, ("--model", self.directory)
        for name, sheet, tokens in (("a", "ward-a", 300), ("b", "ward-b", 320)):
            document, text = scratch / f"{name}.txt", load_sheet(sheet).text
            # A family may read the shipped tokenizer's files in its own way.
            ends = (
                end for end in range(tokens, len(text), 20) if len(self.model.encode(text[:end], special=True)) > tokens
            )
            document.write_text(text[: next(ends)])
            self.cli.json("build", *common, "--document", document, "--id", name)
        asked = [{"question": q.text, "answer": q.answer} for q in load_sheet("ward-a").questions[:12]]
        (questions := scratch / "questions.jsonl").write_text("\n".join(map(json.dumps, asked)))
        ran = self.cli(
            "train", *common, "--document", scratch / "a.txt", "--id", "t", "--questions", questions, *_TRAINING
        )
        return [f"not trained: {ran.err.strip().rpartition('lmcache-cartridge: ')[2]}"[:300]] if ran.status else []

    def row(self, mode: str, notes: Sequence[str]) -> Row:
        """Serve the cartridges and compare; without LMCache's saving where that is refused, and that is noted."""
        log = self.cli.home / f"{mode}.log"
        for saves in (True, False):
            try:
                return self.served(mode, log, [*notes, *([] if saves else ["with --no-save"])], saves=saves)
            except Exception as error:
                traceback.print_exc()
                reasons = _REASON.findall(log.read_text(errors="replace") if log.exists() else "")
                note = f"refused: {reasons[-1]}" if reasons else f"not served: {error}"
                if "--no-save" not in note:
                    break
        return Row(self.name, mode, note=note[:400])

    def served(self, mode: str, log: Path, notes: list[str], *, saves: bool) -> Row:
        """Serve the cartridges with the defaults that a user has and compare. Raises whatever keeps the server from answering."""
        settings = Settings(home=self.cli.home, cpu_bytes=128 << 20)
        options = ["--max-model-len", str(CONTEXT // 2), "--max-logprobs", "-1", "--dtype", "float32"]
        rows = Registry(settings.registry_path).all()
        known = {row.id: Cartridge(load_manifest(root := row.local_root(), None), root, str(root)) for row in rows}
        ids = {name: load_token_ids(one.manifest, one.root).tolist() for name, one in known.items()}
        question = self.model.encode(QUESTION, special=False)
        with serving(settings, log, str(self.directory), *options, mode=mode, saves=saves) as server:

            def ask(*names: str, document: Sequence[int] = ()) -> tuple[torch.Tensor, int]:
                """Return the log probability of every token that may follow, and how many were not computed."""
                size = self.model.fingerprint.vocab_size
                given = {"tokens": 1, "logprobs": size, "return_tokens_as_token_ids": True}
                answer = server.ask([*document, *question], *names, **given)
                found = torch.full((size,), float("-inf"))
                for token, logprob in answer.logprobs[0].items():
                    found[int(token.removeprefix("token_id:"))] = logprob
                least = 256 if len(names) < 2 else len(ids[names[0]]) + 1
                assert not names or answer.cached_tokens >= least, f"of {names} {answer.cached_tokens} were injected"
                return found, answer.cached_tokens

            def after(*names: str) -> float:
                """Return how far the answer after a chain is from transformers' after so much of its KV as was injected."""
                found, injected = ask(*names)
                kv = chain([known[name] for name in names])[:, :, :injected]
                rest = [token for name in names for token in ids[name]][injected:]
                return _apart(found, self.model.logits_after(kv, [*rest, *question])[-1].log_softmax(-1))

            dense, cached = ask(document=ids["a"])
            assert cached == 0, f"{cached} tokens of a plain prompt were not computed"
            plain = self.model.logits([*ids["a"], *question], 1)[-1].log_softmax(-1)
            figures = {"noise": _apart(dense, plain), "cartridge": _apart(ask("a")[0], dense)}
            figures["other"] = _apart(ask("b")[0], dense)
            try:
                check_shift(self.model.fingerprint.rope)
                figures["chain"] = after("a", "b")
            except UnsupportedModel as error:
                notes.append(f"no chains: {error}")
            if "t" in known:
                figures["trained"] = after("t")
        return Row(self.name, mode, **figures, note="; ".join(notes))


def _apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max())


def rows_of(name: str) -> list[Row]:
    """Return the rows of one family."""
    with tempfile.TemporaryDirectory() as scratch:
        return list(one_family(name, Path(scratch)))


def in_process_of_its_own(name: str) -> list[Row]:
    """Return the rows of one family, whose process is ended where it takes too long."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        try:
            return pool.apply_async(rows_of, (name,)).get(_TIMEOUT_S)
        except Exception as error:
            return [Row(name, "all", note=f"not done in {_TIMEOUT_S} s: {error!r}")]


def figures(rows: Sequence[Row]) -> list[report.Figure]:
    """Return whether every row is sound, with what it says, and its figures."""
    made = []
    for row in rows:
        case = {"model": row.family, "mode": row.mode}
        for what in ("noise", "cartridge", "chain", "trained", "other"):
            if (value := getattr(row, what)) is not None:
                made.append(report.Figure.counted(value, what, "nats", **case))
        said = {"sound": "yes" if row.sound else "NO"} | ({"note": row.note} if row.note else {})
        made.append(report.Figure.counted(row.sound, "sound", "", **case | said))
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; exit status 1 where a figure is not at the noise."""
    bench = report.Benchmark(
        __file__, __doc__, ["artifact", "memory", "engine", "serve", "make/prefill.py", "make/train"]
    )
    bench.parser.add_argument("--families", help="names with commas between them (default: all)")
    bench.parser.add_argument("--jobs", type=int, default=2, help="families at once (default %(default)s)")
    options = bench.start(arguments)
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    names = options.families.split(",") if options.families else ["llama"] if options.smoke else list(FAMILIES)
    if unknown := sorted({*names} - {*FAMILIES}):
        bench.parser.error(f"no family is called {', '.join(unknown)}; there are {', '.join(FAMILIES)}")
    rows = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for found in pool.map(in_process_of_its_own, names):
            report.say(f"{found[0].family}: {', '.join(row.note or 'served' for row in found)}")
            rows += found
    bench.publish(figures(rows))
    wrong = [f"{row.family}, {row.mode}" for row in rows if not row.sound]
    print(
        f"NOT at the noise: {', '.join(wrong)}"
        if wrong
        else f"all {len(rows)} rows at the noise, or refused with a reason"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
