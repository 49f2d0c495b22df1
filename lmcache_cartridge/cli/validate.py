"""`validate`: the ladder against a running server or one of its own; with a name, that cartridge's own questions."""

from __future__ import annotations

import argparse
import logging
import shlex
import shutil
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CartridgeError, SettingsError
from .options import NAME, Verb, add_library, add_server_model, registry_of, root_of, settings_of
from .shelf import shelf
from .show import bars, say, show, table

if TYPE_CHECKING:
    from ..make.ladder.climb import Another, Row
    from ..make.ladder.ground import Ground
    from ..make.ladder.held import Held
    from ..make.ladder.maker import Maker
    from ..make.ladder.own import OwnServer

COULD_NOT = 2
"""Exit status where nothing could be tried."""


def add(verb: Verb) -> None:
    """Add the command to the command line."""
    added = verb(
        "validate",
        _validate,
        "Climb the validation ladder on a running server, or on one that it starts; with a cartridge's name, ask what "
        "is known to follow that.",
        "validate --model ./llama --tier 0,0.5,3cross",
    )
    option = added.add_argument
    option("name", nargs="?", help=f"{NAME}: ask a server only what is known to follow this cartridge, and compare")
    option("--url", metavar="URL", help="running server; its key is that in $VLLM_API_KEY")
    add_server_model(added)
    option(
        "--model", action="append", default=[], metavar="DIR",
        help="the server's model, with which cartridges of generated text are made. Without --url a server of it is "
        "started, over a registry of its own. A second one is for tier 3b",
    )  # fmt: skip
    option(
        "--tier", default=None, metavar="N[,N]",
        help="-1, 0, 0.5, 1, 1b, 2, 3, 3cross, 3b, 4 to 7, 7b, 8 to 12, or all (default: what one server tells in two "
        "minutes)",
    )  # fmt: skip
    option("--allow-unchecked", action="store_true", help="pass although some of it could not be checked")
    option("--json", type=Path, metavar="FILE", help="write all rows and the noise there, too")
    option(
        "--cartridges", default="", metavar="A,B",
        help="without --model: prefill cartridges of the server to ask (default: three of those it lists)",
    )  # fmt: skip
    option(
        "--from-server", action="store_true",
        help="with --url: have the server compute the cartridges' KV, as `build --url` does",
    )  # fmt: skip
    option(
        "--vllm",
        default="",
        metavar="OPTIONS",
        help="vLLM's options for servers that are started: --vllm='--max-model-len 8192' (default on CPU --enforce-eager)",
    )
    option(
        "--modes", default="in-process,multiprocess", metavar="MODE,MODE",
        help="modes of the servers: the first for all tiers, a second for tier 12 (default in-process,multiprocess)",
    )  # fmt: skip
    option("--chunk-size", type=int, default=256, help="tokens a chunk, as the server's (default 256)")
    option("--dtype", default="auto", help="of the cartridges, as the engine's (default auto)")
    add_library(added)


def _validate(arguments: argparse.Namespace) -> int:
    if arguments.name is not None:
        return _canary(arguments)
    try:
        return _ladder(arguments)
    except CartridgeError as error:
        print(f"lmcache-cartridge: {error}", file=sys.stderr)
        return COULD_NOT


def _canary(arguments: argparse.Namespace) -> int:
    from ..artifact import reading
    from ..make.server import Server
    from ..make.validate import validate

    if arguments.url is None:
        raise SettingsError(f"validate {arguments.name} needs --url URL")
    location = registry_of(arguments, read_only=True).find(arguments.name)
    manifest = reading.load_manifest(root_of(arguments, location.location), location.digest, payload=False)
    with Server(arguments.url, arguments.server_model) as client, bars(arguments.format) as progress:
        rows = validate(manifest, client, progress)
    passed = all(row.passed for row in rows)
    sensitivity = manifest.canary and manifest.canary.sensitivity
    asked = [row._asdict() for row in rows]
    result = {"name": manifest.name, "passed": passed, "sensitivity": sensitivity, "questions": asked}
    readable = [
        {name: row[name] for name in ("place", "positions", "injected", "difference")}
        | {"bound": round(row["bound"], 4), "passed": "yes" if row["passed"] else f"NO {row['problem'] or ''}".rstrip()}
        for row in asked
    ]
    show(result, table(readable), arguments.format)
    return 0 if passed else 1


def _ladder(arguments: argparse.Namespace) -> int:
    from ..make.ladder import climb

    if arguments.tier is None:
        wanted = climb.default(model=bool(arguments.model), own=arguments.url is None)
    else:
        wanted = climb.read_tiers(arguments.tier)
    modes = _modes(arguments)
    _check(arguments)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cartridge-validate-")))
        setting = _Setting(arguments, scratch, stack, modes)
        ladder = [climb.NOISE] + [
            rung
            for rung in climb.rungs(
                static=lambda: _static(arguments),
                in_bfloat16=setting.in_bfloat16,
                second=setting.second,
                modes=modes,
            )
            if rung.tier in wanted
        ]
        ground = setting.ground()
        rows = []
        for done, row in enumerate(climb.climb(ladder, ground), 1):
            rows.append(row)
            say(
                f"{done}/{len(ladder)} tier {row.tier}, {row.what}: {row.result}, {row.seconds:.1f} s"
                + (f": {row.found}" if row.result == climb.FAIL else ""),
                arguments.format,
            )
        if any(row.result == climb.FAIL for row in rows):
            setting.keep_logs()
    order = [(rung.tier, rung.what) for rung in ladder]
    rows.sort(key=lambda row: order.index((row.tier, row.what)))
    return _tell(arguments, ground, rows)


class _Setting:
    """What the options make of it: the ground, and the servers that other rungs start."""

    def __init__(self, arguments: argparse.Namespace, scratch: Path, stack: ExitStack, modes: list[Any]) -> None:
        self._arguments, self._scratch, self._stack, self._modes = arguments, scratch, stack, modes
        models = arguments.model
        owns = models and arguments.url is None
        self.second: Another | None = (lambda: self._apart(models[1], "second", "auto")) if len(models) > 1 else None
        self.in_bfloat16: Another | None = (lambda: self._apart(models[0], "bf16", "bfloat16")) if owns else None

    def ground(self) -> Ground:
        """Make the cartridges, start the server where it is ours, and measure its noise."""
        from ..make.ladder.ground import Ground, existing
        from ..make.server import Server

        arguments = self._arguments
        with bars(arguments.format) as progress:
            if arguments.url is None:
                own, maker, held = self._own(arguments.model[0], self._scratch, arguments.dtype)
                say(f"starting a server of {arguments.model[0]}, {self._modes[0]} (tens of seconds)", arguments.format)
                self._stack.callback(own.stop)
                own.start()
                client = self._stack.enter_context(own.client())
                ground = Ground(client, held, maker=maker, own=own)
            else:
                client = self._stack.enter_context(Server(arguments.url, arguments.server_model))
                if arguments.model:
                    maker = self._shared(client, progress)
                    held = maker.three()
                    ground = Ground(client, held, maker=maker)
                else:
                    names = [name for name in arguments.cartridges.split(",") if name]
                    ground = Ground(client, existing(client, names))
            ground.measure(progress)
        return ground

    def _own(self, model: str, home: Path, dtype: str) -> tuple[OwnServer, Maker, list[Held]]:
        from ..library.quarantine import Quarantine
        from ..library.registry import Registry
        from ..make.ladder import own
        from ..make.ladder.maker import Home, Maker

        arguments = self._arguments
        say(f"making cartridges of generated text with {model}", arguments.format)
        loaded = _load(model, dtype)
        args = shlex.split(arguments.vllm) or own.eager()
        if not any(word.partition("=")[0] == "--dtype" for word in args):
            args += ["--dtype", loaded.fingerprint.dtype]  # vLLM's own choice for float32 is 16 bits
        server = own.OwnServer(model, home, mode=self._modes[0], chunk=arguments.chunk_size, vllm_args=args)
        home.mkdir(exist_ok=True, parents=True)
        registry = Registry(server.settings.registry_path)
        maker = Maker(
            lambda: loaded,
            Home(registry, Quarantine(server.settings.quarantine_dir)),
            server.settings.cartridges_dir,
            chunk=arguments.chunk_size,
        )
        return server, maker, maker.three()

    def _shared(self, client: Any, progress: Any) -> Maker:
        """Return what makes cartridges for a server that somebody else runs, and takes them away at the end."""
        from ..make.ladder.maker import Maker

        arguments = self._arguments
        directory = settings_of(arguments).cartridges_dir
        maker = Maker(
            lambda: _load(arguments.model[0], arguments.dtype), shelf(arguments, self._stack, client), directory,
            chunk=arguments.chunk_size, server=client if arguments.from_server else None, progress=progress,
        )  # fmt: skip
        self._stack.callback(maker.clear)
        return maker

    def _apart(self, model: str, name: str, dtype: str) -> tuple[OwnServer, Maker, list[Held]]:
        return self._own(model, self._scratch / name, dtype)

    def keep_logs(self) -> None:
        """Copy the servers' logs to where they outlive this command."""
        logs = sorted(self._scratch.rglob("*.log"))
        if logs:
            kept = Path(tempfile.mkdtemp(prefix="cartridge-validate-logs-"))
            for log in logs:
                shutil.copy(log, kept)
            say(f"the servers' logs are in {kept}", self._arguments.format)


def _load(model: str, dtype: str) -> Any:
    from ..make.model import CausalModel

    return CausalModel(model, dtype=dtype)


def _static(arguments: argparse.Namespace) -> str:
    """Tier -1: what `doctor` finds, and each name of vLLM and LMCache that is not promised, tried."""
    from ..make.ladder.ground import Unchecked, Wrong

    if arguments.url is not None and not arguments.model:
        raise Unchecked("the server's machine may be another one; run `lmcache-cartridge doctor` there")
    logging.disable(logging.CRITICAL)  # LMCache logs when it is imported
    try:
        from ..engine import host
        from .doctor import diagnose

        checks = diagnose(settings_of(arguments))
        for part in host.NAMES:
            host.verify(part)
    finally:
        logging.disable(logging.NOTSET)
    if bad := [check for check in checks if check.status == "FAIL"]:
        raise Wrong("; ".join(f"{check.name}: {check.finding}" for check in bad))
    warned = sum(check.status == "warn" for check in checks)
    names = sum(map(len, host.NAMES.values()))
    return f"{len(checks)} checks, {warned} warnings; {names} names of vLLM and LMCache resolved and tried"


def _modes(arguments: argparse.Namespace) -> list[Any]:
    from ..make.ladder.own import MODES

    found = [mode for mode in arguments.modes.split(",") if mode]
    if not found or any(mode not in MODES for mode in found) or len(set(found)) < len(found):
        raise SettingsError(f"--modes {arguments.modes}: write one or two of {', '.join(MODES)}")
    return found


def _check(arguments: argparse.Namespace) -> None:
    if arguments.url is None and not arguments.model:
        raise SettingsError("give --url URL of a running server, --model DIR to start one, or both")
    if arguments.url is None and (arguments.from_server or arguments.cartridges):
        raise SettingsError("--from-server and --cartridges are for a running server; give --url")
    if arguments.url is not None and arguments.vllm:
        raise SettingsError("--vllm is for a server that is started here; leave out --url")
    if arguments.model and arguments.cartridges:
        raise SettingsError("--cartridges are asked without --model, which makes cartridges of its own; give one")
    if arguments.from_server and not arguments.model:
        raise SettingsError("--from-server needs --model too: the canary is made with it")
    if arguments.chunk_size < 16:
        raise SettingsError(f"--chunk-size {arguments.chunk_size} must be at least 16")


def _tell(arguments: argparse.Namespace, ground: Ground, rows: list[Row]) -> int:
    import json

    from ..make.ladder import climb

    code = climb.status(rows, allow_unchecked=arguments.allow_unchecked)
    result = {
        "server": ground.client.url, "model": ground.client.model, "passed": code == 0, "noise": ground.noise._asdict(),
        "rows": [row._asdict() for row in rows],
    }  # fmt: skip
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    if arguments.format == "json":
        print(json.dumps(result, indent=2), flush=True)
        return code
    for row in rows:
        print(f"{row.result:11}  {row.tier:6}  {row.what}: {row.found} ({row.seconds:.1f} s)")
    count = {name: sum(row.result == name for row in rows) for name in (climb.PASS, climb.FAIL, climb.NOT_CHECKED)}
    if code and not count[climb.FAIL]:
        print("not passed: what was asked for was not all checked; --allow-unchecked lets that pass where serving was")
    print(
        f"{count[climb.PASS]} passed, {count[climb.FAIL]} failed, {count[climb.NOT_CHECKED]} not checked; "
        f"{sum(row.seconds for row in rows):.0f} s"
    )
    return code
