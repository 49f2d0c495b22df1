"""Saving: which requests LMCache must not save, and for whom and for which adapter it saves the others. In-process mode."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from . import host_inprocess
from .contract import ADAPTER, TENANT
from .salts import adapter_salt, grant_of, is_apart

if TYPE_CHECKING:
    from vllm.v1.request import Request


def keep_apart(request: Request) -> None:
    """Have LMCache find and save KV for a request beside those with the same `cache_salt` and LoRA adapter only.

    LMCache's keys in-process have no salt, and know no adapter; they have request tags, and those of a client's own
    stay. The request gets parameters of its own: the caller's may be shared with other requests.
    """
    if request.sampling_params is None:
        return
    given = request.kv_transfer_params or {}
    params = {name: value for name, value in given.items() if name not in (TENANT, ADAPTER)}
    params |= tenant(grant_of(given).get("salt", request.cache_salt))
    if is_apart(given, lora_request := request.lora_request):
        is_known = lora_request is not None and lora_request.load_inplace  # which has another salt each time
        params[ADAPTER] = given.get(ADAPTER) if is_known and ADAPTER in given else adapter_salt("", lora_request)
    if params != (request.kv_transfer_params or {}):
        sampling = copy(request.sampling_params)
        sampling.extra_args = (sampling.extra_args or {}) | {"kv_transfer_params": params}
        request.sampling_params, request.kv_transfer_params = sampling, params


def tenant(salt: str | None) -> dict[str, str]:
    """Return the tags under which LMCache saves for requests of a `cache_salt`."""
    return {TENANT: blake3(salt.encode()).hexdigest(16)} if salt else {}


class Lost:
    """Keeps what was computed after a prefix that could not be loaded from being saved. In the worker's thread only.

    vLLM ends or repeats such requests, but LMCache saves in the very step in which the load failed. A chunk saved then
    would be a hit for good, made from whatever was in the blocks.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block = block_tokens
        self._requests: set[str] = set()
        self._before: set[int] = set()
        """Blocks of the step before, since vLLM may have scheduled this one before it knew."""

    def withhold(self, requests: Sequence[Any], failed: set[int]) -> None:
        """Have nothing saved of this step's `requests` that rest on blocks which `failed` to load."""
        if any(spec.can_load or hasattr(spec, "has") for r in requests if (spec := r.load_spec) is not None):
            failed = host_inprocess.over_ranks(failed)  # what one could not load makes wrong what all compute
        bad, self._before = failed | self._before, failed
        for request in requests:
            if bad and not bad.isdisjoint((request.slot_mapping // self._block).tolist()):
                self._requests.add(request.req_id)
            if request.req_id in self._requests and request.save_spec is not None:
                request.save_spec.can_save = False

    def forget(self, requests: set[str]) -> None:
        """Forget requests that have ended."""
        self._requests -= requests
