"""What 100 to 100,000 registered cartridges of 4,096 tokens cost: to register, to start with, in memory, to look up in.

    python benchmarks/scale.py [--full]

Each cartridge has 4,096 token ids of its own, 16 chunks and a payload of its own name and inode that shares one file's
bytes (hard links), so that what is measured is the number of cartridges and not their KV. First start is the time until a
store has read every artefact and hashed every document, most of it in the background; it keeps their rows (from 1,000 on).
Start-up is `CartridgeStore(...)` in a fresh process after that, until every cartridge is found. Lookup is the time of
`store.resident` for a prompt that begins with one of 200 documents drawn at random, each asked for ten times; first lookup is
that of the first time. Reload is `store.refresh()` after one of the cartridges came to be another version.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import report
from blake3 import blake3

from lmcache_cartridge.artifact.manifest import FORMAT, Manifest, Payload, Provenance, Tokens, content_digest
from lmcache_cartridge.artifact.model import Fingerprint
from lmcache_cartridge.artifact.reading import load_manifest
from lmcache_cartridge.engine.host import server_hasher
from lmcache_cartridge.engine.trust import Trust
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.memory.described import Engine
from lmcache_cartridge.memory.store import CartridgeStore
from lmcache_cartridge.settings import Settings, from_mapping

POSITIONS, CHUNK = 4096, 256
SHAPE = Fingerprint("benchmark", 1, 1, 2, "bfloat16", 128_000, (), "00" * 32)
LOOKUPS = 2000
ENGINE = Engine(SHAPE, CHUNK, 0, 1, "heads", server_hasher(CHUNK), pin_memory=False, allow_trained=True)
"""Hashes as LMCache's server does."""


def document(number: int) -> np.ndarray:
    """Return the token ids of a cartridge."""
    return np.random.default_rng(number).integers(0, SHAPE.vocab_size, POSITIONS).astype("<u4")


def write_payload(root: Path) -> tuple[Path, Payload]:
    """Write the payload that all cartridges share and return its entry in their manifests."""
    manifest = report.write_artifact(root, SHAPE, document(0), CHUNK, bytes(CHUNK * SHAPE.token_bytes))
    return root / manifest.payload.file, manifest.payload


def write(root: Path, number: int, version: int, payload_file: Path, payload: Payload) -> Path:
    """Write an artefact by hand, without the syncs of `ArtifactWriter`, which would take most of the time."""
    where = root / f"{number // 1000}" / f"c{number}-{version}"
    where.mkdir(parents=True)
    ids = document(number + 10_000_000 * (version - 1))
    np.save(where / "token_ids.npy", ids, allow_pickle=False)
    os.link(payload_file, where / payload.file)
    draft = Manifest(
        format=FORMAT, id=f"c{number}", version=version, digest="", kind="prefill", positions=POSITIONS,
        fingerprint=SHAPE, tokens=Tokens(POSITIONS, blake3(ids.tobytes()).hexdigest(), file="token_ids.npy"),
        payload=payload, provenance=Provenance(tool="benchmark", created="2026-01-01T00:00:00+00:00"), document=None,
    )  # fmt: skip
    manifest = msgspec.structs.replace(draft, digest=content_digest(draft))
    (where / "manifest.json").write_bytes(manifest.encode())
    return where


def memory_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def settings_of(home: Path) -> Settings:
    """Return the settings of a home that has its own cache directory."""
    return from_mapping(
        {"home": home, "disk_dir": home / "cache", "cpu_bytes": 1 << 20, "disk_bytes": 0, "reload_s": 0}
    )


def prepare(home: Path, count: int) -> dict[str, list[float]]:
    """Make and register `count` cartridges under `home`, and start a store with them for the first time."""
    settings = settings_of(home)
    roots = home / "artefacts"
    payload_file, payload = write_payload(home / "first")
    hard_links = 30_000  # a file of ext4 has at most 65,000 names
    made = []
    for number in range(count):
        if number and number % hard_links == 0:
            copy = home / f"payload-{number}"
            copy.write_bytes(payload_file.read_bytes())
            payload_file = copy
        made.append(write(roots, number, 1, payload_file, payload))
    registry = Registry(settings.registry_path)
    register_s = report.timed(lambda: [registry.register(root) for root in made]) / count
    started = time.perf_counter()
    store = CartridgeStore(settings, ENGINE, Trust)
    while store.numbers()["served"] < count:
        time.sleep(count / 50_000)  # a look takes as long as to read some of them
    first_start_s = time.perf_counter() - started
    store.close()
    return {"register one": [register_s], "first start": [first_start_s]}


def measure(home: Path, count: int) -> dict[str, list[float]]:
    """Return the figures of the `count` cartridges that were prepared under `home`. Run once in a process."""
    settings = settings_of(home)
    gc.collect()
    before = memory_bytes()
    started = time.perf_counter()
    store = CartridgeStore(settings, ENGINE, Trust)
    start_s = time.perf_counter() - started
    gc.collect()
    grown = memory_bytes() - before
    prompts = [list(ENGINE.hasher(document(n))) for n in np.random.default_rng(1).permutation(count)[:200]]
    lookups = [
        report.timed(lambda prompt=prompt: store.resident(prompt))
        for _ in range(LOOKUPS // len(prompts))
        for prompt in prompts
    ]
    assert store.lookup(prompts[0]) >= 0 and len(store.names()) == count
    registry = Registry(settings.registry_path)
    payload_file = home / "first" / "payload.safetensors"
    payload = load_manifest(home / "first").payload
    registry.register(write(home / "artefacts", count // 2, 2, payload_file, payload))
    reload_s = report.timed(store.refresh)
    assert len(store.names()) == count + 1
    idle_s = [report.timed(store.refresh) for _ in range(20)]
    store.close()
    return {
        "start": [start_s], "memory": [grown], "first lookup": lookups[: len(prompts)], "lookup": lookups[len(prompts) :],
        "reload of one": [reload_s], "reload of none": idle_s,
    }  # fmt: skip


def in_own_process(count: int, scratch: Path) -> dict[str, list[float]]:
    """Return what `prepare` and `measure` do, each in a fresh process."""
    found: dict[str, list[float]] = {}
    (home := scratch / str(count)).mkdir()
    for step in (prepare, measure):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            found |= pool.submit(step, home, count).result()
    shutil.rmtree(home)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    bench = report.Benchmark(__file__, __doc__, ["artifact", "library", "memory"])
    options = bench.start(arguments)
    counts = [20] if options.smoke else [100, 10_000, *([100_000] if options.full else [])]
    figures = []
    with tempfile.TemporaryDirectory(prefix="cartridge-scale-") as scratch:
        for count in counts:
            report.say(f"{count} cartridges")
            found = in_own_process(count, Path(scratch))
            figures += [
                report.Figure.of(samples, what, "bytes" if what == "memory" else "s", cartridges=count)
                for what, samples in found.items()
            ]
    bench.publish(figures)


if __name__ == "__main__":
    main()
