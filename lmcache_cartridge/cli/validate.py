"""`validate`: the ladder against a running server or one of its own; with a name, that cartridge's own questions."""

from __future__ import annotations

import shlex
import shutil
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument

from ..errors import SettingsError
from .making import load_for, maker_of
from .options import (
    NAMED,
    ServedChunk,
    ServerModel,
    Url,
    Vllm,
    command,
    load_model,
    option,
    registry_of,
    root_of,
    settings_of,
)
from .show import bars, say, show, table

if TYPE_CHECKING:
    from ..make.ladder.climb import Another, Row
    from ..make.ladder.ground import Ground
    from ..make.ladder.held import Held
    from ..make.ladder.maker import Maker
    from ..make.ladder.own import OwnServer


@command("validate --model ./llama --tier 0,0.5,3cross")
def validate(
    name: Annotated[
        str | None, Argument(help=f"{NAMED}: ask a server only what is known to follow this cartridge, and compare")
    ] = None,
    url: Url = None,
    server_model: ServerModel = None,
    model: Annotated[
        list[str],
        option("the server's model, with which cartridges of generated text are made. Without --url a server of it is "
               "started, over a registry of its own. A second one is for tier 3b", metavar="DIR"),
    ] = [],  # noqa: B006  Typer copies it
    tier: Annotated[
        str | None,
        option("-1, 0, 0.5, 1, 1b, 2, 3, 3cross, 3b, 4 to 7, 7b, 8 to 12, or all (default: what one server tells in two "
               "minutes)", metavar="N,N"),
    ] = None,
    allow_unchecked: Annotated[
        bool, option("pass although some of it could not be checked", "--allow-unchecked")
    ] = False,
    cartridges: Annotated[
        str,
        option("without --model: prefill cartridges of the server to ask (default: three of those it lists)", metavar="A,B"),
    ] = "",
    vllm: Vllm = "",
    modes: Annotated[
        str,
        option("modes of the servers: the first for all tiers, a second for tier 12", metavar="MODE,MODE"),
    ] = "in-process,multiprocess",
    chunk_size: ServedChunk = 256,
) -> int:  # fmt: skip
    """Climb the validation ladder on a running server, or on one that it starts; with a cartridge's name, ask what is known
    to follow that."""
    if name is not None:
        return _canary(name, url, server_model)
    from ..make.ladder import climb
    from ..make.ladder.own import MODES

    wanted = climb.default(model=bool(model), own=url is None) if tier is None else climb.read_tiers(tier)
    chosen: list[Any] = [mode for mode in modes.split(",") if mode]
    if not chosen or any(mode not in MODES for mode in chosen) or len(set(chosen)) < len(chosen):
        raise SettingsError(f"--modes {modes}: write one or two of {', '.join(MODES)}")
    for is_wrong, why in (
        (url is None and not model, "give --url URL of a running server, --model DIR to start one, or both"),
        (url is None and cartridges,
         "--cartridges are for a running server; give --url"),
        (url is not None and vllm, "--vllm is for a server that is started here; leave out --url"),
        (model and cartridges, "--cartridges are asked without --model, which makes cartridges of its own; give one"),
    ):  # fmt: skip
        if is_wrong:
            raise SettingsError(why)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cartridge-validate-")))
        setting = _Setting(scratch, stack, chosen, model, chunk=chunk_size, vllm=shlex.split(vllm))
        ladder = [climb.NOISE] + [
            rung
            for rung in climb.rungs(
                static=lambda: _static(has_model=url is None or bool(model)), in_bfloat16=setting.apart(0, "bfloat16", url),
                second=setting.apart(1, "auto", None), modes=chosen,
            )
            if rung.tier in wanted
        ]  # fmt: skip
        with bars() as progress:
            if url is None:
                ground = setting.started()
            else:
                names = [each for each in cartridges.split(",") if each]
                ground = setting.running(url, server_model, names, progress)
            ground.measure(progress)
        rows = []
        for done, row in enumerate(climb.climb(ladder, ground), 1):
            rows.append(row)
            why = f": {row.found}" if row.result == climb.FAIL else ""
            say(f"{done}/{len(ladder)} tier {row.tier}, {row.what}: {row.result}, {row.seconds:.1f} s{why}")
        if any(row.result == climb.FAIL for row in rows):
            _keep_logs(scratch)
    order = [(rung.tier, rung.what) for rung in ladder]
    rows.sort(key=lambda row: order.index((row.tier, row.what)))
    return _tell(ground, rows, allow_unchecked=allow_unchecked)


def _canary(name: str, url: str | None, server_model: str | None) -> int:
    from ..artifact import reading
    from ..make.server import Server
    from ..make.validate import validate

    if url is None:
        raise SettingsError(f"validate {name} needs --url URL")
    location = registry_of(read_only=True).find(name)
    manifest = reading.load_manifest(root_of(location.location), location.digest, payload=False)
    with Server(url, server_model) as client, bars() as progress:
        rows = validate(manifest, client, progress)
    passed = all(row.passed for row in rows)
    asked = [row._asdict() for row in rows]
    result = {"name": manifest.name, "passed": passed, "sensitivity": manifest.canary and manifest.canary.sensitivity,
              "questions": asked}  # fmt: skip
    readable = [
        {name: row[name] for name in ("place", "positions", "injected", "difference")}
        | {"bound": round(row["bound"], 4), "passed": "yes" if row["passed"] else f"NO {row['problem'] or ''}".rstrip()}
        for row in asked
    ]
    show(result, table(readable))
    return int(not passed)


class _Setting:
    """What the options make of it: the ground, and the servers that other rungs start."""

    def __init__(
        self, scratch: Path, stack: ExitStack, modes: list[Any], models: list[str], *, chunk: int, vllm: list[str],
    ) -> None:  # fmt: skip
        self._scratch, self._stack, self._modes, self._models = scratch, stack, modes, models
        self._chunk, self._vllm = chunk, vllm

    def apart(self, number: int, dtype: str, url: str | None) -> Another | None:
        """Return what makes a server of a model in a `dtype` beside the others; None without that model, or with a URL."""
        if url is not None or number >= len(self._models):
            return None
        return lambda: self._own(self._models[number], self._scratch / f"{number}-{dtype}", dtype)

    def started(self) -> Ground:
        """Make the cartridges and start the server."""
        from ..make.ladder.ground import Ground

        own, maker, held = self._own(self._models[0], self._scratch, "auto")
        say(f"starting a server of {self._models[0]}, {self._modes[0]} (tens of seconds)")
        self._stack.callback(own.stop)
        own.start()
        return Ground(self._stack.enter_context(own.client()), held, maker=maker, own=own)

    def running(
        self,
        url: str,
        server_model: str | None,
        names: list[str],
        progress: Any,
    ) -> Ground:
        """Make cartridges for a server that somebody else runs, taken away at the end, or take what it has."""
        from ..make.ladder.ground import Ground, existing
        from ..make.server import Server

        client = self._stack.enter_context(Server(url, server_model))
        if not self._models:
            return Ground(client, existing(client, names))
        maker = maker_of(lambda: load_model(self._models[0]), settings_of(), self._chunk, progress=progress)
        self._stack.callback(maker.clear)
        return Ground(client, maker.three(), maker=maker)

    def _own(self, model: str, home: Path, dtype: str) -> tuple[OwnServer, Maker, list[Held]]:
        from ..make.ladder.own import OwnServer

        say(f"making cartridges of generated text with {model}")
        loaded, args = load_for(self._vllm, model, dtype)
        server = OwnServer(model, home, mode=self._modes[0], chunk=self._chunk, vllm_args=args)
        home.mkdir(exist_ok=True, parents=True)
        maker = maker_of(lambda: loaded, server.settings, self._chunk)
        return server, maker, maker.three()


def _keep_logs(scratch: Path) -> None:
    """Copy the servers' logs to where they outlive this command."""
    if logs := sorted(scratch.rglob("*.log")):
        kept = Path(tempfile.mkdtemp(prefix="cartridge-validate-logs-"))
        for log in logs:
            shutil.copy(log, kept)
        say(f"the servers' logs are in {kept}")


def _static(*, has_model: bool) -> str:
    """Tier -1: what `doctor` finds, and each name of vLLM and LMCache that is not promised, tried."""
    from ..make.ladder.ground import Unchecked, Wrong

    if not has_model:
        raise Unchecked("the server's machine may be another one; run `lmcache-cartridge doctor` there")
    from .doctor import diagnose

    checks = diagnose(settings_of())
    from ..engine import host

    for part in host.NAMES:
        host.verify(part)
    if bad := [check for check in checks if check.status == "FAIL"]:
        raise Wrong("; ".join(f"{check.name}: {check.finding}" for check in bad))
    warned = sum(check.status == "warn" for check in checks)
    names = sum(map(len, host.NAMES.values()))
    return f"{len(checks)} checks, {warned} warnings; {names} names of vLLM and LMCache resolved and tried"


def _tell(ground: Ground, rows: list[Row], *, allow_unchecked: bool) -> int:
    from ..make.ladder import climb

    passed = climb.status(rows, allow_unchecked=allow_unchecked) == 0
    count = Counter(row.result for row in rows)
    lines = [f"{row.result:11}  {row.tier:6}  {row.what}: {row.found} ({row.seconds:.1f} s)" for row in rows]
    if not passed and not count[climb.FAIL]:
        lines.append(
            "not passed: what was asked for was not all checked; --allow-unchecked lets that pass where serving was"
        )
    lines.append(
        f"{count[climb.PASS]} passed, {count[climb.FAIL]} failed, {count[climb.NOT_CHECKED]} not checked; "
        f"{sum(row.seconds for row in rows):.0f} s"
    )
    result = {"server": ground.client.url, "model": ground.client.model, "passed": passed,
              "noise": ground.noise._asdict(), "rows": [row._asdict() for row in rows]}  # fmt: skip
    show(result, "\n".join(lines))
    return int(not passed)
