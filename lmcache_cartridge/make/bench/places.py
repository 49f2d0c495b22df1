"""Places: documents of p tokens, each with the cartridge that stands for it where there is one, and questions on them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ...errors import CartridgeError
from ..progress import Progress, silent
from ..trial import texts
from .target import UNFIT, Target, most

if TYPE_CHECKING:
    from ..trial.maker import Maker

LENGTHS = (256, 1024, 4096, 16_384, 32_768)
"""The p that are asked for where nothing else is said."""
ROOM = 128
"""Tokens that a question and its answer may have."""


class Place(NamedTuple):
    """Where times are taken: p tokens that stand before a question."""

    p: int
    document: tuple[int, ...]
    cartridge: str | None = None
    """`id@version`."""
    chunks: int = 0
    """Whole chunks of the cartridge."""


def questions(target: Target) -> Iterator[list[int]]:
    """Yield the token ids of questions without an end, each its own, of at most `ROOM` tokens."""
    for number, asked in enumerate(itertools.cycle(texts.write("bench", 4000).questions)):
        yield target.tokenize(prompt=f"\n{number}. Question: {asked}\nAnswer:", add_special_tokens=False)


def plain(target: Target, p: int) -> Place:
    """Return a document of generated text, of p tokens."""
    ids = target.tokenize(prompt=texts.write(f"bench {p}", p).text, add_special_tokens=True)
    return Place(p, tuple(ids[:p]))


def of_cartridge(target: Target, name: str) -> Place:
    """Return the place of a cartridge that the server has. Raises `CartridgeError` where it is none to be measured."""
    found = target.cartridge(name)
    name, p, chunks = f"{found['id']}@{found['version']}", found["positions"], most(found, "chunks")
    if found["state"] in UNFIT:
        raise CartridgeError(f"{name} is {found['state']} on {target.url}; `lmcache-cartridge list` says why")
    if not chunks:
        raise CartridgeError(f"{name} of {p} positions has no whole chunk, so nothing is injected")
    if found["kind"] != "prefill":  # its document is another length
        return plain(target, p)._replace(cartridge=name, chunks=chunks)
    ids = target.cartridge_ids(name)
    if len(ids) != p:
        raise CartridgeError(f"{target.url} gave {len(ids)} token ids of the {p} of {name}")
    return Place(p, tuple(ids), name, chunks)


def choose(
    target: Target, names: Sequence[str], wanted: Sequence[int] | None, *, maker: Maker | None = None,
    progress: Progress = silent,
) -> tuple[list[Place], list[str]]:  # fmt: skip
    """Return where to measure, the shortest first, and what could not be had.

    The p are those of the cartridges named and those `wanted`, of a cartridge that the server lists where one is of this
    length; without any those of some cartridges that it lists, or `LENGTHS`. With a `maker` it makes cartridges for
    `wanted` ones. Raises `CartridgeError` for a name that cannot be measured, and for two of one length.
    """
    if names and not target.has_cartridges:
        raise CartridgeError(f"{target.url} has no route /v1/cartridges, so no cartridge can be asked for")
    given = [of_cartridge(target, name) for name in names or ([] if maker else _listed(target, wanted))]
    found = {place.p: place for place in given}
    if len(found) < len(given):
        raise CartridgeError("two of these cartridges have as many positions; measure them one after the other")
    lengths = sorted({*found, *(wanted or ([] if found else LENGTHS))})
    fits = [p for p in lengths if target.context is None or p + ROOM <= target.context]
    for done, p in enumerate(fits, 1):
        if p not in found:
            found[p] = plain(target, p) if maker is None or p < maker.chunk else _made(maker, p)
        progress("documents", done, len(fits))
    left = [
        f"p = {p}: with a question longer than the server's context of {target.context}"
        for p in lengths
        if p not in fits
    ]
    return [found[p] for p in fits], left


def _listed(target: Target, wanted: Sequence[int] | None) -> list[str]:
    """Return a server's cartridges of the lengths `wanted`; without these of the three longest ones."""
    by_length = {row["positions"]: f"{row['id']}@{row['version']}" for row in target.cartridges()}
    return [by_length[p] for p in wanted or [*by_length][-3:] if p in by_length]


def _made(maker: Maker, p: int) -> Place:
    one = maker.prefill(f"{maker.run}-{p}", p)
    return Place(p, one.ids, one.name, p // maker.chunk)
