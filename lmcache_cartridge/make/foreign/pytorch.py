"""PyTorch files by strangers: tensors, numbers, strings, lists and dicts, and nothing that runs."""

from __future__ import annotations

import io
import pickletools
import warnings
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ...errors import ForeignFormatError

MAX_PICKLE_BYTES = 8 << 20
"""The largest cartridge known describes its tensors in 200 KiB."""
MAX_TUPLES = 20_000
"""A tensor takes five. Python dies hashing a tuple in a tuple in a tuple, 100,000 deep."""

_ALLOWED = {
    "builtins.set",
    "collections.OrderedDict",
    "torch.nn.modules.container.ParameterList",
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_tensor_v2",
    *(f"torch.{kind}Storage" for kind in ("BFloat16", "Half", "Float", "Double", "Long", "Int", "Short", "Char")),
    *(f"torch.{dtype}" for dtype in ("bfloat16", "float16", "float32", "float64")),
    "torch.Size",
}
"""Every name that a pickle may use; a subset of what torch takes for safe, and `ParameterList`."""
_BROKEN = (ValueError, IndexError, OverflowError)
"""What pickletools raises on broken pickles."""


def load(path: Path) -> Any:
    """Return what a file of `torch.save` holds. Nothing in it runs; its tensors are views of the file, not copies.

    Raises `ForeignFormatError`, before any memory is taken for it, for a file that names anything but tensors, is
    packed, or declares more bytes than it has.
    """
    _check(path)
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals([torch.nn.ParameterList]):
            warnings.simplefilter("ignore")  # of a pickle protocol that torch itself does not write
            return torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # whatever torch's restricted unpickler stumbles over in a broken or hostile file
        raise _refusal(path, _reason(error)) from error


def _reason(error: Exception) -> str:
    """Return in one line what torch's unpickler stumbled over."""
    text = str(error).rpartition("WeightsUnpickler error: ")[2]
    if "not resizable" in text:
        return "a tensor is larger than what the file holds for it"
    line = (text.splitlines() or [""])[0]
    return line if isinstance(error, RuntimeError) and line else f"a broken pickle: {type(error).__name__} {line}"


def _refusal(path: Path, reason: str) -> ForeignFormatError:
    return ForeignFormatError(f"{path}: not a PyTorch file of plain tensors: {reason}")


def _check(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            pickled = _pickle_of(path, archive)
    except FileNotFoundError as error:
        raise ForeignFormatError(f"{path}: no such file") from error
    except zipfile.BadZipFile as error:
        raise _refusal(path, f"{_legacy(path)}{error}") from error
    except (ValueError, RuntimeError, NotImplementedError, OSError, EOFError) as error:  # what zipfile trips over
        raise _refusal(path, str(error)) from error
    if strange := _strange_names(path, pickled):
        raise _refusal(
            path, f"it wants {', '.join(strange)}, which may run anything. If you trust its author, load it yourself "
            "and save the keys and values alone"
        )  # fmt: skip


def _pickle_of(path: Path, archive: zipfile.ZipFile) -> bytes:
    """Return the pickle of an archive that has no more in it than the file has bytes."""
    entries = archive.infolist()
    if len({entry.filename for entry in entries}) != len(entries):
        raise _refusal(path, "an entry of its archive is there twice")
    if any(entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size for entry in entries):
        raise _refusal(path, "its archive is compressed, which torch.save never does")
    declared, size = sum(entry.file_size for entry in entries), path.stat().st_size
    if declared > size:
        raise _refusal(path, f"its archive declares {declared} bytes, the file has {size}")
    pickles = [entry for entry in entries if entry.filename.count("/") == 1 and entry.filename.endswith("/data.pkl")]
    if len(pickles) != 1 or pickles[0].file_size > MAX_PICKLE_BYTES:
        raise _refusal(path, f"its archive has no one data.pkl of at most {MAX_PICKLE_BYTES} bytes")
    if damaged := archive.testzip():
        raise _refusal(path, f"{damaged[:80]} does not have the checksum its archive names. Copy the file again")
    return archive.read(pickles[0])


def _strange_names(path: Path, pickled: bytes) -> list[str]:
    """Return every name in a pickle that `_ALLOWED` lacks."""
    names: set[str] = set()
    try:
        tuples = _scan(io.BytesIO(pickled), names)
    except _BROKEN as error:
        raise _refusal(path, f"a broken pickle: {error}") from error
    if tuples > MAX_TUPLES:
        raise _refusal(path, f"{tuples} tuples in its pickle, more than {MAX_TUPLES}")
    return sorted(names - _ALLOWED)


def _scan(stream: io.BytesIO, names: set[str]) -> int:
    """Add every name that the next pickle of a stream uses to `names`, and return how many tuples it makes."""
    strings, tuples = ["?", "?"], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of odd escapes in odd strings
        for operation, argument, _ in pickletools.genops(stream):
            if operation.name in ("GLOBAL", "INST"):
                names.add(argument.replace(" ", ".").replace("__builtin__", "builtins"))
            elif operation.name == "STACK_GLOBAL":
                names.add(".".join(strings[-2:]))
            elif operation.name.startswith("EXT"):
                names.add(f"copyreg extension {argument}")
            elif isinstance(argument, str):
                strings = [strings[-1], argument]
            tuples += operation.name.startswith("TUPLE")
    return tuples


def _legacy(path: Path) -> str:
    """Return what can be said of a file that is no archive: pickles, as torch wrote before 1.6, and what they want."""
    with path.open("rb") as file:
        stream = io.BytesIO(file.read(MAX_PICKLE_BYTES))
    if not stream.getvalue().startswith(b"\x80"):
        return ""
    names: set[str] = set()
    with suppress(*_BROKEN):  # behind its pickles come the bytes of its tensors
        while stream.tell() < len(stream.getvalue()):
            _scan(stream, names)
    wants = f" that wants {', '.join(sorted(names - _ALLOWED))}" if names - _ALLOWED else ""
    return f"a bare pickle{wants}; torch.save has written zip archives since 1.6, so save it again: "
