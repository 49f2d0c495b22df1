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
    passed: bool
    problem: str | None


def ask_canary(manifest: Manifest, server: Server, progress: Progress = silent) -> list[Row]:
    """Ask all questions of a cartridge's canary of a server that serves it under its `id@version`, and compare.

    Those behind itself only where two copies are whole chunks: no request can name less than whole cartridges.
    A request that the server refuses is a row that did not pass. Raises `CartridgeError` for a cartridge without one.
    """
    if manifest.canary is None:
        raise CartridgeError(
            f"{manifest.name} has no canary, so nothing is known to ask; make it again with this release to have one"
        )
    asked = [("alone", 1, each) for each in manifest.canary.after]
    if manifest.canary.behind_positions is None:  # else the server would compute the rest of the second copy
        asked += [("behind itself", 2, each) for each in manifest.canary.behind]
    rows = []
    for place, times, each in asked:
        rows.append(_ask(manifest.name, server, place, times, each))
        progress("validate", len(rows), len(asked))
    return rows


def _ask(name: str, server: Server, place: str, times: int, asked: Asked) -> Row:
    try:
        reply = server.ask(asked.question, [name] * times, tokens=len(asked.answer.tokens))
    except SourceError as error:
        return Row(place, 0, 0, None, asked.answer.bound, False, str(error))
    if reply.status != 200:
        return Row(place, 0, 0, None, asked.answer.bound, False, f"answered {reply.status}: {reply.message}")
    found = compare(asked.answer, reply.tokens, reply.top)
    problem = None if reply.cached else "the server computed the document instead"
    passed = found.passed and problem is None
    return Row(place, found.positions, reply.cached, round(found.difference, 4), found.bound, passed, problem)
