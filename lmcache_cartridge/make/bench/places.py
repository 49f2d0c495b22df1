"""Places: documents of p tokens, each with the cartridge that stands for it where there is one, and questions on them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...artifact.reading import PAYLOAD
from ...errors import CartridgeError
from ..progress import Progress, silent
from ..trial import texts
from .target import UNFIT, Target, most

if TYPE_CHECKING:
    from ..trial.maker import Maker

LENGTHS = (256, 1024, 4096, 16_384, 32_768)
"""The p that are asked for where nothing else is said."""


class Place(NamedTuple):
    """Where times are taken: p tokens that stand before a question."""

    p: int
    document: tuple[int, ...]
    cartridge: str | None = None
    """`id@version`."""
    chunks: int = 0
    """Whole chunks of the cartridge."""
    is_same: bool = True
    """Whether the cartridge's answers are to be those of the document: a trained one's document is another length."""
    files: tuple[Path, ...] = ()
    """The cartridge's on this machine, where they are known."""


def questions(target: Target, count: int) -> list[list[int]]:
    """Return the token ids of so many questions, each its own."""
    asked = texts.write("bench", 4000).questions
    numbered = (f"\n{n}. Question: {asked[n % len(asked)]}\nAnswer:" for n in range(count))
    return [target.tokenize(prompt=text, add_special_tokens=False) for text in numbered]


def plain(target: Target, p: int) -> Place:
    """Return a document of generated text, of p tokens."""
    ids = target.tokenize(prompt=texts.write(f"bench {p}", p).text, add_special_tokens=True)
    if len(ids) < p:
        raise CartridgeError(f"a text of {p} tokens was wanted, and as many words have {len(ids)}")
    return Place(p, tuple(ids[:p]))


def of_cartridge(target: Target, name: str) -> Place:
    """Return the place of a cartridge that the server has. Raises `CartridgeError` where it is none to be measured."""
    found = target.cartridge(name)
    name, p, chunks = f"{found['id']}@{found['version']}", found["positions"], most(found, "chunks")
    if found["state"] in UNFIT:
        raise CartridgeError(f"{name} is {found['state']} on {target.url}; `lmcache-cartridge list` says why")
    if not chunks:
        raise CartridgeError(f"{name} of {p} positions has no whole chunk, so nothing is injected")
    if found["kind"] != "prefill":
        return plain(target, p)._replace(cartridge=name, chunks=chunks, is_same=False)
    ids = target.cartridge_ids(name)
    if len(ids) != p:
        raise CartridgeError(f"{target.url} gave {len(ids)} token ids of the {p} of {name}")
    return Place(p, tuple(ids), name, chunks)


def choose(
    target: Target, names: Sequence[str], wanted: Sequence[int] | None, around: int, *, maker: Maker | None = None,
    progress: Progress = silent,
) -> tuple[list[Place], list[str]]:  # fmt: skip
    """Return where to measure, the shortest first, and what could not be had.

    The p are those of the cartridges named and those `wanted`, of a cartridge that the server lists where one is of this
    length; without any those of some cartridges that it lists, or `LENGTHS`. With a `maker` it makes cartridges for
    `wanted` ones. Beside p there must be room for `around` other tokens.
    Raises `CartridgeError` for a name that cannot be measured.
    """
    if names and not target.has_cartridges:
        raise CartridgeError(f"{target.url} has no route /v1/cartridges, so no cartridge can be asked for")
    left: list[str] = []
    found: dict[int, Place] = {}
    for name in names or ([] if maker else _listed(target, wanted)):
        place = of_cartridge(target, name)
        if place.p not in found and _fits(target, place.p, around):
            found[place.p] = place
        else:
            left.append(
                f"{place.cartridge}: another has {place.p} positions too, or a question has no room behind them"
            )
    lengths = [p for p in wanted or ([] if found else LENGTHS) if p not in found]
    fits = [p for p in sorted(set(lengths)) if _fits(target, p, around)]
    if too_long := sorted({*lengths} - {*fits}):
        left.append(f"p = {', '.join(map(str, too_long))}: longer than the server's context of {target.context}")
    for done, p in enumerate(fits, 1):
        found[p] = plain(target, p) if maker is None or p < maker.chunk else _made(maker, p)
        progress("documents", done, len(fits))
    return [found[p] for p in sorted(found)], left


def _listed(target: Target, wanted: Sequence[int] | None) -> list[str]:
    """Return a server's cartridges of the lengths `wanted`; without these of the three longest ones."""
    by_length = {row["positions"]: f"{row['id']}@{row['version']}" for row in target.cartridges()}
    return [by_length[p] for p in wanted or [*by_length][-3:] if p in by_length]


def _fits(target: Target, p: int, around: int) -> bool:
    return target.context is None or p + around <= target.context


def _made(maker: Maker, p: int) -> Place:
    one = maker.prefill(f"{maker.run}-{p}", p)
    assert one.root is not None, "it was made here"
    return Place(p, one.ids, one.name, p // maker.chunk, files=(one.root / PAYLOAD,))
