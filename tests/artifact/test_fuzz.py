"""Whatever a manifest or a payload's header says, it is refused with a clear error or means what it says; cheaply."""

from __future__ import annotations

import copy
import json
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from chunks import load
from making import Made, heads_bytes, make_artifact

from lmcache_cartridge.artifact import reading
from lmcache_cartridge.artifact.cartridge import Cartridge, Segment
from lmcache_cartridge.artifact.manifest import MAX_TOKENS, Manifest, content_digest, decode
from lmcache_cartridge.artifact.reading import MANIFEST, PAYLOAD
from lmcache_cartridge.errors import ArtifactError, CartridgeError, WrongDtype, WrongShape
from lmcache_cartridge.memory.layout import ChunkShape, heads_view
from lmcache_cartridge.memory.loader import ChunkLoader
from lmcache_cartridge.sources.sources import Sources

_SOURCES = Sources()
LIMIT_BYTES = 4 << 20
"""What reading one small artefact may allocate at most, whatever it claims to be. The largest in here is 600 KiB."""
_VALUES = [
    None, True, False, 0, 1, -1, 2, 15, 1 << 16, (1 << 24) - 1, (1 << 31) - 1, 1 << 31, 1 << 53, 1 << 63, 1 << 64, 10**40,
    0.0, -0.0, 0.5, 1e308, "", "x", "00" * 16, "00" * 32, "../x", "\x00", "é" * 50, "9" * 5000, [], [[]], {}, [0] * 1000,
    ["00" * 16], {"format": "3.0"}, "plain", "int8",
]  # fmt: skip


@pytest.fixture
def made(tmp_path):
    return make_artifact(tmp_path / "doc", positions=40, chunk_tokens=16, layers=1, head_size=8)


@pytest.fixture(params=["plain", "int8"])
def either(request, tmp_path):
    """The same with the KV that is served of it, plain and in int8."""
    made = make_artifact(tmp_path / "doc", positions=40, chunk_tokens=16, layers=1, head_size=8, encoding=request.param)
    if request.param == "int8":
        whole = [_served(made.manifest, tmp_path / "doc", chunk) for chunk in range(2)]
        made = made._replace(kv=torch.cat([heads_view(out, shape) for out, shape in whole], dim=2))
    return made


def _served(manifest: Manifest, root: Path, chunk: int) -> tuple[torch.Tensor, ChunkShape]:
    shape = ChunkShape(2, 1, 16, 8, "bfloat16")
    out = torch.empty(shape.size_bytes, dtype=torch.uint8)
    load(
        ChunkLoader(_SOURCES, shape, range(2), "heads"), [Segment(Cartridge(manifest, root, str(root)), 0)], chunk, out
    )
    return out, shape


def _paths(node: Any, path: tuple = ()) -> list[tuple]:
    if not isinstance(node, dict | list):
        return []
    items = node.items() if isinstance(node, dict) else enumerate(node)
    return [p for name, child in items for p in [(*path, name), *_paths(child, (*path, name))]]


def _at(document: Any, path: tuple) -> Any:
    for name in path:
        document = document[name]
    return document


def _mutated_fields(data: bytes, chance: random.Random) -> bytes:
    """Replace, remove, add or repeat one to three fields."""
    document = json.loads(data)
    for _ in range(chance.randint(1, 3)):
        path = chance.choice(_paths(document))
        parent, name = _at(document, path[:-1]), path[-1]
        how = chance.random()
        if how < 0.7:
            value = copy.deepcopy(chance.choice(_VALUES))
            if isinstance(parent[name], int) and chance.random() < 0.5:
                value = parent[name] * chance.choice([2, 3, 16, 1 << 20]) + chance.choice([-1, 0, 1])
            parent[name] = value
        elif how < 0.8:
            del parent[name]
        elif isinstance(parent, list):
            parent += copy.deepcopy(parent[: chance.randint(1, 100)])
        else:
            parent[chance.choice(["x", "__class__", "", "digest"])] = copy.deepcopy(chance.choice(_VALUES))
    return json.dumps(document).encode()


def _mutated_bytes(data: bytes, chance: random.Random) -> bytes:
    """Flip, cut, insert or repeat some bytes."""
    for _ in range(chance.randint(1, 4)):
        start, end = sorted((chance.randrange(len(data) + 1), chance.randrange(len(data) + 1)))
        end = min(end, start + chance.choice([1, 8, 200]))
        new = chance.choice([b"", chance.randbytes(max(end - start, 1)), data[start:end] * 50, b"[" * 3000, b"9" * 400])
        data = data[:start] + new + data[end:] or b"{"
    return data


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
        reading.check_local_header(manifest, root)
        shape, own = manifest.fingerprint, made.manifest.fingerprint
        if manifest.payload is None or shape.differences(own):
            return "another model's"
        chunks = ChunkShape(own.kv_heads, own.layers, 16, own.head_size, own.dtype)
        loader = ChunkLoader(_SOURCES, chunks, range(own.kv_heads), "heads")
        out = torch.empty(chunks.size_bytes, dtype=torch.uint8)
        for chunk in range(manifest.positions // 16):
            load(loader, [Segment(Cartridge(manifest, root, str(root)), 0)], chunk, out)
            assert out.numpy().tobytes() == heads_bytes(made.kv[:, :, 16 * chunk : 16 * chunk + 16])
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


@pytest.mark.parametrize(
    ("mutate", "signed", "count"),
    [(_mutated_fields, False, 2500), (_mutated_fields, True, 2500), (_mutated_bytes, False, 2500)],
    ids=["fields", "forged fields", "bytes"],
)
def test_a_mutated_manifest_is_an_error_or_sound_and_costs_little(either, tmp_path, mutate, signed, count):
    made, root, chance, seen = either, tmp_path / "doc", random.Random(1), set()
    data = (root / MANIFEST).read_bytes()
    for _ in range(count):
        mutated = mutate(data, chance)
        _overwrite(root / MANIFEST, _signed(mutated) if signed else mutated)
        seen.add(_read_cheaply(made, root, original=not signed))
    assert {"ManifestError", "sound"} <= seen
    assert not signed or {"TruncatedPayload", "CorruptChunk", "ArtifactError"} & seen


def test_a_mutated_header_is_an_error_of_its_own_and_costs_little(either, tmp_path):
    made, root, chance, seen = either, tmp_path / "doc", random.Random(2), set()
    data = (root / PAYLOAD).read_bytes()
    length = int.from_bytes(data[:8], "little")
    text, rest = data[8 : 8 + length], data[8 + length :]

    def check() -> None:
        with pytest.raises(ArtifactError, match="cartridge doc@1: .*payload.safetensors") as caught:
            reading.check_local_header(made.manifest, root)
        seen.add(type(caught.value))

    for turn in range(2600):
        mutated = (_mutated_fields if turn % 2 else _mutated_bytes)(text.rstrip(), chance).ljust(length)[:length]
        head = length if turn % 5 else chance.choice([0, 1, length - 1, length + 8, 1 << 20, 1 << 40, (1 << 64) - 1])
        whole = head.to_bytes(8, "little") + mutated
        if whole == data[: 8 + length] or mutated == text:
            continue
        _overwrite(root / PAYLOAD, whole + rest)
        assert _peak(check) < LIMIT_BYTES
    assert seen == {ArtifactError, WrongDtype, WrongShape}


def test_a_forged_manifest_of_a_huge_cartridge_is_refused_before_anything_is_allocated(made, tmp_path):
    root = tmp_path / "doc"
    document = json.loads((root / MANIFEST).read_bytes())
    for field, value in (("layers", (1 << 24) - 1), ("head_size", (1 << 24) - 1)):
        forged = json.loads(json.dumps(document))
        forged["fingerprint"][field] = value
        token_bytes = 2 * forged["fingerprint"]["layers"] * 2 * forged["fingerprint"]["head_size"] * 2
        forged["payload"]["size_bytes"] = forged["payload"]["data_offset_bytes"] + 40 * token_bytes
        data = _signed(json.dumps(forged).encode())
        decode(data, "it is consistent")
        (root / MANIFEST).write_bytes(data)
        assert _read_cheaply(made, root, original=False) == "TruncatedPayload"


@pytest.mark.parametrize("tokens", ["tokens", "document"])
def test_a_forged_number_of_token_ids_is_refused_before_anything_is_allocated(tmp_path, tokens):
    root, count = tmp_path / "doc", MAX_TOKENS - 1
    made = make_artifact(root, positions=80, kind="trained", chunk_tokens=1 << 20, layers=1, head_size=8)
    forged = json.loads((root / MANIFEST).read_bytes())
    file = "token_ids.npy" if tokens == "tokens" else "document_ids.npy"
    forged[tokens] = {"count": count, "blake3": "00" * 32, "file": file}
    if tokens == "tokens":
        forged["positions"], forged["payload"]["chunk_tokens"] = (1 << 23), (1 << 24) - 1
        forged["tokens"]["count"] = 1 << 23
        forged["payload"]["size_bytes"] += ((1 << 23) - 80) * made.manifest.fingerprint.token_bytes
        with (root / PAYLOAD).open("r+b") as payload:
            payload.truncate(forged["payload"]["size_bytes"])  # takes no room on the disk
    else:
        (root / file).write_bytes((root / "token_ids.npy").read_bytes())
    (root / MANIFEST).write_bytes(_signed(json.dumps(forged).encode()))
    assert _read_cheaply(made, root, original=False) == "ArtifactError"
