"""CartridgeL2Adapter: LMCache's multiprocess storage plugin. Keys in, LMCache's own buffers filled; read-only.

Contract of lmcache 0.5.6, found by running it: a lookup that is never answered hangs its request for ever, and every
other one that asks for the same; a bitmap of the wrong length aborts a request while buffers are written; a buffer may
be freed as soon as its load is answered, and all of them once `close` returns. So nothing here raises but the
constructor, each task is answered by a deadline of its own, and nothing is written after that.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import torch
from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import create_event_notifier
from pydantic import Field, ValidationError

from ..artifact.cartridge import Place
from ..artifact.lru import Lru
from ..errors import SettingsError, UnsupportedEngine
from ..memory.claims import Claim
from ..memory.described import Engine
from ..memory.layout import HELD
from ..memory.store import CartridgeStore
from ..memory.tiles import WORD, has_blocks, is_tiled, unpack
from ..settings import Settings
from . import capture, host
from .capture import Captures
from .contract import CONTROL
from .control import ControlServer
from .l1_copies import L1Copies
from .l2_tasks import Task, Tasks
from .report import Report, ReportServer, check_ids
from .salts import is_check, tag_part, tag_salt
from .trust import opened
from .versions import check_versions

logger = logging.getLogger(__name__)
init_logger(__package__.partition(".")[0])  # our records, the core's too, go where LMCache's go

_LOOKUP_GRACE_S = 2.0
"""How much longer than `lookup_timeout_s` a lookup may take before it is answered with what it has: nothing."""
_LOAD_DEADLINE_S = 30.0
"""How long a load may take before it is answered with what is written."""
_LOOKUP_THREADS = 8
"""As many as LMCache has lookups in flight (`--l2-prefetch-max-in-flight`)."""
_LOAD_THREADS = 2
_MAX_TAGS = 1 << 16
"""Cartridges and chains whose salts are remembered."""


class Parameters(Settings):
    """`adapter_params` of LMCache's server: settings, and what is of this mode alone."""

    control: Annotated[str, Field(min_length=1)]
    """Path of our socket."""
    store_ack: bool = True
    """Whether LMCache hears that what it stores here is stored."""
    lmcache_http: str | None = None
    """Where LMCache's server answers HTTP, so that evicting drops its copies too."""
    engines: Annotated[int, Field(ge=1)] = 1
    """How many engines of different names may be served at once: each has an equal part of `cpu_bytes`."""


class CartridgeL2Adapter(L2AdapterInterface):
    """Answers LMCache's lookups from one `CartridgeStore` for each engine rank that has confirmed what it is.

    A request without cartridges is answered by prefill cartridges, for their own tokens, whatever its salt: its KV is a
    function of the tokens that it brought itself. A cartridge that a request names is found under salts of its tag only.
    """

    def __init__(self, params: Mapping[str, Any], *, l1_memory_desc: Any = None) -> None:
        """Called by LMCache's server. Raises `CartridgeError`, which ends the server's start, with what is wrong."""
        super().__init__(max_capacity_bytes=0)
        try:
            given = Parameters(**params)
        except ValidationError as error:
            raise SettingsError(f"adapter_params: {error}") from None
        check_versions(unproven=given.unproven_versions)
        self._parameters = given
        self._settings = given.model_copy(update={"cpu_bytes": given.cpu_bytes // given.engines})
        self._l1_bytes = getattr(l1_memory_desc, "size", None)
        self._ranks: dict[tuple[str, int], EngineRank] = {}
        self._present: Counter[tuple[str, int]] = Counter()
        """How many processes there are that have reported as a rank."""
        self._tags: Lru[str, str] = Lru(_MAX_TAGS)
        self._checks: Lru[str, tuple[int, MemoryLayoutDesc | None]] = Lru(1 << 10)
        """By which hash LMCache's server was seen to name the chunk of each check whose report has not come, and of what it
        makes its objects.
        """
        self._lock = threading.Lock()
        self._stored: dict[int, L2StoreResult] = {}
        self._store_ids, self._store_event = count(1), create_event_notifier()
        self._lookups = Tasks("lookup", _LOOKUP_THREADS, self._settings.lookup_timeout_s + _LOOKUP_GRACE_S)
        self._loads = Tasks("load", _LOAD_THREADS, _LOAD_DEADLINE_S)
        self._reports = ReportServer(Path(given.control), self._accept, self._gone)
        logger.info("cartridges of %s wait for vLLM's workers at %s", given.home, given.control)

    # What vLLM's workers tell.

    def _accept(self, report: Report, check: str) -> str:
        """Open a store for a rank that says what it is, and return the path of its control socket.

        Raises `CartridgeError` if it must be served nothing.
        """
        if (seen := self._checks.pop(check)) is None:
            raise UnsupportedEngine(
                "this adapter was not asked for the chunk that vLLM looked up: vLLM talks to another LMCache server. "
                f"lmcache.mp.port and {CONTROL} must be those of one"
            )
        if seen[0] not in host.server_hasher(report.chunk_tokens)(check_ids(report.chunk_tokens)):
            raise UnsupportedEngine(
                "LMCache's server names chunks by another algorithm than blake3, by which cartridges are found: every lookup "
                "would miss. Start LMCache's server without --hash-algorithm"
            )
        with self._lock:
            rank = self._ranks.get(report.key)
            if rank is None:
                self._make_room(report.model_name)
                rank = self._ranks[report.key] = self._open(report)
            elif rank.report != report:
                raise UnsupportedEngine(
                    f"an engine of the same name was here before and writes KV as {rank.report.layout} in chunks of "
                    f"{rank.report.chunk_tokens}, not {report.layout} and {report.chunk_tokens}; restart LMCache's server"
                )
            if not rank.takes(seen[1]):
                raise UnsupportedEngine(
                    f"LMCache's server keeps chunks as {seen[1]}, not all of what this engine has: its --chunk-size must be at "
                    "most the model's sliding window, and --separate-object-groups off"
                )
            if not self._present[report.key]:  # of an earlier process nothing is known that is true of this one
                rank.trust.begin_trials()
                rank.copies.drop(lambda key: tag_part(key.cache_salt) is None)
            self._present[report.key] += 1
            return rank.control.path

    def _gone(self, report: Report) -> None:
        """Note that a rank's process has ended. Its store stays, warm, until another engine needs the memory."""
        with self._lock:
            self._present[report.key] -= 1

    def _make_room(self, model_name: str) -> None:
        """Close the stores of engines that are gone. The lock is held. Raises `UnsupportedEngine` where too many are not."""
        others = {name for name, _ in self._ranks} - {model_name}
        living = {name for name in others if any(self._present[rank] for rank in self._ranks if rank[0] == name)}
        if len(living) >= self._parameters.engines:
            raise UnsupportedEngine(
                f"LMCache's server has memory for the cartridges of {self._parameters.engines} engine(s) and serves "
                f"{', '.join(sorted(living))}: end that, start this engine with an LMCache server and `control` of its own, "
                f'or set "engines": {len(living) + 1} in adapter_params, which divides cpu_bytes among them'
            )
        for rank in [rank for rank in self._ranks if rank[0] in others - living]:
            logger.info("the cartridges of %s are let go: it is gone, and another engine has come", rank[0])
            self._ranks.pop(rank).close()

    def _open(self, report: Report) -> EngineRank:
        if report.layout != ("heads", "fused")[report.fingerprint.planes - 1] and not is_tiled(report.layout):
            raise UnsupportedEngine(
                f"KV in the layout {report.layout} cannot be made here; install one version on both sides"
            )
        engine = Engine(
            fingerprint=report.fingerprint,
            chunk_tokens=report.chunk_tokens,
            rank=report.rank,
            world=report.world // report.stages,
            layout=report.layout,
            hasher=host.server_hasher(report.chunk_tokens),
            pin_memory=False,
            allow_trained=report.allow_trained,
            layers=report.layers and range(*report.layers),
            quantiser=report.quantiser,
        )
        store = opened(self._settings, engine)
        return EngineRank(
            report, store, self._tags, self._l1_bytes and self._l1_bytes // report.world, self._parameters.lmcache_http
        )

    # Lookup: LMCache's prefetch thread.

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return the fd that is readable once a lookup is answered."""
        return self._lookups.fd

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """Look leading chunks up and lease them, each rank's by themselves; return the task at once."""
        if keys and is_check(keys[0].cache_salt):  # here: other lookups may have all threads
            self._checks.put(keys[0].cache_salt, (_hash(keys[0]), group_layout_descs.get(0)))
        return self._lookups.submit(len(keys), lambda task: self._lookup(task, keys, group_layout_descs))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Return which keys can be loaded, once; None before and after that."""
        return self._lookups.take(task_id)

    def _lookup(self, task: Task, keys: Sequence[ObjectKey], descs: Mapping[int, MemoryLayoutDesc]) -> None:
        for row in _rows(keys):
            first = keys[row[0]]
            rank, tag = self._find(first)
            if rank is None or first.object_group_id or not rank.takes(descs.get(first.object_group_id)):
                continue
            found = rank.lookup([_hash(keys[i]) for i in row], tag)
            if not task.add(row[:found]):
                self.submit_unlock([keys[i] for i in row[:found]])

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """End one lease of each chunk."""
        for key in keys:
            try:
                rank, tag = self._find(key)
                if rank is not None:
                    rank.release(_hash(key), tag)
            except Exception:
                logger.exception("a chunk was not released; its lease runs out")

    # Load: LMCache's prefetch thread.

    def get_load_event_fd(self) -> int:
        """Return the fd that is readable once a load is answered."""
        return self._loads.fd

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Fill LMCache's buffers with resident chunks; return the task at once."""
        return self._loads.submit(len(keys), lambda task: self._load(task, keys, objects))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Return which buffers are filled, once; None before and after that."""
        return self._loads.take(task_id)

    def _load(self, task: Task, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> None:
        for i, (key, target) in enumerate(zip(keys, objects, strict=True)):
            rank, tag = self._find(key)
            if rank is None or (loan := rank.lend(_hash(key), tag)) is None:
                continue
            with loan:
                if not task.add([i], lambda: _fill(target, loan.bytes, rank.report.groups)):  # noqa: B023 - called before the next turn
                    return
                rank.copies.note(key)

    def _find(self, key: ObjectKey) -> tuple[EngineRank | None, str | None]:
        """Return who serves a key and the tag it stands for; nobody where the engine or the tag is not known."""
        rank, part = self._ranks.get((key.model_name, key.kv_rank)), tag_part(key.cache_salt)
        if part is None:
            return rank, None
        tag = self._tags.get(part)
        return (None, None) if tag is None else (rank, tag)

    # Everything LMCache asks of an adapter that stores: nothing is, but for what somebody means to fetch.

    def get_store_event_fd(self) -> int:
        """Return the fd that is readable once a store is answered."""
        return self._store_event.fileno()

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Store nothing and say so by `store_ack`: true is quiet; false keeps LMCache's `skip_l1` from dropping data.

        What somebody means to fetch is copied.
        """
        for key, chunk in zip(keys, objects, strict=False):  # whatever comes, nothing may raise here
            rank = self._ranks.get((key.model_name, key.kv_rank))
            if rank is not None and chunk.raw_tensor is not None:
                rank.captures.keep(key.cache_salt, _hash(key), _raw(chunk))
        task_id = next(self._store_ids)
        self._stored[task_id] = L2StoreResult(self._parameters.store_ack, 0)
        self._store_event.notify()
        return task_id

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Return the answers since the last call."""
        return {task_id: self._stored.pop(task_id) for task_id in list(self._stored)}

    def get_memory_tags(self) -> Any:
        """Return of what kind of memory chunks come. LMCache asks from 0.5.7 on."""
        api = host.module("lmcache.v1.distributed.api")
        return api.MemoryTags(api.MemorySegment.STORAGE, api.MemoryResidency.LOCAL)

    def report_status(self) -> dict[str, Any]:
        """Return nothing but that we are there: vLLM's `/metrics` tell what each rank is served."""
        return {"is_healthy": True}

    def close(self) -> None:
        """End all work; no buffer of LMCache's is touched afterwards. Blocks for what is being copied or looked up."""
        self._reports.close()
        for tasks in (self._loads, self._lookups):
            tasks.close()
        with self._lock:
            ranks, self._ranks = self._ranks, {}
        for rank in ranks.values():
            rank.close()
        self._store_event.close()


class EngineRank:
    """What one confirmed rank of an engine is served: a store that tells which tags are claimed, and knows their keys from
    then on.
    """

    def __init__(
        self, report: Report, store: CartridgeStore, tags: Lru[str, str], l1_bytes: int | None, http: str | None
    ) -> None:
        """`tags` are those that were claimed, by salt; `l1_bytes` is what LMCache has for its own copies of one prefix,
        None where that is not known.
        """
        self.report, self._store, self._tags, self._l1_bytes = report, store, tags, l1_bytes
        self.control, self.copies = ControlServer(lambda: self), L1Copies(http)
        self._dtype, self._objects = _objects(report, store)
        self.captures = Captures((l1_bytes or 1 << 30) // store.shape.size_bytes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def close(self) -> None:
        """Serve this rank no more. Blocks for what is being loaded."""
        self.control.close()
        self._store.close()

    def takes(self, desc: MemoryLayoutDesc | None) -> bool:
        """Whether LMCache's objects have room for exactly our chunks."""
        if desc is None or {*desc.dtypes} != {self._dtype}:
            return False
        return [tuple(shape) for shape in desc.shapes] in self._objects

    def claim(self, tag: str, places: Mapping[str, Place]) -> Claim:
        """See `CartridgeStore.claim`. What LMCache has no room for is refused: it would miss, every time."""
        self._tags.put(tag_salt(tag), tag)
        return self._store.claim(tag, places, self._room)

    def _room(self, chunks: int) -> str | None:
        chunk_bytes = self._store.shape.size_bytes
        if self._l1_bytes is None or chunks * chunk_bytes <= self._l1_bytes:
            return None
        return (
            f"its {chunks} chunks of {chunk_bytes} bytes do not fit into the {self._l1_bytes} bytes that LMCache's server "
            "has for them; give it more with --l1-size-gb (serve: --l1-bytes)"
        )

    def evict(self, digest: str) -> int:
        """See `CartridgeStore.evict`. LMCache's own copies of what is in no memory of ours any more go too."""
        evicted = self._store.evict(digest)
        self.copies.drop(lambda key: self._is_of(key, digest))
        return evicted

    def captured(self, name: str, token_ids: list[int], chunk: int) -> bytes | None:
        """See `capture.captured`."""
        report, shape = self.report, self._store.shape
        if report.groups or report.stages > 1 or shape.planes == 1:
            raise UnsupportedEngine(
                "KV cannot be fetched from engines of several stages, with groups of layers or latent vectors"
            )
        hashes = [*self._store.engine.hasher(token_ids[: (chunk + 1) * report.chunk_tokens])]
        raw = self.captures.take(name, hashes[-1] if hashes else 0)
        return None if raw is None else capture.as_heads(unpack(raw, shape, report.layout))

    def _is_of(self, key: ObjectKey, digest: str) -> bool:
        """Whether a key may be of a cartridge, and its chunk is not resident."""
        part = tag_part(key.cache_salt)
        tag = None if part is None else self._tags.get(part) or ""
        if tag is not None and digest != tag and digest not in tag.split("."):
            return False
        return self._store.resident([_hash(key)], tag) == 0


def _rows(keys: Sequence[ObjectKey]) -> list[list[int]]:
    """Return the positions of each rank's and group's keys, of one request; within one they are in the prompt's order."""
    rows: dict[tuple, list[int]] = {}
    for i, key in enumerate(keys):
        rows.setdefault((key.kv_rank, key.object_group_id), []).append(i)
    return list(rows.values())


def _hash(key: ObjectKey) -> int:
    return int.from_bytes(key.chunk_hash, "big")


def _objects(
    report: Report, store: CartridgeStore
) -> tuple[torch.dtype, tuple[list[tuple[int, ...]], list[tuple[int, ...]]]]:
    """Return the dtype and the shapes of LMCache's objects that hold a chunk in the layout that the engine confirmed."""
    (heads, layers, tokens, head_size), dtype = store.shape[:4], HELD[store.shape.dtype]
    width = head_size
    if store.shape.planes == 2:
        width *= 2 * heads
        if has_blocks(report.layout):
            dtype, width = WORD, width * dtype.itemsize // WORD.itemsize
    counts = [len(group) for group in report.groups] or [layers]
    return dtype, ([(count, tokens, width) for count in counts], [(1, count, tokens, width) for count in counts])


def _raw(chunk: MemoryObj) -> torch.Tensor:
    return chunk.raw_tensor.view(torch.uint8)[: chunk.get_size()]


def _fill(target: MemoryObj, chunk: torch.Tensor, groups: Sequence[Sequence[int]] = ()) -> None:
    """Copy a chunk, the layers of each group together. Raises where the buffer is gone, or of another size."""
    order = [layer for group in groups for layer in group] or [0]
    for row, layer in zip(_raw(target).chunk(len(order)), order, strict=True):
        row.copy_(chunk.chunk(len(order))[layer])
