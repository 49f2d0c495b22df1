"""ArtifactWriter: writes one artefact so that it appears whole or not at all."""

from __future__ import annotations

import errno
import shutil
import uuid
from pathlib import Path
from types import TracebackType
from typing import Final, Literal

import msgspec
import numpy as np
from blake3 import blake3

from ..errors import ArtifactError, CartridgeExists, UnsupportedModel
from . import files
from .canary import ServedCanary
from .chat import Chat
from .check import checksum
from .identity import Identity
from .manifest import FORMAT, Kind, Manifest, Payload, Provenance, Tokens, check_id, content_digest, decode
from .model import Fingerprint
from .reading import MANIFEST, PAYLOAD, payload_header

TOKENS: Final = "token_ids.npy"
DOCUMENT: Final = "document_ids.npy"
INLINE_TOKENS = 64
"""Up to this many token ids stand in the manifest itself."""


class ArtifactWriter:
    """Write one artefact, chunk by chunk.

    A context manager: without `commit()` nothing is left behind. Who may read the files is for the umask to say.
    """

    def __init__(
        self,
        root: Path,
        *,
        cartridge_id: str,
        version: int,
        kind: Kind,
        fingerprint: Fingerprint,
        token_ids: np.ndarray | Identity,
        chunk_tokens: int = 256,
        document_ids: np.ndarray | None = None,
        encoding: str = "plain",
        chat: Chat | None = None,
    ) -> None:
        """Start an artefact that will appear at `root`.

        `token_ids` are its p ids, or how a trained cartridge's are drawn from its digest. `document_ids` are those of
        a trained cartridge's document, `chat` is how servers go on with either. `encoding` is that of `Payload`. Raises `CartridgeExists` if `root` is
        there already.
        """
        if encoding != "plain" and fingerprint.planes != 2:
            raise UnsupportedModel("latent vectors are not stored in int8; make the cartridge without `--payload int8`")
        if root.exists():
            raise CartridgeExists(f"{root} exists; an artefact is written once. Choose another id or version")
        self.root = root
        self._token_ids, self._document_ids = token_ids, document_ids
        positions = token_ids.positions if isinstance(token_ids, Identity) else len(token_ids)
        payload = None if kind == "tokens" else Payload(PAYLOAD, 0, 0, chunk_tokens, (), encoding)
        self._draft = Manifest(
            FORMAT, check_id(cartridge_id), version, "", kind, positions, fingerprint, Tokens(positions, ""), payload,
            Provenance("", ""), chat=chat
        )  # fmt: skip
        self._checksums: list[tuple[str, ...]] = []
        self._partial = root.parent / f".{root.name}.{uuid.uuid4().hex}.partial"

    def __enter__(self) -> ArtifactWriter:
        self.root.parent.mkdir(parents=True, exist_ok=True)
        self._partial.mkdir()
        self._file = None
        if self._draft.payload is not None:
            self._file = files.create(self._partial / PAYLOAD)
            self._offset = self._file.write(payload_header(self._draft))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._file is not None:
                self._file.close()
        finally:  # a full disk fails the close too
            shutil.rmtree(self._partial, ignore_errors=True)

    @property
    def payload(self) -> Path:
        """Where the payload lies until `commit()`; complete once every chunk is written."""
        if self._file is not None:
            self._file.flush()
        return self._partial / PAYLOAD

    def write(self, data: memoryview | bytes) -> None:
        """Append the next chunk as it is stored: `[kv_heads, 2, layers, tokens, head_size]` in row-major order, if plain.

        Raises `ArtifactError` for a chunk of another size than the next one must have.
        """
        draft, chunk = self._draft, len(self._checksums)
        of_head = draft.head_bytes(chunk) if chunk < draft.chunks else 0
        expected, view = draft.fingerprint.kv_heads * of_head, memoryview(data).cast("B")
        if self._file is None or not expected or len(view) != expected:
            raise ArtifactError(f"cartridge {draft.id}: chunk {chunk} has {len(view)} bytes, not {expected}")
        self._checksums.append(tuple(checksum(view[i : i + of_head]) for i in range(0, expected, of_head)))
        self._file.write(view)

    def commit(self, provenance: Provenance, canary: ServedCanary | None = None) -> Manifest:
        """Make the artefact appear at its place and return its manifest. Raises `ArtifactError` if chunks lack."""
        if len(self._checksums) != self._draft.chunks:
            raise ArtifactError(
                f"cartridge {self._draft.id}: {len(self._checksums)} of {self._draft.chunks} chunks were written"
            )
        manifest = self._manifest(provenance, canary)
        if self._file is not None:
            files.sync(self._file)
        files.write(self._partial / MANIFEST, [manifest.encode()])
        try:
            self._partial.rename(self.root)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise ArtifactError(f"{self.root} cannot be made: {error.strerror}") from error
            raise CartridgeExists(f"{self.root} appeared while it was being written: {error.strerror}") from error
        files.sync_directory(self.root.parent)
        return manifest

    def _manifest(self, provenance: Provenance, canary: ServedCanary | None) -> Manifest:
        draft, payload, document = self._draft, self._draft.payload, self._document_ids
        if payload is not None:
            payload = msgspec.structs.replace(
                payload, size_bytes=self._offset + draft.data_bytes, data_offset_bytes=self._offset,
                checksums=tuple(self._checksums),
            )  # fmt: skip
        draft = msgspec.structs.replace(
            draft, payload=payload, provenance=provenance, canary=canary,
            document=None if document is None else self._write_ids(document, DOCUMENT),
        )  # fmt: skip
        ids = self._token_ids
        if isinstance(ids, Identity):
            ids = ids.tokens(content_digest(draft))
        draft = msgspec.structs.replace(draft, tokens=self._write_ids(ids, TOKENS))
        manifest = msgspec.structs.replace(draft, digest=content_digest(draft))
        return decode(manifest.encode(), str(self.root))

    def _write_ids(self, token_ids: np.ndarray, name: Literal["token_ids.npy", "document_ids.npy"]) -> Tokens:
        """Return the manifest's entry for some ids, having written them beside it if they are many."""
        ids = np.ascontiguousarray(token_ids, dtype="<u4")
        digest = blake3(ids.tobytes()).hexdigest()
        if len(ids) <= INLINE_TOKENS:
            return Tokens(len(ids), digest, inline=tuple(ids.tolist()))
        with files.create(self._partial / name) as file:
            np.save(file, ids, allow_pickle=False)
            files.sync(file)
        return Tokens(len(ids), digest, file=name)
