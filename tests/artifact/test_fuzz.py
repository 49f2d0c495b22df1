"""Whatever a manifest or a payload's header says, it is refused with a clear error or means what it says; cheaply."""

from __future__ import annotations

import copy
import json
import random
import tracemalloc
from collections.abc import Callable
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from chunks import served
from making import heads_bytes, make_artifact

from lmcache_cartridge.artifact import reading
from lmcache_cartridge.artifact.cartridge import Cartridge, Segment
from lmcache_cartridge.artifact.manifest import MAX_TOKENS, Manifest, content_digest
from lmcache_cartridge.artifact.reading import MANIFEST, PAYLOAD
from lmcache_cartridge.errors import ArtifactError, CartridgeError

LIMIT_BYTES = 4 << 20
"""What reading one small artefact may allocate at most, whatever it claims to be. The largest in here is 600 KiB."""
_VALUES = [
    None, True, False, 0, 1, -1, 2, 15, 1 << 16, (1 << 24) - 1, (1 << 31) - 1, 1 << 31, 1 << 53, 1 << 63, 1 << 64, 10**40,
    0.0, -0.0, 0.5, 1e308, "", "x", "00" * 16, "00" * 32, "../x", "\x00", "é" * 50, "9" * 5000, [], [[]], {}, [0] * 1000,
    ["00" * 16], {"format": "3.0"}, "plain", "int8",
]  # fmt: skip


class Made(NamedTuple):
    manifest: Manifest
    served: list[bytes]
    """What is served of each whole chunk."""


@pytest.fixture
def root(tmp_path):
    return tmp_path / "doc"


@pytest.fixture(params=["plain", "int8"])
def made(request, root):
    manifest = make_artifact(
        root, positions=40, chunk_tokens=16, layers=1, head_size=8, encoding=request.param
    ).manifest
    return Made(manifest, [_served(manifest, root, chunk) for chunk in range(2)])


def _served(manifest: Manifest, root: Path, chunk: int) -> bytes:
    return heads_bytes(served([Segment(Cartridge(manifest, root, str(root)), 0)], 16, chunk))


def _paths(node: Any, path: tuple = ()) -> list[tuple]:
    if not isinstance(node, dict | list):
        return []
    items = node.items() if isinstance(node, dict) else enumerate(node)
    return [p for name, child in items for p in [(*path, name), *_paths(child, (*path, name))]]


def _mutated_fields(data: bytes, chance: random.Random) -> bytes:
    """Replace or remove one to three fields."""
    document = json.loads(data)
    for _ in range(chance.randint(1, 3)):
        path = chance.choice(_paths(document))
        parent, name = reduce(getitem, path[:-1], document), path[-1]
        if chance.random() < 0.1:
            del parent[name]
        elif isinstance(parent[name], int) and chance.random() < 0.5:
            parent[name] = parent[name] * chance.choice([2, 3, 16, 1 << 20]) + chance.choice([-1, 0, 1])
        else:
            parent[name] = copy.deepcopy(chance.choice(_VALUES))
    return json.dumps(document).encode()


def _signed(data: bytes) -> bytes:
    """Give a manifest the digest of its content, as a forger would, where it can have one."""
    try:
        draft = msgspec.json.decode(data, type=Manifest)
        return msgspec.structs.replace(draft, digest=content_digest(draft)).encode()
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return data


def _overwrite(path: Path, data: bytes) -> None:
    """Give a file other content; making it anew takes a hundred times longer on some file systems."""
    with path.open("r+b") as file:
        file.write(data)
        file.truncate()


def _peak(call: Callable[[], Any]) -> int:
    """Return how many bytes Python had allocated at most while `call` ran."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _read(made: Made, root: Path, *, original: bool) -> str:
    """Read an artefact as the registry and a loader do, and return what came of it."""
    try:
        manifest = reading.load_manifest(root)
        reading.load_token_ids(manifest, root)
        reading.load_document_ids(manifest, root)
        if manifest.payload is None or manifest.fingerprint.differences(made.manifest.fingerprint):
            return "another model's"
        for chunk in range(manifest.positions // 16):
            assert _served(manifest, root, chunk) == made.served[chunk]
    except CartridgeError as error:
        assert str(error)
        return type(error).__name__
    if original:  # its digest vouches for what it says
        assert manifest.digest == made.manifest.digest
    return "sound"


def _read_cheaply(made: Made, root: Path, *, original: bool) -> str:
    results: list[str] = []
    assert _peak(lambda: results.append(_read(made, root, original=original))) < LIMIT_BYTES
    return results[0]


@pytest.mark.parametrize("signed", [False, True])
def test_a_mutated_manifest_is_an_error_or_sound_and_costs_little(made, root, signed):
    chance, seen = random.Random(1), set()
    data = (root / MANIFEST).read_bytes()
    for _ in range(2500):
        mutated = _mutated_fields(data, chance)
        _overwrite(root / MANIFEST, _signed(mutated) if signed else mutated)
        seen.add(_read_cheaply(made, root, original=not signed))
    assert {"ManifestError", "sound"} <= seen
    assert not signed or {"TruncatedPayload", "CorruptChunk", "ArtifactError"} & seen


def test_a_forged_number_of_token_ids_is_refused_before_anything_is_allocated(root):
    made = make_artifact(root, positions=80, kind="trained", layers=1, head_size=8)
    forged = json.loads((root / MANIFEST).read_bytes())
    forged["document"] = {"count": MAX_TOKENS - 1, "blake3": "00" * 32, "file": "document_ids.npy"}
    (root / "document_ids.npy").write_bytes((root / "token_ids.npy").read_bytes())
    (root / MANIFEST).write_bytes(_signed(json.dumps(forged).encode()))
    assert _read_cheaply(Made(made.manifest, []), root, original=False) == "ArtifactError"


@pytest.mark.parametrize("old, new", [(b"BF16", b"FP16"), (b"[2,", b"[3,"), (b"{", bytes(8) + b"{")])
def test_a_header_that_its_manifest_does_not_describe_is_refused(root, old, new):
    make_artifact(root, positions=40)
    data = (root / PAYLOAD).read_bytes()
    assert old in data[:4096]
    (root / PAYLOAD).write_bytes(data.replace(old, new, 1)[: len(data)].ljust(len(data)))
    with pytest.raises(ArtifactError, match="cartridge doc@1: .*payload.safetensors has a header"):
        list(reading.verify(root))
