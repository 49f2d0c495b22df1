"""Model: which model KV belongs to, how its keys rotate, and how two models differ."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import msgspec

from ..errors import ModelMismatch, UnsupportedModel

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
ONLINE = "online "
"""What the quantisation begins with where an engine quantises weights that the checkpoint has in full."""

Count = Annotated[int, msgspec.Meta(gt=0, lt=1 << 24)]
Pairing = Literal["half", "interleaved"]
"""Which dimensions rotate together: i with i + rotary_dim / 2, or 2i with 2i + 1."""


class Rotation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How some layers turn their keys by rotary position embedding: all that is needed to turn stored ones further."""

    kind: str
    """One of `hf_config.STATIC_ROPE`."""
    inv_freq: tuple[float, ...]
    """Radians per position of each rotated pair, after scaling."""
    attention_factor: float
    """Factor on cos and sin (yarn); 1.0 elsewhere."""
    parameters: dict[str, float | int | str | bool | None]
    """The config's own RoPE parameters, defaults filled in; of longrope also the `factors` it is of, `long` or `short`."""
    pairing: Pairing | None = None
    """None where nobody found out."""
    layers: tuple[int, ...] | None = None
    """The layers that rotate so, ascending. None where nobody found out which do not."""

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of a head that rotate."""
        return 2 * len(self.inv_freq)

    def differences(self, other: Rotation) -> list[str]:
        """Return one line for each field that differs; frequencies may by rounding, pairings where one is not known."""
        factors = [side.parameters.get("factors") for side in (self, other)]
        if self.kind == other.kind == "longrope" and factors[0] != factors[1]:
            original = self.parameters.get("original_max_position_embeddings")
            return [
                f"factors: {factors[0]}, not {factors[1]}; an engine takes the long ones where its --max-model-len "
                f"is more than {original}, and a cartridge is built for them with such a --max-model-len"
            ]
        if None not in (self.pairing, other.pairing) and self.pairing != other.pairing:
            return [f"pairs of dimensions: {self.pairing}, not {other.pairing}"]
        pairs = [(n, getattr(self, n), getattr(other, n)) for n in ("kind", "rotary_dim", "attention_factor")]
        lines = [f"{name}: {mine}, not {theirs}" for name, mine, theirs in pairs if mine != theirs]
        both = zip(self.inv_freq, other.inv_freq, strict=False)
        if self.rotary_dim != other.rotary_dim or not all(math.isclose(a, b, rel_tol=1e-5) for a, b in both):
            lines.append(f"frequencies: {self.parameters}, not {other.parameters}")
        return lines


Rope = tuple[Rotation, ...]
"""The rotations of a model, each of other layers, ordered by the first of them; empty without rotary embedding."""


def rotation_of(rope: Rope, layer: int) -> Rotation | None:
    """Return how a layer rotates its keys, None where it does not. Where nobody found out which do, all do."""
    return next((each for each in rope if each.layers is None or layer in each.layers), None)


def rotating_layers(rope: Rope) -> tuple[int, ...] | None:
    """Return all layers that rotate their keys, ascending; None where nobody found out."""
    if any(each.layers is None for each in rope):
        return None
    return tuple(sorted(layer for each in rope for layer in each.layers or ()))


def check_shift(rope: Rope) -> None:
    """Raise `UnsupportedModel` where keys cannot be moved exactly: they do not rotate, or it is not known how."""
    layers = rotating_layers(rope)
    if layers == ():
        raise UnsupportedModel("the model has no rotary embedding, so its keys cannot be moved to other positions")
    if layers is None:
        raise UnsupportedModel(
            "it is not known which layers of the model rotate their keys: trying the model did not tell"
        )
    if any(each.pairing is None for each in rope):
        raise UnsupportedModel("it is not known which dimensions of this model's keys rotate together")


def _rope_differences(mine: Rope, theirs: Rope, layers: int) -> list[str]:
    if mine == theirs:
        return []
    if not mine or not theirs:
        return [f"rope: {_named(*mine[:1])}, not {_named(*theirs[:1])}"]
    lines: dict[str, None] = {}
    for layer in range(layers):
        one, other = rotation_of(mine, layer), rotation_of(theirs, layer)
        if one is not None and other is not None:
            lines |= dict.fromkeys(one.differences(other))
        elif one is not other and (one or other).layers is not None:  # type: ignore[union-attr]
            lines[f"of some layers: {_named(one)}, not {_named(other)}"] = None
    return [f"rope {line}" for line in lines]


def _named(rotation: Rotation | None = None) -> str:
    return "none" if rotation is None else rotation.kind


class Fingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The model a cartridge was made for. Equal fingerprints mean that the KV may be injected."""

    architecture: str
    layers: Count
    kv_heads: Count
    """KV heads of the whole model, not of one tensor-parallel rank."""
    head_size: Count
    dtype: Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(DTYPE_BYTES)})$")]
    """dtype of K and V: a key of `DTYPE_BYTES`."""
    vocab_size: Count
    rope: Rope
    config_digest: str
    """blake3 over the config fields that change K or V."""
    weights_digest: str | None = None
    """Sampled blake3 of the safetensors weights (`weights.weights_digest`); None where there were none to read."""
    lora: str | None = None
    """`weights.adapter_digest` of the LoRA adapter that the KV was computed with; None for the base model's."""
    quantisation: str | None = None
    """How the weights are quantised, `hf_config.quantisation_of`; None for weights in full."""
    latent: Annotated[int, msgspec.Meta(gt=0)] | None = None
    """Of multi-head latent attention: how many elements of the one head are its latent vector. Its rotary key comes after
    them, and there are no values. None for K and V."""

    @property
    def planes(self) -> int:
        """Planes of a position's KV: K and V, or one of latent vectors with their rotary keys."""
        return 2 if self.latent is None else 1

    @property
    def base(self) -> Fingerprint:
        """The same of the model without its adapter."""
        return msgspec.structs.replace(self, lora=None)

    @property
    def max_model_len(self) -> int | None:
        """A length of an engine that rotates like this where it depends on that; None for the default."""
        long = (each.parameters for each in self.rope if each.parameters.get("factors") == "long")
        return next((int(given["original_max_position_embeddings"] or 0) + 1 for given in long), None)

    @property
    def token_bytes(self) -> int:
        """Bytes of the KV of one position, all layers and heads."""
        return self.planes * self.layers * self.kv_heads * self.head_size * DTYPE_BYTES[self.dtype]

    def differences(self, other: Fingerprint, *, weights: bool = True) -> list[str]:
        """Return one line for each field that differs, `name: self's value, not other's`; empty when compatible.

        Frequencies may differ by rounding (1e-5 relative). A weights digest, and the layers that rotate, count where
        both sides know them. Without `weights` neither those nor their quantisation count.
        """
        lines = []
        for name in sorted(self.__struct_fields__, key="rope".__eq__):  # whose lines are long
            mine, theirs = getattr(self, name), getattr(other, name)
            if name == "rope":
                lines += _rope_differences(mine, theirs, min(self.layers, other.layers))
            elif name == "weights_digest" and (not weights or None in (mine, theirs)):
                continue
            elif mine != theirs and (weights or name != "quantisation"):
                lines.append(f"{name}: {mine or 'none'}, not {theirs or 'none'}")
        return lines

    def check_fits(self, engine: Fingerprint, *, accept_weights: bool) -> None:
        """Raise `ModelMismatch` unless `engine` runs this model, with any adapter, or any weights where they are accepted."""
        # Which adapter computes is known of each request alone, and compared there.
        if differences := self.base.differences(engine, weights=not accept_weights):
            message = f"made for another model than the one served: {'; '.join(differences)}"
            if not self.base.differences(engine, weights=False):
                message += (
                    ". Only the weights differ: `serve --accept-weights` serves it, for who measured what that changes"
                )
            raise ModelMismatch(message)


# Here, as every decoder of ours is made where its type is: msgspec 0.22 looks at a type's fields when the type is first
# decoded, and a second thread that decodes it meanwhile ends the process with a segmentation fault.
msgspec.json.Decoder(Fingerprint)


def from_plain(plain: Any) -> Fingerprint:
    """Return the fingerprint that was sent as plain values. Raises `msgspec.ValidationError`."""
    return msgspec.convert(plain, Fingerprint)
