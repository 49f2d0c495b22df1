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

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import report  # first: it makes the tests' helpers importable
from commands import Cli
from tqdm import tqdm
from zoo import CONTEXT, FAMILIES

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
    injected: str = ""
    """Positions that were not computed: of the cartridge, the chain and the trained one."""
    note: str = ""

    @property
    def sound(self) -> bool:
        """Whether every figure is at the noise, or the family was refused with a reason."""
        if self.noise is None:
            return self.note.startswith("refused")
        limit = max(BOUND, 2 * self.noise)
        found = [figure for figure in (self.cartridge, self.chain, self.trained) if figure is not None]
        return bool(found) and all(figure <= limit for figure in found) and (self.other or 0) > 3 * limit


def run_cli(home: Path, *argv: str | Path) -> None:
    """Run one command of the command line in this process. Raises `RuntimeError`."""
    ran = Cli(home)(*argv)
    if ran.status:
        raise RuntimeError(ran.err.strip().rpartition("lmcache-cartridge: ")[2])


def one_family(name: str, scratch: Path) -> Iterator[Row]:
    """Make a family's model and cartridges, serve them in each mode, and yield a row for each."""
    import torch
    from families import make_model

    from lmcache_cartridge.errors import CartridgeError
    from lmcache_cartridge.make.model import CausalModel

    directory = make_model(scratch / "model", FAMILIES[name](), torch.float32)
    try:
        model = CausalModel(str(directory))
        made = Made(model, directory, scratch)
    except CartridgeError as error:
        yield Row(name, "build", note=f"refused: {error}")
        return
    for mode in MODES:
        yield made.row(name, mode)


class Made:
    """A model with its cartridges, and what transformers answers after them."""

    def __init__(self, model: Any, directory: Path, scratch: Path) -> None:
        """Build and train. Raises what `build` raises for a model that it refuses."""
        from lmcache_cartridge.cli.recall import load_sheet
        from lmcache_cartridge.library.registry import Registry
        from lmcache_cartridge.settings import Settings

        self.model, self.directory, self.scratch = model, directory, scratch
        self.settings = Settings(home=scratch / "home", cpu_bytes=128 << 20)
        self.notes: list[str] = []
        home, common = self.settings.home, ("--model", str(directory))
        for id_, sheet, tokens in (("a", "ward-a", 300), ("b", "ward-b", 320)):
            document, text = scratch / f"{id_}.txt", load_sheet(sheet).text
            ends = (end for end in range(tokens, len(text), 20) if len(model.encode(text[:end], special=True)) > tokens)
            document.write_text(text[: next(ends)])  # a family may read the shipped tokenizer's files in its own way
            run_cli(home, "build", *common, "--document", document, "--id", id_)
        questions = scratch / "questions.jsonl"
        asked = [{"question": q.text, "answer": q.answer} for q in load_sheet("ward-a").questions[:12]]
        questions.write_text("\n".join(map(json.dumps, asked)))
        try:
            run_cli(home, "train", *common, "--document", scratch / "a.txt", "--id", "t", "--questions", questions,
                    *_TRAINING)  # fmt: skip
        except Exception as error:
            kind = "" if isinstance(error, RuntimeError) else f"{type(error).__name__} "
            self.notes.append(f"not trained: {kind}{error}"[:300])
        registry = Registry(self.settings.registry_path)
        self.found = {entry.id: self._read(Path(entry.location)) for entry in registry.all()}
        self.question = model.encode(QUESTION, special=False)

    def _read(self, root: Path) -> tuple[list[int], Any]:
        """Return a cartridge's token ids and its canonical KV."""
        from lmcache_cartridge.artifact import reading
        from lmcache_cartridge.make.payload import read_kv

        manifest = reading.load_manifest(root, None)
        return reading.load_token_ids(manifest, root).tolist(), read_kv(manifest, root)

    def after(self, injected: int, *names: str) -> Any:
        """Return transformers' log probabilities `[vocabulary]` of what follows the question after the KV of a chain.

        Only `injected` positions of it are there; the others are computed after those, as an engine does.
        """
        import torch

        from lmcache_cartridge.memory.rope import shift

        shape, parts, tokens = self.model.fingerprint, [], []
        for name in names:
            ids, kv = self.found[name]
            parts.append(shift(kv, shape, len(tokens)) if tokens else kv)
            tokens += ids
        kv = torch.cat(parts, dim=2)[:, :, :injected]
        return self.model.logits_after(kv, [*tokens[injected:], *self.question])[-1].log_softmax(-1)

    def plain(self, name: str) -> Any:
        """Return the same after a document's tokens."""
        return self.model.logits(self.found[name][0] + self.question, 1)[-1].log_softmax(-1)

    def row(self, family: str, mode: str) -> Row:
        """Serve the cartridges and compare; without LMCache's saving where that is refused, and that is noted."""
        for saves in (True, False):
            try:
                return self.served(family, mode, saves=saves)
            except Exception as error:
                traceback.print_exc()
                log = self.settings.home / f"{mode}.log"
                said = log.read_text(errors="replace") if log.exists() else ""
                reasons = _REASON.findall(said)
                note = f"refused: {reasons[-1]}" if reasons else f"not served: {error}"
                if "--no-save" not in note:
                    break
        return Row(family, mode, note=note[:400])

    def served(self, family: str, mode: str, *, saves: bool = True) -> Row:
        """Serve the cartridges and compare. Raises whatever keeps the server from answering."""
        from lmcache_cartridge.artifact.model import check_shift
        from lmcache_cartridge.errors import UnsupportedModel

        notes = [*self.notes, *([] if saves else ["with --no-save"])]
        with serving(self.directory, self.settings, mode, saves=saves) as server:

            def ask(names: Sequence[str], ids: Sequence[int]) -> tuple[Any, int]:
                return answer(server, names, [*ids, *self.question], self.model.fingerprint.vocab_size)

            document = self.found["a"][0]
            dense, cached = ask([], document)
            assert cached == 0, f"{cached} tokens of a plain prompt were not computed"
            single, one = ask(["a"], [])
            other, _ = ask(["b"], [])
            figures = {"noise": _apart(dense, self.plain("a")), "cartridge": _apart(single, dense),
                       "other": _apart(other, dense)}  # fmt: skip
            counts = [f"{one} of {len(document)}"]
            try:
                check_shift(self.model.fingerprint.rope)
                chained, both = ask(["a", "b"], [])
                figures["chain"] = _apart(chained, self.after(both, "a", "b"))
                assert both > len(document), "nothing of the second was injected"
                counts.append(f"{both} of {len(document) + len(self.found['b'][0])}")
            except UnsupportedModel as error:
                notes.append(f"no chains: {error}")
            if "t" in self.found:
                trained, whole = ask(["t"], [])
                figures["trained"] = _apart(trained, self.after(whole, "t"))
                counts.append(f"{whole} of {len(self.found['t'][0])}")
            assert all(int(count.split()[0]) >= 256 for count in counts), f"not injected: {counts}"
        return Row(family, mode, **figures, injected=", ".join(counts), note="; ".join(notes))


def _apart(found: Any, expected: Any) -> float:
    return float((found - expected).abs().max())


@contextmanager
def serving(model: Path, settings: Any, mode: str, *, saves: bool = True) -> Iterator[Any]:
    """Serve with the defaults that a user has, as small as it goes."""
    from lmcache_cartridge.make.server import Server
    from lmcache_cartridge.serve.launch import plan
    from lmcache_cartridge.serve.processes import SMALL, ServerProcess

    arguments = ["--max-model-len", str(CONTEXT // 2), "--enforce-eager", "--kv-cache-memory-bytes", str(128 << 20),
                 "--max-logprobs", "-1", "--dtype", "float32"]  # fmt: skip
    launch = plan(str(model), settings, vllm_args=arguments, mode=mode, saves=saves)
    with (
        ServerProcess(launch, settings.home / f"{mode}.log", environment=SMALL) as process,
        Server(process.url) as server,
    ):
        yield server


def answer(server: Any, names: Sequence[str], ids: Sequence[int], vocabulary: int) -> tuple[Any, int]:
    """Return the log probability of every token that may follow, and how many tokens were not computed."""
    import torch

    body: dict[str, Any] = {
        "model": server.model, "prompt": list(ids), "max_tokens": 1, "temperature": 0, "logprobs": vocabulary,
        "return_tokens_as_token_ids": True,
    }  # fmt: skip
    body |= {"cartridges": list(names)} if names else {"cache_salt": "plain"}
    reply = server.post("/v1/completions", body, dict)
    found = torch.full((vocabulary,), float("-inf"))
    for token, logprob in reply["choices"][0]["logprobs"]["top_logprobs"][0].items():
        found[int(token.removeprefix("token_id:"))] = logprob
    details = reply["usage"].get("prompt_tokens_details") or {}
    return found, details.get("cached_tokens") or 0


def in_process_of_its_own(name: str, log: Path) -> list[Row]:
    """Run one family in a process of its own and return its rows."""
    with tempfile.TemporaryDirectory() as scratch, log.open("w") as text:
        command = [sys.executable, __file__, "--one", name]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TMPDIR": scratch}
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=text, text=True, timeout=_TIMEOUT_S, env=environment
            )
        except subprocess.TimeoutExpired:
            return [Row(name, "all", note=f"not done in {_TIMEOUT_S} s")]
        rows = [Row(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]
        return rows or [Row(name, "all", note=f"ended with {done.returncode}; see {log}")]


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
    bench.parser.add_argument("--one", help=argparse.SUPPRESS)
    options = bench.start(arguments)
    if options.one:
        with tempfile.TemporaryDirectory() as scratch:
            for row in one_family(options.one, Path(scratch)):
                print(json.dumps(row._asdict()), flush=True)
        return 0
    names = options.families.split(",") if options.families else ["llama"] if options.smoke else list(FAMILIES)
    if unknown := sorted({*names} - {*FAMILIES}):
        bench.parser.error(f"no family is called {', '.join(unknown)}; there are {', '.join(FAMILIES)}")
    rows = []
    with ThreadPoolExecutor(options.jobs) as pool, tqdm(total=len(names), desc="families") as bar:
        logs = Path(tempfile.mkdtemp(prefix="cartridge-models-"))
        named = [logs / f"{''.join(c if c.isalnum() else '-' for c in name)}.log" for name in names]
        futures = list(map(partial(pool.submit, in_process_of_its_own), names, named))
        for future in futures:
            future.add_done_callback(lambda _: bar.update())
        for future in futures:
            rows += future.result()
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
