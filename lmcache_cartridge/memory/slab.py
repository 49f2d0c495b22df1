"""Slab: memory cut into slots of one size. Every chunk of an engine has the same size, so nothing fragments."""

from __future__ import annotations

import torch

from ..errors import OverBudget

_PAGE = 4096
"""Alignment of slots of whole pages; the kernel takes a tenth longer to read into memory that is not so aligned, and twice
as long where it is not even aligned to 64 bytes."""


class Slab:
    """`budget_bytes // slot_bytes` slots in one allocation on `device`, page-locked where CUDA will copy from it.

    Without page-locking the system commits memory only as slots are written. Not thread-safe.
    """

    def __init__(self, slot_bytes: int, budget_bytes: int, *, device: str = "cpu", pin_memory: bool = False) -> None:
        """Raises `OverBudget` when not even one slot fits."""
        self.slot_bytes = slot_bytes
        self.slots = budget_bytes // slot_bytes
        if self.slots < 1:
            raise OverBudget(
                f"a budget of {budget_bytes} bytes holds no chunk of {slot_bytes} bytes; raise cpu_bytes to at least "
                f"{slot_bytes}, better to the size of the cartridges in use"
            )
        memory = torch.empty(self.slots * slot_bytes + _PAGE, dtype=torch.uint8, device=device, pin_memory=pin_memory)
        self._memory = memory[-memory.data_ptr() % _PAGE :]
        self._free = list(range(self.slots - 1, -1, -1))

    @property
    def free_slots(self) -> int:
        """Slots that `take` can still hand out."""
        return len(self._free)

    def take(self) -> int:
        """Return a slot, now the caller's. Raises `IndexError` when none is free."""
        return self._free.pop()

    def give(self, slot: int) -> None:
        """Return a slot; its bytes may be overwritten from now on."""
        self._free.append(slot)

    def tensor(self, slot: int) -> torch.Tensor:
        """Return the slot's memory as flat uint8; a view, valid while the slot is the caller's."""
        return self._memory[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]
