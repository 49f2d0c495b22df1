"""Artifact: a cartridge on disk, a directory of `manifest.json`, `payload.safetensors` and maybe `token_ids.npy`.

The payload is a plain safetensors file (https://huggingface.co/docs/safetensors/index#format): 8 bytes of little-endian
header length, a JSON header, then the tensors `chunk.00000`, `chunk.00001`, ... without gaps.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from blake3 import blake3

from .errors import ArtifactError, CartridgeExists, CorruptChunk, ManifestError, TruncatedPayload
from .fingerprint import Fingerprint
from .manifest import (
    CHECKSUM_BYTES, FORMAT, MAX_MANIFEST_BYTES, Manifest, Payload, Provenance, Tokens, check_id, content_digest,
    decode,
)  # fmt: skip

MANIFEST = "manifest.json"
PAYLOAD = "payload.safetensors"
TOKENS = "token_ids.npy"
INLINE_TOKENS = 64
"""Up to this many token ids stand in the manifest itself."""
_SAFETENSORS_DTYPE = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


class ByteRange(NamedTuple):
    """Bytes `start` to `end` (exclusive) of a payload."""

    start: int
    end: int


def chunk_range(manifest: Manifest, chunk: int, heads: range) -> ByteRange:
    """Return where KV heads `heads` of stored chunk `chunk` lie in the payload: always one contiguous range."""
    before = chunk * manifest.payload.chunk_tokens * manifest.fingerprint.token_bytes
    start = manifest.payload.data_offset_bytes + before
    head_bytes = manifest.head_bytes(chunk)
    return ByteRange(start + heads.start * head_bytes, start + heads.stop * head_bytes)


def verify_chunk(manifest: Manifest, chunk: int, heads: range, data: memoryview, where: str) -> None:
    """Raise `CorruptChunk` unless `data`, heads `heads` of stored chunk `chunk`, has the manifest's checksums."""
    head_bytes = manifest.head_bytes(chunk)
    for i, head in enumerate(heads):
        found = _checksum(data[i * head_bytes : (i + 1) * head_bytes])
        expected = manifest.payload.checksums[chunk][head]
        if found != expected:
            raise CorruptChunk(
                f"cartridge {manifest.name}: chunk {chunk}, KV head {head} of {where} has checksum {found}, "
                f"its manifest says {expected}. Replace the file from its source, or build the cartridge again"
            )


def _checksum(data: memoryview | bytes) -> str:
    return blake3(data).hexdigest(CHECKSUM_BYTES)


def load_manifest(root: Path) -> Manifest:
    """Return the checked manifest of the artefact at `root`.

    Raises `ManifestError` when it is missing or wrong, `TruncatedPayload` when the payload has another size.
    """
    path = root / MANIFEST
    try:
        with path.open("rb") as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise ManifestError(f"{path}: {error.strerror}; is this the directory of a cartridge?") from error
    manifest = decode(data, str(path))
    payload = root / manifest.payload.file
    size = payload.stat().st_size if payload.is_file() else 0
    if size != manifest.payload.size_bytes:
        raise TruncatedPayload(
            f"cartridge {manifest.name}: {payload} has {size} bytes, its manifest says "
            f"{manifest.payload.size_bytes}. Copy the file again"
        )
    return manifest


def load_token_ids(manifest: Manifest, root: Path) -> np.ndarray:
    """Return the p token ids, uint32, checked against the manifest's digest. Raises `ArtifactError` on a mismatch."""
    if manifest.tokens.inline is not None:
        ids = np.asarray(manifest.tokens.inline, dtype="<u4")
    else:
        path = root / TOKENS
        try:
            with path.open("rb") as file:
                data = file.read(4 * manifest.positions + 4096)
            ids = np.load(io.BytesIO(data), allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise ArtifactError(f"cartridge {manifest.name}: {path}: {error}") from error
    if (
        ids.shape != (manifest.positions,)
        or ids.dtype != np.dtype("<u4")
        or blake3(ids.tobytes()).hexdigest() != manifest.tokens.blake3
    ):
        raise ArtifactError(f"cartridge {manifest.name}: token ids do not have the digest its manifest names")
    if ids.max() >= manifest.fingerprint.vocab_size:
        raise ArtifactError(f"cartridge {manifest.name}: token id {ids.max()} is outside the model's vocabulary")
    return ids


def verify(root: Path) -> Iterator[tuple[int, int]]:
    """Check everything an artefact promises, yielding (chunks done, chunks) as it goes.

    Raises `ManifestError` or `ArtifactError` at the first thing that is wrong.
    """
    manifest = load_manifest(root)
    load_token_ids(manifest, root)
    path = root / manifest.payload.file
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length + 8 != manifest.payload.data_offset_bytes:
            raise ArtifactError(f"cartridge {manifest.name}: {path} has a header of {length} bytes, not the manifest's")
        header = _header(manifest.fingerprint, manifest.positions, manifest.payload.chunk_tokens)
        if file.read(length) != header[8:]:
            raise ArtifactError(f"cartridge {manifest.name}: {path} has a header that its manifest does not describe")
        heads = range(manifest.fingerprint.kv_heads)
        for chunk in range(manifest.chunks):
            start, end = chunk_range(manifest, chunk, heads)
            file.seek(start)
            verify_chunk(manifest, chunk, heads, memoryview(file.read(end - start)), str(path))
            yield chunk + 1, manifest.chunks


def _header(fingerprint: Fingerprint, positions: int, chunk_tokens: int) -> bytes:
    """Return the safetensors length and header of a payload; data starts at a multiple of 4096 for direct I/O."""
    header, offset = {}, 0
    for chunk in range(-(-positions // chunk_tokens)):
        length = min(chunk_tokens, positions - chunk * chunk_tokens)
        header[f"chunk.{chunk:05d}"] = {
            "dtype": _SAFETENSORS_DTYPE[fingerprint.dtype],
            "shape": [fingerprint.kv_heads, 2, fingerprint.layers, length, fingerprint.head_size],
            "data_offsets": [offset, offset + length * fingerprint.token_bytes],
        }
        offset += length * fingerprint.token_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 4096)
    return len(text).to_bytes(8, "little") + text


class ArtifactWriter:
    """Write one artefact, chunk by chunk, so that it appears whole or not at all.

    A context manager: without `commit()` nothing is left behind. Files are private to the user.
    """

    def __init__(
        self,
        root: Path,
        *,
        cartridge_id: str,
        version: int,
        kind: Literal["prefill", "trained"],
        fingerprint: Fingerprint,
        token_ids: np.ndarray,
        chunk_tokens: int,
    ) -> None:
        """Start an artefact that will appear at `root`, holding `len(token_ids)` positions.

        Raises `CartridgeExists` if `root` is there already.
        """
        if root.exists():
            raise CartridgeExists(f"{root} exists; an artefact is written once. Choose another id or version")
        self.root = root
        self._id, self._version = check_id(cartridge_id), version
        self._kind, self._fingerprint, self._chunk_tokens = kind, fingerprint, chunk_tokens
        self._ids = np.ascontiguousarray(token_ids, dtype="<u4")
        self._checksums: list[tuple[str, ...]] = []
        self._partial = root.parent / f".{root.name}.{uuid.uuid4().hex}.partial"

    def __enter__(self) -> ArtifactWriter:
        self.root.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._partial.mkdir(mode=0o700)
        header = _header(self._fingerprint, len(self._ids), self._chunk_tokens)
        self._offset = len(header)
        self._file = _create(self._partial / PAYLOAD)
        self._file.write(header)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        shutil.rmtree(self._partial, ignore_errors=True)

    @property
    def payload(self) -> Path:
        """Where the payload lies until `commit()`; complete once every chunk is written."""
        self._file.flush()
        return self._partial / PAYLOAD

    def write(self, data: memoryview | bytes) -> None:
        """Append the next chunk, `[kv_heads, 2, layers, tokens, head_size]` in row-major order.

        Raises `ArtifactError` for a chunk of another size than the next one must have.
        """
        chunk = len(self._checksums)
        length = min(self._chunk_tokens, len(self._ids) - chunk * self._chunk_tokens)
        expected = max(length, 0) * self._fingerprint.token_bytes
        view = memoryview(data).cast("B")
        if len(view) != expected or not expected:
            raise ArtifactError(f"cartridge {self._id}: chunk {chunk} has {len(view)} bytes, not {expected}")
        head_bytes = expected // self._fingerprint.kv_heads
        self._checksums.append(
            tuple(_checksum(view[i : i + head_bytes]) for i in range(0, expected, head_bytes))
        )
        self._file.write(view)

    def commit(self, provenance: Provenance) -> Manifest:
        """Make the artefact appear at its place and return its manifest. Raises `ArtifactError` if chunks lack."""
        written = min(len(self._checksums) * self._chunk_tokens, len(self._ids))
        if written != len(self._ids):
            raise ArtifactError(f"cartridge {self._id}: {written} of {len(self._ids)} positions were written")
        manifest = self._manifest(provenance)
        _sync(self._file)
        if manifest.tokens.file:
            with _create(self._partial / TOKENS) as file:
                np.save(file, self._ids, allow_pickle=False)
                _sync(file)
        with _create(self._partial / MANIFEST) as file:
            file.write(manifest.encode())
            _sync(file)
        try:
            self._partial.rename(self.root)
        except OSError as error:
            raise CartridgeExists(f"{self.root} appeared while it was being written: {error.strerror}") from error
        return manifest

    def _manifest(self, provenance: Provenance) -> Manifest:
        inline = len(self._ids) <= INLINE_TOKENS
        draft = Manifest(
            format=FORMAT,
            id=self._id,
            version=self._version,
            digest="",
            kind=self._kind,
            positions=len(self._ids),
            fingerprint=self._fingerprint,
            tokens=Tokens(
                blake3=blake3(self._ids.tobytes()).hexdigest(),
                inline=tuple(self._ids.tolist()) if inline else None,
                file=None if inline else TOKENS,
            ),
            payload=Payload(
                file=PAYLOAD,
                size_bytes=self._offset + len(self._ids) * self._fingerprint.token_bytes,
                data_offset_bytes=self._offset,
                chunk_tokens=self._chunk_tokens,
                checksums=tuple(self._checksums),
            ),
            provenance=provenance,
        )
        return decode(_with_digest(draft).encode(), str(self.root))


def _with_digest(draft: Manifest) -> Manifest:
    return msgspec.structs.replace(draft, digest=content_digest(draft))


def _create(path: Path) -> io.BufferedWriter:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def _sync(file: io.BufferedWriter) -> None:
    file.flush()
    os.fsync(file.fileno())
