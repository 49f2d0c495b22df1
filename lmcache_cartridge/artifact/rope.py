"""Rotary position embedding: how a model turns its keys, read from its config, and how two differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from ..errors import UnsupportedModel
from .caches import engine_pairing, head_size, rotating_layers, takes_long

STATIC_ROPE = ("default", "linear", "llama3", "yarn", "longrope")
"""RoPE types whose frequencies do not depend on the sequence length, so that KV stays valid under any prompt. Those of
longrope depend on the engine's longest, which is settled when it starts."""


class Rope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rotary position embedding: everything needed to rotate stored keys to other positions."""

    kind: str
    """One of `STATIC_ROPE`."""
    rotary_dim: int
    """Leading dimensions of a head that rotate; `2 * len(inv_freq)`."""
    inv_freq: tuple[float, ...]
    """Radians per position of each rotated pair, after scaling."""
    attention_factor: float
    """Factor on cos and sin (yarn); 1.0 elsewhere."""
    parameters: dict[str, float | int | str | bool | None]
    """The config's own RoPE parameters, defaults filled in; of longrope also the `factors` it is of, `long` or `short`."""
    pairing: Literal["half", "interleaved"] | None = None
    """Which dimensions rotate together: i with i + rotary_dim / 2, or 2i with 2i + 1; None where nobody found out."""
    layers: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    """The layers that rotate their keys so, ascending; those that no rotation names leave theirs as they are. Unset where
    nobody found out."""
    others: tuple[Rope, ...] | msgspec.UnsetType = msgspec.UNSET
    """How layers of other kinds rotate theirs, each with its layers; ordered by the first of them. Unset where all that
    rotate do so alike."""

    @property
    def rotations(self) -> tuple[Rope, ...]:
        """This one and the others."""
        return (self,) if self.others is msgspec.UNSET else (self, *self.others)

    @property
    def rotating(self) -> tuple[int, ...] | msgspec.UnsetType:
        """All layers that rotate their keys, ascending. Unset where nobody found out."""
        found: list[int] = []
        for each in self.rotations:
            if each.layers is msgspec.UNSET:
                return msgspec.UNSET
            found += each.layers
        return tuple(sorted(found))

    def of_layer(self, layer: int) -> Rope | None:
        """Return how a layer rotates its keys, None where it does not. Where nobody found out which do, all do alike."""
        return next((each for each in self.rotations if each.layers is msgspec.UNSET or layer in each.layers), None)

    @property
    def max_model_len(self) -> int | None:
        """A length of an engine that rotates like this where it depends on that; None for the default."""
        if self.parameters.get("factors") != "long":
            return None
        return int(self.parameters["original_max_position_embeddings"] or 0) + 1


def check_shift(rope: Rope | None) -> None:
    """Raise `UnsupportedModel` where keys cannot be moved exactly: they do not rotate, or it is not known how."""
    if rope is None or rope.rotating == ():
        raise UnsupportedModel("the model has no rotary embedding, so its keys cannot be moved to other positions")
    if rope.rotating is msgspec.UNSET:
        raise UnsupportedModel(
            "it is not known which layers of the model rotate their keys: an earlier release made the cartridge (build it "
            "again), or trying the model did not tell"
        )
    if any(each.pairing is None for each in rope.rotations):
        raise UnsupportedModel("it is not known which dimensions of this model's keys rotate together")


def rope_differences(mine: Rope | None, theirs: Rope | None, layers: int) -> list[str]:
    """Return one line for each difference of how the keys of models of so many layers rotate, as `Fingerprint.differences` does."""
    if mine is None or theirs is None:
        return [] if mine is theirs else [f"rope: {mine and mine.kind}, not {theirs and theirs.kind}"]
    if len(mine.rotations) == len(theirs.rotations) == 1:
        lines = [f"rope {line}" for line in _rotation_differences(mine, theirs)]
        unset = msgspec.UNSET
        if mine.layers is not unset and theirs.layers is not unset and mine.layers != theirs.layers:
            lines.append(f"rope layers: {list(mine.layers)}, not {list(theirs.layers)}")
        return lines
    where: dict[str, list[int]] = {}
    for layer in range(layers):
        one, other = mine.of_layer(layer), theirs.of_layer(layer)
        if one is None or other is None:
            found = [] if one is other else [f"{one and one.kind}, not {other and other.kind}"]
        else:
            found = _rotation_differences(one, other)
        for line in found:
            where.setdefault(line, []).append(layer)
    return [f"rope of layers {', '.join(map(str, which))}: {line}" for line, which in where.items()]


def _rotation_differences(mine: Rope, theirs: Rope) -> list[str]:
    factors, others = (side.parameters.get("factors") for side in (mine, theirs))
    if mine.kind == theirs.kind == "longrope" and factors != others:
        original = mine.parameters.get("original_max_position_embeddings")
        return [
            f"factors: {factors}, not {others}; an engine takes the long ones where its --max-model-len "
            f"is more than {original}, and a cartridge is built for them with such a --max-model-len"
        ]
    pairings = [mine.pairing, theirs.pairing]
    if None not in pairings and pairings[0] != pairings[1]:
        return [f"pairs of dimensions: {pairings[0]}, not {pairings[1]}"]
    lines = [
        f"{name}: {getattr(mine, name)}, not {getattr(theirs, name)}"
        for name in ("kind", "rotary_dim", "attention_factor")
        if getattr(mine, name) != getattr(theirs, name)
    ]
    same_length = len(mine.inv_freq) == len(theirs.inv_freq)
    if not same_length or not all(
        math.isclose(a, b, rel_tol=1e-5) for a, b in zip(mine.inv_freq, theirs.inv_freq, strict=False)
    ):
        lines.append(f"frequencies: {mine.parameters}, not {theirs.parameters}")
    return lines


def read_rope(
    config: Mapping[str, Any],
    inv_freq: Sequence[float] | None,
    attention_factor: float,
    pairing: Literal["half", "interleaved"] | None,
    of_kinds: Mapping[str, tuple[Sequence[float], float]] | None,
    max_model_len: int | None,
) -> Rope | None:
    """Return the RoPE of a config whose model rotates by these frequencies: arguments of `fingerprint.of_config`.

    Raises `UnsupportedModel` where it changes with the sequence length.
    """
    kinds = rope_kinds(config)
    for parameters in [rope_parameters(config, kind) for kind in kinds] or [rope_parameters(config)]:
        _check_static(parameters, bool(kinds))
    if kinds:
        return None if of_kinds is None else _rope_of_kinds(config, of_kinds, pairing)
    rope = None if inv_freq is None else _rope(config, inv_freq, attention_factor, pairing)
    return _with_factors(rope, takes_long_factors(config, max_model_len))


def rope_kinds(config: Mapping[str, Any]) -> list[str]:
    """Return the kinds of layers, by the names in `layer_types`, that each have RoPE parameters of their own.

    Ordered by the first layers. Empty where all layers share theirs, or have none.
    """
    given = _given(config)
    return [kind for kind in dict.fromkeys(config.get("layer_types") or ()) if isinstance(given.get(kind), Mapping)]


def rope_parameters(config: Mapping[str, Any], kind: str | None = None) -> dict[str, Any]:
    """Return the RoPE parameters of a config by their standard names, defaults filled in; empty where it has none.

    `kind` is one of `rope_kinds`, where there are some. Raises `UnsupportedModel` where it is not said whose they are.
    """
    parameters = dict(_given(config) if kind is None else _given(config)[kind])
    if kinds := sorted(name for name, value in parameters.items() if isinstance(value, Mapping)):
        raise UnsupportedModel(
            f"its RoPE has parameters for each kind of layer ({', '.join(kinds)}), and its layer_types do not say which "
            "layers are of which kind"
        )
    if rotary_dim := None if parameters else config.get("rotary_dim"):  # GPT-J
        parameters["partial_rotary_factor"] = rotary_dim / head_size(config)
    if not parameters and config.get("rope_theta") is None:
        return {}
    parameters.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
    parameters.setdefault("rope_type", parameters.pop("type", "default"))
    # vLLM makes the first of DeepSeek's yarn as it loads a config. With mrope a token has three positions, of which a text's
    # are one and the same.
    parameters["rope_type"] = {"deepseek_yarn": "yarn", "mrope": "default"}.get(
        parameters["rope_type"], parameters["rope_type"]
    )
    return parameters


def _with_factors(rope: Rope | None, is_long: bool | None) -> Rope | None:
    if rope is None or is_long is None:
        return rope
    parameters = rope.parameters | {"factors": "long" if is_long else "short"}
    return msgspec.structs.replace(rope, parameters=parameters)


def takes_long_factors(config: Mapping[str, Any], max_model_len: int | None) -> bool | None:
    """Return what `takes_long` does of the RoPE of a config; None also where kinds of layers have RoPE of their own."""
    return None if rope_kinds(config) else takes_long(rope_parameters(config), config, max_model_len)


def _given(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a config says of RoPE: parameters, or parameters by kind of layer."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    local = config.get("rope_local_base_freq")  # Gemma 3 as transformers 4 reads it
    if local is None or any(isinstance(value, Mapping) for value in given.values()):
        return given
    return {
        "full_attention": {"rope_type": "default", "rope_theta": config.get("rope_theta"), **given},
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }


def _check_static(parameters: Mapping[str, Any], of_kind: bool) -> None:
    kind = parameters.get("rope_type", "default")
    if kind not in STATIC_ROPE or (kind == "longrope" and of_kind):
        raise UnsupportedModel(
            f"RoPE type {kind!r} changes its frequencies with the sequence length, so stored keys would be wrong "
            f"under a longer prompt; supported: {', '.join(STATIC_ROPE)}"
        )


def _rope_of_kinds(
    config: Mapping[str, Any],
    of_kinds: Mapping[str, tuple[Sequence[float], float]],
    pairing: Literal["half", "interleaved"] | None,
) -> Rope:
    """Return the rotations of all kinds of layers, the first layer's first."""
    first, *others = (
        msgspec.structs.replace(
            _rope(config, *of_kinds[kind], pairing, kind),
            layers=tuple(layer for layer, named in enumerate(config["layer_types"]) if named == kind),
        )
        for kind in rope_kinds(config)
    )
    return msgspec.structs.replace(first, others=tuple(others)) if others else first


def _rope(
    config: Mapping[str, Any],
    inv_freq: Sequence[float],
    attention_factor: float,
    pairing: Literal["half", "interleaved"] | None,
    of_kind: str | None = None,
) -> Rope:
    parameters = rope_parameters(config, of_kind) or {"rope_theta": 10000.0, "rope_type": "default"}
    return Rope(
        kind=parameters["rope_type"],
        rotary_dim=2 * len(inv_freq),
        inv_freq=tuple(float(f) for f in inv_freq),
        attention_factor=float(attention_factor),
        parameters={k: v for k, v in sorted(parameters.items()) if not isinstance(v, list | dict)},
        pairing=pairing or engine_pairing(config),
        layers=rotating_layers(config),
    )
