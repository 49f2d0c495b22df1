"""Publish to a library and remove from it, over and over, as one of several processes: `python publishing.py LOCATION HOME NUMBER COUNT [blind]`.

Prints the names of its own that are published at the end. Another process changes those that both share. With `blind` its
writes have no condition, as those of a publisher that forgot it.
"""

from __future__ import annotations

import json
import random
import sys
from contextlib import suppress
from io import BytesIO
from pathlib import Path

from making import make_artifact

from lmcache_cartridge.errors import CartridgeNotFound
from lmcache_cartridge.settings import Settings
from lmcache_cartridge.sources.published import Library
from lmcache_cartridge.sources.s3 import S3Source
from lmcache_cartridge.sources.writers import DirectoryWriter, S3Writer

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


def forget_the_condition() -> None:
    """Have this process write whatever is there."""

    def on_s3(self: S3Source, location: str, file: str, data: bytes, known: str | None) -> str:
        self.upload(location, file, BytesIO(data))
        return self.revision(location, file)

    def in_directory(self: DirectoryWriter, file: str, data: bytes, known: str | None) -> str:
        path = self._root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return self._source.revision(str(self._root), file)

    S3Source.swap, DirectoryWriter.swap, S3Writer.check = on_s3, in_directory, lambda self: None  # type: ignore[method-assign]


def main() -> None:
    location, home, number, count, *how = sys.argv[1:]
    if how:
        forget_the_condition()
    settings = Settings(home=Path(home), disk_dir=Path(home), library=location)
    with Library(settings) as library:
        library.registry.begin()
        print("ready", flush=True)
        sys.stdin.readline()
        print(json.dumps(change(library, Path(home), int(number), int(count))))


if __name__ == "__main__":
    main()
