"""Top: a running server's tiers, requests and cartridges, live in a terminal."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from ..errors import CartridgeError, SettingsError
from ..serve.metrics import PREFIX, RANK_NUMBERS, TIER_NUMBERS

if TYPE_CHECKING:
    from rich.console import RenderableType

_TIMEOUT_S = 10.0
_TIERS = ("device", "cpu", "disk", "source")
_COUNTED = tuple(number.name for number in TIER_NUMBERS if number.kind == "counter")
_HELD = tuple(number.name for number in TIER_NUMBERS if number.kind == "gauge")
_RANK = tuple(number.name for number in RANK_NUMBERS)
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


def read(url: str, api_key: str | None = None, *, clock: Callable[[], float] = time.monotonic) -> Reading:
    """Ask a server. Blocks. Raises `CartridgeError` where none answers, or none with cartridges."""
    from prometheus_client.parser import text_string_to_metric_families

    text = _get(f"{url}/metrics", None)
    at_s, samples = clock(), defaultdict(list)
    try:
        for family in text_string_to_metric_families(text.decode()):
            for sample in family.samples:
                if sample.name.startswith(PREFIX):
                    samples[sample.name.removeprefix(PREFIX)].append((sample.labels, sample.value))
    except ValueError:
        raise CartridgeError(f"{url}/metrics is no Prometheus text; is it a vLLM server?") from None
    if not samples:
        raise CartridgeError(f"{url} serves no cartridges; start it with `lmcache-cartridge serve`")
    try:
        listed = _list(f"{url}/v1/cartridges", api_key)
    except _Denied:
        listed = None
    except (ValueError, KeyError, TypeError):
        raise CartridgeError(f"{url}/v1/cartridges is no list of cartridges") from None
    return Reading(at_s, dict(samples), listed)


def _list(url: str, api_key: str | None) -> list[dict[str, Any]]:
    """Return the first page of cartridges, and of the others those that are active."""
    first = json.loads(_get(url, api_key))
    listed = first["data"]
    if first["has_more"]:
        known = {(row["id"], row["version"]) for row in listed}
        active = json.loads(_get(f"{url}?active=true", api_key))["data"]
        listed += [row for row in active if (row["id"], row["version"]) not in known]
    return listed


class _Denied(CartridgeError):
    """The server wants an API key, or another one."""


def _get(url: str, api_key: str | None) -> bytes:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {api_key}"} if api_key else {})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
            return reply.read()
    except urllib.error.HTTPError as error:
        error.close()
        kind = _Denied if error.code in (401, 403) else CartridgeError
        raise kind(f"{url} answers {error.code} {error.reason}; is it a vLLM server with cartridges?") from None
    except (OSError, http.client.HTTPException) as error:
        raise CartridgeError(f"{url} does not answer: {getattr(error, 'reason', error)}") from None


def check_url(url: str) -> str:
    """Return the base of a server's URLs. Raises `SettingsError` if it is none."""
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        sound = False
    if not sound or parts.query or parts.fragment:
        raise SettingsError(f"--url {url}: write http://HOST:PORT")
    return url.rstrip("/").removesuffix("/metrics")


def summarise(now: Reading, before: Reading | None = None) -> dict[str, Any]:
    """Return a reading as plain values, ranks summed up; with an earlier one of the same server also rates.

    A rate is None without an earlier reading, and where a counter went back: the server was started again.
    """
    samples = now.samples
    elapsed_s = now.at_s - before.at_s if before else 0.0

    def rate(name: str, **labels: str) -> float | None:
        if before is None or elapsed_s <= 0:
            return None
        gained = _sum(samples, name, **labels) - _sum(before.samples, name, **labels)
        return gained / elapsed_s if gained >= 0 else None

    def count(name: str, **labels: str) -> dict[str, Any]:
        name = f"{name}_total"
        return {"total": _sum(samples, name, **labels), "per_s": rate(name, **labels)}

    tiers = {}
    for tier in _TIERS:
        counted = {name: count(name, tier=tier) for name in _COUNTED if _has(samples, f"{name}_total", tier)}
        # The disk tier's ranks share one directory, and each tells of all of it.
        add_up = max if tier == "disk" else sum
        held = {name: add_up(_values(samples, name, tier=tier)) for name in _HELD if _has(samples, name, tier)}
        if not counted and not held:
            continue
        tiers[tier] = counted | held
        if _has(samples, "load_seconds_count", tier):
            loads, seconds = (_sum(samples, f"load_seconds_{part}", tier=tier) for part in ("count", "sum"))
            tiers[tier]["loads"] = {"total": loads, "per_s": rate("load_seconds_count", tier=tier)}
            tiers[tier]["mean_load_seconds"] = seconds / loads if loads else None
    outcomes = {labels["outcome"]: None for labels, _ in samples.get("requests_total", ())}  # in the server's order
    waited = _sum(samples, "request_wait_seconds_count")
    return {
        "ranks": len({labels["rank"] for labels, _ in samples.get("served_cartridges", ())}),
        "status_age_seconds": max(_values(samples, "status_age_seconds"), default=None),
        **{name: max(_values(samples, name), default=0) for name in _RANK},
        "waiting_requests": _sum(samples, "waiting_requests"),
        "requests": {outcome: count("requests", outcome=outcome) for outcome in outcomes},
        "lost_prompts": count("lost_prompts"),
        "positions": count("positions"),
        "mean_request_wait_seconds": _sum(samples, "request_wait_seconds_sum") / waited if waited else None,
        "tiers": tiers,
        "cartridges": now.cartridges,
    }


def _values(samples: Samples, name: str, **wanted: str) -> list[float]:
    return [value for labels, value in samples.get(name, ()) if wanted.items() <= labels.items()]


def _sum(samples: Samples, name: str, **wanted: str) -> float:
    return sum(_values(samples, name, **wanted))


def _has(samples: Samples, name: str, tier: str) -> bool:
    return bool(_values(samples, name, tier=tier))


def run(url: str, api_key: str | None, interval_s: float, *, once: bool, as_json: bool) -> None:
    """Show a server until interrupted, or once; as JSON one line each time. Blocks.

    Raises `CartridgeError` where the first reading fails; later failures are shown, and the server is asked again.
    """
    url = check_url(url)
    first = read(url, api_key)
    views = _views(url, api_key, interval_s, first)
    if once:
        views = iter([(summarise(first), None)])
    if as_json:
        for summary, problem in views:
            print(json.dumps(summary if problem is None else {"error": problem}), flush=True)
        return
    from rich.console import Console
    from rich.live import Live

    console = Console()
    width = min(console.width, _COLUMNS) if console.is_terminal else _COLUMNS
    if once or not console.is_terminal:
        console = Console(width=width, no_color=not console.is_terminal)
        for summary, problem in views:
            console.print(draw(url, summary, problem))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for summary, problem in views:
            live.update(draw(url, summary, problem, lines=console.height), refresh=True)


def _views(
    url: str, api_key: str | None, interval_s: float, first: Reading
) -> Iterator[tuple[dict[str, Any], str | None]]:
    """Yield what to show, and what is wrong, every `interval_s`; does not end."""
    now, summary = first, summarise(first)
    yield summary, None
    while True:
        time.sleep(interval_s)
        try:
            now, before = read(url, api_key), now
        except CartridgeError as error:
            yield summary, str(error)
            continue
        summary = summarise(now, before)
        yield summary, None


def draw(
    url: str, summary: Mapping[str, Any], problem: str | None = None, *, lines: int | None = None
) -> RenderableType:
    """Return a summary for a terminal of 80 columns, and of `lines` lines where the rest is to be left out.

    Counters are shown by the second, or as totals where there are no rates yet.
    """
    from rich.console import Group
    from rich.text import Text

    head = [Text(f"{_heading(summary)}  {url}", style="bold", no_wrap=True, overflow="ellipsis")]
    if problem is not None:
        head.append(Text(problem, style="bold red"))
    elif (summary["status_age_seconds"] or 0) > 5:
        head.append(Text(f"the workers' numbers are {summary['status_age_seconds']:.0f} s old", style="bold red"))
    head += [Text(line, no_wrap=True, overflow="ellipsis") for line in _requests(summary)]
    parts = [*head, Text(), _tier_table(summary["tiers"]), Text()]
    room = None if lines is None else max(lines - len(head) - len(summary["tiers"]) - 6, 1)
    return Group(*parts, _cartridge_table(summary, room))


def _heading(summary: Mapping[str, Any]) -> str:
    ranks = f"{summary['ranks']} rank{'s' * (summary['ranks'] != 1)}"
    parts = [f"{summary['served_cartridges']:.0f} served"]
    parts += [
        f"{summary[f'{name}_cartridges']:.0f} {name}"
        for name in ("refused", "quarantined", "pinned")
        if summary[f"{name}_cartridges"]
    ]
    return f"{ranks}, cartridges: {', '.join(parts)}"


def _requests(summary: Mapping[str, Any]) -> list[str]:
    def shown(counter: Mapping[str, Any]) -> str:
        per_s = counter["per_s"]
        return f"{counter['total']:.0f}" if per_s is None else f"{counter['total']:.0f} ({per_s:.1f}/s)"

    outcomes = ", ".join(f"{name} {shown(c)}" for name, c in summary["requests"].items())
    waits = f"requests waiting {summary['waiting_requests']:.0f}, claims {summary['open_claims']:.0f}"
    if summary["open_claims"]:
        waits += f" (oldest {_duration(summary['oldest_claim_seconds'])})"
    waits += f", loading {summary['waiting_claims']:.0f}"
    mean_s = summary["mean_request_wait_seconds"]
    return [
        f"requests: {outcomes}",
        f"positions {shown(summary['positions'])}, lost prompts {shown(summary['lost_prompts'])}",
        waits + ("" if mean_s is None else f", mean wait {_duration(mean_s)}"),
    ]


def _tier_table(tiers: Mapping[str, Mapping[str, Any]]) -> RenderableType:
    from rich.table import Table

    rates = any(c["per_s"] is not None for tier in tiers.values() for c in tier.values() if isinstance(c, dict))
    per_s = "/s" if rates else ""
    drawn = Table(box=None, padding=(0, 1), pad_edge=False, collapse_padding=True, header_style="dim")
    for title in (
        "tier",
        "used",
        "budget",
        f"hits{per_s}",
        f"miss{per_s}",
        "hit%",
        f"evict{per_s}",
        "load",
        "took",
        "fail",
        f"read{per_s}",
    ):
        drawn.add_column(title, justify="left" if title == "tier" else "right", no_wrap=True)
    for name, tier in tiers.items():

        def flow(key: str, show: Callable[[float], str] = _number, tier: Mapping[str, Any] = tier) -> str:
            if key not in tier:
                return ""
            value = tier[key]["per_s" if rates else "total"]
            return "-" if value is None else show(value)

        drawn.add_row(
            name,
            _size(tier["resident_bytes"]) if "resident_bytes" in tier else "",
            _size(tier["budget_bytes"]) if "budget_bytes" in tier else "",
            flow("hits"), flow("misses"), _hit_share(tier, rates), flow("evicted"),
            _number(tier["loading_chunks"]) if "loading_chunks" in tier else "",
            _duration(tier["mean_load_seconds"]) if tier.get("mean_load_seconds") is not None else "",
            _number(tier["failed"]["total"]) if "failed" in tier else "",
            flow("read_bytes", _size),
        )  # fmt: skip
    return drawn


def _hit_share(tier: Mapping[str, Any], rates: bool) -> str:
    if "hits" not in tier or "misses" not in tier:
        return ""
    hits, misses = (tier[key]["per_s" if rates else "total"] for key in ("hits", "misses"))
    return "-" if not hits and not misses or hits is None or misses is None else f"{100 * hits / (hits + misses):.0f}"


def _cartridge_table(summary: Mapping[str, Any], room: int | None) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    cartridges: list[dict[str, Any]] | None = summary["cartridges"]
    if cartridges is None:
        return Text("the cartridges are shown with the server's API key: --api-key or $VLLM_API_KEY", style="dim")
    if not cartridges:
        return Text("no cartridges are registered", style="dim")
    drawn = Table(box=None, padding=(0, 1), pad_edge=False, collapse_padding=True, header_style="dim")
    drawn.add_column("cartridge", no_wrap=True, overflow="ellipsis", max_width=28)
    for title in ("state", "chunks", "loading", "eta", "size"):
        drawn.add_column(title, justify="left" if title == "state" else "right", no_wrap=True)
    drawn.add_column("pin", no_wrap=True)
    # What moves comes first: what is loading, then what is resident.
    order = {"loading": 0, "resident": 1, "quarantined": 2, "refused": 3}
    rows = sorted(cartridges, key=lambda row: order.get(row["state"], 4))
    for row in rows[:room]:
        fastest = max(row["tiers"].values(), key=lambda tier: tier["resident_chunks"])
        loading = row["loading"] or {}
        share = f"{100 * loading['resident_chunks'] / loading['chunks']:.0f} %" if loading.get("chunks") else ""
        drawn.add_row(
            Text(f"{row['id']}@{row['version']}"), row["state"], f"{fastest['resident_chunks']}/{fastest['chunks']}",
            "failing" if loading.get("failing") else share,
            "" if loading.get("eta_s") is None else _duration(loading["eta_s"]),
            _size(row["bytes"]), "yes" if row["pinned"] else "",
        )  # fmt: skip
    count = max(len(rows), int(summary["served_cartridges"] + summary["refused_cartridges"]))
    if count > (shown := len(rows[:room])):
        drawn.add_row(f"and {count - shown} more", "", "", "", "", "", "")
    return drawn


def _size(count: float) -> str:
    """Return bytes in at most 8 characters."""
    return _scaled(count, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"), 1024)


def _number(value: float) -> str:
    """Return a number in at most 6 characters."""
    return f"{value:.0f}" if value < 1000 and value == int(value) else _scaled(value, ("", "k", "M", "G", "T"), 1000)


def _scaled(value: float, units: Sequence[str], base: int) -> str:
    from rich.filesize import pick_unit_and_suffix

    unit, suffix = pick_unit_and_suffix(int(value), list(units), base)
    value /= unit
    return f"{value:.{int(value < 99.95 and suffix != 'B')}f} {suffix}".rstrip()


def _duration(seconds: float) -> str:
    """Return a time in at most 7 characters."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    return (
        f"{seconds:.1f} s"
        if seconds < 100
        else f"{seconds / 60:.0f} min"
        if seconds < 6000
        else f"{seconds / 3600:.0f} h"
    )
