"""Imported: `.pt` files that requests name, made into artefacts by a child process, kept, and found again.

The child reads the file as `lmcache-cartridge import --no-compare` does: nothing in it runs, and no weights are loaded. It has
a deadline and a limit of memory, so a file that is made to do harm costs its own import and no more.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec
from blake3 import blake3

from ..artifact import files, reading
from ..artifact.bytesource import ByteRange
from ..artifact.location import is_remote
from ..artifact.lru import Lru
from ..artifact.model import Fingerprint
from ..errors import SourceError, SourceNotFound
from ..settings import Settings
from ..sources.s3 import S3Source
from .request import Refusal, without_paths

logger = logging.getLogger("vllm.lmcache_cartridge.serve.imported")

SUFFIX = ".pt"
_AT_ONCE = 2
"""Children at once in one API server; each has a core for some seconds."""
DEADLINE_S = 600.0
_REFUSED_S = 60.0
"""How long a file that was refused is not looked at again, unless it changes."""
_USED_S = 3600.0
"""What was used so recently is not removed for others."""
MEMORY_BYTES = 32 << 30
"""Address space that torch may take by itself; to it come four times the file."""
_PIECE_BYTES = 64 << 20
_BESIDE = ("prefix_token_ids.json", "document_token_ids.json", "meta.json")
"""What an import reads beside a file."""
_UNFINISHED = ".made-"
_SECRETS = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL|^AWS_", re.IGNORECASE)
_CHILD = (
    "import ctypes, os, resource, sys; limit = int(sys.argv.pop(1)); "
    "ctypes.CDLL(None).prctl(1, 9); os.nice(5); resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); "
    "resource.setrlimit(resource.RLIMIT_AS, (limit, limit)); "
    "from lmcache_cartridge.cli.main import main; sys.exit(main(sys.argv[1:]))"
)
"""Ends with its parent (`PR_SET_PDEATHSIG`), and takes the limit before it loads anything."""


class Served(NamedTuple):
    """What imports are for."""

    model: str
    """Directory of the model."""
    dtype: str
    """Of the engine's KV."""
    chunk_tokens: int
    fingerprint: Fingerprint
    """What the engine runs: after another model took the directory's place files are imported again."""

    def command(self, path: Path, name: str, home: Path, memory_bytes: int) -> list[str]:
        """Return the command that imports a file into a home, as the cartridge `name`, in so much address space."""
        return [
            sys.executable, "-P", "-c", _CHILD, str(memory_bytes), "import", str(path), "--id", name,
            "--model", self.model, "--dtype", self.dtype, "--chunk-size", str(self.chunk_tokens),
            "--no-compare", "--home", str(home), "--format", "json",
        ]  # fmt: skip


class Imports:
    """Artefacts made of files, under `cache_dir/imported`, which processes may share. Safe from any thread.

    Whoever asks sees to it that a file is not asked for twice at a time, which would import it twice.
    """

    def __init__(self, settings: Settings, source: S3Source, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`source` reads objects on S3. Touches no file before the first call."""
        self._settings, self._source, self._clock = settings, source, clock
        self._directory = settings.cache_dir / "imported"
        self._slots = threading.BoundedSemaphore(_AT_ONCE)
        self._refused: Lru[str, tuple[float, str]] = Lru(1000)
        self.served: Served | None = None
        """None where nothing can be imported."""

    def of(self, location: str, shown: str) -> Path:
        """Return the artefact of a file, or of an object on S3, which is made first where there is none of it as it is now.

        Blocks for that. Raises `Refusal`, which calls the place `shown`: 404, 422 for what cannot be imported, and 503 where that
        cannot be done now.
        """
        most = self._settings.imported_bytes
        if self.served is None or most == 0:
            why = (
                "by the setting imported_bytes"
                if self.served
                else "here; `lmcache-cartridge import` makes a cartridge of one"
            )
            raise Refusal(422, f"{shown}: no {SUFFIX} files are imported {why}")
        looks = self._look(location, shown)
        if (size := looks[0]) > most:
            raise Refusal(422, f"{shown} has {size} bytes, more than the setting imported_bytes")
        key = blake3(msgspec.json.encode([location, looks, self.served])).hexdigest(16)
        root = self._directory / key
        if not (root / reading.MANIFEST).is_file():
            refused = self._refused.get(key)
            if refused is not None and self._clock() < refused[0]:
                raise Refusal(422, refused[1])
            try:
                self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
                with self._slots, TemporaryDirectory(
                    prefix=_UNFINISHED, dir=self._directory, ignore_cleanup_errors=True
                ) as work:  # fmt: skip
                    self._make_room(size, shown)
                    made = self._import(self.served, location, size, Path(work), key, shown)
                    if self._look(location, shown) != looks:
                        raise Refusal(503, f"{shown} is being changed", retry_after_s=2)
                    if not (root / reading.MANIFEST).is_file():  # else another process was first
                        shutil.rmtree(root, ignore_errors=True)  # half of one that somebody removed
                        made.rename(root)
            except OSError as error:
                logger.warning("%s cannot be imported: %s", location, error)
                raise Refusal(503, f"{shown} cannot be imported now", retry_after_s=30) from None
        with suppress(OSError):
            os.utime(root)  # it is used
        return root

    def _look(self, location: str, shown: str) -> list[Any]:
        """Return the size of a file or object, and what changes when it does. Raises `Refusal`."""
        try:
            if is_remote(location):
                return [self._source.size(location, ""), self._source.revision(location, "")]
            path = Path(location)
            beside = (other.stat() for name in _BESIDE if (other := path.parent / name).is_file())
            stats = [path.stat(), *beside]
            return [stats[0].st_size, *((s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for s in stats)]
        except (OSError, SourceNotFound):
            raise Refusal(404, f"no cartridge is at {shown}") from None
        except SourceError:
            raise Refusal(503, f"{shown} cannot be reached", retry_after_s=5) from None

    def _import(self, served: Served, location: str, size: int, work: Path, key: str, shown: str) -> Path:
        """Return the directory that a child has made. Raises `OSError`, and `Refusal`, which is remembered."""
        path = work / "object.pt" if is_remote(location) else Path(location)
        if is_remote(location):
            with files.create(path, 0o600) as file:
                for start in range(0, size, _PIECE_BYTES):
                    piece = memoryview(bytearray(min(_PIECE_BYTES, size - start)))
                    self._source.read_into(location, "", ByteRange(start, start + len(piece)), piece)
                    file.write(piece)
        name = _id(location)
        made = work / "cartridges" / name / "1"
        environment = {k: v for k, v in os.environ.items() if not _SECRETS.search(k)} | {
            "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        try:
            child = subprocess.run(
                served.command(path, name, work, MEMORY_BYTES + 4 * size), stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment, timeout=DEADLINE_S,
            )  # fmt: skip
            why = _reason(child.stderr, path)
            if child.returncode == 0 and (made / reading.MANIFEST).is_file():
                return made
        except subprocess.TimeoutExpired:
            why = f"it took more than {DEADLINE_S:g} s"
        message = f"{shown} cannot be imported: {why}"
        logger.warning("%s: %s", path, why)
        self._refused.put(key, (self._clock() + _REFUSED_S, message))
        raise Refusal(422, message)

    def _make_room(self, size: int, shown: str) -> None:
        """Remove what was not used for longest until another one has room. Raises `Refusal` where all is in use."""
        now, there = time.time(), []
        for root in self._directory.iterdir():
            if root.name.startswith(_UNFINISHED) and root.stat().st_mtime < now - _USED_S - DEADLINE_S:
                shutil.rmtree(root, ignore_errors=True)  # of a process that was killed
            elif not root.name.startswith(".") and root.is_dir():
                there.append((root.stat().st_mtime, sum(p.stat().st_size for p in root.iterdir()), root))
        free = self._settings.imported_bytes - sum(used for _, used, _ in there)
        for used_at, used, root in sorted(there):
            if free >= size or used_at > now - _USED_S:
                break
            gone = self._directory / f"{_UNFINISHED}{root.name}"
            with suppress(OSError):
                root.rename(gone)  # at once, for whoever looks
                shutil.rmtree(gone, ignore_errors=True)
                free += used
        if free < size:
            raise Refusal(503, f"{shown} finds no room in imported_bytes, all of which is in use", retry_after_s=60)


def _id(location: str) -> str:
    """Return the id of what is made of a file: its name, and a part that tells files of one name apart."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(location).stem).strip("-")[:80] or "file"
    return f"{stem}.{blake3(location.encode()).hexdigest(4)}"


def _reason(errors: bytes, path: Path) -> str:
    """Return the last line that a child said of itself, fit for a client."""
    said = [line for line in errors.decode(errors="replace").splitlines() if line.startswith("lmcache-cartridge: ")]
    if not said:
        return "the import failed; the server's log says for which file"
    reason = said[-1].removeprefix("lmcache-cartridge: ").removeprefix(f"{path}: ")
    return without_paths(reason, {str(path): path.name, str(path.parent): ""})
