"""Manifest: what a cartridge is. A frozen value; the artefact's `manifest.json` is its only serialised form."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from blake3 import blake3

from ..errors import ManifestError
from .canary import ServedCanary, TokenId
from .chat import Chat
from .model import DTYPE_BYTES, Count, Fingerprint

FORMAT = "3.0"
"""Format of artefacts written here. A reader accepts its own major version and refuses others."""
MAX_MANIFEST_BYTES = 64 << 20
MAX_TOKENS = 1 << 24
"""More than the context of any engine; so many ids are as large as the largest manifest."""
CHECKSUM_BYTES = 16
"""Checksums are blake3 truncated to 128 bits."""
_ID = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z"
Id = Annotated[str, msgspec.Meta(pattern=_ID)]
"""What a cartridge or label may be called, see `check_id`."""
_Checksum = Annotated[str, msgspec.Meta(min_length=2 * CHECKSUM_BYTES, max_length=2 * CHECKSUM_BYTES)]
_TokenCount = Annotated[int, msgspec.Meta(gt=0, lt=MAX_TOKENS)]

Kind = Literal["prefill", "trained", "tokens"]
"""`prefill`: KV computed by a plain forward pass over the ids. `trained`: optimised KV, identity tokens. `tokens`: a
prompt prefix without KV, which the engine computes once and its own caches keep."""


class Canary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The check made at build time: logits after stored KV against logits after the document itself."""

    question: str
    top1_equal: bool
    max_abs_logit_difference: float


class Origin(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a cartridge was made of that was KV already: an import's file, or the cartridge that was compressed."""

    format: str
    """The format, for people: `PEFT CARTRIDGE adapter`, `cartridge`."""
    name: str
    """A file's name without its directory, a Hub id, or `id@version`."""
    blake3: str
    """Digest of the file, or the cartridge's own."""
    model: str | None = None
    """The model it says it is for."""


class Measured(msgspec.Struct, frozen=True):
    """What was answered from KV as it is served."""

    of: str
    """`questions`: answered greedily, none of which the cartridge was made for or chosen by. `tokens that it was made for`:
    first choices at the document's own, where there were no questions; they say too much."""
    count: int
    cartridge: float
    """Share of them that were right; of an answer of more than a few words, the words it shares with the right one (F1)."""
    interval: tuple[float, float]
    """Of that share, 95%, by Wilson."""
    document: float
    """The same behind the document itself, and behind nothing."""
    nothing: float
    kept: float | None
    """Share of what the document adds; None where that is next to nothing."""


class Training(msgspec.Struct, frozen=True):
    """How a cartridge was trained here. What older releases said of it beside this is not read."""

    objective: str
    init: str
    seed: int
    questions: int
    """That it was trained on."""
    steps: int
    best_step: int
    """Steps done when the KV that is kept was found."""
    loss: float | None
    """Nats an answer token, of the last step; None where training took none."""
    seconds: float
    rate: float | None = None
    """Peak learning rate."""
    validation: int = 0
    """Questions that chose where to stop and which KV to keep."""
    measured: Measured | None = None


class Compaction(msgspec.Struct, frozen=True):
    """How a cartridge was compacted here. What older releases said of it beside this is not read."""

    queries: str
    """What was asked behind the document: `questions`, or `repeat`, the document itself."""
    query_tokens: int
    """Tokens whose queries were matched, in each layer and head."""
    examples: int
    """Questions, or pieces of the document."""
    seconds: float
    """In all, the document's prefill included."""
    refine: int = 0
    """Gradient steps for each layer."""
    measured: Measured | None = None


class Provenance(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where a cartridge came from. Not part of its digest. Holds no path of the machine that made it."""

    tool: str
    created: str
    """ISO 8601, UTC."""
    model: str | None = None
    document: str | None = None
    """File name of the source document, without its directory."""
    document_blake3: str | None = None
    canary: Canary | None = None
    origin: Origin | None = None
    training: Training | None = None
    compaction: Compaction | None = None
    lora: str | None = None
    """Directory name of the LoRA adapter it was computed with."""


class Tokens(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Token ids; many of them lie in a file beside the manifest."""

    count: _TokenCount
    blake3: str
    """Digest of the ids as little-endian uint32."""
    inline: tuple[TokenId, ...] | None = None
    file: Literal["token_ids.npy", "document_ids.npy"] | None = None


class Payload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The bytes: a safetensors file of one tensor a chunk.

    Plain ones are `[kv_heads, planes, layers, tokens, head_size]`, int8 ones `[kv_heads, bytes]`; planes are K and V, or one
    of latent vectors, `Fingerprint.latent`. Heads are outermost, so
    that the heads of any tensor-parallel rank are one contiguous range of a chunk.
    """

    file: Literal["payload.safetensors"]
    size_bytes: int
    data_offset_bytes: Annotated[int, msgspec.Meta(gt=0, lt=1 << 30)]
    """Where the first tensor starts; chunks follow each other without gaps."""
    chunk_tokens: Count
    checksums: tuple[tuple[_Checksum, ...], ...]
    """Hex blake3 of each head of each chunk as it is stored: `checksums[chunk][kv_head]`."""
    encoding: Annotated[str, msgspec.Meta(pattern="^(plain|int8)$")] = "plain"
    """How it holds KV: in the model's dtype, or as `int8.py` says. Left out of the file where it is "plain"."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Identity, geometry and provenance of one version of a cartridge."""

    format: str
    id: Id
    version: Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]
    digest: str
    """blake3 over everything that decides an answer: kind, model, p, tokens, checksums, chat. Not the id or provenance."""
    kind: Kind
    positions: _TokenCount
    """p, the number of KV positions."""
    fingerprint: Fingerprint
    tokens: Tokens
    """The p ids that stand for the cartridge at the head of a prompt."""
    payload: Payload | None
    """None for a cartridge of tokens only."""
    provenance: Provenance
    document: Tokens | None = None
    """For a trained cartridge, the ids of its document: what a request gets when the KV cannot be had."""
    canary: ServedCanary | None = None
    """What a server asks of its engine before it answers from this cartridge. Not part of its digest."""
    chat: Chat | None = None
    """How a server goes on with tokens of a chat template; None where a prompt follows as it is."""

    @property
    def stored(self) -> Payload:
        """The payload. Raises `ManifestError` for a cartridge of tokens only, which has none."""
        if self.payload is None:
            raise ManifestError(f"cartridge {self.name} has no payload")
        return self.payload

    @property
    def chunks(self) -> int:
        """Stored chunks; the last may hold fewer than `payload.chunk_tokens` positions."""
        return -(-self.positions // self.payload.chunk_tokens) if self.payload else 0

    @property
    def data_bytes(self) -> int:
        """Bytes of all stored chunks; 0 without a payload."""
        if self.payload is None:
            return 0
        last = self.chunks - 1
        return self.fingerprint.kv_heads * (last * self.head_bytes(0) + self.head_bytes(last))

    @property
    def payload_bytes(self) -> int:
        """Size of the payload file; 0 without one."""
        return self.payload.size_bytes if self.payload else 0

    @property
    def name(self) -> str:
        """`id@version`."""
        return f"{self.id}@{self.version}"

    def chunk_length(self, chunk: int) -> int:
        """Return the number of positions in stored chunk `chunk`."""
        return min(self.stored.chunk_tokens, self.positions - chunk * self.stored.chunk_tokens)

    def head_bytes(self, chunk: int) -> int:
        """Return the bytes of one KV head of stored chunk `chunk`: K and V of all layers, as they are stored."""
        shape, tokens = self.fingerprint, self.chunk_length(chunk)
        numbers = shape.planes * shape.layers * tokens * shape.head_size
        if self.stored.encoding == "int8":
            return numbers + 4 * shape.layers * (2 * shape.head_size + tokens)
        return numbers * DTYPE_BYTES[shape.dtype]

    def encode(self) -> bytes:
        """Return the manifest as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


def decode(data: bytes, where: str) -> Manifest:
    """Parse and check a manifest; `where` names its origin in errors.

    Raises `ManifestError` for JSON that is no manifest, an unknown major format, or fields that contradict each
    other or the digest. Allocates no more than a small multiple of `data`.
    """
    try:
        major = _decode_versioned(data).format.partition(".")[0]
        if major != FORMAT.partition(".")[0]:
            raise ManifestError(
                f"{where}: format {major}.x, and this release reads {FORMAT}: an older one is made anew from its document, for "
                "a newer one upgrade lmcache-cartridge"
            )
        manifest = _decode_manifest(data)
        problem = next(_problems(manifest), None)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError(f"{where}: not a cartridge manifest that this release knows: {error}") from error
    if problem is not None:
        raise ManifestError(f"{where}: {problem}")
    return manifest


class _Versioned(msgspec.Struct):
    format: str


_decode_versioned, _decode_manifest = msgspec.json.Decoder(_Versioned).decode, msgspec.json.Decoder(Manifest).decode


def check_id(cartridge_id: str) -> str:
    """Return the id if it may name a cartridge; raise `ManifestError` with the rule otherwise."""
    if not re.search(_ID, cartridge_id):
        raise ManifestError(
            f"{cartridge_id!r} cannot be a cartridge id: 1 to 128 of A-Z a-z 0-9 . _ - and no leading . or -"
        )
    return cartridge_id


def _problems(manifest: Manifest) -> Iterator[str]:
    """Yield where fields contradict each other or the digest."""
    shape, payload = manifest.fingerprint, manifest.payload
    if shape.latent is not None and not (shape.latent < shape.head_size and shape.kv_heads == 1):
        yield f"a latent vector of {shape.latent} in {shape.kv_heads} heads of {shape.head_size} elements"
    named = [layer for each in shape.rope for layer in each.layers or ()]
    in_order = all(list(each.layers or ()) == sorted(each.layers or ()) for each in shape.rope)
    if not in_order or len(named) != len(set(named)) or not all(0 <= layer < shape.layers for layer in named):
        yield f"the layers that rotate are not some of {shape.layers}, in order"
    if len(shape.rope) > 1 and any(each.layers is None for each in shape.rope):
        yield "kinds of layers have RoPE of their own, and not all name their layers"
    if (payload is None) != (manifest.kind == "tokens"):
        yield f"a payload does not go with kind {manifest.kind}"
    if manifest.document is not None and manifest.kind != "trained":
        yield f"document ids do not go with kind {manifest.kind}"
    if manifest.tokens.count != manifest.positions:
        yield f"{manifest.tokens.count} token ids for p = {manifest.positions}"
    if payload is not None:
        if payload.encoding == "int8" and shape.planes != 2:
            yield "latent vectors are not stored in int8"
        if len(payload.checksums) != manifest.chunks or {shape.kv_heads} != set(map(len, payload.checksums)):
            yield f"checksums do not cover {manifest.chunks} chunks of {shape.kv_heads} heads"
        if payload.encoding == "int8" and (of_head := manifest.head_bytes(0)) >= 1 << 31:
            yield f"a head of an int8 chunk has {of_head} bytes, over 2 GiB"
        if payload.size_bytes != (size := payload.data_offset_bytes + manifest.data_bytes):
            yield f"payload of {payload.size_bytes} bytes; its geometry needs {size}"
    ids = [*(manifest.canary.token_ids() if manifest.canary else ()), *(manifest.chat.prefix if manifest.chat else ())]
    for tokens, file in ((manifest.tokens, "token_ids.npy"), (manifest.document, "document_ids.npy")):
        if tokens is not None:
            if (tokens.file, len(tokens.inline or ())) not in ((file, 0), (None, tokens.count)):
                yield "token ids must be inline, all of them, or in their file"
            ids += tokens.inline or ()
    if max(ids, default=0) >= shape.vocab_size:
        yield "a token id is outside the model's vocabulary"
    if manifest.canary is not None and payload is None:
        yield "a canary does not go with a cartridge of tokens only"
    if manifest.digest != content_digest(manifest):
        yield "the digest is not the digest of this manifest"


def content_digest(manifest: Manifest) -> str:
    """Return the blake3 that `Manifest.digest` must be.

    A trained cartridge's token ids are drawn from what it is without any: see `Identity`.
    """
    payload = manifest.payload
    content = (
        manifest.format.partition(".")[0],
        manifest.kind,
        manifest.fingerprint,
        manifest.positions,
        payload and (payload.chunk_tokens, payload.checksums, payload.encoding),
        manifest.tokens.blake3,
        manifest.document and manifest.document.blake3,
        manifest.chat,
    )
    return blake3(msgspec.json.encode(content)).hexdigest()
