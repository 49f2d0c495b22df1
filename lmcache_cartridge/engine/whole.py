"""Whole: a trained cartridge is injected to its last position, or the request that has it ends.

LMCache brings whole chunks. What p leaves behind the last one, the tail, our worker writes itself, by the op of each attention
layer, in the step for which vLLM allocates its blocks. Blocks of what is not there are reported as not loaded, so vLLM ends
the request (`kv_load_failure_policy: fail`) before it samples.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..artifact.lru import Lru
from ..errors import CartridgeError
from ..memory.quantise import Quantiser
from . import host
from .contract import NULL_BLOCK, TAG
from .salts import grant_of

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.lmcache_cartridge.whole")


class Tail(NamedTuple):
    """What one request has of its cartridges behind the last whole chunk."""

    request_id: str
    tag: str
    skip: int
    """Positions of it that vLLM has already."""
    slots: list[int]
    """Where the others go."""
    turn: int = 0
    """1 where the request waits for LMCache from this step on. Its tail is written already, since vLLM shares its blocks as soon
    as it waits no more; but it cannot be ended before (vLLM 0.32), so there is a turn 2, to write what failed in the first.
    """


class _Owed(NamedTuple):
    first: int
    until: int
    is_tail: bool
    """Whether all whole chunks were found."""
    turn: int
    """See `Tail`."""


class Whole:
    """Which positions of trained cartridges LMCache does not bring. In the scheduler's thread."""

    def __init__(self, chunk_tokens: int, block_tokens: int) -> None:
        self._chunk, self._block = chunk_tokens, block_tokens
        self._owed: dict[str, _Owed] = {}
        self._lost: set[int] = set()
        self._tails: list[Tail] = []

    def owes(self, request: Request, computed: int, found: int, *, is_async: bool = False) -> int | None:
        """Return up to where positions are ours to inject: those that LMCache was not `found` to have, after those that are
        `computed`; None where none are. They are noted until `allocated`. `is_async` for one that waits for LMCache.
        """
        until = positions_to_inject(request)
        self._owed.pop(request.request_id, None)
        if found >= until:
            return None
        whole = until // self._chunk * self._chunk
        is_tail = found >= whole
        first = max(computed, whole) if is_tail else computed
        self._owed[request.request_id] = _Owed(first, until, is_tail, int(is_async and is_tail))
        return until

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """Note which blocks were allocated for what is owed."""
        owed = self._owed.pop(request.request_id, None)
        if owed is None or not (external or owed.turn == 2):
            return
        if owed.turn == 1:
            self._owed[request.request_id] = owed._replace(turn=2)
        ids, block = blocks.get_block_ids()[0], self._block
        slots = [ids[at // block] * block + at % block for at in range(owed.first, owed.until)]
        if owed.is_tail:
            tag = (request.kv_transfer_params or {})[TAG]
            skip = owed.first - owed.until // self._chunk * self._chunk
            self._tails.append(Tail(request.request_id, tag, skip, slots, owed.turn))
        else:
            self._lost.update(slot // block for slot in slots)

    def step(self, ended: set[str]) -> tuple[set[int], list[Tail]]:
        """Return which blocks have nothing in them, and what is to be written, of all that was allocated since the last call.
        Requests that have `ended` are forgotten.
        """
        for request_id in ended:
            self._owed.pop(request_id, None)
        step = self._lost, self._tails
        self._lost, self._tails = set(), []
        return step


class InjectsWhole:
    """Makes a connector inject all of a trained cartridge or nothing. A class to inherit before vLLM's."""

    whole: Whole
    """In the scheduler's process."""
    failed: set[int]
    """In the worker's: blocks of this step that have something to be injected, and do not have it."""
    spoilt: Lru[str, bool]
    """Requests whose tail could not be written."""
    metadata: Any
    """Of this step."""

    def write_tails(
        self, tail_of: Callable[[str], torch.Tensor | None], layers: Sequence[tuple[Any, torch.Tensor]],
        quantiser: Quantiser | None, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        """Write tails, as `CartridgeStore.tail` has them, to the caches of these layers from now on. In the worker's process.

        `quantiser` is for caches that are not of `dtype`, in which the model computes.
        """
        self._tail_of, self._layers, self._quantiser, self._dtype = tail_of, layers, quantiser, dtype
        self.failed, self.spoilt = set(), Lru(4096)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take what the scheduler says of the step that begins."""
        super().bind_connector_metadata(connector_metadata)  # type: ignore[misc]
        self.metadata = connector_metadata

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Have LMCache load what this step needs, and write the tails."""
        super().start_load_kv(forward_context, **kwargs)  # type: ignore[misc]
        lost, tails = self.metadata.cartridges
        self.failed = set(lost)
        for tail in tails:
            if tail.turn == 2 and tail.request_id not in self.spoilt:
                continue
            try:
                self._write(tail)
            except Exception as error:
                logger.error("the end of a cartridge was not written: %s", error)
                self.spoilt.put(tail.request_id, True)
                if tail.turn != 1:
                    self.failed.update(slot // self._layers[0][1].shape[2] for slot in tail.slots)

    @torch.inference_mode()
    def _write(self, tail: Tail) -> None:
        kv, end = self._tail_of(tail.tag), tail.skip + len(tail.slots)
        if kv is None or kv.shape[2] < end:
            raise CartridgeError("it is not in memory")
        kv = kv[:, :, tail.skip : end]
        if self._quantiser:
            kv = self._quantiser.numbers(kv, self._dtype)
        write_layers(self._layers, kv, torch.tensor(tail.slots))

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that could not be filled, without the one that requests share and nothing reads."""
        failed, self.failed = self.failed, set()
        return (super().get_block_ids_with_load_errors() | failed) - {NULL_BLOCK}  # type: ignore[misc]

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Note which blocks were allocated for what is ours to inject."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)  # type: ignore[misc]
        self.whole.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        """Return what the workers do in this step."""
        metadata = super().build_connector_meta(scheduler_output)  # type: ignore[misc]
        metadata.cartridges = self.whole.step(scheduler_output.finished_req_ids)
        return metadata


def positions_to_inject(request: Request) -> int:
    """Return how many leading positions of a request must not be computed; 0 for one without trained cartridges."""
    return grant_of(request.kv_transfer_params).get("must_inject", 0)


def write_layers(layers: Sequence[tuple[Any, torch.Tensor]], kv: torch.Tensor, slots: torch.Tensor) -> None:
    """Have attention layers write KV `[2, L, T, H, D]` to slots of their caches, by their own op."""
    for (module, cache), layer in zip(layers, kv.unbind(1), strict=True):
        # The CUDA ops take a token stride only; the CPU op takes a head stride too and needs no copy.
        keys, values = layer if cache.is_cpu else layer.to(cache.device).contiguous()
        host.write_kv(module, keys, values, cache, slots.to(cache.device))
