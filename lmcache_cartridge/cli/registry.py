"""Commands of the registry: `list`, `show`, `label`, `remove`, `verify`, `publish`, `pull`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument

from ..artifact.location import is_remote
from ..errors import CartridgeError
from .options import (
    NAMED,
    Library,
    Name,
    NoPromote,
    check,
    command,
    opened,
    option,
    registry_of,
    root_of,
    settings_of,
    tell,
    valid_id,
)
from .show import bars, show, table

if TYPE_CHECKING:
    from ..library.registry import RegistryEntry
    from ..sources.s3 import S3Source
    from ..sources.sources import Sources


@command("list --format json", "list")
def list_(library: Library = None) -> None:
    """List the registered cartridges."""
    from ..artifact.reading import made_with
    from ..library.quarantine import Quarantine

    quarantine = Quarantine(settings_of().quarantine_dir)
    labels: dict[str, list[str]] = {}
    with opened(library) as registry:
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
    readable = [row | {"digest": row["digest"][:12], "registered": row["registered"][:10]} for row in rows]
    show(rows, table(readable) if rows else "no cartridges yet; make one with `lmcache-cartridge build`")


@command("show handbook", "show")
def show_(name: Name, library: Library = None) -> None:
    """Show everything known of one cartridge."""
    import json

    from ..artifact import reading
    from ..library.quarantine import Quarantine

    with opened(library) as registry:
        location = registry.find(name)
        current = location.name in registry.current([location.id])
    reason = Quarantine(settings_of().quarantine_dir).reason(location.digest)
    manifest = reading.load_manifest(root_of(location.location), location.digest, payload=False)
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
    show(result)


@command("label current handbook@3")
def label(
    label: Annotated[str, Argument(help="a name that moves, or an id")],
    name: Annotated[str | None, Argument(help=f"what it means from now on: {NAMED}")] = None,
    remove: Annotated[bool, option("remove the label; what it points at stays", "--remove")] = False,
    warm: Annotated[bool, option("servers bring what it points at into memory when they start", "--warm")] = False,
    library: Library = None,
) -> None:
    """Point a label at a cartridge, or an id at a version. Servers follow in a second."""
    if (name is None) != remove:
        raise CartridgeError(f"say what {label} means from now on, or --remove")
    meant = None
    with opened(library) as registry:
        if name is None:
            registry.unlabel(label)
        else:
            target = registry.find(name)
            meant = target.name
            if target.id == label:
                registry.promote(meant)
            else:
                registry.label(label, meant, warm=warm)
    show({"label": label, "name": meant}, f"{label} means {meant}" if meant else f"removed the label {label}")


@command("remove handbook@2")
def remove(
    name: Annotated[str, Argument(help="id (the version it means) or id@version")],
    delete_files: Annotated[
        bool,
        option("delete the artefact too, if `build` put it there", "--delete-files"),
    ] = False,
    library: Library = None,
) -> None:  # fmt: skip
    """Take a version out of the registry. Servers let the requests that use it finish."""
    import shutil

    ours = settings_of().cartridges_dir.resolve()
    check(
        locals(),
        "--delete-files excludes --library; servers may still read the files of a published cartridge, so they stay; delete "
        "them where `show --library` says that they lie, once no server needs them",
    )
    with opened(library) as registry:
        removed = registry.remove(name)
    deleted = delete_files and Path(removed.location).is_relative_to(ours)
    if deleted:
        shutil.rmtree(removed.location)
    show({"name": removed.name, "location": removed.location, "files_deleted": deleted})


@command("verify handbook")
def verify(name: Annotated[list[str], Argument(help=NAMED)], library: Library = None) -> int:
    """Check every checksum of a cartridge. Lifts its quarantine if it is sound."""
    from ..library.quarantine import Quarantine
    from ..sources.s3 import S3Source
    from ..sources.sources import Sources

    settings = settings_of(library=library)
    quarantine, results = Quarantine(settings.quarantine_dir), []
    with opened(library) as registry, closing(Sources(S3Source(**settings.s3))) as sources:
        for one in name:
            location = registry.find(one)
            problem = None
            try:
                _check(location, sources)
            except CartridgeError as error:
                problem = str(error)
            else:
                quarantine.lift(location.digest, location.location)
            results.append({"name": location.name, "sound": problem is None, "problem": problem})
    show(results, table(results))
    return int(not all(r["sound"] for r in results))


def _check(location: RegistryEntry, sources: Sources) -> None:
    """Read an artefact whole where it lies, with a progress bar. Raises `CartridgeError` unless it is sound."""
    from ..artifact import reading

    root, elsewhere = root_of(location.location), location.location if is_remote(location.location) else None
    reading.load_manifest(root, location.digest, payload=elsewhere is None)
    with bars() as shown:
        for done, total in reading.verify(root, sources, elsewhere):
            shown(location.name, done, total)


@command("publish handbook --library s3://cartridges/fleet --label current")
def publish(
    name: Name,
    location: Annotated[
        str | None, Argument(help="without --library: s3://bucket/prefix that the files of this one go under")
    ] = None,
    library: Annotated[
        str | None,
        option("published library: s3://bucket/prefix, or an absolute directory that machines share", metavar="WHERE"),
    ] = None,
    label: Annotated[str | None, option("also point this label of the library at it, in the same step")] = None,
    next_version: Annotated[
        bool,
        option("publish it as the library's next version of its id; machines that build by themselves count by themselves",
               "--next-version"),
    ] = False,
    no_promote: NoPromote = False,
) -> None:  # fmt: skip
    """Store a cartridge in a library, or alone on S3. Verified, and whole or not at all; servers follow a library."""
    if (location is None) == (library is None):
        raise CartridgeError("say where to publish to: --library WHERE, or an s3://bucket/prefix for this one alone")
    if location is not None:
        _push(name, location)
        return
    from ..sources.published import Library

    row = registry_of().find(name)
    with Library(settings_of(library=library)) as published, bars(unit_scale=True) as progress:
        manifest = published.publish(
            row.local_root(), label=label, promote=not no_promote, next_version=next_version, progress=progress
        )
        where = published.registry.find(manifest.name).location
        promoted = manifest.name in published.registry.current([manifest.id])
    show({"name": manifest.name, "promoted": promoted, "digest": manifest.digest, "location": where, "label": label})


def _push(name: str, location: str) -> None:
    from ..sources import s3, transfer

    s3.parse(location)
    root = registry_of().find(name).local_root()
    with _transfer() as (source, shown):
        done = transfer.push(root, location, source, progress=shown)
    show({"name": done.manifest.name, "digest": done.manifest.digest, "location": location, "pushed": done.changed})


@command("pull s3://cartridges/handbook/1")
def pull(
    location: Annotated[str, Argument(help="s3://bucket/prefix that a cartridge was published to")],
    id: Annotated[str | None, option("name of the cartridge here (default: its own)", callback=valid_id)] = None,
    no_promote: NoPromote = False,
) -> None:
    """Bring a cartridge from S3 here, verify and register it."""
    from ..sources import s3, transfer

    s3.parse(location)
    registry, directory = registry_of(), settings_of().cartridges_dir
    with _transfer() as (source, shown):
        done = transfer.pull(location, source, registry, directory, progress=shown, name=id, promote=not no_promote)
    tell(registry, done.manifest, path=str(done.root), pulled=done.changed)


@contextmanager
def _transfer() -> Iterator[tuple[S3Source, Callable[[str, int, int], None]]]:
    """Lend an S3 source and progress bars."""
    from ..sources.s3 import S3Source

    with closing(S3Source(**settings_of().s3)) as source, bars(unit_scale=True) as progress:
        yield source, progress
