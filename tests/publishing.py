"""Publish to a library and remove from it, over and over, as one of several processes: `python publishing.py LOCATION HOME NUMBER COUNT`.

Prints the names of its own that are published at the end. Another process changes those that both share.
"""

from __future__ import annotations

import json
import random
import sys
from contextlib import suppress
from pathlib import Path

from making import make_artifact

from lmcache_cartridge.errors import CartridgeNotFound
from lmcache_cartridge.settings import Settings
from lmcache_cartridge.sources.published import Library

OWN, SHARED = 12, 3


def made(home: Path, name: str, seed: int) -> Path:
    root = home / "made" / name
    make_artifact(root, positions=16, layers=1, kv_heads=1, cartridge_id=name, seed=seed)
    return root


def change(library: Library, home: Path, number: int, count: int) -> list[str]:
    """Publish what is not there and remove what is, `count` times; return the own names that are there at the end."""
    chance, there = random.Random(number), set[str]()
    own = {f"own-{number}-{one:02}": made(home, f"own-{number}-{one:02}", 100 * number + one) for one in range(OWN)}
    shared = {f"shared-{one}": made(home, f"shared-{one}", 1000 + one) for one in range(SHARED)}
    for _ in range(count):
        if chance.random() < 0.25:
            name = chance.choice(sorted(shared))
            if chance.random() < 0.5:
                library.publish(shared[name])
            else:
                with suppress(CartridgeNotFound):
                    library.registry.remove(f"{name}@1")
            continue
        name = chance.choice(sorted(own))
        if name in there:
            library.registry.remove(f"{name}@1")
        else:
            library.publish(own[name])
        there ^= {name}
    return sorted(f"{name}@1" for name in there)


def main() -> None:
    location, home, number, count = sys.argv[1:]
    settings = Settings(home=Path(home), disk_dir=Path(home), library=location)
    with Library(settings) as library:
        library.registry.begin()
        print(json.dumps(change(library, Path(home), int(number), int(count))))


if __name__ == "__main__":
    main()
