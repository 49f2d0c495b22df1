"""Top: a running server's tiers, requests and cartridges, as one table that is drawn again and again."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import CartridgeError, SourceError
from ..make.server import Server
from ..serve.metrics import PREFIX, RANK_NUMBERS, TIER_NUMBERS
from .show import scaled, size

if TYPE_CHECKING:
    from rich.console import RenderableType

_TIERS = ("device", "cpu", "disk", "source")
_STATES = ("loading", "resident", "quarantined", "refused")
"""In the order in which cartridges are listed: what moves comes first."""
_FLOWS = {
    "hits": "hits",
    "misses": "miss",
    "evicted": "evict",
    "loads": "loads",
    "failed": "fail",
    "read_bytes": "read",
}
"""Counters of a tier, and their columns."""


class Reading(NamedTuple):
    """What a server said at one moment."""

    at_s: float
    """By a clock of the reader's."""
    samples: dict[str, list[tuple[dict[str, str], float]]]
    """Labels and values by a metric's name, without our prefix."""
    cartridges: list[dict[str, Any]] | None
    """As `/v1/cartridges` lists them: its first page, and all that are active. None where it takes another API key."""


def read(url: str, *, clock: Callable[[], float] = time.monotonic) -> Reading:
    """Ask a server. Blocks. Raises `CartridgeError` where none answers, or none with cartridges."""
    from prometheus_client.parser import text_string_to_metric_families

    samples = defaultdict(list)
    with Server(url, "any", 10.0) as server:
        reply = _get(server, "/metrics")
        at_s = clock()
        try:
            for family in text_string_to_metric_families(reply.content.decode()):
                for sample in family.samples:
                    if sample.name.startswith(PREFIX):
                        samples[sample.name.removeprefix(PREFIX)].append((sample.labels, sample.value))
        except ValueError:
            raise CartridgeError(f"{url}/metrics is no Prometheus text; is it a vLLM server?") from None
        if not samples:
            raise CartridgeError(f"{url} serves no cartridges; start it with `lmcache-cartridge serve`")
        if (reply := _get(server, "/v1/cartridges", 401, 403)).status_code != 200:
            return Reading(at_s, dict(samples), None)
        try:
            listed = {(row["id"], row["version"]): row for row in reply.json()["data"]}
            if reply.json()["has_more"]:
                active = _get(server, "/v1/cartridges?active=true").json()["data"]
                listed |= {(row["id"], row["version"]): row for row in active}
        except (ValueError, KeyError, TypeError):
            raise CartridgeError(f"{url}/v1/cartridges is no list of cartridges") from None
    return Reading(at_s, dict(samples), list(listed.values()))


def _get(server: Server, path: str, *allowed: int) -> Any:
    try:
        reply = server.send("GET", path)
    except SourceError as error:
        raise CartridgeError(f"{server.url}{path} does not answer: {error.__cause__}") from None
    if reply.status_code not in (200, *allowed):
        status = f"{reply.status_code} {reply.reason_phrase}"
        raise CartridgeError(f"{server.url}{path} answers {status}; is it a vLLM server with cartridges?")
    return reply


def summarise(now: Reading, before: Reading | None = None) -> dict[str, Any]:
    """Return a reading as plain values, ranks summed up; with an earlier one of the same server also rates.

    A rate is None without an earlier reading, and where a counter went back: the server was started again.
    """
    elapsed_s = now.at_s - before.at_s if before else 0.0

    def values(name: str, of: Reading = now, /, **wanted: str) -> list[float]:
        return [value for labels, value in of.samples.get(name, ()) if wanted.items() <= labels.items()]

    def count(name: str, **labels: str) -> dict[str, float | None]:
        total = sum(values(name, **labels))
        gained = total - sum(values(name, before, **labels)) if before else -1.0
        return {"total": total, "per_s": gained / elapsed_s if elapsed_s > 0 and gained >= 0 else None}

    tiers: dict[str, dict[str, Any]] = {}
    for tier in _TIERS:
        found: dict[str, Any] = {}
        for number in TIER_NUMBERS:
            if number.kind == "counter" and values(f"{number.name}_total", tier=tier):
                found[number.name] = count(f"{number.name}_total", tier=tier)
            elif number.kind == "gauge" and (held := values(number.name, tier=tier)):
                # The disk tier's ranks share one directory, and each tells of all of it.
                found[number.name] = max(held) if tier == "disk" else sum(held)
        if values("load_seconds_count", tier=tier):
            found["loads"] = count("load_seconds_count", tier=tier)
        if found:
            tiers[tier] = found
    outcomes = dict.fromkeys(labels["outcome"] for labels, _ in now.samples.get("requests_total", ()))
    return {
        "ranks": len({labels["rank"] for labels, _ in now.samples.get("served_cartridges", ())}),
        "status_age_seconds": max(values("status_age_seconds"), default=0.0),
        **{number.name: max(values(number.name), default=0) for number in RANK_NUMBERS},
        "waiting_requests": sum(values("waiting_requests")),
        "requests": {outcome: count("requests_total", outcome=outcome) for outcome in outcomes},
        "lost_prompts": count("lost_prompts_total"),
        "positions": count("positions_total"),
        "tiers": tiers,
        "cartridges": now.cartridges,
    }


def run(url: str, interval_s: float, *, once: bool, as_json: bool) -> None:
    """Show a server until interrupted, or once; as JSON one line each time. Blocks.

    Raises `CartridgeError` where the first reading fails; later failures are shown, and the server is asked again.
    """
    from rich.console import Console
    from rich.live import Live

    url = url.rstrip("/").removesuffix("/metrics")
    found = islice(views(url, interval_s, read(url)), 1 if once else None)
    console = Console()
    if as_json:
        for summary, problem in found:
            print(json.dumps(summary if problem is None else {"error": problem}), flush=True)
    elif once or not console.is_terminal:
        console = console if console.is_terminal else Console(width=80, no_color=True)
        for summary, problem in found:
            console.print(draw(url, summary, problem))
    else:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for summary, problem in found:
                live.update(draw(url, summary, problem), refresh=True)


def views(url: str, interval_s: float, first: Reading) -> Iterator[tuple[dict[str, Any], str | None]]:
    """Yield what to show, and what is wrong, every `interval_s`; does not end. A lost server's last numbers stay."""
    now, summary = first, summarise(first)
    yield summary, None
    while True:
        time.sleep(interval_s)
        problem = None
        try:
            now, before = read(url), now
            summary = summarise(now, before)
        except CartridgeError as error:
            problem = str(error)
        yield summary, problem


def draw(url: str, summary: Mapping[str, Any], problem: str | None = None) -> RenderableType:
    """Return a summary for a terminal of 80 columns. Counters are shown by the second, or as totals without rates yet."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    tiers, cartridges, s = summary["tiers"], summary["cartridges"], ""
    if any(
        flow.get("per_s") is not None for tier in tiers.values() for flow in tier.values() if isinstance(flow, dict)
    ):
        s = "/s"

    def shown(flow: Mapping[str, Any], show: Callable[[float], str] = _count) -> str:
        value = flow.get("per_s" if s else "total")
        return "-" if value is None else show(value)

    if problem is None and summary["status_age_seconds"] > 5:
        problem = f"the workers' numbers are {summary['status_age_seconds']:.0f} s old"
    states = ", ".join(
        f"{summary[f'{name}_cartridges']:.0f} {name}" for name in ("served", "refused", "quarantined", "pinned")
    )
    requests = ", ".join(f"{name} {shown(flow)}{s}" for name, flow in summary["requests"].items())
    lines = [
        f"{summary['ranks']} ranks, cartridges: {states}  {url}", problem, f"requests: {requests}",
        f"positions {shown(summary['positions'])}{s}, lost prompts {shown(summary['lost_prompts'])}{s}, requests waiting "
        f"{summary['waiting_requests']:.0f}, claims {summary['open_claims']:.0f}",
    ]  # fmt: skip
    table = Table("tier", "used", "budget", *(f"{title}{s}" for title in _FLOWS.values()), box=None, pad_edge=False)
    for name, tier in tiers.items():
        held = (size(tier[key]) if key in tier else "" for key in ("resident_bytes", "budget_bytes"))
        flows = (shown(tier.get(key, {}), size if key == "read_bytes" else _count) for key in _FLOWS)
        table.add_row(name, *held, *flows)
    rows = Table("cartridge", "state", "chunks", "loading", "size", "pin", box=None, pad_edge=False)
    for row in sorted(cartridges or (), key=lambda row: (*_STATES, row["state"]).index(row["state"])):
        fastest = max(row["tiers"].values(), key=lambda tier: tier["resident_chunks"])
        loading = row["loading"] or {}
        share = f"{100 * loading['resident_chunks'] / loading['chunks']:.0f} %" if loading.get("chunks") else ""
        name = Text(f"{row['id']}@{row['version']}", overflow="ellipsis", no_wrap=True)
        name.truncate(28, overflow="ellipsis")
        rows.add_row(
            name, row["state"], f"{fastest['resident_chunks']}/{fastest['chunks']}",
            "failing" if loading.get("failing") else share, size(row["bytes"]), "yes" if row["pinned"] else "",
        )  # fmt: skip
    others = summary["served_cartridges"] + summary["refused_cartridges"] - len(cartridges or ())
    if others > 0:
        rows.add_row(f"and {others:.0f} more")
    below = rows if cartridges else "no cartridges are registered"
    if cartridges is None:
        below = "the cartridges are shown with the server's API key: $VLLM_API_KEY"
    return Group(*(Text(line, no_wrap=True, overflow="ellipsis") for line in lines if line), "", table, "", below)


def _count(value: float) -> str:
    """Return a number in at most 6 characters."""
    return f"{value:.0f}" if value < 1000 and value == int(value) else scaled(value, ["", "k", "M", "G", "T"], 1000)
