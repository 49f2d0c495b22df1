"""Checkpoints of keys and values in PyTorch files: HazyResearch's, knlp's, plain lists, a vLLM fork's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ...errors import ForeignFormatError
from . import pickle
from .formats import Foreign, Pairs
from .ids import DOCUMENT_IDS, IDS, ids_beside, plain_ids, read_json

FORMS = {
    "HazyResearch checkpoint": r"(?P<part>trainable|frozen|fixed)_(?P<plane>keys|values)\.(?P<layer>\d{1,4})",
    "layers.N.attention.prefix tensors": r"(?P<part>)layers\.(?P<layer>\d{1,4})\.attention\.prefix\.(?P<plane>keys|values)",
    "list of (K, V), one a layer": r"(?P<part>)(?P<layer>\d{1,4})\.(?P<plane>\w+)",
}
"""How the tensors of a form are called: the names and numbers on the way to each, with dots between them."""
_PLANES = {"0": 0, "k": 0, "key": 0, "keys": 0, "1": 1, "v": 1, "value": 1, "values": 1}
_DEEP = 2


def read(path: Path, *, drop_frozen: bool = False) -> Foreign:
    """Return the KV, the token ids, or both, in a PyTorch file; ids may also lie beside it in `prefix_token_ids.json`.

    A frozen prefix is the attention sink and stays in front, unless `drop_frozen`. Raises `ForeignFormatError` for
    a file in no known form. Of a `kv_cache` in no known form beside token ids nothing is used.
    """
    content = pickle.load(path)
    inside = content if isinstance(content, dict) else {}
    ids, (form, segments) = inside.get("token_ids"), _kv(path, content)
    if not segments:
        form, segments = "{token_ids, kv_cache, metadata}", _kv(path, inside.get("kv_cache"))[1]
    if not segments and ids is None:
        names = sorted(str(name)[:40] for name in list(inside)[:8] if isinstance(name, str | int))
        raise ForeignFormatError(
            f"{path}: no known form of KV; it has {', '.join(names) or f'a {type(content).__name__} in it'}, and trainable_keys, "
            "a list of (K, V), layers.N.attention.prefix.keys or token_ids was expected"
        )
    if drop_frozen:
        segments = segments[-1:]
    return Foreign(
        form, path, segments,
        token_ids=ids_beside(path.parent, IDS) if ids is None else plain_ids(ids, path),
        document_ids=ids_beside(path.parent, DOCUMENT_IDS), base_model=_base_model(path, inside),
    )  # fmt: skip


def _base_model(path: Path, inside: dict[Any, Any]) -> str | None:
    """Return the model that a checkpoint, or the `meta.json` beside it, says it is for."""
    notes, beside = inside.get("metadata"), path.parent / "meta.json"
    if not isinstance(notes, dict) and beside.is_file():
        notes = read_json(beside)
    name = notes.get("model") if isinstance(notes, dict) else None
    return name if isinstance(name, str) else None


def _kv(path: Path, content: Any) -> tuple[str, tuple[Pairs, ...]]:
    """Return the form of what a file holds and its KV, frozen before trainable; nothing where it has none that is known."""
    leaves = dict(_leaves(content, "", _DEEP))
    for form, pattern in FORMS.items():
        parts: dict[str, dict[tuple[int, int | None], Any]] = {}
        for name, leaf in leaves.items():
            if match := re.fullmatch(pattern, name):
                parts.setdefault(match["part"], {})[int(match["layer"]), _PLANES.get(match["plane"])] = leaf
        if not parts:
            continue
        named = sorted(parts)  # fixed or frozen before trainable
        if named[-1] not in ("", "trainable") or len(named) > 2:
            raise ForeignFormatError(
                f"{path}: has KV that is {', '.join(named)}; trainable was expected, and frozen or fixed may be beside it"
            )
        return form, tuple(_pairs(path, f"{part} KV".strip(), parts[part]) for part in named)
    return "", ()


def _leaves(content: Any, name: str, deep: int) -> Iterator[tuple[str, Any]]:
    """Yield what is in a list or dict, `deep` levels down, with the names on the way."""
    if isinstance(content, torch.nn.ParameterList):
        # Its own methods are not used: the file may have put anything in their place.
        content = vars(content).get("_parameters")
    if isinstance(content, list | tuple):
        content = dict(enumerate(content))
    if isinstance(content, dict) and deep:
        for key, inner in content.items():
            if isinstance(key, str | int):
                yield from _leaves(inner, f"{name}.{key}" if name else str(key), deep - 1)
    elif content is not None:
        yield name, content


def _pairs(path: Path, what: str, found: dict[tuple[int, int | None], Any]) -> Pairs:
    """Return K and V of each layer."""
    layers = range(len(found) // 2)
    is_whole = set(found) == {(layer, plane) for layer in layers for plane in (0, 1)}
    if not is_whole or not all(isinstance(each, torch.Tensor) for each in found.values()):
        raise ForeignFormatError(f"{path}: {what} is not a tensor of keys and one of values for every layer")
    return [(found[layer, 0], found[layer, 1]) for layer in layers]
