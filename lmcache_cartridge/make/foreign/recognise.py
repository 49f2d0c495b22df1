"""Recognise what a path or a Hub id holds."""

from __future__ import annotations

import re
from pathlib import Path

from ...errors import ForeignFormatError, SourceError
from . import checkpoint, peft
from .formats import Foreign
from .ids import DOCUMENT_IDS, IDS, read_ids

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def locate(path: str) -> Path:
    """Return the local place of `path`; what is no path and looks like a Hub id is fetched as an adapter.

    The Hub is asked through `huggingface_hub`, which keeps to its cache under `HF_HUB_OFFLINE=1`. Raises
    `ForeignFormatError` where there is nothing, `SourceError` where the Hub has or gives nothing.
    """
    if Path(path).exists():
        return Path(path)
    if not _HUB_ID.fullmatch(path):
        raise ForeignFormatError(f"{path}: no such file or directory")
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(path, allow_patterns=[peft.CONFIG, peft.WEIGHTS, peft.PICKLED, IDS, DOCUMENT_IDS])
        )
    except Exception as error:  # httpx, the Hub's own errors, files: whatever a download may end with
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise SourceError(f"{path}: no such file here, and the Hub gave none: {reason}") from error


def recognise(path: Path, *, drop_frozen: bool = False) -> Foreign:
    """Return what a foreign file or directory holds, without its frozen positions where `drop_frozen`.

    Raises `ForeignFormatError` for one in no known format.
    """
    if path.is_dir():
        if (path / peft.CONFIG).is_file():
            return peft.read(path)
        path = _only_file(path)
    if path.suffix == ".json":
        return Foreign("token ids in JSON", path, token_ids=read_ids(path))
    return checkpoint.read(path, drop_frozen=drop_frozen)


def _only_file(directory: Path) -> Path:
    found = sorted(directory.glob("cartridge.pt")) or sorted(directory.glob("*.pt")) or sorted(directory.glob(IDS))
    if len(found) != 1:
        raise ForeignFormatError(
            f"{directory}: a directory has {peft.CONFIG}, cartridge.pt, one other .pt file, or {IDS}; it has {len(found)} .pt"
        )
    return found[0]
