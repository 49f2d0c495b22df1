"""`validate`: pytest's checks of a running server or of one of its own; with a name, that cartridge's own questions."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument

from ..errors import CartridgeError, SettingsError
from .making import own_server
from .options import (
    NAMED,
    ServedChunk,
    ServerModel,
    Url,
    Vllm,
    check,
    command,
    listed,
    load_model,
    option,
    registry_of,
    root_of,
    settings_of,
)
from .show import bars, say, show, table

if TYPE_CHECKING:
    from ..artifact.manifest import Manifest
    from ..make.trial.own import Mode
    from ..validate.context import Context
    from ..validate.suite import Row


@command("validate --model ./llama --tier 0,0.5,3cross")
def validate(
    name: Annotated[
        str | None, Argument(help=f"{NAMED}: ask a server only what is known to follow this cartridge, and compare")
    ] = None,
    url: Url = None,
    server_model: ServerModel = None,
    model: Annotated[
        str | None,
        option("the server's model, with which cartridges of generated text are made. Without --url a server of it is "
               "started, over a registry of its own", metavar="DIR"),
    ] = None,
    tier: Annotated[
        str | None,
        option("-1, 0, 0.5, 1, 1b, 2, 3, 3cross, 4 to 7, 7b, 8 to 12, or all (default: what one server tells in two "
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
    mode: Annotated[
        Literal["in-process", "multiprocess"], option("of the server that is started, as `serve --mode`")
    ] = "in-process",
    chunk_size: ServedChunk = 256,
) -> int:  # fmt: skip
    """Check a running server, or one that it starts. By pytest, tier by tier; $PYTEST_ADDOPTS may say '-x -k chain
    --junitxml=report.xml'. With a cartridge's name, ask what is known to follow that."""
    if name is not None:
        return _canary(name, url, server_model)
    check(
        locals(), "validate needs --url or --model", "--cartridges need --url; they are for a running server",
        "--vllm excludes --url; it is for a server that is started here",
        "--cartridges exclude --model, which makes cartridges of its own",
    )  # fmt: skip
    from ..validate import suite

    wanted = suite.default(model=bool(model), own=url is None) if tier is None else suite.read_tiers(tier)
    with ExitStack() as stack:
        with bars() as progress:
            if url is None:
                context = _started(stack, str(model), mode, chunk_size, vllm)
            else:
                context = _running(stack, url, server_model, model, listed(cartridges), chunk_size, progress)
            context.measure(progress)
        rows = suite.Suite(context, wanted, say).run()
        if context.own is not None and any(row.result == suite.FAIL for row in rows):
            _keep_logs(context.own.home)
    return _tell(context, rows, suite.status(rows, allow_unchecked=allow_unchecked))


def _canary(name: str, url: str | None, server_model: str | None) -> int:
    from ..artifact import reading
    from ..make.server import Server
    from ..validate.canary import ask_canary

    if url is None:
        raise SettingsError(f"validate {name} needs --url URL")
    location = registry_of(read_only=True).find(name)
    manifest = reading.load_manifest(root_of(location.location), location.digest, payload=False)
    with Server(url, server_model) as client, bars() as progress:
        rows = [row._asdict() for row in ask_canary(manifest, client, progress)]
    passed = all(row["problem"] is None for row in rows)
    show({"name": manifest.name, "passed": passed, "questions": rows}, table(rows))
    return int(not passed)


def _started(stack: ExitStack, model: str, mode: Mode, chunk: int, vllm: str) -> Context:
    """Return cartridges on a server that is started here, and ends with `stack`."""
    from ..validate.context import Context

    say(f"making cartridges of generated text with {model}")
    own, maker = own_server(stack, model, chunk, vllm, mode=mode)
    held = maker.three()
    say(f"starting a server of {model}, {mode} (tens of seconds)")
    try:
        own.start()
    except CartridgeError:
        _keep_logs(own.home)
        raise
    return Context(stack.enter_context(own.client()), held, maker=maker, own=own, static=_static)


def _running(
    stack: ExitStack, url: str, server_model: str | None, model: str | None, names: list[str], chunk: int, progress: Any
) -> Context:
    """Return cartridges made for a server that somebody else runs, taken away with `stack`, or those that it has."""
    from ..make.server import Server
    from ..make.trial.maker import Maker
    from ..validate.context import Context, existing

    client = stack.enter_context(Server(url, server_model))
    if model is None:
        return Context(client, existing(client, names, _known))
    maker = Maker(load_model(model, max_model_len=client.max_model_len()), settings_of(), chunk, progress)
    stack.callback(maker.clear)
    return Context(client, maker.three(), maker=maker, static=_static)


def _known(digest: str) -> Manifest | None:
    """Return the manifest of what has this digest, if it is registered under --home."""
    from ..artifact import reading

    for row in registry_of(read_only=True).having([digest]):
        with suppress(CartridgeError):
            return reading.load_manifest(root_of(row.location), digest, payload=False)
    return None


def _keep_logs(home: Path) -> None:
    """Copy the servers' logs to where they outlive this command."""
    kept = Path(tempfile.mkdtemp(prefix="cartridge-validate-logs-"))
    for log in home.rglob("*.log"):
        shutil.copy(log, kept)
    say(f"the servers' logs are in {kept}")


def _static() -> str:
    """Return what `doctor` finds, and that the names of vLLM and LMCache hold. Raises `CartridgeError` for what is wrong."""
    from ..engine import host
    from .doctor import diagnose

    checks = diagnose(settings_of())
    for part in host.NAMES:
        host.verify(part)
    if bad := [check for check in checks if check.status == "FAIL"]:
        raise CartridgeError("; ".join(f"{check.name}: {check.finding}" for check in bad))
    warned = sum(check.status == "warn" for check in checks)
    names = sum(map(len, host.NAMES.values()))
    return f"{len(checks)} checks, {warned} warnings; {names} names of vLLM and LMCache resolved and tried"


def _tell(context: Context, rows: list[Row], status: int) -> int:
    from ..validate.suite import FAIL, NOT_CHECKED, PASS

    count = Counter(row.result for row in rows)
    lines = [f"{row.result:11}  {row.tier:6}  {row.what}: {row.found} ({row.seconds:.1f} s)" for row in rows]
    if status and not count[FAIL]:
        lines.append(
            "not passed: what was asked for was not all checked; --allow-unchecked lets that pass where serving was"
        )
    lines.append(
        f"{count[PASS]} passed, {count[FAIL]} failed, {count[NOT_CHECKED]} not checked; "
        f"{sum(row.seconds for row in rows):.0f} s"
    )
    result = {"model": context.client.model, "passed": status == 0,
              "noise": context.noise._asdict(), "rows": [row._asdict() for row in rows]}  # fmt: skip
    show(result, "\n".join(lines))
    return int(status > 0)
