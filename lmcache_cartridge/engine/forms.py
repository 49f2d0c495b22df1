"""Forms: cartridges, router and settings as `kv_connector_extra_config` names them, for a server without registry or YAML.

`cartridge_path`, `cartridges` and `router` become settings, and `cartridge.SETTING` is one. Where no LMCache YAML is given,
each process writes the same one of them, before LMCache or anything of ours reads it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError

from ..artifact.files import replace
from ..artifact.location import SCHEME, is_remote
from ..errors import SettingsError
from ..settings import Settings, from_mapping
from .contract import CONTROL, REQUEST_API
from .lmcache_file import CLASS, EXTRA_VARIABLE, MODULE, VARIABLE, lmcache_yaml, yaml_path

EXTRA = "kv_connector_extra_config"
SKIP_SAVING = "LMCACHE_FORCE_SKIP_SAVE"
"""LMCache's variable by which it saves nothing in-process, whatever `kv_role` says."""
_SETTING = "cartridge."
_CHUNK_TOKENS = 256
"""LMCache's default too; its own key `lmcache.chunk_size` holds over it."""
_SAY_NOTHING = ("LMCACHE_CONFIG_FILE", "LMCACHE_CHUNK_SIZE", "LMCACHE_TRACK_USAGE", "LMCACHE_LOG_LEVEL", SKIP_SAVING)
"""LMCache's variables that name no place to save in."""


class _Named(BaseModel, extra="forbid"):
    cartridge_id: str
    path: str


class _Router(BaseModel, extra="forbid"):
    type: Literal["explicit", "label", "static", "composite"]
    field: str | None = None
    cartridge_id: str | None = None
    composites: dict[str, list[str]] = {}


class _Forms(BaseModel):
    cartridge_path: str | None = None
    cartridges: Annotated[dict[str, str] | list[_Named], Field(min_length=1)] | None = None
    router: _Router | None = None


_FORMS = tuple(_Forms.model_fields)
_TAKES = {"label": {"field"}, "composite": {"field", "composites"}, "static": {"cartridge_id"}}
"""What goes with a router, by its type."""


def from_forms(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the forms in an extra configuration stand for; empty where it has none.

    A path, taken against the working directory, or `s3://bucket/prefix` is the only one that requests may name by it. Raises
    `SettingsError` for what is malformed, contradicts itself, or is not there.
    """
    values = {key.removeprefix(_SETTING): value for key, value in extra.items() if _is_setting(key)}
    try:
        forms = _Forms.model_validate(extra)
    except ValidationError as error:
        told = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise _wrong(told) from None
    made: dict[str, Any] = {}
    named = _named(forms.cartridges or {})
    paths = list(dict.fromkeys(named.values()))
    if forms.cartridge_path is not None:
        if named or forms.router:
            raise _wrong(
                "cartridge_path is for every request: leave cartridges and router out, or name it in cartridges"
            )
        paths = [_path(forms.cartridge_path)]
        made = {"router": "static", "static": {"*": paths[0]}}
    if named:
        made["composites"] = {name: [path] for name, path in named.items()}
    if forms.router:
        made |= _routed(forms.router, named)
    if twice := sorted(made.keys() & values.keys()):
        raise _wrong(f"{twice[0]} is given as a setting, and by the forms beside it; give one of them")
    for name, ours in (
        ("roots", [p for p in paths if not is_remote(p)]),
        ("buckets", [p.removeprefix(SCHEME) for p in paths if is_remote(p)]),
    ):
        if ours:
            own = values.get(name, [])
            if not isinstance(own, list | tuple):
                raise _wrong(f"{_SETTING}{name} must be a list")
            made[name] = [*own, *ours]
    return values | made


def with_forms(settings: Settings, transfer: Mapping[str, Any]) -> tuple[Settings, dict[str, Any]]:
    """Return settings with the forms in a transfer configuration, and that without them. Raises `SettingsError`."""
    extra = transfer.get(EXTRA) or {}
    if not isinstance(extra, Mapping):
        raise _wrong("it must be an object")
    rest = {key: value for key, value in extra.items() if key not in _FORMS and not _is_setting(key)}
    if rest == extra:
        return settings, dict(transfer)
    own = {f"{_SETTING}{name}": getattr(settings, name) for name in settings.model_fields_set}
    if twice := sorted(own.keys() & extra.keys()):
        raise _wrong(f"{twice[0]} is given as a setting beside it too; give one of them")
    values = from_mapping(from_forms({**own, **extra}), f"{EXTRA}: {_SETTING}")
    return values, {k: v for k, v in transfer.items() if k != EXTRA} | ({EXTRA: rest} if rest else {})


def _is_setting(key: str) -> bool:
    return key.startswith(_SETTING) and key not in (CONTROL, REQUEST_API)


def extra_of(transfer: Any) -> Mapping[str, Any]:
    """Return the extra configuration in a transfer configuration of vLLM's, parsed or not; empty without one."""
    if isinstance(transfer, str):
        try:
            transfer = json.loads(transfer)
        except ValueError:
            return {}
    extra = transfer.get(EXTRA) if isinstance(transfer, Mapping) else getattr(transfer, EXTRA, None)
    return extra if isinstance(extra, Mapping) else {}


def is_named(transfer: Any) -> bool:
    """Whether a transfer configuration, or anything else that LMCache is configured by, names cartridges.

    A mention is enough, wherever it stands: where LMCache makes nothing of it our connector does not start.
    """
    extra = extra_of(transfer)
    told: list[Any] = [extra, {name: value for name, value in os.environ.items() if name.startswith("LMCACHE_")}]
    with suppress(OSError, ValueError, yaml.YAMLError):
        told.append(yaml.safe_load(Path(os.environ.get(VARIABLE, os.devnull)).read_text()))
    is_told = any(name in str(told) for name in (MODULE, CLASS))  # a subclass of users' is of another module
    return is_told or any(key in _FORMS or key.startswith(_SETTING) for key in extra)


def configure(transfer: Any, *, in_process: bool = True) -> Settings | None:
    """Have this process, LMCache in it too, read the settings in a transfer configuration; None where it has none.

    Writes the YAML under the home, atomically, and names it by the environment, before anybody reads either. Where
    nothing names a place to save in, LMCache in-process saves nothing. Raises `SettingsError`, also where a YAML is named
    already.
    """
    extra = extra_of(transfer)
    if (lmcaches := extra.get("lmcache.extra_config")) is not None:
        os.environ[EXTRA_VARIABLE] = lmcaches if isinstance(lmcaches, str) else json.dumps(lmcaches)
    if not (values := from_forms(extra)):
        return None
    settings = from_mapping(values, f"{EXTRA}: {_SETTING}")
    yaml = lmcache_yaml(settings, _CHUNK_TOKENS)
    path = yaml_path(settings, yaml)
    if (named := os.environ.get(VARIABLE)) and Path(named) != path:
        raise _wrong(
            f"cartridges and settings stand in it, and ${VARIABLE} names a YAML too; write roots, buckets, router, static "
            "and composites into that, or unset the variable",
        )  # fmt: skip
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace(path, [yaml.encode()], 0o600)
    except OSError as error:
        raise SettingsError(
            f"{path} cannot be written: {error.strerror}; $LMCACHE_CARTRIDGE_HOME names a directory for it"
        ) from None
    if in_process and saves_nowhere(extra, os.environ):
        os.environ.setdefault(SKIP_SAVING, "1")
    os.environ[VARIABLE] = str(path)
    return settings


def saves_nowhere(extra: Mapping[str, Any], environment: Mapping[str, str]) -> bool:
    """Whether LMCache in-process, by the YAML that we write of no saved bytes, has no place to save what vLLM computes.

    `kv_role: kv_both`, as users write it, then means what `kv_consumer` does.
    """
    variables = (name for name in environment if name.startswith("LMCACHE_") and name not in _SAY_NOTHING)
    keys = (key for key in extra if key.startswith("lmcache.") and key != "lmcache.chunk_size")
    return not any(keys) and all(name.startswith("LMCACHE_CARTRIDGE_") for name in variables)


def _named(given: dict[str, str] | list[_Named]) -> dict[str, str]:
    """Return paths by name, of `{NAME: PATH}` or `[{"cartridge_id": NAME, "path": PATH}]`."""
    pairs = given.items() if isinstance(given, dict) else [(entry.cartridge_id, entry.path) for entry in given]
    named: dict[str, str] = {}
    for name, path in pairs:
        if name in named:
            raise _wrong(f"cartridges: {name} is named twice")
        named[name] = _path(path)
    return named


def _path(given: str) -> str:
    """Return a location. Raises `SettingsError` unless it can be one; what is on S3 is not asked for."""
    if is_remote(given):
        return given
    path = Path.cwd() / given
    try:
        path = path.resolve(strict=True)
        sound = (path / "manifest.json").is_file() if path.is_dir() else path.suffix == ".pt"
    except (OSError, RuntimeError, ValueError) as error:
        raise _wrong(f"{path}: {getattr(error, 'strerror', None) or 'cannot be read'}") from None
    if not sound:
        raise _wrong(f"{given} is neither a cartridge, a directory with manifest.json, nor a .pt file")
    return str(path)


def _routed(router: _Router, named: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings that a router stands for."""
    made: dict[str, Any] = {"router": router.type}
    if strange := sorted(router.model_fields_set - _TAKES.get(router.type, set()) - {"type"}):
        raise _wrong(f"router.{strange[0]} goes with no router of type {router.type}")
    if router.field:
        made["label_field"] = router.field
    if router.type == "static":
        chosen = router.cartridge_id or (next(iter(named)) if len(named) == 1 else None)
        if chosen is None:
            raise _wrong('router: which one? Write {"type": "static", "cartridge_id": NAME}')
        made["static"] = {"*": chosen}
    if router.composites:
        if twice := sorted(named.keys() & router.composites.keys()):
            raise _wrong(f"router.composites: {twice[0]} is one of the cartridges already")
        made["composites"] = {name: [path] for name, path in named.items()}
        made["composites"] |= {name: [named.get(n, n) for n in chain] for name, chain in router.composites.items()}
    return made


def _wrong(problem: str) -> SettingsError:
    return SettingsError(f"{EXTRA}: {problem}")
