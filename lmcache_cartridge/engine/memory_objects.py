"""MemoryObjects: what LMCache gets of resident chunks: memory objects over their bytes, which it frees to end a loan."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from lmcache.v1.memory_management import (
    MemoryAllocatorInterface,
    MemoryFormat,
    MemoryObj,
    MemoryObjMetadata,
    TensorMemoryObj,
)

from ..memory.layout import DTYPES, ChunkShape
from ..memory.tier import Hold


class MemoryObjects:
    """Makes memory objects over chunks of one shape, a fresh one for each loan: LMCache counts references in it.

    LMCache's own constructors take as long as all the rest of a hit. They make one object here; every other gets its
    attributes, with bytes, metadata, a lock and a loan of its own. What is shared is never written to (lmcache 0.5.6).
    """

    def __init__(self, shape: ChunkShape, layout: str) -> None:
        """`layout` is how the engine's injector reads chunks: a key of `layout.VIEWS`, or one of `tiles`."""
        planes = (2, shape.heads * shape.head_size) if layout == "kv_2ltd" else (2 * shape.heads, shape.head_size)
        size, dtype = torch.Size([planes[0], shape.layers, shape.tokens, planes[1]]), DTYPES[shape.dtype]
        metadata = MemoryObjMetadata(
            size, dtype, 0, shape.size_bytes, ref_count=1, fmt=MemoryFormat.KV_2LTD, shapes=[size], dtypes=[dtype]
        )
        first = TensorMemoryObj(torch.empty(0, dtype=torch.uint8), metadata, _Lender())
        self._metadata, self._object = dict(vars(metadata)), dict(vars(first))
        first.invalidate()  # it has no loan

    def over(self, loans: Sequence[Hold]) -> list[MemoryObj]:
        """Return an object over the bytes of each loan, LMCache's to release, which ends the loan. Copies nothing."""
        return list(map(self._over, loans))

    def _over(self, loan: Hold) -> MemoryObj:
        data = loan.bytes
        metadata = MemoryObjMetadata.__new__(MemoryObjMetadata)
        metadata.__dict__.update(self._metadata, address=data.data_ptr())
        made = TensorMemoryObj.__new__(TensorMemoryObj)
        # In one step: an object that is collected half-made must not be freed.
        made.__dict__.update(self._object, raw_data=data, meta=metadata, lock=threading.Lock(), loan=loan)
        return made


class _Lender(MemoryAllocatorInterface):
    """The `parent allocator` of every memory object: LMCache frees the object, its loan ends."""

    def free(self, memory_obj: MemoryObj, allocator_type: str | None = None) -> None:
        """End the object's loan. LMCache calls this with the object's lock held and sometimes twice."""
        memory_obj.valid = False
        memory_obj.loan.close()

    def batched_free(self, memory_objs: list[MemoryObj], *_: Any, **__: Any) -> None:
        """End the objects' loans."""
        for memory_obj in memory_objs:
            self.free(memory_obj)

    def allocate(self, *_: Any, **__: Any) -> None:
        """Return None: a lender has nothing but its loan."""

    def batched_allocate(self, *_: Any, **__: Any) -> None:
        """Return None: a lender has nothing but its loan."""
