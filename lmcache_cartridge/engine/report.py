"""Confirm: how a vLLM worker tells the adapter in LMCache's server what it is, before anything is served to it.

An L2 adapter sees keys, shapes and a dtype. Model, block size and how a block is packed are invisible to it, and a
wrong guess is silent garbage. So each worker reports what it found out about itself over one Unix socket; the reply
is the path of the control socket of its rank's store. Who has not reported gets nothing.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from ..artifact.model import Fingerprint
from ..errors import CartridgeError, UnsupportedEngine
from ..memory.quantise import Quantiser
from . import frames
from .client import TIMEOUT_S, ControlClient, Held
from .contract import CONTROL


class Report(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank of one engine, as it found itself."""

    model_name: str
    """As in LMCache's keys; another one for every engine that may not have the same bytes, see `key_name`."""
    fingerprint: Fingerprint
    allow_trained: bool
    chunk_tokens: int = 0
    """LMCache's chunk size."""
    layout: str = ""
    """How the engine was seen to write KV: `heads` where it caches latent vectors, `fused`, or one of `tiles`."""
    rank: int = 0
    """Number of this worker in its engine."""
    world: int = 1
    """Workers of the engine: tensor-parallel ranks times stages."""
    stages: int = 1
    """Stages of the pipeline."""
    layers: tuple[int, int] | None = None
    """The first layer of this worker's stage, and the first behind it; None: all."""
    quantiser: Quantiser | None = None
    """How these layers write their caches where these are quantised."""
    groups: tuple[tuple[int, ...], ...] = ()
    """Which layers have blocks of one kind, in the order in which they lie in LMCache's objects; empty where all have."""

    @property
    def key(self) -> tuple[str, int]:
        """What LMCache's keys name this rank by: the model and `kv_rank`."""
        return self.model_name, self.world << 24 | self.rank << 16 | self.world << 8 | self.rank


def key_name(model: str, *facts: Any) -> str:
    """Return the model name for LMCache's keys: the model's last name and a digest of whatever decides a chunk's bytes.

    LMCache's memory keeps chunks beyond the life of an engine. With this name none is ever given to an engine that
    has other blocks, other weights, or computes what it could not load. Short, since LMCache's `fs` adapter makes one
    file name of a key, of at most 255 bytes.
    """
    digest = blake3(msgspec.json.encode((model, facts))).hexdigest(8)
    return f"{model.rstrip('/').rpartition('/')[2].replace('@', '-')[-24:]}#cartridge-{digest}"


def check_ids(chunk_tokens: int) -> list[int]:
    """Return the ids of the chunk that is looked up under a check's salt."""
    return list(range(chunk_tokens))


def confirm(path: str, report: Report, check: str) -> tuple[str, Held]:
    """Report to the adapter at `path`; return the path of the control socket of this rank's store, and what the caller must
    keep for as long as the engine lives: its end tells the adapter that the engine is gone. Blocks for the answer.

    `check` is a salt of `check_salt` under which LMCache's server has looked `check_ids` up: the adapter has seen by
    which hash the server names chunks. Raises `UnsupportedEngine` if nobody answers, or with the adapter's reason for
    serving this engine nothing.
    """
    told = Held(ControlClient([path]))
    try:
        [control] = told.begin("report", msgspec.msgpack.encode((report, check))).result(TIMEOUT_S)
    except (UnsupportedEngine, TimeoutError) as error:
        raise UnsupportedEngine(
            f"no cartridge adapter listens at {path} ({error}). Start LMCache's server first, with --l2-adapter and "
            f"the same `control` as in {CONTROL}; see `lmcache-cartridge config lmcache-multiprocess.sh`"
        ) from error
    except CartridgeError as error:
        raise UnsupportedEngine(f"the cartridge adapter refuses this engine: {error}") from None
    return control, told


class ReportServer(frames.FrameServer):
    """Takes reports at a Unix socket that no other user may open."""

    def __init__(self, path: Path, accept: Callable[[Report, str], str], gone: Callable[[Report], None]) -> None:
        """`accept` takes a report and its check, and returns the path of a control socket or raises `CartridgeError`.
        `gone` is called when whoever sent an accepted report has gone.

        Raises `UnsupportedEngine` where another adapter listens or the directory is not ours alone.
        """
        _take_place(path)
        self._accept, self._gone = accept, gone
        super().__init__(str(path))

    def close(self) -> None:
        """Take no more reports."""
        super().close()
        Path(self.path).unlink(missing_ok=True)

    async def answer(self, held: ExitStack, has_left: Callable[[], bool], method: str, *arguments: Any) -> str:
        """Take one report."""
        try:
            report, check = _decode_report(*arguments)
        except msgspec.DecodeError as error:
            raise UnsupportedEngine(f"no report of this version: {error}") from error
        control = await self.in_thread(self._accept, report, check)
        held.callback(self._gone, report)
        return control


_decode_report = msgspec.msgpack.Decoder(tuple[Report, str]).decode


def _take_place(path: Path) -> None:
    """Make the socket's directory, and see that nobody listens there."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.parent.stat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise UnsupportedEngine(
            f"{path.parent} may be written to by other users; put `control` into a directory of yours"
        )
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(TIMEOUT_S)
        if asking.connect_ex(str(path)) == 0:  # else nobody does, and a dead one's socket is replaced
            raise UnsupportedEngine(f"another adapter listens at {path}; give each its own `control`")
