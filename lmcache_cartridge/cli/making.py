"""What several commands make cartridges with: of many documents, or for a server of their own or one that follows `--home`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from .options import check, load_model, settings_of
from .show import bar, show

if TYPE_CHECKING:
    from ..make.model import CausalModel
    from ..make.trial.maker import Maker
    from ..make.trial.own import OwnServer


ONE = "--publish, --ray need many documents; `publish` takes one"
"""What holds where a command makes one cartridge."""


def many(places: list[str], given: Mapping[str, Any]) -> int:
    """Make the cartridges of all documents as `batch.Recipe` is given; return the exit status, 1 where one was not made."""
    check(given, "--ray needs --publish; the cartridges lie on many machines")
    from ..make.corpus import find

    sources, rows = find(places)
    from ..make import batch, cluster

    recipe = {name: given[name] for name in batch.Recipe.__slots__ if given.get(name) is not None}
    how: Any = batch.Recipe(**recipe), sources, settings_of(library=given["publish"])
    done = cluster.rows(given["ray"], *how) if given["ray"] else batch.rows(*how)
    rows += bar(iterable=done, total=len(sources), unit=" documents")
    failed, made = [row for row in rows if row.problem], sum(row.made for row in rows)
    counted = f"{made} made, {len(rows) - made - len(failed)} there already, {len(failed)} failed"
    show([row._asdict() for row in rows], "\n".join([counted, *(f"{row.document}: {row.problem}" for row in failed)]))
    return int(bool(failed))


def load_for(vllm: str, model: str) -> tuple[CausalModel, list[str]]:
    """Return a model as a server with these options of vLLM has it, and the options: in the dtype of its cartridges."""
    from ..make.trial.own import eager
    from ..serve.arguments import Arguments

    args = shlex.split(vllm) or eager()
    most, given = map(Arguments(args).get, ("max-model-len", "dtype"))
    loaded = load_model(model, dtype="auto", max_model_len=int(most) if most and most.isdecimal() else None)
    return loaded, args if given else [*args, "--dtype", loaded.fingerprint.dtype]  # vLLM's own for float32 is 16 bits


def own_server(
    stack: ExitStack, model: str, chunk: int, vllm: str, *, lengths: Sequence[int] = (), **launched: Any
) -> tuple[OwnServer, Maker]:
    """Return a server over a home of its own, not started, and what makes cartridges for it; both end with `stack`.

    Where `lengths` are given it has memory for cartridges of them, and can be told to drop what is there.
    """
    from ..make.trial.maker import Maker
    from ..make.trial.own import OwnServer

    home = Path(stack.enter_context(TemporaryDirectory(prefix="cartridge-server-")))
    loaded, args = load_for(vllm, model)
    settings: dict[str, Any] = {}
    if lengths:
        room = room_bytes(lengths, loaded.context_tokens, loaded.fingerprint.token_bytes)
        settings = {"admin": True, "cpu_bytes": room}
    own = OwnServer(model, home, chunk_tokens=chunk, vllm_args=args, settings=settings, **launched)
    stack.callback(own.stop)
    return own, Maker(loaded, own.settings, chunk)


def room_bytes(lengths: Sequence[int], context: int | None, token_bytes: int) -> int:
    """Return the bytes for the two longest cartridges that a model's `context` has room for, and some."""
    longest = max(lengths) if context is None else min(max(lengths), context)
    return max(1 << 30, 3 * longest * token_bytes)
