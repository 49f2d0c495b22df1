"""Salts: whose KV is whose in LMCache's keys, which have a salt and no tags, in multiprocess mode."""

from __future__ import annotations

import re
import struct
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from .contract import GRANT, TAG

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

_OURS = "cartridge-"
"""What every salt begins with that this package makes; a client's own that begins so is replaced by its hash."""
_TAG, _CLIENT, _APART, _ADAPTER = f"{_OURS}kv-", f"{_OURS}client-", f"{_OURS}apart-", f"{_OURS}lora-"
_TAG_SALT = len(_TAG) + 32
_PLAIN_SALT = re.compile(r"[^@/\\\x00]{0,96}")
"""Salts that LMCache's keys can carry, and the file names that its `fs` adapter makes of them (LMCache 0.5.6)."""
_CHECK = f"{_OURS}check-"
"""What a salt begins with under which a worker has LMCache's server look up a chunk that nobody has."""
_ID = 2**31 - 1
"""What a shifted id is cut to."""
_PROCESS = uuid.uuid4().hex
"""Stands for the files of adapters, which may be others when vLLM is started again."""


def grant_of(kv_transfer_params: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return what the API server granted a request, see `GRANT`; empty for one without cartridges."""
    return (kv_transfer_params or {}).get(GRANT) or {}


def key_salt(kv_transfer_params: Mapping[str, Any] | None, cache_salt: str | None = None) -> str:
    """Return the salt for LMCache's keys of a request, by which tenants are kept apart: no two of them have one in common.

    Without cartridges it is the client's own `cache_salt`. With cartridges it is made of their tag, which the API server
    alone can set and no client can spell, so identity tokens are worth nothing by themselves; and of the client's own
    salt, so that what is computed after a cartridge stays with the tenant. A request with other tags has one of its own.
    """
    params = kv_transfer_params or {}
    tags = {k: v for k, v in params.items() if k.startswith("lmcache.tag.")}
    own = grant_of(params).get("salt", cache_salt) or ""
    if tags.keys() == {TAG}:
        return tag_salt(str(tags[TAG]), own)
    if tags:
        return _APART + _hash(repr((sorted(tags.items()), own)))
    if own.startswith(_OURS) or not _PLAIN_SALT.fullmatch(own):
        return _CLIENT + _hash(own)
    return own


def tag_salt(tag: str, own: str = "") -> str:
    """Return the salt for the keys of a cartridge or chain, of requests whose client has its `own`."""
    return _TAG + _hash(tag) + (f"-{_hash(own)}" if own else "")


def shared_salt(salt: str) -> str | None:
    """Return the salt that requests of all tenants for one cartridge or chain may have, of one of `key_salt`; None without.

    Only where `shifted` keeps apart what follows: then LMCache has one copy of a cartridge, and not one for each tenant.
    """
    return salt[:_TAG_SALT] if salt.startswith(_TAG) else None


def own_shifts(salt: str, count: int) -> tuple[int, ...]:
    """Return the `count` numbers below 2**31 by which the tokens of one tenant, whose salt of `key_salt` this is, are shifted."""
    stream = blake3(f"shifts {salt}".encode()).digest(4 * count)
    return tuple(number & _ID for number in struct.unpack(f"<{count}I", stream))


def shifted(token_ids: list[int], start: int, shifts: Sequence[int]) -> list[int]:
    """Return the token ids by which LMCache's keys are made, where those from `start` on are shifted, one each.

    A key is a chain of hashes, so one shifted chunk is enough for all that follow. Prompts of one tenant stay different;
    for one of another tenant to have the same ids all shifts would have to differ by less than the vocabulary, of which
    the odds are below 2**-12 for each token.
    """
    end = start + len(shifts)
    moved = [(number + shift) & _ID for number, shift in zip(token_ids[start:end], shifts, strict=False)]
    return [*token_ids[:start], *moved, *token_ids[end:]]


def tag_part(salt: str) -> str | None:
    """Return what the salts of all clients for one tag have in common: `tag_salt` of the tag alone; None without a tag.

    A salt that no cartridge may be found under has a part that is no tag's.
    """
    if salt.startswith(_OURS) and not salt.startswith(_CLIENT):
        return salt[:_TAG_SALT]
    return None


def _hash(text: str) -> str:
    return blake3(text.encode("utf-8", "surrogatepass")).hexdigest(16)


def adapter_name(lora_request: LoRARequest | None) -> str:
    """Return what tells an adapter of one vLLM from its others; empty for the base model."""
    if lora_request is None:
        return ""
    return repr((lora_request.lora_name, lora_request.lora_path, lora_request.lora_int_id))


def is_apart(kv_transfer_params: Mapping[str, Any] | None, lora_request: LoRARequest | None) -> bool:
    """Whether a request is computed by another adapter, or another than the base model, than its cartridges are for.

    Without cartridges: whether it is an adapter's. LMCache's keys know no adapters (LMCache 0.5.6), and what is computed
    after cartridges is told apart by their digests.
    """
    return grant_of(kv_transfer_params).get("adapter", "") != adapter_name(lora_request)


def adapter_salt(salt: str, lora_request: LoRARequest | None) -> str:
    """Return the salt for the keys of a request that `is_apart` and would have `salt` otherwise.

    Nothing of ours is found under it. What an adapter had computed is not found once vLLM was started again, since its
    files may be others then; and that of one which was loaded in the place of another is never found.
    """
    if lora_request is not None and lora_request.load_inplace:
        return _ADAPTER + uuid.uuid4().hex
    return _ADAPTER + _hash(repr((_PROCESS, adapter_name(lora_request), salt)))


def check_salt() -> str:
    """Return a salt that no request has had."""
    return _CHECK + uuid.uuid4().hex


def is_check(salt: str) -> bool:
    """Whether a salt is one of `check_salt`."""
    return salt.startswith(_CHECK)
