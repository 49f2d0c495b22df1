"""`bench`: times of a running server, or of one that it starts, as one report that can be sent."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CartridgeError, SettingsError
from .options import Verb, add_library, add_server_model, settings_of
from .shelf import shelf
from .show import bars, say, show, table

if TYPE_CHECKING:
    from ..make.bench.page import Report
    from ..make.bench.target import Target
    from ..make.ladder.maker import Maker

NOTHING, INTERRUPTED = 2, 130
"""Exit status where nothing could be measured, and after Ctrl-C, with the report of what was."""


def add(verb: Verb) -> None:
    """Add the command to the command line."""
    added = verb(
        "bench",
        _bench,
        "Measure a vLLM server by `vllm bench serve`: time to first token, per output token and between tokens, with every "
        "token computed, with its own prefix cache, and with cartridges warm and cold. Writes report.html and bench.json.",
        "bench --url http://localhost:8000 --cartridge handbook --c 1,4 --budget-s 300",
    )
    option = added.add_argument
    option("--url", metavar="URL", help="running server, with cartridges or without; its key is that in $VLLM_API_KEY")
    add_server_model(added)
    option(
        "--cartridge", action="append", default=[], metavar="NAME",
        help="one of the server's cartridges; once for each (default: up to three that it lists, of different lengths)",
    )  # fmt: skip
    option(
        "--model", metavar="DIR",
        help="the server's model, with which a cartridge of generated text is made for each p, taken away at the end. "
        "The server follows the registry of --home, or --library. Without --url a server of it is started",
    )  # fmt: skip
    option(
        "--p", type=_numbers, metavar="N,N",
        help="tokens of the document before the question, these alone: of a cartridge that the server lists where one has "
        "this length (default: those of the cartridges; without any 256 to 32768, as the server's context has room)",
    )  # fmt: skip
    option("--c", type=_numbers, default=[1, 4, 16], metavar="N,N", help="requests at once (default 1,4,16)")
    option("--repeat", type=int, default=5, metavar="N", help="times that each is asked, by turns (default 5)")
    option("--tokens", type=int, default=16, metavar="N", help="of each answer (default 16)")
    option(
        "--ways",
        type=_ways,
        default=None,
        metavar="WAY,WAY",
        help="dense, prefix, warm, cold (default: all that can be had)",
    )
    option(
        "--budget-s", type=float, default=600.0, metavar="S",
        help="stop measuring after so many seconds, with what there is (default 600)",
    )  # fmt: skip
    option("--out", type=Path, default=Path("bench"), metavar="DIR", help="where the report goes (default ./bench)")
    option(
        "--vllm", default="", metavar="OPTIONS",
        help="vLLM's options for a server that is started: --vllm='--max-model-len 8192' (default on CPU --enforce-eager)",
    )  # fmt: skip
    option("--chunk-size", type=int, default=256, help="tokens a chunk, as the server's (default 256)")
    option("--dtype", default="auto", help="of the cartridges, as the engine's (default auto)")
    add_library(added)


def _numbers(text: str) -> list[int]:
    parts = [part.strip().replace("_", "") for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers from 1 on")
    return sorted({int(part) for part in parts})


def _ways(text: str) -> list[str]:
    known = ("dense", "prefix", "warm", "cold")
    wanted = [part.strip() for part in text.split(",") if part.strip()]
    if not wanted:
        raise argparse.ArgumentTypeError(f"{text!r} names no way; there are {', '.join(known)}")
    if unknown := [way for way in wanted if way not in known]:
        raise argparse.ArgumentTypeError(f"there is no way {', '.join(unknown)}; there are {', '.join(known)}")
    return [way for way in known if way in wanted]


def _bench(arguments: argparse.Namespace) -> int:
    from ..make.bench import page

    with ExitStack() as stack:
        try:
            _check(arguments)
            target, maker = _target(arguments, stack)
            report = _measure(arguments, target, maker)
        except CartridgeError as error:
            print(f"lmcache-cartridge: {error}", file=sys.stderr)
            return NOTHING
        files = page.write(report, arguments.out)
        return _tell(arguments, report, files)


def _check(arguments: argparse.Namespace) -> None:
    if arguments.url is None and arguments.model is None:
        raise SettingsError("give --url URL of a running server, --model DIR to start one, or both")
    if arguments.url is None and arguments.cartridge:
        raise SettingsError("--cartridge is for a running server; give --url")
    if arguments.url is not None and arguments.vllm:
        raise SettingsError("--vllm is for a server that is started here; leave out --url")
    for name in ("repeat", "tokens", "budget_s"):
        if not getattr(arguments, name) > 0:
            raise SettingsError(f"--{name.replace('_', '-')} {getattr(arguments, name)} must be above 0")
    if arguments.chunk_size < 16:
        raise SettingsError(f"--chunk-size {arguments.chunk_size} must be at least 16")
    _check_out(arguments.out)


def _check_out(out: Path) -> None:
    """Raise `SettingsError` where no report can be written, before minutes of measuring; leave nothing there."""
    try:
        there = next(each for each in (out, *out.parents) if each.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise SettingsError(f"--out {out} is no directory to write to: {error.strerror}") from error


def room_bytes(lengths: Sequence[int], context: int | None, token_bytes: int) -> int:
    """Return the bytes for the two longest cartridges that a model's `context` has room for, and some."""
    longest = max(lengths) if context is None else min(max(lengths), context)
    return max(1 << 30, 3 * longest * token_bytes)


def _target(arguments: argparse.Namespace, stack: ExitStack) -> tuple[Target, Maker | None]:
    """Return the server, started where it is ours, and what makes cartridges for it; both end with `stack`."""
    from ..make.bench.target import Target

    if arguments.url is not None:
        target = stack.enter_context(Target(arguments.url, arguments.server_model))
        if arguments.model is None:
            return target, None
        if not target.has_cartridges:
            raise CartridgeError(f"{target.url} has no route /v1/cartridges, so no cartridge can be made for it; "
                                 "leave out --model")  # fmt: skip
        directory = settings_of(arguments).cartridges_dir
        maker = _maker(arguments, shelf(arguments, stack, target), directory)
        stack.callback(maker.clear)
        return target, maker
    return _own(arguments, stack)


def _own(arguments: argparse.Namespace, stack: ExitStack) -> tuple[Target, Maker]:
    from ..library.quarantine import Quarantine
    from ..library.registry import Registry
    from ..make.bench import places
    from ..make.bench.target import Target
    from ..make.ladder.maker import Home
    from ..make.ladder.own import OwnServer, eager
    from ..settings import Settings

    class Own(OwnServer):
        @property
        def settings(self) -> Settings:
            """With evicting on, and room for the two longest cartridges."""
            return super().settings.model_copy(update={"admin": True, "cpu_bytes": room})

    home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cartridge-bench-")))
    vllm = shlex.split(arguments.vllm) or eager()
    loaded = _load(arguments)
    if not any(word.partition("=")[0] == "--dtype" for word in vllm):
        vllm += ["--dtype", loaded.fingerprint.dtype]  # vLLM's own choice for float32 is 16 bits
    room = room_bytes(arguments.p or places.LENGTHS, loaded.context_tokens, loaded.fingerprint.token_bytes)
    server = Own(arguments.model, home, chunk=arguments.chunk_size, vllm_args=vllm)
    registry = Registry(server.settings.registry_path)
    made = Home(registry, Quarantine(server.settings.quarantine_dir))
    maker = _maker(arguments, made, server.settings.cartridges_dir, loaded=loaded)
    say(f"starting a server of {arguments.model} (tens of seconds)", arguments.format)
    stack.callback(server.stop)
    server.start()
    with server.client() as client:
        target = stack.enter_context(Target(client.url, client.model))
    return target, maker


def _maker(arguments: argparse.Namespace, kept: Any, directory: Path, loaded: Any = None) -> Maker:
    import uuid

    from ..make.ladder.maker import Maker

    maker = Maker(lambda: loaded or _load(arguments), kept, directory, chunk=arguments.chunk_size)
    maker.run = f"bench-{uuid.uuid4().hex[:6]}"
    return maker


def _load(arguments: argparse.Namespace) -> Any:
    from ..make.model import CausalModel

    return CausalModel(arguments.model, dtype=arguments.dtype)


def _measure(arguments: argparse.Namespace, target: Target, maker: Maker | None) -> Report:
    from ..make.bench import figures
    from ..make.bench.load import WAYS, Load, Plan
    from ..make.bench.page import Report
    from ..make.bench.places import Questions, choose
    from ..make.bench.watch import Watch

    ways = tuple(way for way in WAYS if arguments.ways is None or way in arguments.ways)
    plan = Plan([], arguments.c, arguments.repeat, arguments.tokens, ways, arguments.budget_s)
    questions = Questions(target, plan.questions)
    load, around = Load(target, questions, arguments.tokens), questions.longest + arguments.tokens
    with bars(arguments.format) as progress:
        chosen, left = choose(target, arguments.cartridge, arguments.p, around, maker=maker, progress=progress)
    if not chosen:
        raise CartridgeError(f"nothing can be measured: {'; '.join(left)}")
    plan = plan._replace(places=chosen)
    with bars(arguments.format) as progress, Watch(target) as watch:
        measured = load.measure(plan, progress)
    unlike = {place.p: not place.is_same for place in chosen}
    rows = figures.rows(measured, unlike)
    told = [*left, *measured.left_out]
    told += [f"p = {row.p}, c = {row.c}, {row.way}: {'; '.join(row.remarks[:3])}" for row in rows if row.remarks]
    if any(run.cached is None for run in measured.runs):
        told.append("the server has no counters of cached tokens, so that nothing shows that a run was of its way")
    if any(unlike.values()):
        told.append("a trained cartridge is compared in time with a generated text of p tokens, and not in its answers")
    if "cold" in ways and not all(place.files for place in chosen if place.cartridge):
        told.append("no file was dropped from the system's page cache, from which what is cold may have been read")
    return Report(target, plan, measured, rows, watch, told)


def _tell(arguments: argparse.Namespace, report: Report, files: list[Path]) -> int:
    from ..make.bench import page

    measured, rows = report.measured, report.rows
    names = [str(path) for path in files]
    if arguments.format == "json":
        show(page.as_values(report) | {"files": names}, "", "json")
    elif rows:
        print(table(page.times(rows)))
    for remark in report.remarks:
        say(f"- {remark}", arguments.format)
    say(f"written: {' '.join(names)}", arguments.format)
    if measured.stopped:
        say(f"lmcache-cartridge: {measured.stopped}", arguments.format)
    if measured.was_interrupted:
        return INTERRUPTED
    if not any(row.requests for row in rows):
        return NOTHING
    return 1 if any(row.remarks for row in rows) else 0
