"""Remote: a cartridge that a running server makes of a text as a context, which is brought here and removed there."""

from __future__ import annotations

import shutil
import time
import uuid
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from ..artifact import files
from ..artifact.bytesource import ByteRange, Seen, SmallFile
from ..artifact.manifest import MAX_MANIFEST_BYTES, Manifest, decode
from ..artifact.reading import MANIFEST
from ..errors import SourceError, TruncatedPayload
from ..sources.transfer import fetch
from .document import read_text
from .foreign.ids import read_ids
from .progress import Progress, silent
from .server import Server
from .write import compress

ROUTE = "/v1/cartridges"
TTL_S = 300.0
"""How long the server keeps what nobody fetches any more: whoever is killed leaves nothing there."""
_POLL_S = 0.5


def asked(
    source: Path, token_ids: Path | None, messages: Any, role: str | None, arguments: dict[str, Any]
) -> dict[str, Any]:
    """Return a text file, one of token ids, or messages, as the server's route takes it.

    `role` is the document's as a message, `arguments` the chat template's. Raises `ArtifactError` for a file that has no such thing.
    """
    if token_ids is not None:
        return {"token_ids": read_ids(token_ids)}
    _, text = read_text(source)
    if messages is None and role is None:
        return {"document": text}
    said = messages if role is None else [{"role": role, "content": text}]
    return {"messages": said, "chat_template_kwargs": arguments}


def build(
    server: Server, text: dict[str, Any], source: Path, root: Path, *, cartridge_id: str, version: int, encoding: str = "plain",
    progress: Progress = silent,
) -> Manifest:  # fmt: skip
    """Have the server's model, or its LoRA adapter, make a cartridge of a text, as `asked` returns it, and bring it to `root`, every byte checked.

    `source` is the file that the provenance names.

    It is made under a salt of its own, so nobody else's context is used, changed or removed, though it had the same text.
    What is stored in int8 here has no canary: the server asks of plain KV. Raises
    `SourceError` where the server makes nothing, and `ArtifactError` for what cannot be stored; leaves nothing then.
    Registers nothing.
    """
    own = {"cache_salt": uuid.uuid4().hex}
    found = server.request("POST", ROUTE, json=text | own | {"ttl": TTL_S, "model": server.model}).json()
    context: Any = _Context(server, f"{ROUTE}/{found['id']}", own)
    plain = root.with_name(f".{root.name}.{uuid.uuid4().hex}.plain")
    try:
        while found["state"] == "making":
            progress("KV", found["done"], found["tokens"])
            time.sleep(_POLL_S)
            found = context.request("GET").json()
        if found["error"] is not None:
            raise SourceError(f"{server.url} made no cartridge: {found['error']}")
        made = decode(context.read("", MANIFEST, MAX_MANIFEST_BYTES).data, server.url)
        if made.digest != found["digest"]:
            raise SourceError(f"{server.url} sent another cartridge than the one that it made")
        digest = blake3(source.read_bytes()).hexdigest()
        about = msgspec.structs.replace(made.provenance, document=source.name, document_blake3=digest)
        made = msgspec.structs.replace(made, id=cartridge_id, version=version, provenance=about)
        fetch(made, "", context, plain, progress, nullcontext())
        if encoding == "int8":
            return compress(plain, root, cartridge_id=cartridge_id, version=version, progress=progress)
        plain.rename(root)
        files.sync_directory(root.parent)
        return made
    finally:
        shutil.rmtree(plain, ignore_errors=True)
        with suppress(SourceError):
            context.request("DELETE")


class _Context:
    """The files of a context on a server, as what `fetch` needs of a `ByteSource`; each read of a part has it kept for `TTL_S` from then on."""

    def __init__(self, server: Server, path: str, own: dict[str, str]) -> None:
        self._server, self._path, self._own = server, path, own

    def request(self, method: str, rest: str = "", **content: Any) -> Any:
        """Return a reply about the context. Raises `SourceError`."""
        return self._server.request(method, self._path + rest, params=self._own, **content)

    def _part(self, file: str, where: ByteRange) -> Any:
        return self.request("GET", f"/files/{file}", headers={"Range": f"bytes={where.start}-{where.end - 1}"})

    def read_into(self, location: str, file: str, where: ByteRange, out: memoryview, seen: Seen | None = None) -> None:
        self.request("PATCH", json={"ttl": TTL_S})
        data = self._part(file, where).content
        if len(data) != len(out):
            raise TruncatedPayload(f"{self._server.url} sent {len(data)} bytes of {file} for {len(out)}")
        out[:] = data

    def read(self, location: str, file: str, limit_bytes: int, *, known: str | None = None) -> SmallFile:
        return SmallFile(self.request("GET", f"/files/{file}").content, "")

    def size(self, location: str, file: str) -> int:
        return int(self._part(file, ByteRange(0, 1)).headers["content-range"].rpartition("/")[2])
