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
from typing import Any

import yaml

from ..artifact.files import replace
from ..artifact.location import SCHEME, is_remote, parse
from ..artifact.manifest import check_id
from ..errors import CartridgeError, SettingsError
from ..settings import Settings, from_mapping
from .contract import CONTROL, REQUEST_API
from .lmcache_file import CLASS, EXTRA_VARIABLE, MODULE, VARIABLE, lmcache_yaml, yaml_path

EXTRA = "kv_connector_extra_config"
SKIP_SAVING = "LMCACHE_FORCE_SKIP_SAVE"
"""LMCache's variable by which it saves nothing in-process, whatever `kv_role` says."""
_SETTING = "cartridge."
_NO_SETTING = (CONTROL, REQUEST_API)
_FORMS = ("cartridge_path", "cartridges", "router")
_TYPES = ("explicit", "label", "static", "composite")
_CHUNK_TOKENS = 256
"""LMCache's default too; its own key `lmcache.chunk_size` holds over it."""
_SAY_NOTHING = ("LMCACHE_CONFIG_FILE", "LMCACHE_CHUNK_SIZE", "LMCACHE_TRACK_USAGE", "LMCACHE_LOG_LEVEL", SKIP_SAVING)
"""LMCache's variables that name no place to save in."""


def from_forms(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the forms in an extra configuration stand for; empty where it has none.

    A path, taken against the working directory, or `s3://bucket/prefix` is the only one that requests may name by it. Raises
    `SettingsError` for what is malformed, contradicts itself, or is not there.
    """
    values = {
        key.removeprefix(_SETTING): value
        for key, value in extra.items()
        if key.startswith(_SETTING) and key not in _NO_SETTING
    }
    given = {name: extra[name] for name in _FORMS if extra.get(name) is not None}
    if "cartridge_path" in given and (clash := [name for name in ("cartridges", "router") if name in given]):
        raise _wrong("cartridge_path", f"it is for every request, so leave {clash[0]} out, or name it in `cartridges`")
    paths: list[str] = []
    made: dict[str, Any] = {}
    if "cartridge_path" in given:
        paths = [_path(given["cartridge_path"], "cartridge_path")]
        made = {"router": "static", "static": {"*": paths[0]}}
    named = _named(given["cartridges"]) if "cartridges" in given else {}
    if named:
        paths = list(dict.fromkeys(named.values()))
        made = {"composites": {name: [path] for name, path in named.items()}}
    if "router" in given:
        made |= _routed(given["router"], named)
    if twice := sorted(made.keys() & values.keys()):
        raise _wrong(f"{_SETTING}{twice[0]}", "the forms beside it say so too; give one of them")
    for name, ours in (
        ("roots", [p for p in paths if not is_remote(p)]),
        ("buckets", [p for p in paths if is_remote(p)]),
    ):
        if ours:
            own = values.get(name, [])
            if not isinstance(own, list | tuple):
                raise _wrong(f"{_SETTING}{name}", "must be a list")
            made[name] = [*own, *(path.removeprefix(SCHEME) for path in ours)]
    return values | made


def with_forms(settings: Settings, transfer: Mapping[str, Any]) -> tuple[Settings, dict[str, Any]]:
    """Return settings with the forms in a transfer configuration, and that without them. Raises `SettingsError`."""
    extra = transfer.get(EXTRA) or {}
    if not isinstance(extra, Mapping):
        raise _wrong("", "must be an object")
    if not (values := from_forms(extra)):
        return settings, dict(transfer)
    own = {name: getattr(settings, name) for name in settings.model_fields_set}
    for name in sorted(own.keys() & values.keys()):
        if name not in ("roots", "buckets"):
            raise _wrong("", f"{name} is given as a setting beside it too; give one of them")
        values[name] = [*map(str, own[name]), *values[name]]
    rest = {k: v for k, v in extra.items() if k not in _FORMS and (not k.startswith(_SETTING) or k in _NO_SETTING)}
    left = {k: v for k, v in transfer.items() if k != EXTRA}
    return from_mapping(own | values, f"{EXTRA}: {_SETTING}"), left | ({EXTRA: rest} if rest else {})


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
            "", f"cartridges and settings stand in it, and ${VARIABLE} names a YAML too; write roots, buckets, router, static "
            "and composites into that, or unset the variable",
        )  # fmt: skip
    _write(path, yaml)
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


def _named(given: Any) -> dict[str, str]:
    """Return paths by name, of `{NAME: PATH}` or `[{"cartridge_id": NAME, "path": PATH}]`."""
    pairs: list[tuple[Any, Any]]
    if isinstance(given, Mapping):
        pairs = list(given.items())
    elif isinstance(given, list | tuple):
        pairs = []
        for number, entry in enumerate(given):
            if not isinstance(entry, Mapping) or entry.keys() != {"cartridge_id", "path"}:
                raise _wrong(f"cartridges.{number}", 'write {"cartridge_id": NAME, "path": PATH}')
            pairs.append((entry["cartridge_id"], entry["path"]))
    else:
        raise _wrong("cartridges", 'write {NAME: PATH}, or a list of {"cartridge_id": NAME, "path": PATH}')
    if not pairs:
        raise _wrong("cartridges", "is empty")
    named: dict[str, str] = {}
    for name, path in pairs:
        if not isinstance(name, str):
            raise _wrong("cartridges", f"{name!r} is no name")
        try:
            check_id(name)
        except CartridgeError as error:
            raise _wrong("cartridges", str(error)) from None
        if name in named:
            raise _wrong("cartridges", f"{name} is named twice")
        named[name] = _path(path, f"cartridges.{name}")
    return named


def _path(given: Any, where: str) -> str:
    """Return a location. Raises `SettingsError` unless it can be one; what is on S3 is not asked for."""
    if not isinstance(given, str) or not given or "\0" in given:
        raise _wrong(where, "must be a path or s3://BUCKET/PREFIX")
    if is_remote(given):
        try:
            if not parse(given)[1]:
                raise _wrong(where, f"{given} is a whole bucket; name the cartridge in it")
        except CartridgeError as error:
            raise _wrong(where, str(error)) from None
        return given
    path = Path.cwd() / given
    try:
        path = path.resolve(strict=True)
        sound = (path / "manifest.json").is_file() if path.is_dir() else path.suffix == ".pt"
    except (OSError, RuntimeError) as error:
        raise _wrong(where, f"{path}: {getattr(error, 'strerror', None) or 'cannot be read'}") from None
    if not sound:
        raise _wrong(where, f"{given} is neither a cartridge, a directory with manifest.json, nor a .pt file")
    return str(path)


def _routed(given: Any, named: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings that a router stands for."""
    if not isinstance(given, Mapping) or given.get("type") not in _TYPES:
        raise _wrong("router", f'write {{"type": TYPE}} with one of {", ".join(_TYPES)}')
    kind, made = given["type"], {"router": given["type"]}
    takes = {"label": {"field"}, "composite": {"field", "composites"}, "static": {"cartridge_id"}}.get(kind, set())
    if strange := sorted(map(str, given.keys() - takes - {"type"})):
        raise _wrong(f"router.{strange[0]}", f"goes with no router of type {kind}")
    if "field" in given:
        if not isinstance(given["field"], str) or not given["field"].isprintable() or not given["field"]:
            raise _wrong("router.field", "must be the name of a field of requests")
        made["label_field"] = given["field"]
    if kind == "static":
        chosen = given.get("cartridge_id") or (next(iter(named)) if len(named) == 1 else None)
        if not isinstance(chosen, str):
            raise _wrong("router", 'which one? Write {"type": "static", "cartridge_id": NAME}')
        made["static"] = {"*": chosen}
    if chains := given.get("composites"):
        if not isinstance(chains, Mapping) or not all(isinstance(names, list) for names in chains.values()):
            raise _wrong("router.composites", "must be {NAME: [NAME, ...]}")
        if twice := sorted(named.keys() & chains.keys()):
            raise _wrong("router.composites", f"{twice[0]} is one of the cartridges already")
        made["composites"] = {name: [path] for name, path in named.items()}
        made["composites"] |= {name: [named.get(n, n) for n in names] for name, names in chains.items()}
    return made


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.is_file() or path.read_text() != text:
            replace(path, [text.encode()], 0o600)
    except OSError as error:
        raise SettingsError(
            f"{path} cannot be written: {error.strerror}; $LMCACHE_CARTRIDGE_HOME names a directory for it"
        ) from None


def _wrong(where: str, problem: str) -> SettingsError:
    return SettingsError(f"{EXTRA}{'.' if where else ''}{where}: {problem}")
