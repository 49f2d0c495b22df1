"""CartridgeBackend: LMCache's in-process storage plugin. LMCache keys in, memory objects out; read-only.

Contract of lmcache 0.5.6, found by running it: an exception in `contains` stalls the scheduler for seconds, one in
`batched_get_blocking`, `batched_submit_put_task` or `get_allocator_backend` kills the engine, and one in the
constructor is logged and the plugin dropped. So nothing here raises but the constructor, whose error
`CartridgeConnector` finds in `CartridgeBackend.refusal` and stops the server with.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from lmcache.logging import init_logger
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import (
    MemoryAllocatorInterface,
    MemoryFormat,
    MemoryObj,
    MemoryObjMetadata,
    TensorMemoryObj,
)
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

from ..errors import UnsupportedEngine
from ..memory.layout import HELD, ChunkShape
from ..memory.store import CartridgeStore
from ..settings import from_extra_config
from . import contract, host_inprocess
from .describe import describe
from .trust import opened

logger = logging.getLogger(__name__)
init_logger(__package__.partition(".")[0])  # our records, the core's too, go where LMCache's go

TAG, TENANT = (name.removeprefix("lmcache.tag.") for name in (contract.TAG, contract.TENANT))
"""The request tag under which a cartridge or chain is found, its value is the digests, joined by dots; and the one that
keeps what LMCache saves for one tenant from the others, which is no matter to cartridges."""

_store: CartridgeStore | None = None
_lock = threading.Lock()


class CartridgeBackend(StoragePluginInterface):
    """Answers LMCache's keys from a `CartridgeStore`, which all instances in a process share, opened by the first.

    LMCache may build this class again without closing the old instance (`POST /backends`); sharing the store keeps
    the memory budget true.
    """

    refusal: ClassVar[Exception | None] = None
    """Why the last constructor call in this process raised."""

    def __init__(self, **kwargs: Any) -> None:
        """Called by LMCache with keywords only. Raises `CartridgeError` when this engine cannot be served."""
        super().__init__(**kwargs)
        try:
            self.store = self._open()
            """None in the scheduler's process, which has no memory to serve from."""
            if self.store is not None:
                self._over = memory_objects(self.store.shape)
        except Exception as error:
            CartridgeBackend.refusal = error
            raise
        CartridgeBackend.refusal = None

    def _open(self) -> CartridgeStore | None:
        if self.metadata.role == "scheduler":
            return None
        host_inprocess.keep_from_adopting(self.local_cpu_backend, lambda chunk: isinstance(chunk, CartridgeMemory))
        settings = from_extra_config(self.config.extra_config, type(self).__name__)
        if 1000 * settings.lookup_timeout_s >= self.config.lookup_timeout_ms:
            raise UnsupportedEngine(
                f"lookup_timeout_s is {settings.lookup_timeout_s}, but LMCache gives up on a lookup after "
                f"lookup_timeout_ms: {self.config.lookup_timeout_ms}; make ours shorter"
            )
        lmcache_engine = host_inprocess.lmcache_engine()
        if lmcache_engine is None:
            raise UnsupportedEngine(
                "LMCache has no vLLM engine in this process; the plugin runs in vLLM's workers only"
            )
        engine = describe(self.config, self.metadata, lmcache_engine)
        global _store
        with _lock:
            if _store is None:
                _store = opened(settings, engine)
            return _store

    # Lookup: LMCache's lookup thread and worker thread.

    def batched_contains(self, keys: list[CacheEngineKey], pin: bool = False) -> int:
        """Return how many leading keys are resident; with `pin`, load what is missing first and lease it all."""
        if not keys or self.store is None:
            return 0
        ask = self.store.lookup if pin else self.store.resident
        try:
            return ask([key.chunk_hash for key in keys], _tag(keys[0]))
        except Exception:
            return _failed(0)

    def contains(self, key: CacheEngineKey, pin: bool = False) -> bool:
        """`batched_contains` for one key; a trained cartridge of several chunks is never pinned by one of them."""
        return self.batched_contains([key], pin) == 1

    def pin(self, key: CacheEngineKey) -> bool:
        """Lease a chunk, loading it if need be; False if that cannot be."""
        return self.contains(key, pin=True)

    def unpin(self, key: CacheEngineKey) -> bool:
        """End one lease of a chunk; False if it has none."""
        try:
            return self.store is not None and self.store.release(key.chunk_hash, _tag(key) if key.tags else None)
        except Exception:
            return _failed(False)

    # Retrieval: LMCache's worker thread.

    def batched_get_blocking(self, keys: list[CacheEngineKey]) -> list[MemoryObj | None]:
        """Return a memory object over the resident bytes of each key, LMCache's to release; None from a miss on."""
        found: list[MemoryObj | None] = []
        try:
            if keys and self.store is not None:
                # LMCache asks for the chunks of one request, and a request has one set of tags.
                loans = self.store.lend_run([key.chunk_hash for key in keys], _tag(keys[0]))
                found = [*map(self._over, loans)]
        except Exception:
            found = _failed([])
        return found + [None] * (len(keys) - len(found))

    def get_blocking(self, key: CacheEngineKey) -> MemoryObj | None:
        """Return a memory object over the chunk's resident bytes, LMCache's to release, or None on a miss."""
        return self.batched_get_blocking([key])[0]

    # Everything LMCache asks of a backend that stores: nothing is.

    def exists_in_put_tasks(self, key: CacheEngineKey) -> bool:
        """Return False: nothing is ever being stored."""
        return False

    def batched_submit_put_task(
        self, keys: Sequence[CacheEngineKey], objs: list[MemoryObj], *_: Any, **__: Any
    ) -> None:
        """Store nothing and take no reference."""

    def remove(self, key: CacheEngineKey, force: bool = True) -> bool:
        """Remove nothing and return False; cartridges are removed from the registry."""
        return False

    def touch_cache(self) -> None:
        """Do nothing: recency is noted when chunks are used."""

    def get_allocator_backend(self) -> Any:
        """Return LMCache's own CPU backend, since this one allocates nothing for others."""
        return self.local_cpu_backend

    def close(self) -> None:
        """Stop loading; objects handed out stay valid. Calling again is no change."""
        global _store
        if self.store is None:
            return
        with _lock:
            if _store is self.store:
                _store = None
        self.store.close()

    def __str__(self) -> str:
        return type(self).__name__


def _failed(answer: Any) -> Any:
    """Log the error that is being handled, and return what LMCache is told instead."""
    logger.exception("a cartridge lookup failed; LMCache is told of a miss")
    return answer


def memory_objects(shape: ChunkShape) -> Callable[[Any], MemoryObj]:
    """Return what makes a memory object over the bytes of a loan, LMCache's to release, which ends the loan. Copies nothing.

    A fresh one for each hold: LMCache counts references in it.
    """
    size = torch.Size([2 * shape.heads, shape.layers, shape.tokens, shape.head_size])
    dtype = HELD[shape.dtype]

    def over(loan: Any) -> MemoryObj:
        data = loan.bytes
        metadata = MemoryObjMetadata(
            size, dtype, data.data_ptr(), shape.size_bytes, ref_count=1, fmt=MemoryFormat.KV_2LTD, shapes=[size],
            dtypes=[dtype],
        )  # fmt: skip
        made = CartridgeMemory(data, metadata, _LENDER)
        made.end_loan = loan.close
        return made

    # Else a request would find out that LMCache's have changed.
    over(SimpleNamespace(bytes=torch.empty(0), close=lambda: None)).ref_count_down()
    return over


class CartridgeMemory(TensorMemoryObj):
    """A memory object over a cartridge's resident bytes: LMCache may read it, and keeps it in no cache of its own."""

    end_loan: Callable[[], None]


class _Lender(MemoryAllocatorInterface):
    """The parent allocator of memory objects: LMCache frees an object, and its loan ends."""

    def free(self, memory_obj: MemoryObj, allocator_type: str | None = None) -> None:
        """End the object's loan. LMCache calls this with the object's lock held and sometimes twice."""
        memory_obj.invalidate()
        memory_obj.end_loan()

    def batched_free(self, memory_objs: list[MemoryObj], *_: Any, **__: Any) -> None:
        """End the loans of objects."""
        for memory_obj in memory_objs:
            self.free(memory_obj)

    def allocate(self, *_: Any, **__: Any) -> None:
        """Return None: it has nothing but what was lent."""

    batched_allocate = allocate


_LENDER = _Lender()


def _tag(key: CacheEngineKey) -> str | None:
    """Return the cartridge a tagged request names, None for an untagged one.

    A request with any other tag, an adapter's among them, asked LMCache to keep it apart, and gets nothing that was not
    made for that tag.
    """
    if not key.tags:
        return None
    tags = [(name, value) for name, value in key.tags if name != TENANT]
    if not tags:
        return None
    return str(tags[0][1]) if len(tags) == 1 and tags[0][0] == TAG else ""


def worker_store() -> CartridgeStore:
    """Return the store of this process. Raises `UnsupportedEngine` where there is none."""
    if _store is None:
        raise UnsupportedEngine("LMCache has not loaded the cartridge plugin in this worker")
    return _store
