"""Moving: `push` to S3 and `pull` from there."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

from .authoring import add_no_promote
from .context import Verb, local_root, registry_of, settings_of
from .output import progress, show

_OF_BYTES = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}


def add(verb: Verb) -> None:
    """Add the commands to the command line."""
    push = verb("push", _push, "Verify a registered cartridge and store it on S3, whole or not at all.",
                "push handbook s3://cartridges/handbook/1 --endpoint-url http://minio:9000")  # fmt: skip
    push.add_argument("name", help="id (the version it means), id@version or label")
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
        remote.add_argument(
            "--endpoint-url",
            help="S3 server (default: $AWS_ENDPOINT_URL_S3, or AWS). Credentials come from the environment, a profile "
            "or a role, as for every AWS tool",
        )
        remote.add_argument("--region", help="S3 region (default: that of the environment or profile)")


def _push(arguments: argparse.Namespace) -> None:
    from ..sources import s3, transfer

    s3.parse(arguments.location)
    row = registry_of(arguments).find(arguments.name)
    root = local_root(row)
    with _transfer(arguments) as (source, shown):
        done = transfer.push(root, arguments.location, source, force=arguments.force, progress=shown)
    result = {
        "name": done.manifest.name, "digest": done.manifest.digest, "location": arguments.location,
        "pushed": done.changed,
    }  # fmt: skip
    there = (
        f"pushed {row.name} to"
        if done.changed
        else f"the content of {row.name} is there already, as {done.manifest.name}:"
    )
    show(result, f"{there} {arguments.location}", arguments.format)


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
def _transfer(arguments: argparse.Namespace) -> Iterator[tuple[Any, Any]]:
    """Lend an S3 source and a progress bar, off with --format json."""
    from ..sources.sources import Sources

    settings = settings_of(arguments, s3_endpoint_url=arguments.endpoint_url, s3_region=arguments.region)
    with closing(Sources(settings)) as sources, ExitStack() as stack:
        bars: dict[str, Callable[[int, int], None]] = {}

        def show_progress(what: str, done: int, total: int) -> None:
            if what not in bars:
                kind = {"unit": " chunks"} if what == "verify" else _OF_BYTES
                bars[what] = stack.enter_context(progress(what, form=arguments.format, **kind))
            bars[what](done, total)

        yield sources.s3(), show_progress
