"""Imported: `.pt` files that requests name, made into artefacts by a child process, kept, and found again.

The child reads the file as `lmcache-cartridge import --no-compare` does: nothing in it runs, and no weights are loaded. It has
a deadline and a limit of memory, so a file that is made to do harm costs its own import and no more.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from blake3 import blake3

from ..artifact import files, reading
from ..artifact.bytesource import ByteRange
from ..artifact.lru import Lru
from ..errors import SourceError, SourceNotFound
from ..settings import Settings
from ..sources.locks import locked
from ..sources.s3 import S3Source
from .request import Refusal, without_paths

logger = logging.getLogger("vllm.lmcache_cartridge.serve.imported")

SUFFIX = ".pt"
_AT_ONCE = 2
"""Children at once in one API server; each has a core for some seconds."""
_MAX_WAITING = 8
"""Files that wait for their turn, each with a thread; others are told to come again."""
DEADLINE_S = 600.0
_REFUSED_S = 60.0
"""How long a file that was refused is not looked at again, unless it changes."""
_USED_S = 3600.0
"""What was used so recently is not removed for others."""
_FRESH_S = 10.0
"""How long an object on S3 is not asked for its revision again."""
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

    def command(self, path: Path, name: str, home: Path, memory_bytes: int) -> list[str]:
        """Return the command that imports a file into a home, as the cartridge `name`, in so much address space."""
        return [
            sys.executable, "-P", "-c", _CHILD, str(memory_bytes), "import", str(path), "--id", name,
            "--model", self.model, "--dtype", self.dtype, "--chunk-size", str(self.chunk_tokens),
            "--no-compare", "--home", str(home), "--format", "json",
        ]  # fmt: skip


class Imports:
    """Artefacts made of files, under `cache_dir/imported`, which processes may share. Safe from any thread."""

    def __init__(self, settings: Settings, source: S3Source, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`source` reads objects on S3. Touches no file before the first call."""
        self._settings, self._source, self._clock = settings, source, clock
        self._directory = settings.cache_dir / "imported"
        self._slots = threading.BoundedSemaphore(_AT_ONCE)
        self._waiting = threading.BoundedSemaphore(_AT_ONCE + _MAX_WAITING)
        self._refused: Lru[str, tuple[float, str]] = Lru(1000)
        self._revisions: Lru[str, tuple[float, tuple[str, int]]] = Lru(1000)
        self.served: Served | None = None
        """None where nothing can be imported."""

    def of_file(self, path: Path, shown: str) -> Path:
        """Return the artefact of a file, which is made first where there is none of it as it is now. Blocks for that.

        `path` has no links in it. Raises `Refusal`, which calls it `shown`: 422 for what cannot be imported, and 503 where
        that cannot be done now.
        """
        return self._of(str(path), self._stamps(path, shown), shown, path, lambda _: path)

    def of_object(self, location: str, shown: str, *, force: bool = False) -> Path:
        """Return the artefact of an object on S3, as `of_file`, which also raises 404.

        S3 is asked whether it changed at most every ten seconds, unless with `force`. Where S3 cannot be reached what was
        made before is had.
        """
        revision, size = self._revision(location, shown, force)

        def download(directory: Path) -> Path:
            path = directory / "object.pt"
            try:
                with files.create(path, 0o600) as file:
                    for start in range(0, size, _PIECE_BYTES):
                        piece = memoryview(bytearray(min(_PIECE_BYTES, size - start)))
                        self._source.read_into(location, "", ByteRange(start, start + len(piece)), piece)
                        file.write(piece)
                if self._source.revision(location, "") != revision:
                    raise SourceError("it was replaced while it was read")
            except SourceError:
                self._revisions.pop(location)
                raise Refusal(503, f"{shown} cannot be read now", retry_after_s=5) from None
            return path

        server = self._settings.s3_endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3", "")
        return self._of(location, [server, revision, size], shown, size, download)

    def _revision(self, location: str, shown: str, force: bool) -> tuple[str, int]:
        known = self._revisions.get(location)
        if known is not None and not force and self._clock() < known[0] + _FRESH_S:
            return known[1]
        try:
            found = self._source.revision(location, ""), self._source.size(location, "")
        except SourceNotFound:
            raise Refusal(404, f"no cartridge is at {shown}") from None
        except SourceError:
            if known is not None:
                return known[1]
            raise Refusal(503, f"{shown} cannot be reached", retry_after_s=5) from None
        self._revisions.put(location, (self._clock(), found))
        return found

    def _stamps(self, path: Path, shown: str) -> list[object]:
        try:
            found = [path.stat(), *(beside.stat() for name in _BESIDE if (beside := path.parent / name).is_file())]
        except OSError:
            raise Refusal(404, f"no cartridge is at {shown}") from None
        return [(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for s in found]

    def _of(
        self, location: str, stamps: list[object], shown: str, whole: Path | int, get: Callable[[Path], Path]
    ) -> Path:
        served, settings = self.served, self._settings
        if served is None or settings.imported_bytes == 0:
            why = (
                "by the setting imported_bytes"
                if served
                else "here; `lmcache-cartridge import` makes a cartridge of one"
            )
            raise Refusal(422, f"{shown}: no {SUFFIX} files are imported {why}")
        size = whole if isinstance(whole, int) else whole.stat().st_size
        if size > settings.imported_bytes:
            raise Refusal(422, f"{shown} has {size} bytes, more than the setting imported_bytes")
        facts = json.dumps([location, stamps, served, _stamps_of(Path(served.model))])
        key = blake3(facts.encode()).hexdigest(16)
        root = self._directory / key
        if not (root / reading.MANIFEST).is_file():
            refused = self._refused.get(key)
            if refused is not None and self._clock() < refused[0]:
                raise Refusal(422, refused[1])
            with self._turn(key, shown):
                if not (root / reading.MANIFEST).is_file():
                    self._make_room(size, shown)
                    with TemporaryDirectory(
                        prefix=_UNFINISHED, dir=self._directory, ignore_cleanup_errors=True
                    ) as name:
                        path = get(work := Path(name))
                        made = self._import(key, path, work, _id(location), size, shown)
                        if isinstance(whole, Path) and self._stamps(whole, shown) != stamps:
                            raise Refusal(503, f"{shown} is being changed", retry_after_s=2)
                        shutil.rmtree(root, ignore_errors=True)  # half of one that was being removed
                        made.rename(root)
        with suppress(OSError):
            os.utime(root)  # it is used
        return root

    @contextmanager
    def _turn(self, key: str, shown: str) -> Iterator[None]:
        """Wait for one of a few places, and until nobody else, of all processes, makes the same."""
        busy = Refusal(503, f"{shown}: other files are being imported", retry_after_s=5)
        if not self._waiting.acquire(blocking=False):
            raise busy
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._slots, locked(self._directory / f".lock-{key[:2]}", DEADLINE_S):
                yield
        except TimeoutError:
            raise busy from None
        except OSError as error:
            logger.warning("%s cannot be used: %s", self._directory, error)
            raise Refusal(503, f"{shown} cannot be imported now", retry_after_s=30) from None
        finally:
            self._waiting.release()

    def _import(self, key: str, path: Path, work: Path, name: str, size: int, shown: str) -> Path:
        """Return the directory that a child has made. Raises `Refusal`, which is remembered where the file is at fault."""
        assert self.served is not None
        command = self.served.command(path, name, work, MEMORY_BYTES + 4 * size)
        environment = {k: v for k, v in os.environ.items() if not _SECRETS.search(k)} | {
            "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        with (work / "errors").open("wb") as errors:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, env=environment,
                start_new_session=True,
            )  # fmt: skip
            try:
                status = child.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        made = work / "cartridges" / name / "1"
        if status == 0 and (made / reading.MANIFEST).is_file():
            return made
        why = _reason(work / "errors", path) if status is not None else f"it took more than {DEADLINE_S:g} s"
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


def _stamps_of(model: Path) -> Sequence[object]:
    """Return what changes when a model's files do."""
    found = [model / "config.json", *model.glob("*.safetensors")]
    return sorted((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in found if p.is_file())


def _id(location: str) -> str:
    """Return the id of what is made of a file: its name, and a part that tells files of one name apart."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(location).stem).strip("-")[:80] or "file"
    return f"{stem}.{blake3(location.encode()).hexdigest(4)}"


def _reason(errors: Path, path: Path) -> str:
    """Return the last line that a child said of itself, fit for a client."""
    text = errors.read_bytes()[-4096:].decode(errors="replace")
    said = [line for line in text.splitlines() if line.startswith("lmcache-cartridge: ")]
    if not said:
        return "the import failed; the server's log says for which file"
    reason = said[-1].removeprefix("lmcache-cartridge: ").removeprefix(f"{path}: ")
    return without_paths(reason, {str(path): path.name, str(path.parent): ""})
