"""Resolve: which cartridges the names of a request stand for, and the token ids, tag and salt that it gets by them.

Knows no vLLM. Everything here is safe to run in a thread.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from blake3 import blake3

from ..artifact import reading
from ..artifact.chat import Chat
from ..artifact.hf_config import reach
from ..artifact.location import allowed, is_remote
from ..artifact.lru import Lru
from ..artifact.manifest import MAX_TOKENS, Manifest
from ..artifact.model import Fingerprint, check_shift
from ..engine.host_api import share
from ..errors import (
    CartridgeError,
    CartridgeNotFound,
    ModelMismatch,
    RegistryError,
    SourceError,
    SourceNotFound,
    UnsupportedModel,
)
from ..library.manifest_cache import MAX_AGE_S, ManifestCache
from ..library.quarantine import Quarantine
from ..library.registry import Registry, RegistryEntry
from ..settings import Settings
from ..sources.s3 import S3Source
from ..sources.sources import Sources
from .contexts import PUBLISHED, Contexts
from .imported import SUFFIX, Imports
from .request import NeedsReading, Reference, Refusal, StillMade, Unservable, shorten, unreadable, without_paths

logger = logging.getLogger("vllm.lmcache_cartridge.serve.resolve")

MAX_READS = 64
"""Manifests that are read at once, one of each location; requests for what was read before wait for none of them."""
_MAX_REGISTERED, _MAX_ROWS = 128, 10_000
"""Registered cartridges whose token ids are kept; names whose versions are remembered for when the registry cannot be read."""
_REFUSED_S = _REPLACED_S = 1.0
"""How long a version that an engine refused is passed over; how often S3 is asked again where the copy here was replaced."""
_WARN_EVERY_S = 60.0


class Selection(NamedTuple):
    """Cartridges resolved for one request."""

    manifests: tuple[Manifest, ...]
    places: tuple[tuple[str, str], ...]
    """The directory of each manifest with its token ids, and the location of each payload."""
    token_ids: tuple[int, ...]
    """Ids of all of them, in order; they go before the prompt's own. Of what is computed those of its document."""
    document_ids: tuple[int, ...] | None
    """Ids of the documents' own text, for when the KV cannot be had; None if one carries none."""
    afresh: tuple[str, ...] = ()
    """Digests of those whose copies in memory and on local disk must be dropped first (`force_redownload`)."""
    references: tuple[Reference, ...] = ()
    """What the request named, one of each."""
    adapter: Any = None
    """vLLM's request of the LoRA adapter that computes the prompt; None for the base model."""
    computed: int = 0
    """How many of the last ones the engine computes: the first of tokens only, and what stands behind it."""

    @property
    def injected(self) -> tuple[Manifest, ...]:
        """Those whose KV is injected."""
        return self.manifests[: len(self.manifests) - self.computed]

    @property
    def positions(self) -> int:
        """Leading positions whose KV is injected, as far as they fill chunks."""
        return sum(m.positions for m in self.injected)

    @property
    def tag(self) -> str | None:
        """The digests of what is injected in order, which LMCache's keys are bound to. None without any KV."""
        return ".".join(m.digest for m in self.injected) or None

    @property
    def chat(self) -> Chat | None:
        """How a request's messages go on; None where they follow as they are rendered alone."""
        return self.manifests[-1].chat

    @property
    def lora(self) -> str | None:
        """The digest of the LoRA adapter that all were made with; None for the base model."""
        return self.manifests[0].fingerprint.lora

    @property
    def located(self) -> dict[str, tuple[str, str]]:
        """`places` by digest, as workers want them."""
        return {m.digest: place for m, place in zip(self.injected, self.places, strict=False)}

    @property
    def must_inject(self) -> int:
        """Leading positions that must never be computed: up to the end of the last trained cartridge."""
        end = needed = 0
        for manifest in self.injected:
            end += manifest.positions
            needed = end if manifest.kind == "trained" else needed
        return needed

    @property
    def names(self) -> str:
        """`id@version` of each, for people."""
        return ", ".join(m.name for m in self.manifests)

    def used(self, cached_tokens: int = 0) -> str:
        """Return the response header: `id@version;positions=p;injected=n` for each, and how others were `served`.

        `cached_tokens` leading positions of the prompt were not computed, see `share`; each cartridge has its share.
        """
        parts, start = [], 0
        for place, manifest in enumerate(self.manifests):
            is_computed = place >= len(self.injected)
            how = f";served={'tokens' if manifest.kind == 'tokens' else 'document'}" if is_computed else ""
            told = share(start, manifest.positions, 0 if is_computed else cached_tokens)
            parts.append(f"{manifest.name};{told}{how}")
            start += manifest.positions
        return ", ".join(parts)

    @property
    def replaced(self) -> str:
        """The response header where the documents' text took the cartridges' place."""
        if self.computed:
            return self._replace(computed=len(self.manifests)).used()
        return f"{self.used()};served=document"

    def refused(self, rank: Mapping[str, Any]) -> Unservable:
        """Return a worker's refusal of a claim as one for the client, without paths."""
        places = {place: m.name for m, pair in zip(self.manifests, self.places, strict=True) for place in pair}
        reason = without_paths(rank["refused"], places)
        if rank["mismatch"]:
            message = f"{self.names} cannot be used with the model served here: {reason}"
            return Unservable(409, message, rank["digest"])
        return Unservable(422, f"{self.names} cannot be served: {reason}", rank["digest"])

    def salt(self, client_salt: str | None, secret: bytes = b"") -> str:
        """Return the request's `cache_salt`, different for each chain, content and client salt.

        Digests and identity tokens are no secrets. A server that takes salts from clients gives a `secret` of its own,
        so that nobody can send the salt and read the blocks, or put computed ones under it.
        """
        content = ".".join(m.digest for m in self.manifests)
        return blake3(secret + f"{content}\0{client_salt or ''}".encode()).hexdigest()


class Found(NamedTuple):
    """The cartridge that one reference stands for, and where it lies."""

    manifest: Manifest
    root: Path
    """The directory of its manifest and token ids."""
    location: str
    """Where its payload is."""
    token_ids: tuple[int, ...]
    document_ids: tuple[int, ...] | None


class Resolver:
    """Turns references into a `Selection`, from the registry, the configured roots and buckets."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings, self._clock = settings, clock
        self.registry = Registry(settings.registry_path, read_only=True)
        self._quarantine = Quarantine(settings.quarantine_dir)
        # A connection for each read there may be: a slow one keeps no other waiting.
        self.sources = Sources(S3Source(**settings.s3 | {"connections": MAX_READS}))
        self._manifests = ManifestCache(settings.manifests_dir, self.sources)
        self.contexts = Contexts(settings, self.registry)
        self.imports = Imports(settings, self.sources.s3, clock=clock)
        """What is made of `.pt` files that requests name."""
        self._registered: Lru[tuple[str, str], Found] = Lru(_MAX_REGISTERED)
        """By location and digest; once it was checked against the digest, it is not read again."""
        self._rows: Lru[str, list[RegistryEntry]] = Lru(_MAX_ROWS)
        """The registry's last answer for a name, for when it cannot be read."""
        self._refused: dict[str, float] = {}
        self._warned_s = float("-inf")
        self._lock = threading.Lock()
        self._load = lru_cache(maxsize=_MAX_REGISTERED)(self._load_anew)
        self.model: Fingerprint | None = None
        self.context = MAX_TOKENS
        """What is served, and how many tokens its context has; what does not fit is refused before its ids are read."""

    def pass_over(self, digest: str) -> None:
        """For a moment, let an id whose newest version this is stand for an older one: this one cannot be served."""
        now = self._clock()
        with self._lock:
            self._refused = {d: until for d, until in self._refused.items() if until > now} | {digest: now + _REFUSED_S}

    def resolve(self, references: Sequence[Reference], found: Mapping[Reference, Found] | None = None) -> Selection:
        """Return the selection. Raises `Refusal`: 404 unknown, 422 not usable so, 503 not to be had
        now.

        An id stands for its newest version that is sound and was not passed over, or else for its newest. Blocks as
        long as sources do. With `found`, earlier results of `find`, it blocks for the server's own directories only,
        and raises `NeedsReading` where another manifest must be read.
        """
        known = found or {}
        each = [known.get(reference) or self.find(reference, wait=found is None) for reference in references]
        manifests = tuple(one.manifest for one in each)
        kv = next((i for i, m in enumerate(manifests) if m.kind == "tokens"), len(manifests))
        for one in each[kv:]:
            self._check_computed(one, manifests[kv])
        if len({manifest.fingerprint.lora for manifest in manifests}) > 1:
            raise Refusal(422, "cartridges of different LoRA adapters, or of one and the base model, make no chain")
        if first := next((m for m in manifests[:-1] if m.chat is not None), None):
            raise Refusal(
                422, f"{first.name} is of a chat, which the request goes on with; in a chain it must be the last"
            )
        for manifest in manifests[1:kv]:
            try:
                check_shift(manifest.fingerprint.rope)
            except UnsupportedModel as error:
                raise Refusal(422, f"{manifest.name} cannot stand behind another cartridge: {error}") from None
        most, end = reach(manifests[0].fingerprint.architecture), sum(m.positions for m in manifests)
        if most is not None and len(manifests) > 1 and end > most:
            raise Refusal(422, f"the chain has {end} positions; this model's KV cannot be moved beyond {most}")
        documents = [one.document_ids for one in each if one.document_ids is not None]
        whole = tuple(chain.from_iterable(documents)) if len(documents) == len(each) else None
        afresh = tuple(m.digest for m, r in zip(manifests, references, strict=True) if r.force_redownload)
        places = tuple((str(one.root), one.location) for one in each)
        computed = len(each) - kv
        ids = tuple(
            chain.from_iterable([one.token_ids for one in each[:kv]] + [one.document_ids or () for one in each[kv:]])
        )
        return Selection(manifests, places, ids, whole, afresh, tuple(references), computed=computed)

    def _check_computed(self, one: Found, first: Manifest) -> None:
        """Raise `Refusal` for a cartridge that stands behind `first`, of tokens only, and cannot be computed there.

        LMCache finds KV from the first position on, and has none of `first`.
        """
        manifest, where = one.manifest, f"it stands behind {first.name}, which has no KV, so the engine computes both"
        if manifest.fingerprint.base.differences(first.fingerprint.base):
            raise Refusal(409, f"{first.name} and {manifest.name} are of different models")
        if manifest.kind == "trained" and one.document_ids is None:
            raise Refusal(422, f"{manifest.name} has no text to compute: {where}. Name it first")
        if manifest.kind == "trained" and self._settings.on_miss != "document":
            raise Refusal(
                422, f"{manifest.name} is trained: {where}. Name it first, or have its document's text take its place by the "
                "setting on_miss=document",
            )  # fmt: skip

    def find(self, reference: Reference, *, wait: bool = True) -> Found:
        """Return the cartridge that one reference stands for, no context but of the current request's tenants. Raises `Refusal`.

        Raises `NeedsReading` in place of a read that may hang, unless it is to `wait`.
        """
        where = reference.where()
        is_file = where != "registry" and reference.id.endswith(SUFFIX)
        if is_file or where == "local":
            if not wait:
                raise NeedsReading(reference, os.path.normpath(reference.id))
            root = self._imported(reference, where) if is_file else self._local(reference)
            return self._read(reference, root, str(root), None)
        if where == "s3":
            self._check_bucket(reference)
            return self._read(reference, self._fetched(reference, reference.id, wait), reference.id, None)
        rows, refusals = self.candidates(reference), {}
        now, refused = self._clock(), self._refused
        for row in sorted(rows, key=lambda row: refused.get(row.digest, 0) > now):
            try:
                return self._of(reference, row, wait)
            except Refusal as refusal:
                if refusal.retry_after_s is not None:
                    raise
                self.pass_over(row.digest)
                refusals[row] = refusal
        raise refusals[rows[0]]

    def candidates(self, reference: Reference) -> list[RegistryEntry]:
        """Return the versions that a registered name may mean, the newest first. Raises `Refusal`: 404, 503."""
        rows = self.contexts.seen(self._known(reference))
        own = (not rows or rows[0].version > 1) and self.contexts.own([reference.id])  # its maker means it alone
        if own and not (rows := [row for row in rows if row.version == 1]):
            raise StillMade(503, f"{_shown(reference)} is still being made", retry_after_s=2)
        if not rows:
            raise Refusal(404, f"no cartridge is called {_shown(reference)}")
        return rows

    def _known(self, reference: Reference) -> list[RegistryEntry]:
        try:
            rows = self.registry.candidates(reference.id)
        except CartridgeNotFound:
            self._rows.pop(reference.id)
            return []
        except RegistryError as error:
            known = self._rows.get(reference.id)
            if self._clock() >= self._warned_s + _WARN_EVERY_S:
                self._warned_s = self._clock()
                logger.warning("what was found before is served on: %s", error)
            if known is None:
                raise unreadable(error) from None
            return known
        return self._rows.put(reference.id, rows)

    def _of(self, reference: Reference, row: RegistryEntry, wait: bool) -> Found:
        """Return one registered version. Raises as `find` does."""
        if not is_remote(row.location):
            found = None if reference.force_redownload else self._registered.get((row.location, row.digest))
            if found is not None:
                return self._usable(reference, found)
            if not wait:
                raise NeedsReading(reference, row.location)
            return self._read(reference, Path(row.location), row.location, row.digest)
        root = None if reference.force_redownload else self._manifests.known(row.location)
        if root is None:
            root = self._fetched(reference, row.location, wait)
        elif not self._is_sound(root, row.digest):
            root = self._fetched(reference, row.location, wait, max_age_s=_REPLACED_S)
        return self._read(reference, root, row.location, row.digest)

    def _read(self, reference: Reference, root: Path, location: str, digest: str | None) -> Found:
        """Read a manifest and what belongs to it. Raises `Refusal` unless it can be used."""
        try:
            manifest, ids, document = self._load(root, digest, _stamp(root))
        except CartridgeError:
            raise Refusal(422, f"cartridge {_shown(reference)} is damaged; see `lmcache-cartridge verify`") from None
        found = Found(manifest, root, location, ids, document)
        if digest is not None and location == str(root):
            self._registered.put((location, digest), found)
        return self._usable(reference, found)

    def _usable(self, reference: Reference, found: Found) -> Found:
        """Return it. Raises `Refusal` for a quarantined one without text, unless it is fetched anew."""
        manifest = found.manifest
        is_needed = manifest.kind == "trained" and found.document_ids is None and not reference.force_redownload
        reason = self._quarantine.reason(manifest.digest, found.location) if is_needed else None
        copies = self.registry.having([manifest.digest]) if reason else []
        if reason and all(self._quarantine.reason(row.digest, row.location) for row in copies):
            places = {str(found.root): manifest.name, found.location: manifest.name}
            raise Refusal(422, f"cartridge {manifest.name} is quarantined: {without_paths(reason, places)}")
        return found

    def _fetched(self, reference: Reference, location: str, wait: bool, *, max_age_s: float = MAX_AGE_S) -> Path:
        """Return the local copy of a manifest in S3, not older than `max_age_s`."""
        force = reference.force_redownload
        if not wait and (force or self._manifests.known(location, max_age_s) is None):
            raise NeedsReading(reference, location)
        try:
            return self._manifests.fetch(location, force=force, max_age_s=max_age_s)
        except SourceNotFound:
            raise Refusal(404, f"no cartridge is at {_shown(reference)}") from None
        except SourceError:
            raise Refusal(503, f"{_shown(reference)} cannot be reached", retry_after_s=5) from None
        except CartridgeError:
            raise Refusal(422, f"cartridge {_shown(reference)} is damaged") from None

    def _check_fits(self, manifest: Manifest) -> None:
        """Raise `Refusal` for what the engine cannot use."""
        try:
            if self.model is not None:
                manifest.fingerprint.check_fits(self.model, accept_weights=self._settings.accept_weights)
        except ModelMismatch as error:
            raise Refusal(409, f"{manifest.name} cannot be used with the model served here: {error}") from None
        if (size := manifest.positions) >= self.context:
            raise Refusal(
                400, f"{manifest.name} has {size} positions, which leave nothing of the context of {self.context}"
            )

    def _load_anew(
        self, root: Path, digest: str | None, stamp: int
    ) -> tuple[Manifest, tuple[int, ...], tuple[int, ...] | None]:
        """Return a cartridge's manifest, token ids and document ids. `stamp` is for the cache: it differs once replaced."""
        # The payload is the workers' to find sound or not: without it a document is still answered from its tokens.
        manifest = reading.load_manifest(root, digest, payload=False)
        self._check_fits(manifest)
        ids = tuple(reading.load_token_ids(manifest, root).tolist())
        if manifest.kind != "trained":
            return manifest, ids, ids
        is_short = manifest.document is not None and manifest.document.count < self.context
        document = reading.load_document_ids(manifest, root) if is_short else None
        return manifest, ids, None if document is None else tuple(document.tolist())

    def _is_sound(self, root: Path, digest: str) -> bool:
        """Whether the copy at `root` is undamaged, and of the artefact that was registered."""
        try:
            self._load(root, digest, _stamp(root))
        except CartridgeError:
            return False
        return True

    def _local(self, reference: Reference) -> Path:
        """Return the real path of a directory under a configured root; whatever is wrong, the client hears 404."""
        path = Path(reference.id)
        try:
            real = path.resolve(strict=True)
        except (OSError, ValueError, RuntimeError):
            real = None
        roots = [root.resolve() for root in self._settings.roots]
        is_private = PUBLISHED in str(real) or real and real.is_relative_to(self._settings.contexts_dir.resolve())
        if real is None or is_private or not path.is_absolute() or not any(map(real.is_relative_to, roots)):
            raise Refusal(404, f"no cartridge is at {_shown(reference)} {_under('roots', self._settings.roots)}")
        return real

    def _check_bucket(self, reference: Reference) -> None:
        if PUBLISHED in reference.id or not allowed(reference.id, self._settings.buckets):
            raise Refusal(404, f"no cartridge is at {_shown(reference)} {_under('buckets', self._settings.buckets)}")

    def _imported(self, reference: Reference, where: str) -> Path:
        """Return the artefact that was made of a `.pt` file, or that lies under such a name. Raises `Refusal`."""
        if where == "local":
            path = self._local(reference)
            return path if path.is_dir() else self.imports.of(str(path), _shown(reference))
        self._check_bucket(reference)
        return self.imports.of(reference.id, _shown(reference))


def _under(setting: str, places: Sequence[Any]) -> str:
    """Return, for an error message, which setting says where requests may look. It tells of nothing that is elsewhere."""
    return f"under the setting `{setting}`" + ("" if places else ", which is empty")


def _stamp(root: Path) -> int:
    """Return a number that changes when the artefact at `root` is replaced."""
    try:
        return (root / reading.MANIFEST).stat().st_mtime_ns
    except OSError:
        return 0


def _shown(reference: Reference) -> str:
    """Return the id for an error message: what the client sent, shortened; never a path of the server's."""
    return repr(shorten(reference.id))
