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
    from rich.table import Table

_TIERS = ("device", "cpu", "disk", "source")
_STATES = ("loading", "resident", "quarantined", "refused")
"""In the order in which cartridges are listed: what moves comes first."""
_COLUMNS = 80

Samples = dict[str, list[tuple[dict[str, str], float]]]
"""Labels and values by a metric's name, without our prefix."""


class Reading(NamedTuple):
    """What a server said at one moment."""

    at_s: float
    """By a clock of the reader's."""
    samples: Samples
    cartridges: list[dict[str, Any]] | None
    """As `/v1/cartridges` lists them: its first page, and all that are active. None where it takes another API key."""


def read(url: str, *, clock: Callable[[], float] = time.monotonic) -> Reading:
    """Ask a server. Blocks. Raises `CartridgeError` where none answers, or none with cartridges."""
    from prometheus_client.parser import text_string_to_metric_families

    samples: Samples = defaultdict(list)
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
        try:
            listed = _list(server)
        except (ValueError, KeyError, TypeError):
            raise CartridgeError(f"{url}/v1/cartridges is no list of cartridges") from None
    return Reading(at_s, dict(samples), listed)


def _list(server: Server) -> list[dict[str, Any]] | None:
    """Return the first page of cartridges, and of the others those that are active; None without the right key."""
    if (reply := _get(server, "/v1/cartridges", may_deny=True)).status_code != 200:
        return None
    first = reply.json()
    listed = first["data"]
    if first["has_more"]:
        known = {(row["id"], row["version"]) for row in listed}
        active = _get(server, "/v1/cartridges?active=true").json()["data"]
        listed += [row for row in active if (row["id"], row["version"]) not in known]
    return listed


def _get(server: Server, path: str, *, may_deny: bool = False) -> Any:
    try:
        reply = server.send("GET", path)
    except SourceError as error:
        raise CartridgeError(f"{server.url}{path} does not answer: {error.__cause__}") from None
    if reply.status_code != 200 and not (may_deny and reply.status_code in (401, 403)):
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

    def mean(name: str, **labels: str) -> float | None:
        many = sum(values(f"{name}_count", **labels))
        return sum(values(f"{name}_sum", **labels)) / many if many else None

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
            found["mean_load_seconds"] = mean("load_seconds", tier=tier)
        if found:
            tiers[tier] = found
    outcomes = dict.fromkeys(labels["outcome"] for labels, _ in now.samples.get("requests_total", ()))
    return {
        "ranks": len({labels["rank"] for labels, _ in now.samples.get("served_cartridges", ())}),
        "status_age_seconds": max(values("status_age_seconds"), default=None),
        **{number.name: max(values(number.name), default=0) for number in RANK_NUMBERS},
        "waiting_requests": sum(values("waiting_requests")),
        "requests": {outcome: count("requests_total", outcome=outcome) for outcome in outcomes},
        "lost_prompts": count("lost_prompts_total"),
        "positions": count("positions_total"),
        "mean_request_wait_seconds": mean("request_wait_seconds"),
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
        width = min(console.width, _COLUMNS) if console.is_terminal else _COLUMNS
        console = Console(width=width, no_color=not console.is_terminal)
        for summary, problem in found:
            console.print(draw(url, summary, problem))
    else:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for summary, problem in found:
                live.update(draw(url, summary, problem, lines=console.height), refresh=True)


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


def draw(
    url: str, summary: Mapping[str, Any], problem: str | None = None, *, lines: int | None = None
) -> RenderableType:
    """Return a summary for a terminal of 80 columns, and of `lines` lines where the rest is to be left out.

    Counters are shown by the second, or as totals where there are no rates yet.
    """
    from rich.console import Group
    from rich.text import Text

    some = [
        f"{summary[f'{name}_cartridges']:.0f} {name}"
        for name in ("served", "refused", "quarantined", "pinned")
        if summary[f"{name}_cartridges"] or name == "served"
    ]
    heading = f"{summary['ranks']} rank{'s' * (summary['ranks'] != 1)}, cartridges: {', '.join(some)}  {url}"
    head = [Text(heading, style="bold", no_wrap=True, overflow="ellipsis")]
    if problem is None and (summary["status_age_seconds"] or 0) > 5:
        problem = f"the workers' numbers are {summary['status_age_seconds']:.0f} s old"
    if problem is not None:
        head.append(Text(problem, style="bold red"))
    head += [Text(line, no_wrap=True, overflow="ellipsis") for line in _requests(summary)]
    room = None if lines is None else max(lines - len(head) - len(summary["tiers"]) - 6, 1)
    return Group(*head, Text(), _tier_table(summary["tiers"]), Text(), _cartridge_table(summary, room))


def _requests(summary: Mapping[str, Any]) -> list[str]:
    def shown(counter: Mapping[str, Any]) -> str:
        per_s = "" if counter["per_s"] is None else f" ({counter['per_s']:.1f}/s)"
        return f"{counter['total']:.0f}{per_s}"

    oldest = f" (oldest {_duration(summary['oldest_claim_seconds'])})" if summary["open_claims"] else ""
    mean_s = summary["mean_request_wait_seconds"]
    return [
        f"requests: {', '.join(f'{name} {shown(c)}' for name, c in summary['requests'].items())}",
        f"positions {shown(summary['positions'])}, lost prompts {shown(summary['lost_prompts'])}",
        f"requests waiting {summary['waiting_requests']:.0f}, claims {summary['open_claims']:.0f}{oldest}, "
        f"loading {summary['waiting_claims']:.0f}" + ("" if mean_s is None else f", mean wait {_duration(mean_s)}"),
    ]


def _table(left: set[str], *titles: str) -> Table:
    from rich.table import Table

    drawn = Table(box=None, padding=(0, 1), pad_edge=False, collapse_padding=True, header_style="dim")
    for title in titles:
        side: Any = "left" if title in left else "right"
        drawn.add_column(title, justify=side, no_wrap=True, max_width=28 if title == "cartridge" else None)
    return drawn


def _tier_table(tiers: Mapping[str, Mapping[str, Any]]) -> Table:
    rates = any(c["per_s"] is not None for tier in tiers.values() for c in tier.values() if isinstance(c, dict))
    flow, s = ("per_s", "/s") if rates else ("total", "")
    drawn = _table(
        {"tier"}, "tier", "used", "budget", f"hits{s}", f"miss{s}", "hit%", f"evict{s}", "load", "took", "fail", f"read{s}"
    )  # fmt: skip
    for name, tier in tiers.items():
        flows = {key: value[flow] for key, value in tier.items() if isinstance(value, dict)}

        def cell(values: Mapping[str, Any], key: str, show: Callable[[float], str]) -> str:
            return "" if key not in values else "-" if values[key] is None else show(values[key])

        hits, misses = flows.get("hits"), flows.get("misses")
        asked = None if hits is None or misses is None else hits + misses
        share = "" if "misses" not in flows else f"{100 * hits / asked:.0f}" if hits is not None and asked else "-"
        drawn.add_row(
            name, cell(tier, "resident_bytes", size), cell(tier, "budget_bytes", size),
            cell(flows, "hits", _count), cell(flows, "misses", _count), share, cell(flows, "evicted", _count),
            cell(tier, "loading_chunks", _count), cell(tier, "mean_load_seconds", _duration).strip("-"),
            cell(tier.get("failed", {}), "total", _count), cell(flows, "read_bytes", size),
        )  # fmt: skip
    return drawn


def _cartridge_table(summary: Mapping[str, Any], room: int | None) -> RenderableType:
    from rich.text import Text

    cartridges: list[dict[str, Any]] | None = summary["cartridges"]
    if cartridges is None:
        return Text("the cartridges are shown with the server's API key: $VLLM_API_KEY", style="dim")
    if not cartridges:
        return Text("no cartridges are registered", style="dim")
    drawn = _table({"cartridge", "state", "pin"}, "cartridge", "state", "chunks", "loading", "eta", "size", "pin")
    rows = sorted(cartridges, key=lambda row: (*_STATES, row["state"]).index(row["state"]))
    for row in rows[:room]:
        fastest = max(row["tiers"].values(), key=lambda tier: tier["resident_chunks"])
        loading = row["loading"] or {}
        share = f"{100 * loading['resident_chunks'] / loading['chunks']:.0f} %" if loading.get("chunks") else ""
        drawn.add_row(
            Text(f"{row['id']}@{row['version']}"), row["state"], f"{fastest['resident_chunks']}/{fastest['chunks']}",
            "failing" if loading.get("failing") else share,
            "" if loading.get("eta_s") is None else _duration(loading["eta_s"]),
            size(row["bytes"]), "yes" if row["pinned"] else "",
        )  # fmt: skip
    count = max(len(rows), int(summary["served_cartridges"] + summary["refused_cartridges"]))
    if count > (shown := len(rows[:room])):
        drawn.add_row(f"and {count - shown} more")
    return drawn


def _count(value: float) -> str:
    """Return a number in at most 6 characters."""
    return f"{value:.0f}" if value < 1000 and value == int(value) else scaled(value, ["", "k", "M", "G", "T"], 1000)


def _duration(seconds: float) -> str:
    """Return a time in at most 7 characters."""
    for limit, unit_s, form in ((1, 0.001, "{:.0f} ms"), (100, 1, "{:.1f} s"), (6000, 60, "{:.0f} min")):
        if seconds < limit:
            return form.format(seconds / unit_s)
    return f"{seconds / 3600:.0f} h"
