"""Top: a running server's tiers, requests and cartridges, as one table that is drawn again and again."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from contextlib import nullcontext
from operator import itemgetter
from typing import Any

from httpx import HTTPError
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..errors import CartridgeError
from ..make.server import Server
from ..serve.metrics import PREFIX
from .show import count, size

_COLUMNS = {"used": "resident_bytes", "budget": "budget_bytes", "hits": "hits_total", "miss": "misses_total", "read": "read_bytes_total",
            "evict": "evicted_total", "loads": "promoted_total", "fail": "failed_total"}  # fmt: skip
Numbers = dict[str, dict[str, float]]
"""By a metric's name, without our prefix, and by its tier or outcome, or the empty text; of all ranks together."""


def read(url: str) -> tuple[Numbers, list[dict[str, Any]] | None]:
    """Return a server's numbers and, unless they take another API key, the cartridges that it has in memory or loads.
    Blocks. Raises `CartridgeError` where no server with cartridges answers."""
    numbers: Numbers = defaultdict(dict)
    with Server(url, "any", 10.0) as server:
        reply = server.send("GET", "/metrics")
        try:
            for family in text_string_to_metric_families(reply.raise_for_status().content.decode()):
                for sample in family.samples if family.name.startswith(PREFIX) else ():
                    found = numbers[sample.name.removeprefix(PREFIX)]
                    key = sample.labels.get("tier") or sample.labels.get("outcome", "")
                    # Ranks share the registry and the disk tier's directory: each tells of all of it.
                    is_shared = family.type == "gauge" and key in ("disk", "")
                    found[key] = (max if is_shared else sum)((found.get(key, 0.0), sample.value))
            if not numbers:
                raise CartridgeError(f"{url} serves no cartridges; start it with `lmcache-cartridge serve`")
            if (reply := server.send("GET", "/v1/cartridges?active=true")).status_code in (401, 403):
                return numbers, None
            return numbers, reply.json()["data"]
        except (ValueError, KeyError, TypeError, HTTPError):
            raise CartridgeError(f"{reply.url} answers {reply.status_code}, not as vLLM with cartridges does") from None


def rates(now: Numbers, before: Numbers, elapsed_s: float) -> Numbers:
    """Return what each counter gained in a second between two readings; 0 where it began again."""
    counters = {name: of for name, of in now.items() if name.endswith(("_total", "_count"))}
    return {name: {key: max(0.0, value - before.get(name, {}).get(key, 0.0)) / elapsed_s for key, value in of.items()}
            for name, of in counters.items()}  # fmt: skip


def draw(url: str, view: dict[str, Any]) -> Group:
    """Return a view for a terminal of 80 columns. Counters are shown by the second, or as totals without rates yet."""
    shown, cartridges = defaultdict(lambda: {"": 0.0}, view["numbers"] | (view["rates"] or {})), view["cartridges"]
    s = "/s" if view["rates"] else ""
    now = [f"{shown[f'{kind}_cartridges']['']:.0f} {kind}" for kind in ("served", "refused", "quarantined", "pinned")]
    flow = {name: ", ".join(f"{key} {count(n)}{s}".strip() for key, n in of.items()) for name, of in shown.items()}
    old_s, waiting, claims = (shown[name][""] for name in ("status_age_seconds", "waiting_requests", "open_claims"))
    lines = [
        f"cartridges: {', '.join(now)}  {url}",
        f"the workers' numbers are {old_s:.0f} s old" if old_s > 5 else "",
        f"requests: {flow.get('requests_total', '')}, {waiting:.0f} waiting, {claims:.0f} claims",
        f"positions {flow.get('positions_total')}, lost prompts: {flow.get('lost_prompts_total')}",
    ]
    titles = (title + s * name.endswith(("_total", "_count")) for title, name in _COLUMNS.items())
    tiers = Table("tier", *titles, box=None, pad_edge=False)
    for tier in filter(None, shown["resident_bytes"] | shown["read_bytes_total"]):
        found = ((size if "bytes" in name else count, shown[name].get(tier)) for name in _COLUMNS.values())
        tiers.add_row(tier, *("-" if n is None else show(n) for show, n in found))
    rows = Table("cartridge", "state", "chunks", "size", "pin", box=None, pad_edge=False)
    for row in sorted(cartridges or (), key=lambda row: not row["loading"]):
        name, pin = Text(f"{row['id']:.24}@{row['version']}"), "yes" if row["pinned"] else ""
        state = "failing" if (row["loading"] or {}).get("failing") else row["state"]
        chunks = "{resident_chunks}/{chunks}".format_map(max(row["tiers"].values(), key=itemgetter("resident_chunks")))
        rows.add_row(name, state, chunks, size(row["bytes"]), pin)
    if (others := shown["served_cartridges"][""] + shown["refused_cartridges"][""] - rows.row_count) > 0:
        rows.add_row(f"and {others:.0f} more")
    below = "the cartridges are shown with the server's API key: $VLLM_API_KEY" if cartridges is None else rows
    return Group(*(Text(line, no_wrap=True, overflow="ellipsis") for line in lines if line), "", tiers, "", below)


def run(url: str, interval_s: float, *, once: bool, as_json: bool) -> None:
    """Show a server until interrupted, or once; as JSON one line each time. Blocks. Raises as `read`."""
    console, before, before_s = Console(), None, 0.0
    is_live = console.is_terminal and not once and not as_json
    with Live(console=console, screen=True, auto_refresh=False) if is_live else nullcontext() as live:
        while True:
            (numbers, cartridges), at_s = read(url), time.monotonic()
            gained = rates(numbers, before, at_s - before_s) if before else None
            view = {"numbers": numbers, "rates": gained, "cartridges": cartridges}
            before, before_s = numbers, at_s
            if live:
                live.update(draw(url, view), refresh=True)
            else:
                print(json.dumps(view), flush=True) if as_json else console.print(draw(url, view))
            if once:
                return
            time.sleep(interval_s)
