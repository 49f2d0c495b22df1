"""PyTorch files by strangers: tensors, numbers, strings, lists and dicts, and nothing that runs."""

from __future__ import annotations

import pickletools
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from ...errors import ForeignFormatError

MAX_PICKLE_BYTES = 8 << 20
"""The largest cartridge known describes its tensors in 200 KiB."""
MAX_TUPLES = 20_000
"""A tensor takes five. Python dies hashing a tuple in a tuple in a tuple, 100,000 deep."""

ALLOWED = {
    "builtins.set",
    "collections.OrderedDict",
    "torch.nn.modules.container.ParameterList",
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_tensor_v2",
    *(f"torch.{kind}Storage" for kind in ("BFloat16", "Half", "Float", "Double", "Long", "Int", "Short", "Char")),
    *(f"torch.{dtype}" for dtype in ("bfloat16", "float16", "float32", "float64")),
    "torch.Size",
}
"""Every name that a pickle may use. Torch's own list is longer, and `bytearray` of it takes any memory that is asked for."""


def load(path: Path) -> Any:
    """Return what a file of `torch.save` holds. Nothing in it runs; its tensors are views of the file, not copies.

    Raises `ForeignFormatError`, before any memory is taken for it, for a file that names anything but tensors, is
    packed, or declares more bytes than it has.
    """
    if not path.is_file():
        raise ForeignFormatError(f"{path}: no such file")
    try:
        with zipfile.ZipFile(path) as archive:
            pickled = _pickle_of(path, archive)
        _check_pickle(path, pickled)
        with warnings.catch_warnings(), torch.serialization.safe_globals([torch.nn.ParameterList]):
            warnings.simplefilter("ignore")  # of a pickle protocol that torch itself does not write
            return torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
    except ForeignFormatError:
        raise
    except Exception as error:  # whatever readers of archives and pickles stumble over in a broken or hostile file
        told = str(error).rpartition("WeightsUnpickler error: ")[2].split("\n")
        raise _refusal(path, f"{type(error).__name__} {next(filter(None, told), '')}") from error


def _refusal(path: Path, reason: str) -> ForeignFormatError:
    return ForeignFormatError(f"{path}: not a PyTorch file of plain tensors: {reason}")


def _pickle_of(path: Path, archive: zipfile.ZipFile) -> bytes:
    """Return the pickle of an archive that has no more in it than the file has bytes."""
    entries = archive.infolist()
    if len({entry.filename for entry in entries}) != len(entries):
        raise _refusal(path, "an entry of its archive is there twice")
    if any(entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size for entry in entries):
        raise _refusal(path, "its archive is compressed, which torch.save never does")
    pickles = [entry for entry in entries if entry.filename.count("/") == 1 and entry.filename.endswith("/data.pkl")]
    if len(pickles) != 1 or pickles[0].file_size > MAX_PICKLE_BYTES:
        raise _refusal(path, f"its archive has no one data.pkl of at most {MAX_PICKLE_BYTES} bytes")
    if damaged := archive.testzip():
        raise _refusal(path, f"{damaged[:80]} does not have the checksum its archive names. Copy the file again")
    return archive.read(pickles[0])


def _check_pickle(path: Path, pickled: bytes) -> None:
    """Refuse a pickle with names that `ALLOWED` lacks, or too many tuples.

    `GLOBAL` is the one opcode with a name that torch's unpickler takes; it refuses those with which Python's has others.
    """
    names, tuples = set[str](), 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of odd escapes in odd strings
        for operation, argument, _ in pickletools.genops(pickled):
            tuples += operation.name.startswith("TUPLE")
            if operation.name == "GLOBAL":
                names.add(str(argument).replace(" ", ".").replace("__builtin__.", "builtins."))
    if strange := sorted(names - ALLOWED):
        raise _refusal(
            path,
            f"it wants {', '.join(strange)}, which may run anything. If you trust its author, load it yourself and save "
            "the keys and values alone",
        )
    if tuples > MAX_TUPLES:
        raise _refusal(path, f"{tuples} tuples in its pickle, more than {MAX_TUPLES}")
