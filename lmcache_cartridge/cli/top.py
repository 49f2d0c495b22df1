"""Top: a running server's tiers, requests and cartridges, as one table that is drawn again and again."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from contextlib import nullcontext, suppress
from operator import itemgetter
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..errors import CartridgeError
from ..make.server import Server
from ..serve.metrics import PREFIX
from .show import count, size

_TIERS = {"used": "resident_bytes", "budget": "budget_bytes", "hits": "hits_total", "miss": "misses_total", "read": "read_bytes_total",
          "evict": "evicted_total", "loads": "promoted_total", "fail": "failed_total"}  # fmt: skip
_SERVER = (
    "served_cartridges", "refused_cartridges", "quarantined_cartridges", "pinned_cartridges", "requests_total", "positions_total",
    "lost_prompts_total", "waiting_requests", "open_claims", "status_age_seconds",
)  # fmt: skip
Numbers = dict[str, dict[str, float]]
"""By a metric's name, without our prefix, and by its tier or outcome, or the empty text; of all ranks together."""


def read(url: str) -> tuple[Numbers, list[dict[str, Any]]]:
    """Return a server's numbers, and the cartridges that it has in memory or loads. Blocks.

    Raises `CartridgeError` where no server with cartridges answers, or the key is not its own.
    """
    numbers: Numbers = defaultdict(dict)
    with Server(url, "any", 10.0) as server:
        with suppress(ValueError):  # another server's
            for family in text_string_to_metric_families(server.request("GET", "/metrics").text):
                for sample in family.samples if family.name.startswith(PREFIX) else ():
                    found = numbers[sample.name.removeprefix(PREFIX)]
                    key = sample.labels.get("tier") or sample.labels.get("outcome", "")
                    # Ranks share the registry and the disk tier's directory: each tells of all of it.
                    is_shared = family.type == "gauge" and key in ("disk", "")
                    found[key] = (max if is_shared else sum)((found.get(key, 0.0), sample.value))
        if not numbers:
            raise CartridgeError(f"{url} serves no cartridges; start it with `lmcache-cartridge serve`")
        return numbers, server.request("GET", "/v1/cartridges?active=true").json()["data"]


def draw(url: str, numbers: Numbers, cartridges: list[dict[str, Any]]) -> Group:
    """Return them for a terminal of 80 columns, by the names that they have in the reference."""
    lines = [url]
    for metric in _SERVER:
        told = ", ".join(f"{key} {count(value)}".strip() for key, value in numbers.get(metric, {}).items())
        lines.append(f"{metric}: {told}")
    tiers = Table("tier", *_TIERS, box=None, pad_edge=False)
    for tier in numbers["resident_bytes"] | numbers["read_bytes_total"]:
        found = ((size if "bytes" in name else count, numbers[name].get(tier)) for name in _TIERS.values())
        tiers.add_row(tier, *("-" if value is None else show(value) for show, value in found))
    rows = Table("cartridge", "state", "chunks", "size", "pin", box=None, pad_edge=False)
    for row in sorted(cartridges, key=lambda row: not row["loading"]):
        state = "failing" if (row["loading"] or {}).get("failing") else row["state"]
        chunks = "{resident_chunks}/{chunks}".format_map(max(row["tiers"].values(), key=itemgetter("resident_chunks")))
        name = Text(f"{row['id']:.24}@{row['version']}")  # no markup of rich's
        rows.add_row(name, state, chunks, size(row["bytes"]), "yes" if row["pinned"] else "")
    return Group(*(Text(line, no_wrap=True, overflow="ellipsis") for line in lines), "", tiers, "", rows)


def run(url: str, interval_s: float, *, once: bool, as_json: bool) -> None:
    """Show a server until interrupted, or once; as JSON one line each time. Blocks. Raises as `read`."""
    console = Console()
    is_live = console.is_terminal and not once and not as_json
    with Live(console=console, screen=True, auto_refresh=False) if is_live else nullcontext() as live:
        while True:
            numbers, cartridges = read(url)
            if live:
                live.update(draw(url, numbers, cartridges), refresh=True)
            elif as_json:
                print(json.dumps({"numbers": numbers, "cartridges": cartridges}), flush=True)
            else:
                console.print(draw(url, numbers, cartridges))
            if once:
                return
            time.sleep(interval_s)
