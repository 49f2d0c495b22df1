"""Commands around a server: `serve`, `top`, `demo`, `doctor`, `config` and `completion`."""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CartridgeError, SettingsError
from .options import Verb, settings_of
from .show import say, show, size, working

if TYPE_CHECKING:
    from ..serve.arguments import Arguments


def add(verb: Verb) -> None:
    """Add the commands to the command line."""
    _add_serve(verb)
    top = verb(
        "top",
        _top,
        "Show a running server live: tiers, requests, loads and cartridges. Ctrl-C ends it.",
        "top --url http://localhost:8000 --interval 1",
    )
    top.add_argument(
        "--url",
        default="http://localhost:8000",
        help="the server (default http://localhost:8000); its key is that in $VLLM_API_KEY",
    )
    top.add_argument("--interval", type=_seconds, default=2.0, help="seconds between refreshes (default 2)")
    top.add_argument("--once", action="store_true", help="show it once, with totals instead of rates, and end")

    demo = verb(
        "demo", _demo, "Build, serve and question a cartridge of a shipped document; about two minutes.", "demo"
    )
    demo.add_argument("--questions", type=int, default=12, help="how many to ask each way (default and at most 12)")

    verb("doctor", _doctor, "Check versions, hashing, layout and plugin; say how to fix what is wrong.", "doctor")

    config = verb(
        "config",
        _config,
        "Print a configuration file to start from; without a name, list them.",
        "config lmcache.yaml > lmcache.yaml",
    )
    config.add_argument("name", nargs="?", help="name of the file")


def _add_serve(verb: Verb) -> None:
    serve = verb(
        "serve",
        _serve,
        "Start vLLM's OpenAI server with cartridges. Other options go to vLLM as they are.",
        "serve ./llama --port 8000 --max-model-len 8192",
    )
    serve.set_defaults(passes_on=True)
    option = serve.add_argument
    option("model", help="as for `vllm serve`")
    option("--chunk-size", type=int, default=256, help="LMCache's chunk size in tokens (default 256)")
    option("--cpu-bytes", help="memory for resident cartridges (default 1GiB)")
    option("--disk-bytes", help="local disk for what comes from S3 (default 16GiB)")
    option(
        "--library",
        metavar="WHERE",
        help="published library to follow and serve, in place of the registry of --home: s3://bucket/prefix, or an "
        "absolute directory that machines share",
    )
    option(
        "--on-load-failure",
        choices=("fail", "recompute"),
        default="fail",
        help="what vLLM does with a request whose chunk cannot be loaded after all. fail: vLLM ends it, and this server "
        "asks again with the document's own text, or tells the client; recompute: vLLM computes the tokens, and no "
        "trained cartridge is served, whose tokens mean nothing (default fail)",
    )
    option(
        "--set",
        action="append",
        default=[],
        metavar="SETTING=VALUE",
        help="any other setting, as `on_miss=document`; lists and maps as JSON. May be given often",
    )
    option(
        "--mode",
        choices=("in-process", "multiprocess"),
        default="in-process",
        help="where LMCache runs: in vLLM's workers, or as a server of its own beside vLLM, which is started and ended "
        "with it (default in-process)",
    )
    option(
        "--l1-bytes",
        default="0",
        help="memory of LMCache's own. In-process: of each worker's, in which LMCache saves the KV that vLLM computes, of "
        "plain prompts and of what follows a cartridge (default 0: it saves nothing). Multiprocess: of LMCache's server, "
        "for that and for the copies it hands to vLLM (default: eight times the largest registered cartridge, 512MiB at "
        "least; half of it with --no-save)",
    )
    option("--lmcache-port", type=int, default=0, help="multiprocess: port of LMCache's server (default: a free one)")
    option(
        "--no-save",
        action="store_true",
        help="multiprocess: serve cartridges only. Else LMCache also saves the KV that vLLM computes, of plain prompts and "
        "of what follows a cartridge, and answers later prompts with it, each tenant's (cache_salt) by itself",
    )
    option(
        "--l2-adapter",
        action="append",
        default=[],
        metavar="JSON",
        help="multiprocess: one more place where LMCache saves, as `lmcache server --l2-adapter` takes it, for example "
        """'{"type": "fs", "base_path": "/var/cache/lmcache"}'. May be given often. With a secret in it better as a JSON list of such texts """
        "in $LMCACHE_CARTRIDGE_L2_ADAPTERS",
    )
    option(
        "--unproven-versions",
        action="store_true",
        help="run with versions of vLLM and LMCache that this release was not proven with; they may answer wrongly "
        "without an error",
    )
    option(
        "--accept-weights",
        action="store_true",
        help="serve cartridges whose model differs from this one in its weights alone, as of the original of a quantised "
        "model; you measured the difference. Canaries are still asked",
    )
    option("--print", action="store_true", help="print the files and command instead of running them")


def _serve(arguments: argparse.Namespace) -> None:
    from ..serve.arguments import Arguments, redacted
    from ..serve.launch import L2_ADAPTERS, plan

    values = {
        name: value
        for name in ("cpu_bytes", "disk_bytes", "library", "unproven_versions", "accept_weights")
        if (value := getattr(arguments, name)) not in (None, False)
    }
    for name, value in map(_assignment, arguments.set):
        if name in values or (name == "home" and arguments.home is not None):
            raise SettingsError(f"--{name.replace('_', '-')} and --set {name} are the same setting; give one")
        values[name] = value
    settings = settings_of(arguments, **values)
    launch = plan(
        arguments.model, settings, chunk_tokens=arguments.chunk_size, mode=arguments.mode,
        on_load_failure=arguments.on_load_failure, vllm_args=[word for word in arguments.rest if word != "--"],
        l1_bytes=_bytes("--l1-bytes", arguments.l1_bytes), lmcache_port=arguments.lmcache_port,
        saves=not arguments.no_save, l2_adapters=arguments.l2_adapter or json.loads(os.environ.get(L2_ADAPTERS, "[]")),
    )  # fmt: skip
    plain = {"yaml_path": launch.yaml_path, "yaml": launch.yaml, "environment": launch.shown_environment,
             "command": redacted(launch.command), "lmcache": launch.lmcache}  # fmt: skip
    if arguments.print:
        show(plain, str(launch), arguments.format)
        return
    _look_before(arguments.model, Arguments(launch.command))
    told = [arguments.model, arguments.mode, f"home={settings.home}"]
    for name in sorted(settings.model_fields_set - {"home"}):
        value = getattr(settings, name)
        told.append(f"{name}={size(value) if name.endswith('_bytes') else value}")
    show(plain, f"{', '.join(told)}; --print shows all", arguments.format)
    launch.write()
    launch.become()


def _look_before(model: str, options: Arguments) -> None:
    """Raise `SettingsError` for what vLLM would end with after it has loaded itself; say what the start will take."""
    if model.startswith((".", "/", "~")) and not Path(model).exists():
        raise SettingsError(f"{model}: there is no such model")
    port = options.get("port") or "8000"
    if options.get("uds") is None:
        with suppress(OSError), socket.create_connection((options.get("host") or "127.0.0.1", int(port)), 1):
            raise SettingsError(f"port {port} is taken; name another by --port")
    if options.get("enforce-eager") is None:
        say("the first start of a model compiles it, which takes minutes; not with --enforce-eager")


def _bytes(option: str, text: str) -> int:
    from ..settings import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as error:
        raise SettingsError(f"{option}: {error}") from None


def _assignment(text: str) -> tuple[str, Any]:
    """Return the name and value in `NAME=VALUE`; a value that is JSON counts as what it says."""
    name, equals, value = text.partition("=")
    if not equals:
        raise SettingsError(f"--set {text}: write --set SETTING=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.1 and 3600 seconds")
    return seconds


def _top(arguments: argparse.Namespace) -> None:
    from .top import run

    run(arguments.url, arguments.interval, once=arguments.once, as_json=arguments.format == "json")


def _demo(arguments: argparse.Namespace) -> int:
    from .demo import run

    return run(arguments.home, arguments.questions, arguments.format)


def _doctor(arguments: argparse.Namespace) -> int:
    with working("look at the engine", arguments.format):
        from .doctor import diagnose

        logging.disable(logging.CRITICAL)  # LMCache logs when it is imported, in colour into a pipe too
        try:
            checks = diagnose(settings_of(arguments))
        finally:
            logging.disable(logging.NOTSET)
    lines = [f"{c.status:4}  {c.name}: {c.finding}" + (f"\n      fix: {c.fix}" if c.fix else "") for c in checks]
    show([c._asdict() for c in checks], "\n".join(lines), arguments.format)
    return 1 if any(c.status == "FAIL" for c in checks) else 0


def _config(arguments: argparse.Namespace) -> None:
    directory = config_directory()
    files = (path.relative_to(directory) for path in directory.rglob("*") if path.is_file())
    names = sorted(path.as_posix() for path in files if path.suffix != ".pyc" and path.name != "__init__.py")
    if arguments.name is None:
        show(names, "\n".join(names), arguments.format)
        return
    if arguments.name not in names:
        raise CartridgeError(f"there is no configuration file {arguments.name!r}; there are {', '.join(names)}")
    text = (directory / arguments.name).read_text(encoding="utf-8")
    show({"name": arguments.name, "text": text}, text.removesuffix("\n"), arguments.format)


def config_directory() -> Path:
    """Return where the configuration files lie: in the installed package, or beside it in a source tree."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.with_name("configs")
