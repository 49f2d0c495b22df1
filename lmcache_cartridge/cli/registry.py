"""Commands of the registry: `register`, `label`, `remove`, `list`, `describe`, `verify`, `push`, `pull`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..artifact.location import is_remote
from ..errors import ArtifactError, CartridgeError, CartridgeNotFound
from .options import (
    NAME,
    Verb,
    add_library,
    add_no_promote,
    add_s3,
    copy_of,
    load_model,
    next_version,
    opened,
    registry_of,
    root_of,
    settings_of,
)
from .show import bar, bars, fields, show, size, table, working

if TYPE_CHECKING:
    from ..library.registry import Registry, RegistryEntry
    from ..sources.s3 import S3Source
    from ..sources.sources import Sources

_OF_BYTES = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}


def add(verb: Verb) -> None:
    """Add the commands to the command line."""
    register = verb("register", _register, "Register an artefact where it lies, or token ids as a stored prompt prefix.",
                    "register s3://bucket/cartridges/handbook")  # fmt: skip
    register.add_argument(
        "path",
        help="directory of manifest.json and payload.safetensors, its s3:// location, or a .json or .pt file of token_ids",
    )
    register.add_argument("--label", help="also point this label at it")
    register.add_argument("--id", help="for a file of token ids: name of the cartridge")
    register.add_argument("--model", help="for a file of token ids: directory or cached Hub id of their model")

    add_no_promote(register)

    label = verb("label", _label, "Point a label at a cartridge, or an id at one of its versions, in one step; servers follow in a "
                 "second.", "label current handbook@3")  # fmt: skip
    label.add_argument("label", help="a name that moves, or an id")
    what = label.add_mutually_exclusive_group(required=True)
    what.add_argument("name", nargs="?", help=f"what it means from now on: {NAME}")
    what.add_argument("--remove", action="store_true", help="remove the label; what it points at stays")
    label.add_argument(
        "--warm", action="store_true", help="servers bring what it points at into memory when they start"
    )

    remove = verb("remove", _remove, "Take a version out of the registry. Servers let the requests that use it finish.",
                  "remove handbook@2")  # fmt: skip
    remove.add_argument("name", help="id (the version it means) or id@version")
    remove.add_argument(
        "--delete-files",
        action="store_true",
        help="delete the artefact too, if `build` put it there; also of an id@version that is registered no more",
    )

    listed = verb("list", _list, "List the registered cartridges.", "list --format json")

    describe = verb("describe", _describe, "Show everything known of one cartridge.", "describe handbook")
    describe.add_argument("name", help=NAME)

    verify = verb("verify", _verify, "Read a cartridge whole and check every checksum; lifts a quarantine if sound.",
                  "verify handbook")  # fmt: skip
    verify.add_argument("name", nargs="+", help=NAME)

    push = verb("push", _push, "Verify a registered cartridge and store it on S3, whole or not at all.",
                "push handbook s3://cartridges/handbook/1 --endpoint-url http://minio:9000")  # fmt: skip
    push.add_argument("name", help=NAME)
    push.add_argument("location", help="s3://bucket/prefix that the files go under")
    push.add_argument(
        "--force",
        action="store_true",
        help="replace an artefact of other content; requests that use the old one fail",
    )

    pull = verb("pull", _pull, "Bring a cartridge from S3 here, verify every checksum and register it.",
                "pull s3://cartridges/handbook/1 --endpoint-url http://minio:9000")  # fmt: skip
    pull.add_argument("location", help="s3://bucket/prefix that a cartridge was pushed to")
    pull.add_argument("--id", help="name of the cartridge here (default: its own)")
    add_no_promote(pull)
    for remote in (push, pull):
        add_s3(remote)

    publish = verb("publish", _publish, "Store a registered cartridge in a published library, and let every server that "
                   "follows it see it, whole or not at all.",
                   "publish handbook --library s3://cartridges/fleet --label current")  # fmt: skip
    publish.add_argument("name", help=NAME)
    publish.add_argument("--label", help="also point this label of the library at it, in the same step")
    publish.add_argument(
        "--next-version",
        action="store_true",
        help="publish it as the library's next version of its id; machines that build by themselves count by themselves",
    )
    add_no_promote(publish)
    add_library(publish, required=True)
    for shared in (label, remove, listed, describe, verify):
        add_library(shared)


def _register(arguments: argparse.Namespace) -> None:
    registry = registry_of(arguments)
    if is_remote(arguments.path):
        manifest = registry.register(copy_of(arguments, arguments.path), arguments.path, promote=arguments.promote)
    else:
        path = Path(arguments.path)
        root = path if path.is_dir() else _stored_prefix(arguments, path, registry)
        manifest = registry.register(root, promote=arguments.promote)
    if arguments.label:
        registry.label(arguments.label, manifest.name)
    current = sorted(registry.current([manifest.id]))
    promoted = manifest.name in current
    result = {"name": manifest.name, "promoted": promoted, "digest": manifest.digest, "label": arguments.label}
    stays = "" if promoted else f"; {manifest.id} means {' '.join(current) or 'nothing yet'}"
    show(result, f"registered {manifest.name}{stays}", arguments.format)


def _stored_prefix(arguments: argparse.Namespace, path: Path, registry: Registry) -> Path:
    """Make an artefact of a file of token ids and return its directory."""
    from ..artifact.manifest import check_id

    if not path.is_file():
        raise ArtifactError(f"{path}: no such file or directory")
    if not (arguments.id and arguments.model):
        raise ArtifactError(f"{path} is a file; for token ids give --id and --model too")
    check_id(arguments.id)
    with working("read the token ids", arguments.format):
        from ..make.foreign.convert import import_
        from ..make.foreign.recognise import recognise

        foreign = recognise(path)
    if foreign.segments:
        raise ArtifactError(f"{path}: holds KV beside its token ids; `lmcache-cartridge import` takes both")
    version, root = next_version(arguments, registry)
    import_(load_model(arguments), foreign, root, cartridge_id=arguments.id, version=version)
    return root


def _label(arguments: argparse.Namespace) -> None:
    name = None
    with opened(arguments) as registry:
        if arguments.remove:
            registry.unlabel(arguments.label)
        else:
            target = registry.find(arguments.name)
            name = target.name
            if target.id == arguments.label:
                registry.promote(name)
            else:
                registry.label(arguments.label, name, warm=arguments.warm)
    text = f"{arguments.label} means {name}" if name else f"removed the label {arguments.label}"
    show({"label": arguments.label, "name": name}, text, arguments.format)


def _remove(arguments: argparse.Namespace) -> None:
    import shutil

    ours = settings_of(arguments).cartridges_dir.resolve()
    if arguments.library is not None and arguments.delete_files:
        raise ArtifactError(
            "servers may still read the files of a published cartridge, so they stay; delete them where `describe "
            "--library` says that they lie, once no server needs them"
        )
    try:
        with opened(arguments) as registry:
            removed = registry.remove(arguments.name)
        name, location = removed.name, removed.location
    except CartridgeNotFound:
        left = _left(ours, arguments.name)
        if left is None or not arguments.delete_files:
            raise
        name, location = arguments.name, left
    deleted = arguments.delete_files and Path(location).is_relative_to(ours)
    if deleted:
        shutil.rmtree(location)
    stay = "" if deleted else f"; its files stay at {location}"
    result = {"name": name, "location": location, "files_deleted": deleted}
    show(result, f"removed {name}{stay}", arguments.format)


def _left(directory: Path, name: str) -> str | None:
    """Return where the files of an `id@version` lie that is not registered, None if there are none."""
    from ..artifact.manifest import check_id

    cartridge_id, _, version = name.partition("@")
    root = directory / check_id(cartridge_id) / version
    return str(root) if version.isdecimal() and root.is_dir() else None


def _list(arguments: argparse.Namespace) -> None:
    from ..artifact.reading import made_with
    from ..library.quarantine import Quarantine

    quarantine = Quarantine(settings_of(arguments).quarantine_dir)
    labels: dict[str, list[str]] = {}
    with opened(arguments) as registry:
        for label, name in registry.labels().items():
            labels.setdefault(name, []).append(label)
        found = registry.all()
        current = registry.current(row.id for row in found)
    made = [made_with(Path(row.location)) for row in found]
    rows: list[dict[str, Any]] = [
        {"id": row.id, "version": row.version, "current": row.name in current, "kind": row.kind,
         "positions": row.positions, "bytes": row.bytes, "model": by.get("model"), "registered": row.registered,
         "lora": by.get("lora"),
         "labels": labels.get(row.name, []),
         "quarantined": quarantine.reason(row.digest) is not None, "digest": row.digest}
        for row, by in zip(found, made, strict=True)
    ]  # fmt: skip
    readable = [
        row | {name: "yes" if row[name] else "" for name in ("current", "quarantined")}
        | {"bytes": size(row["bytes"]), "labels": " ".join(row["labels"]), "digest": row["digest"][:12]}
        | {"lora": row["lora"] or "", "model": row["model"] or "", "registered": row["registered"][:10]}
        for row in rows
    ]  # fmt: skip
    empty = "no cartridges yet; make one with `lmcache-cartridge build`"
    show(rows, table(readable) if rows else empty, arguments.format)


def _describe(arguments: argparse.Namespace) -> None:
    import json

    from ..artifact import reading
    from ..library.quarantine import Quarantine

    with opened(arguments) as registry:
        location = registry.find(arguments.name)
        current = location.name in registry.current([location.id])
    reason = Quarantine(settings_of(arguments).quarantine_dir).reason(location.digest)
    manifest = reading.load_manifest(root_of(arguments, location.location), location.digest, payload=False)
    result = json.loads(manifest.encode())
    if payload := result["payload"]:
        payload.setdefault("encoding", "plain")
        del payload["checksums"]
    for rotation in result["fingerprint"]["rope"]:
        del rotation["inv_freq"]
    if asked := result["canary"]:  # what is asked and answered is for servers
        result["canary"] = {"questions": len(asked["after"]), "in_a_chain": len(asked.get("behind", ())),
                            "sensitivity": asked["sensitivity"]}  # fmt: skip
    elif result["payload"]:
        result["canary"] = "none: no server tries its engine with it; make it again to have one"
    result |= {"current": current, "location": location.location,
               "registered": location.registered, "quarantined": reason}  # fmt: skip
    show(result, fields(result), arguments.format)


def _verify(arguments: argparse.Namespace) -> int:
    from ..library.quarantine import Quarantine
    from ..sources.s3 import S3Source
    from ..sources.sources import Sources

    settings = settings_of(arguments)
    quarantine, results = Quarantine(settings.quarantine_dir), []
    with opened(arguments) as registry, closing(Sources(S3Source(**settings.s3))) as sources:
        for name in arguments.name:
            location = registry.find(name)
            problem = None
            try:
                _check(arguments, location, sources)
            except CartridgeError as error:
                problem = str(error)
            else:
                quarantine.lift(location.digest, location.location)
            results.append({"name": location.name, "sound": problem is None, "problem": problem})
    lines = [f"{r['name']}: {'sound' if r['sound'] else r['problem']}" for r in results]
    show(results, "\n".join(lines), arguments.format)
    return 0 if all(r["sound"] for r in results) else 1


def _check(arguments: argparse.Namespace, location: RegistryEntry, sources: Sources) -> None:
    """Read an artefact whole where it lies, with a progress bar. Raises `CartridgeError` unless it is sound."""
    from ..artifact import reading

    root, read, where = root_of(arguments, location.location), None, None
    if is_remote(location.location):
        where = f"{location.location}/{reading.PAYLOAD}"
        read = partial(sources.read_into, location.location, reading.PAYLOAD)
    reading.load_manifest(root, location.digest, payload=read is None)
    with bars(arguments.format) as shown:
        for done, total in reading.verify(root, read, where):
            shown(location.name, done, total)


def _push(arguments: argparse.Namespace) -> None:
    from ..sources import s3, transfer

    s3.parse(arguments.location)
    row = registry_of(arguments).find(arguments.name)
    root = row.local_root()
    with _transfer(arguments) as (source, shown):
        done = transfer.push(root, arguments.location, source, force=arguments.force, progress=shown)
    result = {
        "name": done.manifest.name, "digest": done.manifest.digest, "location": arguments.location,
        "pushed": done.changed,
    }  # fmt: skip
    before = f"the content of {row.name} is there already, as {done.manifest.name}:"
    show(result, f"{f'pushed {row.name} to' if done.changed else before} {arguments.location}", arguments.format)


def _publish(arguments: argparse.Namespace) -> None:
    from ..make.progress import Bars
    from ..sources.published import Library

    without = argparse.Namespace(**vars(arguments) | {"library": None})
    row = registry_of(without).find(arguments.name)
    with Library(settings_of(arguments)) as library, Bars(partial(_bar, arguments)) as progress:
        manifest = library.publish(
            row.local_root(), label=arguments.label, promote=arguments.promote, next_version=arguments.next_version,
            progress=progress,
        )  # fmt: skip
        where = library.registry.find(manifest.name).location
        promoted = manifest.name in library.registry.current([manifest.id])
    result = {"name": manifest.name, "promoted": promoted, "digest": manifest.digest, "location": where,
              "label": arguments.label}  # fmt: skip
    as_what = "" if manifest.name == row.name else f" as {manifest.name}"
    show(result, f"published {row.name}{as_what} at {where}", arguments.format)


def _bar(arguments: argparse.Namespace, desc: str, **options: Any) -> Any:
    return bar(arguments.format, desc=desc, **options, **({"unit": " chunks"} if desc == "verify" else _OF_BYTES))


def _pull(arguments: argparse.Namespace) -> None:
    from ..artifact.manifest import check_id
    from ..sources import s3, transfer

    s3.parse(arguments.location)
    if arguments.id is not None:
        check_id(arguments.id)
    registry, directory = registry_of(arguments), settings_of(arguments).cartridges_dir
    with _transfer(arguments) as (source, shown):
        done = transfer.pull(
            arguments.location, source, registry, directory, progress=shown, name=arguments.id,
            promote=arguments.promote,
        )  # fmt: skip
    result = {
        "name": done.manifest.name, "digest": done.manifest.digest, "path": str(done.root), "pulled": done.changed,
        "promoted": done.manifest.name in registry.current([done.manifest.id]),
    }  # fmt: skip
    text = f"pulled {done.manifest.name}" if done.changed else f"{done.manifest.name} is here already"
    show(result, f"{text}: {done.root}", arguments.format)


@contextmanager
def _transfer(arguments: argparse.Namespace) -> Iterator[tuple[S3Source, Callable[[str, int, int], None]]]:
    """Lend an S3 source and a progress bar, off with --format json."""
    from ..make.progress import Bars
    from ..sources.s3 import S3Source

    settings = settings_of(arguments)
    with closing(S3Source(**settings.s3)) as source, Bars(partial(_bar, arguments)) as progress:
        yield source, progress
