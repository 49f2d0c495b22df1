"""Int8: the heads of a chunk in a byte a number, keys in steps of their channel, values in steps of their position.

A head of a chunk is one record, little-endian and without gaps, so that it can be read and checked by itself:

key_step     [layers, head_size]                 float32
key_middle   [layers, head_size]                 float32: halfway between the least and the largest key of the channel
value_step   [layers, tokens]                    float32
codes        [2, layers, tokens, head_size]      int8, -127 to 127

A key is `code * key_step + key_middle`, a value `code * value_step`, each rounded to the dtype of the model's KV:
`codec.py` does it.
"""

from __future__ import annotations

import numpy as np

from .model import Fingerprint

_LARGEST = {"bfloat16": 255 * 2.0**120, "float16": 65504.0, "float32": float(np.finfo("<f4").max)}
_LEAST_CODE = 128


def record(shape: Fingerprint, tokens: int) -> np.dtype:
    """Return the layout of one head of `tokens` positions; `manifest.head_bytes` is its size."""
    return np.dtype(
        [
            ("key_step", "<f4", (shape.layers, shape.head_size)),
            ("key_middle", "<f4", (shape.layers, shape.head_size)),
            ("value_step", "<f4", (shape.layers, tokens)),
            ("codes", "i1", (2, shape.layers, tokens, shape.head_size)),
        ]
    )


def tokens(shape: Fingerprint, head_bytes: int) -> int:
    """Return the positions of a head's record of `head_bytes`."""
    return (head_bytes // shape.layers - 8 * shape.head_size) // (2 * shape.head_size + 4)


def is_finite(data: memoryview, shape: Fingerprint, tokens: int) -> bool:
    """Return whether no code there could be would come to a NaN or an infinity in the model's dtype."""
    heads = np.frombuffer(data, record(shape, tokens))
    keys = _LEAST_CODE * np.abs(heads["key_step"].astype("f8")) + np.abs(heads["key_middle"])
    values = _LEAST_CODE * np.abs(heads["value_step"].astype("f8"))
    largest = _LARGEST[shape.dtype]
    return bool((keys <= largest).all() and (values <= largest).all())  # a NaN is not at most anything
