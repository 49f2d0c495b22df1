"""Beside: other documents' KV around the KV that is trained, as other cartridges stand around it in a chain.

After Cartridges at Scale (Hardalov et al., arXiv 2606.04557): what was trained alone looks at its neighbours when it is
asked, and takes attention that is theirs when they are asked; in a chain both are answered worse. Here neighbours are
drawn anew for every forward pass, their KV is fixed, and questions on them are asked beside those on the document.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

from ...artifact.rope import check_shift
from ...errors import CartridgeError
from ...memory.rope import shift
from ..model import CausalModel
from .lesson import Lesson
from .packing import Example

EACH = 8
"""Questions on each neighbour in a forward pass. At 16x of the shipped model a chain of three lost 32 points without any, 20
with 8, of other sheets; 16 did no better."""


class Neighbour(NamedTuple):
    """Another document."""

    kv: torch.Tensor
    """Canonical `[2, L, q, H, D]` from position 0 on: its cartridge's."""
    lesson: Lesson
    """Questions on it, and what the model predicts behind the document itself; may be empty."""


class Around(NamedTuple):
    """Neighbours of positions 0 to p - 1, canonical `[2, L, T, H, D]`; None where there is none on a side."""

    before: torch.Tensor | None
    """Its keys rotated to the positions before 0. RoPE knows relative positions only, so that nothing changes by it."""
    after: torch.Tensor | None
    """Its keys rotated to position p and on."""
    asked: list[Example]
    """Questions on them."""

    @property
    def tokens_after(self) -> int:
        """Positions between the cartridge and the question."""
        return 0 if self.after is None else self.after.shape[2]

    def surround(self, model: CausalModel, past: Any, rows: int) -> Any:
        """Return a cache of `rows` sequences with the neighbours around what `past` holds, which keeps its gradients."""
        sides = [None if kv is None else model.cache(kv, rows).layers for kv in (self.before, self.after)]
        found = DynamicCache()
        for number, own in enumerate(past.layers):
            before, after = (side and side[number] for side in sides)
            layers = [layer for layer in (before, own, after) if layer is not None]
            keys, values = ([getattr(layer, name).to(own.keys) for layer in layers] for name in ("keys", "values"))
            found.update(torch.cat(keys, dim=2), torch.cat(values, dim=2), number)
        return found


class Company:
    """Other documents, some of which stand around a cartridge while it is trained."""

    def __init__(self, model: CausalModel, others: Sequence[Neighbour], most: int) -> None:
        """`most` of the `others` stand around a cartridge at once.

        Raises `UnsupportedModel` where keys cannot be moved, and `CartridgeError` for fewer others than `most`.
        """
        check_shift(model.fingerprint.rope)
        if not 1 <= most <= len(others):
            raise CartridgeError(
                f"--beside {most} needs as many other cartridges or documents, and {len(others)} are given"
            )
        self._shape, self._others, self.most = model.fingerprint, list(others), most

    @property
    def tokens(self) -> int:
        """Positions that the company takes at most."""
        return sum(sorted(other.kv.shape[2] for other in self._others)[-self.most :])

    def join(self, own: Lesson) -> Lesson:
        """Return a lesson with the neighbours' targets behind its own, where `draw` finds them; same examples."""
        if own.log_probs is None or own.tokens is None:
            return own
        rows, joined, lessons = len(own.log_probs), [], [own]
        for other in self._others:
            lesson = other.lesson
            if lesson.log_probs is not None:
                moved = [example._replace(first=rows + example.first) for example in lesson.examples]
                lessons.append(lesson)
                rows += len(lesson.log_probs)
                other = other._replace(lesson=lesson._replace(examples=moved))
            joined.append(other)
        self._others = joined
        log_probs, tokens = (
            torch.cat([kept for each in lessons if (kept := getattr(each, name)) is not None])
            for name in ("log_probs", "tokens")
        )
        return Lesson(own.examples, log_probs, tokens)

    def draw(self, draw: random.Random, positions: int) -> Around:
        """Return up to `most` others, some before and some after `positions`, all drawn; maybe none."""
        chosen = draw.sample(self._others, draw.randint(0, self.most))
        asked = [
            e for other in chosen for e in draw.sample(other.lesson.examples, min(EACH, len(other.lesson.examples)))
        ]
        return self.around(chosen, draw.randint(0, len(chosen)), positions, asked)

    def whole(self, positions: int) -> Around:
        """Return the first `most` others, half of them before and none asked; the same ones every time."""
        return self.around(self._others[: self.most], (self.most + 1) // 2, positions, [])

    def around(self, chosen: Sequence[Neighbour], before: int, positions: int, asked: list[Example]) -> Around:
        """Return `chosen` neighbours around `positions`, the first `before` of them before it."""
        kvs = [other.kv for other in chosen]
        ahead = sum(kv.shape[2] for kv in kvs[:before])
        return Around(self._moved(kvs[:before], -ahead), self._moved(kvs[before:], positions), asked)

    def _moved(self, kvs: Sequence[torch.Tensor], start: int) -> torch.Tensor | None:
        moved = []
        for kv in kvs:
            moved.append(shift(kv, self._shape, start))
            start += kv.shape[2]
        return torch.cat(moved, dim=2) if moved else None
