"""Commands for several servers: `fleet serve`, `fleet score` and `fleet pick`."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any

from ..errors import CartridgeError, FleetError
from .options import Verb
from .show import show, table

_URL = "http://127.0.0.1:9300"


def add(verb: Verb) -> None:
    """Add the commands to those of `fleet`."""
    serve = verb(
        "serve",
        _serve,
        "Follow what a fleet's servers hold, and say over HTTP which of them a request should go to. POST /score, POST /pick, "
        "GET /metrics, GET /health; a line in the log every minute. Needs `pip install 'lmcache-cartridge[fleet]'`.",
        "fleet serve --config fleet.yaml",
    )
    serve.add_argument(
        "--config",
        type=Path,
        required=True,
        help="YAML file with the servers; `lmcache-cartridge config fleet.yaml` prints one",
    )
    score = verb(
        "score",
        _score,
        "Ask the service how well each server suits a prompt with cartridges before it, and why.",
        "fleet score --cartridge handbook --prompt 'Who is on call?'",
    )
    _add_request(score)
    text = score.add_mutually_exclusive_group()
    text.add_argument("--prompt", help="text that follows the cartridges")
    text.add_argument("--messages", metavar="JSON", help="a conversation that follows them, as chat requests have it")
    text.add_argument("--token-ids", metavar="JSON", help="token ids that follow them")
    score.add_argument(
        "--pod", action="append", default=None, metavar="NAME", help="score this server only. May be given often"
    )
    pick = verb(
        "pick",
        _pick,
        "Ask the service which server a request should go to, and why.",
        "fleet pick --cartridge handbook",
    )
    _add_request(pick)
    pick.add_argument("--path", default="/v1/completions", help="the request's (default /v1/completions)")
    pick.add_argument("--body", metavar="JSON", help="the request as a client sends it, in place of --cartridge")


def _add_request(parser: Any) -> None:
    option = parser.add_argument
    option("--url", default=_URL, help=f"the service (default {_URL})")
    option(
        "--cartridge", action="append", default=[], metavar="NAME", help="id, id@version or label. May be given often"
    )
    option("--model", help="name of the model or LoRA adapter (default: the first that is served)")


def _serve(arguments: argparse.Namespace) -> None:
    from ..fleet.config import read_config
    from ..fleet.service import Fleet
    from ..fleet.web import serve

    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )  # fmt: skip
    config = read_config(arguments.config)
    fleet = Fleet(config)
    pods = ", ".join(f"{pod.name} ({pod.address})" for pod in fleet.pods)
    show(
        {"listen": config.listen, "pods": [pod.name for pod in fleet.pods]},
        f"{config.listen}: {pods}",
        arguments.format,
    )
    serve(fleet)


def _score(arguments: argparse.Namespace) -> None:
    question: dict[str, Any] = _named(arguments) | ({"prompt": arguments.prompt} if arguments.prompt else {})
    for name in ("messages", "token_ids"):
        if (text := getattr(arguments, name)) is not None:
            question[name] = _json(f"--{name.replace('_', '-')}", text)
    if arguments.pod is not None:
        question["pods"] = arguments.pod
    answer = _asked(arguments.url, "/score", question)
    show(answer, _readable(answer), arguments.format)


def _pick(arguments: argparse.Namespace) -> None:
    body = _named(arguments) if arguments.body is None else _json("--body", arguments.body)
    answer = _asked(arguments.url, "/pick", body, path=arguments.path)
    receipt = answer["receipt"]
    reason = {"score": "it scores highest", "owner": f"nobody has it; {receipt['key']} is its own"}[receipt["by"]]
    problem = f"\n{receipt['problem']}" if "problem" in receipt else ""
    readable = f"{answer['pod']} {answer['address']}: {reason}{problem}\n\n{_readable(answer)}"
    show(answer, readable, arguments.format)


def _named(arguments: argparse.Namespace) -> dict[str, Any]:
    named = {"cartridges": arguments.cartridge} if arguments.cartridge else {}
    return named | ({"model": arguments.model} if arguments.model else {})


def _json(option: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise CartridgeError(f"{option}: {error}") from None


def _readable(answer: dict[str, Any]) -> str:
    receipt = answer["receipt"]
    rows = [
        {"server": name, "score": f"{one['total']:.3f}", "prefix": f"{one['prefix']:.3f}", "load": f"{one['load']:.3f}"}
        | {"waiting": one["waiting"]} | {tier: one["matched"].get(tier, 0) for tier in ("gpu", "cpu", "disk")}
        for name, one in sorted(receipt["scores"].items(), key=lambda item: -item[1]["total"])
    ]  # fmt: skip
    out = "".join(f"\nleft out: {name}: {why}" for name, why in receipt["left_out"].items())
    return f"{receipt['tokens']} tokens looked for; of them in the blocks, memory and disk of each:\n{table(rows)}{out}"


def _asked(url: str, route: str, body: Any, **query: str) -> dict[str, Any]:
    """Return what the service answers. Raises `FleetError` with its words, or that it cannot be reached."""
    import httpx

    try:
        reply = httpx.post(url.rstrip("/") + route, json=body, params=query, timeout=30)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise FleetError(f"{url}: {error}; is `lmcache-cartridge fleet serve` running there?") from None
    try:
        answer = reply.json()
        if reply.is_success and "receipt" in answer:
            return answer
        raise FleetError(answer["error"]["message"])
    except (ValueError, KeyError, TypeError):
        raise FleetError(f"{url}{route} answers {reply.status_code}, and is no service of this kind") from None
