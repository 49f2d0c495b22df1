"""Chains answer as the concatenated documents do, and clearly worse when the keys are not rotated to their places.

Measured through the loader's own path, with the shipped model in transformers. What rotation is worth depends on
distance: this model finds facts by their words, and up to some 2,000 positions it does not mind keys from a place a
thousand positions off. So the second sheet of a chain of two of 1,050 tokens gains next to nothing from rotation; behind
a first sheet of 3,150 tokens it is lost without.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from chunks import load
from recall.ward import Document, write_document
from wards import MODEL, margins, patients, prefill, save

from lmcache_cartridge.artifact.cartridge import Cartridge, Segment
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.memory import loader
from lmcache_cartridge.memory.layout import ChunkShape, heads_view
from lmcache_cartridge.memory.loader import ChunkLoader
from lmcache_cartridge.sources.sources import Sources

MARGIN = 0.05
"""By this share of all questions a chain may do worse than the concatenated documents. Measured: it does better."""


class Chain(NamedTuple):
    model: CausalModel
    documents: list[Document]
    cartridges: list[Cartridge]
    ids: list[int]
    """Of the concatenated documents, `<s>` once."""

    def load(self) -> torch.Tensor:
        """Return the canonical KV of the chain as the loader makes it."""
        segments, offset = [], 0
        for cartridge in self.cartridges:
            segments.append(Segment(cartridge, offset))
            offset += cartridge.manifest.positions
        model = self.cartridges[0].manifest.fingerprint
        shape = ChunkShape(model.kv_heads, model.layers, offset, model.head_size, model.dtype)  # all of it in one chunk
        out = torch.empty(shape.size_bytes, dtype=torch.uint8)
        load(ChunkLoader(Sources(), shape, range(model.kv_heads), "heads"), segments, 0, out)
        return heads_view(out, shape)

    def right(self, kv: torch.Tensor, document: int) -> float:
        """Return the share of every other question on one document that are answered right."""
        return float((margins(self.model, kv, self.documents[document].facts[::2]) > 0).float().mean())


def _chain(root: Path, sizes: list[int]) -> Chain:
    model = CausalModel(MODEL)
    total = sum(sizes)
    documents, first = [], 0
    names = random.Random(9).sample(patients(0, 1), len(patients(0, 1)))
    for number, size in enumerate(sizes):  # each gets its share of the patients, and none is on two sheets
        last = first + len(names) * size // total
        documents.append(write_document(random.Random(f"chain{number}"), size, names[first:last]))
        first = last
    ids = [model.encode(document.text, special=True) for document in documents]
    cartridges = [
        Cartridge(save(model, root / str(i), each, name=f"c{i}"), root / str(i), str(root / str(i)))
        for i, each in enumerate(ids)
    ]
    return Chain(model, documents, cartridges, [ids[0][0], *(i for each in ids for i in each[1:])])


@pytest.fixture
def unrotated(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a context in which the loader leaves keys where they were."""

    def off(chain: Chain) -> torch.Tensor:
        with monkeypatch.context() as patched:
            patched.setattr(loader, "shift_keys", lambda keys, shape, offset: keys)
            return chain.load()

    return off


def _report(chain: Chain, unrotated: Any) -> list[tuple[float, float, float]]:
    """Return for each document the right answers: concatenated, as a chain, as a chain not rotated."""
    variants = [prefill(chain.model, chain.ids), chain.load(), unrotated(chain)]
    found = [tuple(chain.right(kv, i) for kv in variants) for i in range(len(chain.documents))]
    for i, (concatenated, rotated, not_rotated) in enumerate(found):
        print(f"sheet {i}: concatenated {concatenated:.3f}, chain {rotated:.3f}, not rotated {not_rotated:.3f}")
    return found


def test_behind_a_long_sheet_a_second_one_is_lost_without_rotation(tmp_path: Path, unrotated: Any) -> None:
    _, (concatenated, rotated, not_rotated) = _report(_chain(tmp_path, [3150, 1050]), unrotated)
    assert rotated >= concatenated - MARGIN
    assert rotated >= 0.95
    assert not_rotated <= rotated - 0.3


def test_four_sheets_answer_as_the_concatenated_document_does_and_worse_without_rotation(
    tmp_path: Path, unrotated: Any
) -> None:
    found = _report(_chain(tmp_path, [1050] * 4), unrotated)
    concatenated, rotated, not_rotated = (sum(column) / len(found) for column in zip(*found, strict=True))
    assert rotated >= concatenated - MARGIN
    assert not_rotated <= rotated - 0.2
