"""Canary: ask a running server a cartridge's canary over HTTP, as any client asks, and compare."""

from __future__ import annotations

from typing import NamedTuple

from ..artifact.canary import Asked, compare
from ..artifact.manifest import Manifest
from ..errors import CartridgeError, SourceError
from ..make.progress import Progress, silent
from ..make.server import Server


class Row(NamedTuple):
    """One question, asked."""

    place: str
    """`alone`, or `behind itself`: with its keys rotated, as later in a chain."""
    positions: int
    """Of the answer, compared."""
    injected: int
    """Positions of the prompt that the engine did not compute."""
    difference: float | None
    bound: float
    problem: str | None
    """Why it did not pass; None where it did."""


def ask_canary(manifest: Manifest, server: Server, progress: Progress = silent) -> list[Row]:
    """Ask all questions of a cartridge's canary of a server that serves it under its `id@version`, and compare.

    Those behind itself only where two copies are whole chunks: no request can name less than whole cartridges.
    A request that the server refuses is a row that did not pass. Raises `CartridgeError` for a cartridge without one.
    """
    if (canary := manifest.canary) is None:
        raise CartridgeError(
            f"{manifest.name} has no canary, so nothing is known to ask; make it again with this release to have one"
        )
    asked = [("alone", 1, each) for each in canary.after]
    if canary.behind_positions is None:  # else the server would compute the rest of the second copy
        asked += [("behind itself", 2, each) for each in canary.behind]
    rows = []
    for place, times, each in asked:
        rows.append(_ask(server, place, [manifest.name] * times, each))
        progress("validate", len(rows), len(asked))
    return rows


def _ask(server: Server, place: str, names: list[str], asked: Asked) -> Row:
    expected = asked.answer
    try:
        expected = asked.expected(in_fp8=server.caches_in_fp8())
        reply = server.ask(asked.question, names, tokens=len(expected.tokens))
        refused = reply.status != 200 and f"answered {reply.status}: {reply.message}"
    except SourceError as error:
        refused = str(error)
    bound = round(expected.bound, 4)
    if refused:
        return Row(place, 0, 0, None, bound, refused)
    found = compare(expected, reply.tokens, reply.top)
    problem = None if found.passed else "the answer is another one"
    if not reply.cached:
        problem = "the server computed the document instead"
    return Row(place, found.positions, reply.cached, round(found.difference, 4), bound, problem)
