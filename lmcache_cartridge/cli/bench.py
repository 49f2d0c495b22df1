"""`bench`: times of a running server, or of one that it starts, as one report that can be sent."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import BadParameter

from ..errors import CartridgeError
from .making import own_server
from .options import ServedChunk, ServerModel, Url, Vllm, check, command, listed, load_model, option, settings_of
from .show import bars, is_json, say, show, table

if TYPE_CHECKING:
    from ..make.bench.target import Target
    from ..make.trial.maker import Maker


def _numbers(text: str) -> list[int]:
    parts = listed(text)
    if not parts or not all(part.isdecimal() and int(part) for part in parts):
        raise BadParameter(f"{text!r} is no list of numbers from 1 on")
    return sorted({int(part) for part in parts})


@command("bench --url http://localhost:8000 --cartridge handbook --c 1,4 --repeat 2")
def bench(
    url: Url = None,
    server_model: ServerModel = None,
    cartridge: Annotated[
        list[str],
        option("one of the server's cartridges; once for each (default: the three longest that it lists, of different lengths)",
               metavar="NAME"),
    ] = [],  # noqa: B006  Typer copies it
    model: Annotated[
        str | None,
        option("the server's model, with which a cartridge of generated text is made for each p, taken away at the end. The "
               "server follows the registry of --home. Without --url a server of it is started"),
    ] = None,
    p: Annotated[
        Any,
        option("tokens of the document before the question, these alone: of a cartridge that the server lists where one has "
               "this length (default: those of the cartridges; without any 256 to 32768, as the server's context has room)",
               metavar="N,N", parser=_numbers),
    ] = None,
    c: Annotated[Any, option("requests at once", metavar="N,N", parser=_numbers)] = "1,4,16",
    repeat: Annotated[int, option("times that each is asked, by turns", min=1)] = 5,
    output: Annotated[Path, option("where the report goes", metavar="DIR")] = Path("bench"),
    vllm: Vllm = "",
    chunk_size: ServedChunk = 256,
) -> int:  # fmt: skip
    """Measure a vLLM server by `vllm bench serve`. Time to first token, per output token and between tokens, with every
    token computed, with its own prefix cache, and with cartridges warm and cold. Writes report.html and bench.json."""
    check(locals(), "bench needs --url or --model", "--cartridge needs --url; it is of a running server",
          "--vllm excludes --url; it is for a server that is started here")  # fmt: skip
    output.mkdir(parents=True, exist_ok=True)  # fails before minutes of measuring
    from ..make.bench import page
    from ..make.bench.load import Load
    from ..make.bench.places import choose

    with ExitStack() as stack:
        if url is not None:
            target, maker = _running(stack, url, server_model, model, chunk_size)
        else:
            target, maker = _own(stack, str(model), p, chunk_size, vllm)
        load = Load(target)
        with bars() as progress:
            chosen, left = choose(target, cartridge, p, maker=maker, progress=progress)
        if not chosen:
            raise CartridgeError(f"nothing can be measured: {'; '.join(left)}")
        with bars() as progress:
            measured = load.measure(chosen, c, repeat, progress)
        report = page.report(target, chosen, c, repeat, measured, left)
        return _tell(report, page.write(report, output))


def _running(
    stack: ExitStack, url: str, server_model: str | None, model: str | None, chunk: int
) -> tuple[Target, Maker | None]:
    """Return a server that somebody else runs, and what makes cartridges for it and takes them away with `stack`."""
    from ..make.bench.target import Target

    target = stack.enter_context(Target(url, server_model))
    if model is None:
        return target, None
    if not target.has_cartridges:
        raise CartridgeError(f"{target.url} has no route /v1/cartridges, so no cartridge can be made for it; "
                             "leave out --model")  # fmt: skip
    from ..make.trial.maker import Maker

    maker = Maker(load_model(model), settings_of(), chunk)
    stack.callback(maker.clear)
    return target, maker


def _own(stack: ExitStack, model: str, p: list[int] | None, chunk: int, vllm: str) -> tuple[Target, Maker]:
    """Return a server that is started here, and what makes cartridges for it; both end with `stack`."""
    from ..make.bench import places
    from ..make.bench.target import Target

    server, maker = own_server(stack, model, chunk, vllm, lengths=p or places.LENGTHS)
    say(f"starting a server of {model} (tens of seconds)")
    server.start()
    with server.client() as client:
        return stack.enter_context(Target(client.url, client.model)), maker


def _tell(report: dict[str, Any], files: list[Path]) -> int:
    from ..make.bench import page

    rows, names = report["rows"], [str(path) for path in files]
    if is_json():
        show(report | {"files": names}, "")
    elif rows:
        print(table(page.times(rows)))
    for remark in report["remarks"]:
        say(f"- {remark}")
    say(f"written: {' '.join(names)}")
    if report["interrupted"]:
        say("lmcache-cartridge: interrupted; what is missing was not measured")
    return int(any(row["remarks"] for row in rows) or not any(row["requests"] for row in rows))
