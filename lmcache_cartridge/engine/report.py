"""Confirm: how a vLLM worker tells the adapter in LMCache's server what it is, before anything is served to it.

An L2 adapter sees keys, shapes and a dtype. Model, block size and how a block is packed are invisible to it, and a
wrong guess is silent garbage. So each worker reports what it found out about itself over one Unix socket; the reply
is the path of the control socket of its rank's store. Who has not reported gets nothing.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import socketserver
import stat
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from blake3 import blake3

from ..artifact.lru import Lru
from ..artifact.model import Fingerprint
from ..errors import UnsupportedEngine
from ..memory.quantise import Quantiser
from . import frames
from .contract import CONTROL
from .salts import is_check

logger = logging.getLogger(__name__)

HASH = "blake3"
"""By which LMCache's server must name chunks: its default, and of its algorithms the one that has no seed."""
_MAX_CHECKS = 1 << 10
"""Checks whose report has not come."""


class Report(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank of one engine, as it found itself."""

    model_name: str
    """As in LMCache's keys; another one for every engine that may not have the same bytes, see `key_name`."""
    fingerprint: Fingerprint
    chunk_tokens: int
    """LMCache's chunk size."""
    heads: int
    """KV heads of this rank."""
    layout: str
    """How the engine was seen to write KV: `heads` where it caches latent vectors, `fused`, or one of `tiles`."""
    rank: int
    """Number of this worker in its engine."""
    world: int
    """Workers of the engine: tensor-parallel ranks times stages."""
    allow_trained: bool
    stages: int = 1
    """Stages of the pipeline."""
    first_layer: int = 0
    layers: int | None = None
    """Layers of this worker's stage; None: all."""
    quantiser: Quantiser | None = None
    """How these layers write their caches where these are quantised."""

    @property
    def tensor_ranks(self) -> int:
        """Ranks among which the heads of a layer are divided; this one is `rank % tensor_ranks`."""
        return self.world // self.stages

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


class Confirmed(NamedTuple):
    """What a rank has of the adapter that takes its report."""

    control: str
    """Path of the control socket of this rank's store."""
    connection: socket.socket
    """The caller's to keep for as long as the engine lives: its end tells the adapter that the engine is gone."""


def confirm(path: str, report: Report, check: str) -> Confirmed:
    """Report to the adapter at `path` and return where this rank's store answers. Blocks for the answer.

    `check` is a salt of `check_salt` under which LMCache's server has looked `check_ids` up: the adapter has seen by
    which hash the server names chunks. Raises `UnsupportedEngine` if nobody listens, or with the adapter's reason for
    serving this engine nothing.
    """
    try:
        connection = frames.connect(path)
    except OSError as error:
        raise UnsupportedEngine(
            f"no cartridge adapter listens at {path} ({error}). Start LMCache's server first, with --l2-adapter and "
            f"the same `control` as in {CONTROL}; see `lmcache-cartridge config lmcache-multiprocess.sh`"
        ) from error
    try:
        if frames.peer_uid(connection) != os.geteuid():
            raise UnsupportedEngine(f"another user listens at {path}")
        frames.send(connection, [msgspec.to_builtins(report, builtin_types=(bytes,)), check])
        if (frame := frames.receive(connection)) is None:
            raise UnsupportedEngine(f"the cartridge adapter at {path} ended while it was asked")
        problem, result = msgspec.msgpack.decode(frame)
        if problem is not None:
            raise UnsupportedEngine(f"the cartridge adapter refuses this engine: {problem}")
    except BaseException:
        connection.close()
        raise
    return Confirmed(result, connection)


class HashChecks:
    """By which hash LMCache's server was seen to name the chunk of each check."""

    def __init__(self) -> None:
        self._seen: Lru[str, int] = Lru(_MAX_CHECKS)

    def see(self, salt: str, chunk_hash: int) -> bool:
        """Remember the hash in a key if its salt is a check's; False, and no change, for any other key."""
        if not is_check(salt):
            return False
        self._seen.put(salt, chunk_hash)
        return True

    def compare(self, salt: str, ours: int) -> None:
        """Raise `UnsupportedEngine` unless the server named the chunk of a check as we do: every lookup would miss."""
        seen = self._seen.pop(salt)
        if seen is None:
            raise UnsupportedEngine(
                "this adapter was not asked for the chunk that vLLM looked up: vLLM talks to another LMCache server. "
                f"lmcache.mp.port and {CONTROL} must be those of one"
            )
        if seen != ours:
            raise UnsupportedEngine(
                f"LMCache's server names chunks by {_servers_hash()}, cartridges are found by {HASH}: every lookup "
                "would miss. Start LMCache's server without --hash-algorithm"
            )


def _servers_hash() -> str:
    """Return what the command line of LMCache's server, which is this process, says of `--hash-algorithm`."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--hash-algorithm", default="another algorithm")
    return parser.parse_known_args(sys.argv[1:])[0].hash_algorithm


class ReportServer:
    """Takes reports at a Unix socket that no other user may open, in threads of its own."""

    def __init__(self, path: Path, accept: Callable[[Report, str], str], gone: Callable[[Report], None]) -> None:
        """`accept` takes a report and its check, and returns the path of a control socket or raises `CartridgeError`.
        `gone` is called when whoever sent an accepted report has gone.

        Raises `UnsupportedEngine` where another adapter listens or the directory is not ours alone.
        """
        _take_place(path)

        class Connection(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                _answer(self.request, accept, gone)

        self._path = path
        self._server = socketserver.ThreadingUnixStreamServer(str(path), Connection)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="cartridge-reports", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more reports."""
        self._server.shutdown()
        self._server.server_close()
        self._path.unlink(missing_ok=True)


def _answer(connection: Any, accept: Callable[[Report, str], str], gone: Callable[[Report], None]) -> None:
    """Take one report and wait until whoever sent it goes."""
    accepted: list[Report] = []

    def take(frame: bytes) -> str:
        report, check = _report(frame)
        control = accept(report, check)
        accepted.append(report)
        return control

    try:
        if (frame := frames.receive(connection)) is not None:
            frames.send(connection, frames.result(partial(take, frame), logger, "taking a report"))
            while accepted and frames.receive(connection) is not None:
                pass
    except OSError as error:
        logger.debug("a report broke off: %s", error)
    finally:
        for report in accepted:
            gone(report)


_decode_report = msgspec.msgpack.Decoder(tuple[Report, str]).decode


def _report(frame: bytes) -> tuple[Report, str]:
    try:
        return _decode_report(frame)
    except msgspec.DecodeError as error:
        raise UnsupportedEngine(f"no report of this version: {error}") from error


def _take_place(path: Path) -> None:
    """Make the socket's directory, and remove what a dead adapter left there."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.parent.stat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise UnsupportedEngine(
            f"{path.parent} may be written to by other users; put `control` into a directory of yours"
        )
    if not path.exists():
        return
    try:
        frames.connect(str(path)).close()
    except OSError:
        path.unlink(missing_ok=True)
        return
    raise UnsupportedEngine(f"another adapter listens at {path}; give each its own `control`")
