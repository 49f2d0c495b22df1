"""Commands around a server: `serve`, `top`, `demo`, `doctor`, `config` and `fleet serve`."""

from __future__ import annotations

import logging
import socket
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Context, Typer

from ..errors import CartridgeError, SettingsError
from .options import ChunkSize, Library, app, assignment, command, home, option, settings_of
from .show import is_json, say, show

if TYPE_CHECKING:
    from ..serve.arguments import Arguments

fleet = Typer(help="Say which of several servers a request should go to.", rich_markup_mode=None)


@command("serve ./llama --port 8000 --max-model-len 8192", allow_extra_args=True, ignore_unknown_options=True)
def serve(
    context: Context,
    model: Annotated[str, Argument(help="as for `vllm serve`")],
    chunk_size: ChunkSize = 256,
    library: Library = None,
    on_load_failure: Annotated[
        Literal["fail", "recompute"],
        option("what vLLM does with a request whose chunk cannot be loaded after all. fail: vLLM ends it, and this server "
               "asks again with the document's own text, or tells the client; recompute: vLLM computes the tokens, and no "
               "trained cartridge is served, whose tokens mean nothing"),
    ] = "fail",
    set: Annotated[
        list[str], option("any other setting, as on_miss=document; lists and maps as JSON. May be given often",
                          metavar="NAME=VALUE"),
    ] = [],  # noqa: B006  Typer copies it
    mode: Annotated[
        Literal["in-process", "multiprocess"] | None,
        option("where LMCache runs: in vLLM's workers, or as a server of its own beside vLLM, which is started and ended "
               "with it (default: multiprocess where vLLM has a GPU, in-process elsewhere, and the other where only that can "
               "have what is asked for; the start says which and why)"),
    ] = None,
    l1_bytes: Annotated[
        str,
        option("memory of LMCache's own. In-process: of each worker's, in which LMCache saves the KV that vLLM computes, of "
               "plain prompts and of what follows a cartridge (default: it saves nothing). Multiprocess: of LMCache's "
               "server, for that and for the copies it hands to vLLM (default: eight times the largest registered "
               "cartridge, 512MiB at least; half of it with --no-save)"),
    ] = "0",
    no_save: Annotated[
        bool,
        option("multiprocess: serve cartridges only. Else LMCache also saves the KV that vLLM computes, of plain prompts and "
               "of what follows a cartridge, and answers later prompts with it, each tenant's (cache_salt) by itself",
               "--no-save"),
    ] = False,
    l2_adapter: Annotated[
        list[str],
        option("multiprocess: one more place where LMCache saves, as `lmcache server --l2-adapter` takes it, for example "
               """'{"type": "fs", "base_path": "/var/cache/lmcache"}'. May be given often""", metavar="JSON"),
    ] = [],  # noqa: B006
    unproven_versions: Annotated[
        bool,
        option("run with versions of vLLM and LMCache that this release was not proven with; they may answer wrongly without "
               "an error", "--unproven-versions"),
    ] = False,
    accept_weights: Annotated[
        bool,
        option("serve cartridges whose model differs from this one in its weights alone, as of the original of a quantised "
               "model; you measured the difference. Canaries are still asked", "--accept-weights"),
    ] = False,
    print: Annotated[bool, option("print the files and command instead of running them", "--print")] = False,
) -> None:  # fmt: skip
    """Start vLLM's OpenAI server with cartridges. Other options go to vLLM as they are."""
    from ..serve.arguments import Arguments, redacted
    from ..serve.launch import lead, plan

    if model.startswith("-"):
        raise SettingsError(f"{model}: name the model first, and vLLM's options behind it")
    values: dict[str, Any] = {"library": library, "unproven_versions": unproven_versions or None,
                              "accept_weights": accept_weights or None}  # fmt: skip
    for name, value in map(assignment, set):
        if values.get(name) is not None or (name == "home" and home() is not None):
            raise SettingsError(f"--{name.replace('_', '-')} and --set {name} are the same setting; give one")
        values[name] = value
    settings, size_bytes = settings_of(**values), _bytes("--l1-bytes", l1_bytes)
    words = [word for word in context.args if word != "--"]
    planned = partial(
        plan, model, settings, chunk_tokens=chunk_size, on_load_failure=on_load_failure, vllm_args=words, l1_bytes=size_bytes,
        # in a mode that nobody named nothing is saved that would not be in the other
        saves=not no_save and bool(mode or size_bytes or l2_adapter), l2_adapters=l2_adapter,
    )  # fmt: skip
    launch, why = (
        lead(planned, stages=Arguments(words).number("pipeline-parallel-size"))
        if mode is None
        else (planned(mode=mode), mode)
    )
    plain = {"yaml_path": launch.yaml_path, "yaml": launch.yaml, "environment": launch.environment,
             "command": redacted(launch.command), "lmcache": launch.lmcache}  # fmt: skip
    if print:
        show(plain, str(launch))
        return
    _look_before(model, Arguments(launch.command))
    show(plain, f"{model}, {why}, home={settings.home}; --print shows all")
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


@command("top --url http://localhost:8000 --interval 1")
def top(
    url: Annotated[str, option("the server; its key is that in $VLLM_API_KEY")] = "http://localhost:8000",
    interval: Annotated[float, option("seconds between refreshes", min=0.1, max=3600)] = 2.0,
    once: Annotated[bool, option("show it once and end", "--once")] = False,
) -> None:
    """Show a running server live. Tiers, requests, loads and cartridges; Ctrl-C ends it."""
    from .top import run

    run(url, interval, once=once, as_json=is_json())


@command("demo")
def demo() -> int:
    """Build, serve and question a shipped document. Takes about two minutes."""
    from .demo import run

    return run()


@command("doctor")
def doctor() -> int:
    """Check versions, hashing, layout and plugin. Says how to fix what is wrong."""
    from .doctor import diagnose

    checks = diagnose(settings_of())
    lines = [f"{c.status:4}  {c.name}: {c.finding}" + (f"\n      fix: {c.fix}" if c.fix else "") for c in checks]
    show([c._asdict() for c in checks], "\n".join(lines))
    return int(any(c.status == "FAIL" for c in checks))


@command("config lmcache.yaml")
def config(name: Annotated[str | None, Argument(help="name of the file")] = None) -> None:
    """Print a configuration file to start from. Without a name, list them."""
    directory = config_directory()
    files = (path.relative_to(directory) for path in directory.rglob("*") if path.is_file())
    names = sorted(path.as_posix() for path in files if path.suffix != ".pyc")
    if name is None:
        show(names, "\n".join(names))
        return
    if name not in names:
        raise CartridgeError(f"there is no configuration file {name!r}; there are {', '.join(names)}")
    text = (directory / name).read_text(encoding="utf-8")
    show({"name": name, "text": text}, text.removesuffix("\n"))


def config_directory() -> Path:
    """Return where the configuration files lie: in the installed package, or beside it in a source tree."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.with_name("configs")


@fleet.callback()
def _fleet() -> None:
    """Take what stands before a command."""


@command("fleet serve fleet.yaml", "serve", fleet)
def serve_fleet(
    config: Annotated[
        Path, Argument(help="YAML file with the servers; `lmcache-cartridge config fleet.yaml` prints one")
    ],
) -> None:
    """Say over HTTP which server a request should go to. It follows what all hold: POST /score, POST /pick,
    GET /metrics, GET /health. Needs `pip install 'lmcache-cartridge[fleet]'`."""
    from ..fleet.config import read_config
    from ..fleet.service import Fleet
    from ..fleet.web import serve

    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )  # fmt: skip
    read = read_config(config)
    service = Fleet(read)
    pods = ", ".join(f"{pod.name} ({pod.address})" for pod in service.pods)
    show({"listen": read.listen, "pods": [pod.name for pod in service.pods]}, f"{read.listen}: {pods}")
    serve(service)


app.add_typer(fleet, name="fleet")
