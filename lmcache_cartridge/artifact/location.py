"""Locations: where an artefact lies, an absolute path or `s3://bucket/prefix`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..errors import MalformedLocation

SCHEME = "s3://"
_BUCKET = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]|\.(?!\.)){1,61}[A-Za-z0-9]")
_MAX_KEY_BYTES = 1000
"""S3 allows 1024, of which a file name takes some."""


def is_remote(location: str) -> bool:
    """Return whether a location is on S3."""
    return location.startswith(SCHEME)


def parse(location: str) -> tuple[str, str]:
    """Return bucket and key prefix of `s3://bucket/prefix`.

    Raises `MalformedLocation` unless that is what it is, spelled in the one way that leaves nothing to resolve: no
    empty, `.` or `..` segments, nothing percent-encoded, no query, no control characters.
    """
    bucket, _, key = location.removeprefix(SCHEME).partition("/")
    sound = (
        location.startswith(SCHEME)
        and _BUCKET.fullmatch(bucket)
        and key.isprintable()
        and not set(key) & set("%?#\\")
        and not {"", ".", ".."} & set(key.split("/"))
        and len(key.encode()) <= _MAX_KEY_BYTES
    )
    if not sound:
        raise MalformedLocation(
            f"{location[:200]!r} is no s3://bucket/prefix: no empty, . or .. segments, no % ? # or \\, no / at the end"
        )
    return bucket, key


def allowed(location: str, buckets: Iterable[str]) -> bool:
    """Return whether `location` is, or lies under, one of `buckets`, each `bucket` or `bucket/prefix`."""
    try:
        parse(location)
    except MalformedLocation:
        return False
    segments = location.removeprefix(SCHEME).split("/")
    roots = [bucket.rstrip("/").split("/") for bucket in buckets]
    return any(segments[: len(root)] == root for root in roots)
