"""Checkpoints of keys and values in PyTorch files: HazyResearch's, knlp's, plain lists, a vLLM fork's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from ...errors import ForeignFormatError
from . import pickle
from .formats import Foreign, Pairs
from .ids import DOCUMENT_IDS, IDS, ids_beside, plain_ids, read_json

_FLAT = re.compile(r"layers\.(\d{1,4})\.attention\.prefix\.(keys|values)")
_NAMES = (("k", "v"), ("key", "value"), ("keys", "values"))
_FROZEN = ("frozen", "fixed")


def read(path: Path, *, drop_frozen: bool = False) -> Foreign:
    """Return the KV, the token ids, or both, in a PyTorch file; ids may also lie beside it in `prefix_token_ids.json`.

    A frozen prefix is the attention sink and stays in front, unless `drop_frozen`. Raises `ForeignFormatError` for
    a file in no known form. Of a `kv_cache` in no known form beside token ids nothing is used, and `form` says so.
    """
    content = pickle.load(path)
    inside = content if isinstance(content, dict) else {}
    if (found := _parse(path, content)) is None:
        if content is not inside:
            raise ForeignFormatError(f"{path}: a {type(content).__name__} is no known form of KV")
        first = list(inside)[:8]
        names = sorted(str(name)[:40] if isinstance(name, str | int) else type(name).__name__ for name in first)
        raise ForeignFormatError(
            f"{path}: no known form of KV; it has {', '.join(names) or 'nothing'}, and trainable_keys, a list of (K, V), "
            "layers.N.attention.prefix.keys or token_ids was expected"
        )
    form, segments = found
    ids = plain_ids(inside["token_ids"], path) if inside.get("token_ids") is not None else None
    ids = ids_beside(path.parent, IDS) if ids is None else ids
    if drop_frozen:
        if len(segments) < 2:
            raise ForeignFormatError(f"{path}: has no frozen positions to drop")
        segments = segments[1:]
    if not segments and ids is None:
        raise ForeignFormatError(f"{path}: neither KV nor token ids in it")
    document_ids = ids_beside(path.parent, DOCUMENT_IDS)
    base = _base_model(path, inside)
    return Foreign(form, path, segments, token_ids=ids, document_ids=document_ids, base_model=base)


def _base_model(path: Path, inside: dict[Any, Any]) -> str | None:
    """Return the model that a checkpoint, or the `meta.json` beside it, says it is for."""
    notes, beside = inside.get("metadata"), path.parent / "meta.json"
    if not isinstance(notes, dict) and beside.is_file():
        notes = read_json(beside)
    name = notes.get("model") if isinstance(notes, dict) else None
    return name if isinstance(name, str) else None


def _parse(path: Path, content: Any) -> tuple[str, tuple[Pairs, ...]] | None:
    """Return the form of what a file holds, and its KV; None where it has none that is known."""
    if isinstance(content, list | tuple):
        return "list of (K, V), one a layer", (_pairs(path, content),)
    if not isinstance(content, dict):
        return None
    if "trainable_keys" in content:
        return _trainable(path, content)
    if any(isinstance(name, str) and _FLAT.fullmatch(name) for name in content):
        return "layers.N.attention.prefix tensors", (_flat(path, content),)
    if content.get("kv_cache") is not None and (found := _parse(path, content["kv_cache"])) is not None:
        return "{token_ids, kv_cache, metadata}", found[1]
    if "token_ids" in content:
        unread = ", without its kv_cache, which is in no known form" if content.get("kv_cache") is not None else ""
        return f"{{token_ids}}{unread}", ()
    return None


def _trainable(path: Path, content: dict[str, Any]) -> tuple[str, tuple[Pairs, ...]]:
    trainable = _zipped(path, content, "trainable")
    frozen = {name: pairs for name in _FROZEN if (pairs := _zipped(path, content, name))}
    if len(frozen) == 2:
        raise ForeignFormatError(f"{path}: has both frozen_keys and fixed_keys, which are two names for one thing")
    name = next((f"{name}_keys" for name in frozen), "nothing frozen")
    return f"HazyResearch checkpoint, {name}", (*frozen.values(), trainable)


def _zipped(path: Path, content: dict[str, Any], name: str) -> Pairs:
    keys, values = (_tensors(path, content.get(f"{name}_{plane}"), f"{name}_{plane}") for plane in ("keys", "values"))
    if len(keys) != len(values):
        raise ForeignFormatError(f"{path}: {len(keys)} {name}_keys and {len(values)} {name}_values")
    return list(zip(keys, values, strict=True))


def _tensors(path: Path, value: Any, name: str) -> list[torch.Tensor]:
    """Return the tensors of a list or `ParameterList`; none for None."""
    if isinstance(value, torch.nn.ParameterList):
        # Its own methods are not used: the file may have put anything in their place.
        value = vars(value).get("_parameters")
        is_list = isinstance(value, dict) and set(value) == {str(i) for i in range(len(value))}
        value = [value[str(i)] for i in range(len(value))] if is_list else "?"
    value = [] if value is None else value
    if not isinstance(value, list | tuple) or not all(isinstance(tensor, torch.Tensor) for tensor in value):
        raise ForeignFormatError(f"{path}: {name} is not a list of tensors")
    return list(value)


def _pairs(path: Path, layers: list | tuple) -> Pairs:
    found = []
    for number, layer in enumerate(layers):
        if isinstance(layer, dict):
            layer = next(([layer[name] for name in names] for names in _NAMES if set(layer) == set(names)), None)
        is_pair = isinstance(layer, list | tuple) and len(layer) == 2
        if not is_pair or not all(isinstance(tensor, torch.Tensor) for tensor in layer):
            raise ForeignFormatError(f"{path}: layer {number} is neither (K, V) nor a dict of k and v")
        found.append((layer[0], layer[1]))
    if not found:
        raise ForeignFormatError(f"{path}: an empty list is no KV")
    return found


def _flat(path: Path, content: dict[Any, Any]) -> Pairs:
    matches = {_FLAT.fullmatch(name): tensor for name, tensor in content.items() if isinstance(name, str)}
    planes = {(int(m[1]), m[2]): tensor for m, tensor in matches.items() if m}
    layers = [[(layer, plane) for plane in ("keys", "values")] for layer in range(len(planes) // 2)]
    if set(planes) != {each for layer in layers for each in layer}:
        raise ForeignFormatError(f"{path}: layers.N.attention.prefix has gaps: not keys and values of every layer")
    return _pairs(path, [[planes[each] for each in layer] for layer in layers])
