"""Artifact: a cartridge on disk, a directory of `manifest.json`, `payload.safetensors` and maybe `token_ids.npy`.

The payload is a plain safetensors file (https://huggingface.co/docs/safetensors/index#format): 8 bytes of little-endian
header length, a JSON header, then the tensors `chunk.00000`, `chunk.00001`, ... without gaps. They are K and V in the
model's dtype, or bytes that `int8.py` describes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from blake3 import blake3

from ..errors import ArtifactError, ManifestError, ReplacedArtifact, TruncatedPayload
from .bytesource import ByteRange, ByteSource
from .check import ChunkCheck
from .local import LocalSource, open_regular
from .manifest import MAX_MANIFEST_BYTES, Manifest, Tokens, decode

MANIFEST = "manifest.json"
PAYLOAD: Final = "payload.safetensors"
_NPY_BYTES = 4096
"""More than NumPy's header of an array has."""
_SAFETENSORS_DTYPE = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def chunk_range(manifest: Manifest, chunk: int, heads: range) -> ByteRange:
    """Return where KV heads `heads` of stored chunk `chunk` lie in the payload: always one contiguous range."""
    before = chunk * manifest.fingerprint.kv_heads * manifest.head_bytes(0)
    start = manifest.stored.data_offset_bytes + before
    of_head = manifest.head_bytes(chunk)
    return ByteRange(start + heads.start * of_head, start + heads.stop * of_head)


class _Made(msgspec.Struct):
    """What a list shows of a manifest."""

    provenance: dict[str, Any]


_decode_made = msgspec.json.Decoder(_Made).decode


def made_with(root: Path) -> dict[str, Any]:
    """Return the provenance of the artefact at `root`, empty where it cannot be read.

    Checks nothing else.
    """
    try:
        return _decode_made(_read_at_most(f"{root}/{MANIFEST}", MAX_MANIFEST_BYTES)).provenance
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return {}


def load_manifest(root: Path, digest: str | None = None, *, payload: bool = True) -> Manifest:
    """Return the checked manifest of the artefact at `root`, which must have `digest` if that is given.

    Without `payload` its payload may lie elsewhere and is not looked at. Raises `ManifestError` when it is missing or
    wrong, `TruncatedPayload` when the payload has another size, `ReplacedArtifact` when it is another artefact.
    """
    path = f"{root}/{MANIFEST}"
    try:
        data = _read_at_most(path, MAX_MANIFEST_BYTES)
    except OSError as error:
        raise ManifestError(f"{path}: {error.strerror}; is this the directory of a cartridge?") from error
    manifest = decode(data, path)
    if digest is not None and manifest.digest != digest:
        raise ReplacedArtifact(
            f"{root} was replaced after it was registered: it is {manifest.name} with digest {manifest.digest[:16]}... "
            f"now, not {digest[:16]}...; register it again as a new version"
        )
    if manifest.payload is None or not payload:
        return manifest
    file = root / manifest.payload.file
    try:
        size = file.stat().st_size if file.is_file() else 0
    except OSError as error:
        raise ArtifactError(f"cartridge {manifest.name}: {file}: {error.strerror}") from error
    check_size(manifest, size, str(file))
    return manifest


def check_size(manifest: Manifest, size_bytes: int, where: str) -> None:
    """Raise `TruncatedPayload` unless the payload `where` has the manifest's size."""
    if size_bytes != manifest.payload_bytes:
        raise TruncatedPayload(
            f"cartridge {manifest.name}: {where} has {size_bytes} bytes, its manifest says "
            f"{manifest.payload_bytes}. Copy or publish it again"
        )


def id_files(manifest: Manifest) -> dict[str, int]:
    """Return the files of token ids that the manifest names, and how many bytes each may have at most."""
    listed = [tokens for tokens in (manifest.tokens, manifest.document) if tokens is not None]
    return {tokens.file: 4 * tokens.count + _NPY_BYTES for tokens in listed if tokens.file is not None}


def load_token_ids(manifest: Manifest, root: Path) -> np.ndarray:
    """Return the p token ids, uint32, checked against the manifest's digest. Raises `ArtifactError` on a mismatch."""
    return _load_ids(manifest, manifest.tokens, root)


def load_document_ids(manifest: Manifest, root: Path) -> np.ndarray | None:
    """Return the ids of a trained cartridge's document, as `load_token_ids` does, or None if it carries none."""
    return None if manifest.document is None else _load_ids(manifest, manifest.document, root)


def _load_ids(manifest: Manifest, tokens: Tokens, root: Path) -> np.ndarray:
    if tokens.file is None:
        ids = np.asarray(tokens.inline, dtype="<u4")
    else:
        path, size = f"{root}/{tokens.file}", 4 * tokens.count
        try:
            data = _read_at_most(path, size + _NPY_BYTES)
        except OSError as error:
            raise ArtifactError(f"cartridge {manifest.name}: {path}: {error.strerror}") from error
        # The digest vouches for the ids, so the .npy header before them is not parsed: hostile ones break np.load.
        sound = data.startswith(np.lib.format.MAGIC_PREFIX) and len(data) > size
        ids = np.frombuffer(data[-size:] if sound else b"", dtype="<u4")
    if blake3(ids.tobytes()).hexdigest() != tokens.blake3 or len(ids) != tokens.count:
        raise ArtifactError(f"cartridge {manifest.name}: token ids do not have the digest its manifest names")
    if ids.max() >= manifest.fingerprint.vocab_size:
        raise ArtifactError(f"cartridge {manifest.name}: token id {ids.max()} is outside the model's vocabulary")
    return ids


def _read_at_most(path: str, limit_bytes: int) -> bytes:
    """Return the first bytes of a file. Allocates no more than it has, whatever the limit: a manifest may set that."""
    with open(path, "rb", opener=open_regular) as file:
        return file.read(min(limit_bytes, os.fstat(file.fileno()).st_size))


def verify(root: Path, source: ByteSource | None = None, location: str | None = None) -> Iterator[tuple[int, int]]:
    """Check everything an artefact promises, yielding (chunks done, chunks) as it goes.

    Its payload may lie elsewhere than beside its manifest: at `location` of `source`. Raises `CartridgeError` for the first fault.
    """
    manifest = load_manifest(root, payload=location is None)
    load_token_ids(manifest, root)
    load_document_ids(manifest, root)
    if manifest.payload is None:
        return
    source, location = source or LocalSource(), location or str(root)
    where = f"{location}/{PAYLOAD}"
    expected = payload_header(manifest)
    header = bytearray(len(expected))
    if len(expected) == manifest.payload.data_offset_bytes:
        source.read_into(location, PAYLOAD, ByteRange(0, len(expected)), memoryview(header))
    if header != expected:  # by which other readers would read something else
        raise ArtifactError(f"cartridge {manifest.name}: {where} has a header that its manifest does not describe")
    heads = range(manifest.fingerprint.kv_heads)
    buffer = memoryview(bytearray(len(heads) * manifest.head_bytes(0)))
    for chunk in range(manifest.chunks):
        check, data = ChunkCheck(manifest, chunk, heads), buffer[: len(heads) * manifest.head_bytes(chunk)]
        source.read_into(location, PAYLOAD, chunk_range(manifest, chunk, heads), data, check.update)
        check.finish(data, where)
        yield chunk + 1, manifest.chunks


def payload_header(manifest: Manifest) -> bytes:
    """Return the safetensors length and header of a payload; data starts at a multiple of 4096."""
    shape, is_int8 = manifest.fingerprint, manifest.stored.encoding == "int8"
    header, offset = {}, 0
    for chunk in range(manifest.chunks):
        length, of_head = manifest.chunk_length(chunk), manifest.head_bytes(chunk)
        end = offset + shape.kv_heads * of_head
        header[f"chunk.{chunk:05d}"] = {
            "dtype": "U8" if is_int8 else _SAFETENSORS_DTYPE[shape.dtype],
            "shape": [
                shape.kv_heads,
                *([of_head] if is_int8 else [shape.planes, shape.layers, length, shape.head_size]),
            ],
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 4096)
    return len(text).to_bytes(8, "little") + text
