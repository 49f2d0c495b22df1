"""Settings: what can be configured, parsed once at the edges (plugin, command line)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from .errors import SettingsError

HOME_VARIABLE = "LMCACHE_CARTRIDGE_HOME"
_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def default_home() -> Path:
    """Return `$LMCACHE_CARTRIDGE_HOME`, or `lmcache-cartridge` under the user's data directory (XDG)."""
    if home := os.environ.get(HOME_VARIABLE):
        return Path(home).expanduser().absolute()
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(data).expanduser() / "lmcache-cartridge"


def parse_bytes(value: Any) -> Any:
    """Return the number of bytes in `512MiB`, `1.5 GiB` or a plain number; other values unchanged."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]*)?)\s*([A-Za-z]*)\s*", value)
    if not match or match[2].upper() not in _UNITS:
        raise ValueError(f"{value!r} is no size; write bytes, or a number with KiB, MiB, GiB or TiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0)]


class Settings(BaseModel):
    """Settings of one serving process. In LMCache's `extra_config` each is `storage_plugin.<name>.<setting>`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    home: Path = Field(default_factory=default_home)
    """Directory of the registry and of cartridges built here."""
    cpu_bytes: Bytes = 1 << 30
    """Budget of the cpu tier."""
    disk_bytes: Bytes = 0
    """Budget of the disk tier, a local copy of slower sources, for all processes that use its directory together; 0
    switches it off."""
    disk_dir: Path | None = None
    """Where the disk tier lies; `lmcache-cartridge` under the user's cache directory (XDG) by default."""
    lookup_timeout_s: float = Field(default=1.0, gt=0, le=60)
    """How long a lookup may wait for chunks to be loaded; it holds up the scheduler, so keep it below LMCache's
    own `lookup_timeout_ms`."""
    lease_s: float = Field(default=300.0, gt=0)
    """How long a looked-up chunk stays in memory for a request that never comes for it."""
    load_threads: int = Field(default=4, ge=1, le=256)
    """Chunks loaded at once."""

    # What requests may ask for; read by the API server.

    roots: tuple[Path, ...] = ()
    """Directories under which requests may name artefacts by absolute path."""
    router: Literal["explicit", "label", "static", "composite"] = "explicit"
    """Where a request's cartridges come from when it names none itself: nowhere; a label in `label_field`; `static`;
    or a label in `label_field` that stands for a chain in `composites`."""
    label_field: str = "cartridge_label"
    """Request field that holds a label."""
    static: dict[str, str] = {}
    """Cartridge by `model:NAME` or `key:SHA256-OF-THE-API-KEY`, and `*` for everybody else."""
    composites: dict[str, Annotated[list[str], Field(min_length=1, max_length=16)]] = {}
    """Names that stand for a chain of cartridges, wherever a request may name one."""
    on_miss: Literal["error", "document"] = "error"
    """What a request gets when a trained cartridge cannot be had: an error, or its document's text where it has one."""
    ready_timeout_s: float = Field(default=30.0, gt=0)
    """How long a request waits in the API server for its cartridges to be loaded."""
    admin: bool = False
    """Whether `POST /v1/cartridges/...` may preload, pin, unpin and evict."""

    @property
    def registry_path(self) -> Path:
        """The registry file."""
        return self.home / "registry.sqlite"

    @property
    def cartridges_dir(self) -> Path:
        """Where `build` puts artefacts: `<id>/<version>`."""
        return self.home / "cartridges"

    @property
    def quarantine_dir(self) -> Path:
        """Where quarantined cartridges are noted."""
        return self.home / "quarantine"

    @property
    def cache_dir(self) -> Path:
        """Where the disk tier lies: `disk_dir`, or `lmcache-cartridge` under the user's cache directory (XDG)."""
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return self.disk_dir or Path(cache).expanduser() / "lmcache-cartridge"


def from_mapping(values: Mapping[str, Any], prefix: str = "") -> Settings:
    """Return settings from plain values. Raises `SettingsError` naming each wrong or unknown key with `prefix`."""
    try:
        return Settings(**values)
    except ValidationError as error:
        problems = [
            f"{prefix}{'.'.join(map(str, e['loc']))}: "
            + ("no such setting" if e["type"] == "extra_forbidden" else e["msg"])
            for e in error.errors()
        ]
        known = ", ".join(Settings.model_fields)
        raise SettingsError("; ".join(problems) + f". Settings are: {known}") from None
