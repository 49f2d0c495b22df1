"""Serving: `serve`, `demo`, `top` and `doctor`."""

from __future__ import annotations

import argparse
from typing import Any

from .context import Verb, settings_of
from .output import show


def add(verb: Verb) -> None:
    """Add the commands to the command line."""
    serve = verb("serve", _serve, "Start vLLM's OpenAI server with cartridges. Other options go to vLLM as they are.",
                 "serve ./llama --port 8000 --max-model-len 8192")  # fmt: skip
    serve.set_defaults(passes_on=True)
    serve.add_argument("model", help="as for `vllm serve`")
    serve.add_argument("--chunk-size", type=int, default=256, help="LMCache's chunk size in tokens (default 256)")
    serve.add_argument("--cpu-bytes", help="memory for resident cartridges (default 1GiB)")
    serve.add_argument("--disk-bytes", help="local disk for what comes from S3 (default 16GiB)")
    serve.add_argument(
        "--on-load-failure",
        choices=("fail", "recompute"),
        default="fail",
        help="what vLLM does with a request whose chunk cannot be loaded after all. fail: vLLM ends it, and this server "
        "asks again with the document's own text, or tells the client; recompute: vLLM computes the tokens, and no "
        "trained cartridge is served, whose tokens mean nothing (default fail)",
    )
    serve.add_argument(
        "--set", action="append", default=[], metavar="SETTING=VALUE",
        help="any other setting, as `on_miss=document`; lists and maps as JSON. May be given often",
    )  # fmt: skip
    serve.add_argument(
        "--mode", choices=("in-process", "multiprocess"), default="in-process",
        help="where LMCache runs: in vLLM's workers, or as a server of its own beside vLLM, which is started and ended "
        "with it (default in-process)",
    )  # fmt: skip
    serve.add_argument(
        "--l1-bytes", default="0",
        help="multiprocess: memory of LMCache's server for the copies it hands to vLLM (default: four times the largest "
        "registered cartridge, 256MiB at least)",
    )  # fmt: skip
    serve.add_argument(
        "--lmcache-port", type=int, default=0, help="multiprocess: port of LMCache's server (default: a free one)"
    )
    serve.add_argument("--print", action="store_true", help="print the files and command instead of running them")

    demo = verb(
        "demo", _demo, "Build, serve and question a cartridge of a shipped document; about two minutes.", "demo"
    )
    demo.add_argument("--questions", type=int, default=12, help="how many to ask each way (default and at most 12)")

    top = verb("top", _top, "Show a running server live: tiers, requests, loads and cartridges. Ctrl-C ends it.",
               "top --url http://localhost:8000 --interval 1")  # fmt: skip
    top.add_argument("--url", default="http://localhost:8000", help="the server (default http://localhost:8000)")
    top.add_argument(
        "--api-key",
        help="the server's, for the list of cartridges; better in $VLLM_API_KEY, where `ps` does not show it",
    )
    top.add_argument("--interval", type=_seconds, default=2.0, help="seconds between refreshes (default 2)")
    top.add_argument("--once", action="store_true", help="show it once, with totals instead of rates, and end")

    verb("doctor", _doctor, "Check versions, hashing, layout and plugin; say how to fix what is wrong.", "doctor")


def _serve(arguments: argparse.Namespace) -> None:
    from ..errors import SettingsError
    from ..serve.launch import plan

    given = {"cpu_bytes": arguments.cpu_bytes, "disk_bytes": arguments.disk_bytes, "home": arguments.home}
    values = {name: value for name, value in given.items() if value is not None and name != "home"}
    for name, value in map(_assignment, arguments.set):
        if given.get(name) is not None:
            raise SettingsError(f"--{name.replace('_', '-')} and --set {name} are the same setting; give one")
        values[name] = value
    settings = settings_of(arguments, **values)
    launch = plan(
        arguments.model,
        settings,
        chunk_tokens=arguments.chunk_size,
        on_load_failure=arguments.on_load_failure,
        vllm_args=[a for a in arguments.rest if a != "--"],
        mode=arguments.mode,
        l1_bytes=_bytes("--l1-bytes", arguments.l1_bytes),
        lmcache_port=arguments.lmcache_port,
    )
    print(launch, flush=True)
    if not arguments.print:
        launch.run()


def _bytes(option: str, text: str) -> int:
    from ..errors import SettingsError
    from ..settings import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as error:
        raise SettingsError(f"{option}: {error}") from None


def _assignment(text: str) -> tuple[str, Any]:
    """Return the name and value in `NAME=VALUE`; a value that is JSON counts as what it says."""
    import json

    from ..errors import SettingsError

    name, equals, value = text.partition("=")
    if not equals:
        raise SettingsError(f"--set {text}: write --set SETTING=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _demo(arguments: argparse.Namespace) -> int:
    from .demo import run

    return run(arguments.home, arguments.questions, arguments.format)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.1 and 3600 seconds")
    return seconds


def _top(arguments: argparse.Namespace) -> None:
    import os

    from .top import run

    key = arguments.api_key or os.environ.get("VLLM_API_KEY")
    run(arguments.url, key, arguments.interval, once=arguments.once, as_json=arguments.format == "json")


def _doctor(arguments: argparse.Namespace) -> int:
    from .doctor import diagnose

    checks = diagnose(settings_of(arguments))
    lines = [f"{c.status:4}  {c.name}: {c.finding}" + (f"\n      fix: {c.fix}" if c.fix else "") for c in checks]
    show([c._asdict() for c in checks], "\n".join(lines), arguments.format)
    return 1 if any(c.status == "FAIL" for c in checks) else 0
