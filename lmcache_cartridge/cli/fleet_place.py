"""`fleet place`: which server of a fleet owns which cartridge, by the hash of the router before it."""

from __future__ import annotations

import argparse
from collections import Counter

from ..errors import CartridgeError, CartridgeNotFound
from ..fleet.affinity import affinity_key
from ..library.placement import ROUTERS, owner
from .options import Verb, add_library, opened
from .show import show, table


def add(verb: Verb) -> None:
    """Add the command to the command line."""
    parser = verb(
        "place",
        _place,
        "Say which server of a fleet owns each cartridge, by the hash of the router before it.",
        "fleet place --servers engine-0,engine-1 --library s3://cartridges/fleet",
    )
    parser.add_argument(
        "names", nargs="*", metavar="KEY",
        help="cartridges, labels, or chains as `handbook,legal`, which need not be registered (default: every id that is)",
    )  # fmt: skip
    parser.add_argument(
        "--servers",
        required=True,
        metavar="A,B",
        help="all servers behind the router, in its order and as it calls them: for Envoy the `hostname` of each "
        "endpoint, or its ADDRESS:PORT without `use_hostname_for_hashing`; for vllm-router the URLs given to it; for `fleet serve` the names of its pods",
    )
    parser.add_argument(
        "--router",
        choices=tuple(ROUTERS),
        default="envoy",
        help="whose hash. envoy: its MAGLEV, as our configuration has it; envoy-ring-hash: its RING_HASH with 1024 points; "
        "vllm-router: its consistent_hash on x-session-id; picker: whom `fleet serve` picks where nobody has it "
        "(default envoy)",
    )
    add_library(parser)


def _place(arguments: argparse.Namespace) -> None:

    servers = [part.strip() for part in arguments.servers.split(",")]
    if not all(servers) or len(set(servers)) != len(servers):
        raise CartridgeError(f"--servers {arguments.servers}: name every server once, with commas between them")
    if arguments.names:
        sizes: dict[str, int | None] = {affinity_key(None, name): None for name in arguments.names}
    else:
        with opened(arguments) as registry:
            sizes = {row.id: row.bytes for row in registry.newest(-1)}
    if not sizes:
        raise CartridgeNotFound("nothing is registered")
    owners = {key: owner(key, servers, arguments.router) for key in sorted(sizes)}
    counts, totals = Counter(owners.values()), Counter[str]()
    for key, server in owners.items():
        totals[server] += sizes[key] or 0
    rows = [{"cartridge": key, "server": server} for key, server in owners.items()]
    shares = [{"server": server, "cartridges": counts[server], "bytes": totals[server]} for server in servers]
    readable = f"{table(rows)}\n\n{table(shares)}"
    show({"router": arguments.router, "owners": owners, "servers": shares}, readable, arguments.format)
