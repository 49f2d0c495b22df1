"""Sources: where artefacts come from, local directories or S3, told apart by the form of their location."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..artifact.bytesource import ByteRange, ByteSource, Seen, Small
from ..artifact.local import LocalSource
from ..artifact.location import is_remote
from ..errors import MalformedLocation
from .s3 import S3Source

if TYPE_CHECKING:
    from ..settings import Settings


class Sources:
    """Local directories and S3 as one `ByteSource`. The S3 client is made when the first `s3://` location is read."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._local = LocalSource()
        self._s3: S3Source | None = None
        self._lock = threading.Lock()

    def read_into(self, location: str, file: str, where: ByteRange, out: memoryview, seen: Seen | None = None) -> None:
        """See `ByteSource.read_into`."""
        self._of(location).read_into(location, file, where, out, seen)

    def read_each(self, location: str, file: str, start: int, outs: Sequence[memoryview]) -> None:
        """See `ByteSource.read_each`."""
        self._of(location).read_each(location, file, start, outs)

    def request_bytes(self, location: str) -> int:
        """Return how much to ask for at once, where many small requests cost more than few; 0 where they do not."""
        return self._settings.s3_part_bytes if is_remote(location) else 0

    def read(self, location: str, file: str, limit_bytes: int, *, known: str | None = None) -> Small | None:
        """See `ByteSource.read`."""
        return self._of(location).read(location, file, limit_bytes, known=known)

    def size(self, location: str, file: str) -> int:
        """See `ByteSource.size`."""
        return self._of(location).size(location, file)

    def s3(self) -> S3Source:
        """Return the S3 source. Raises `SourceError` where boto3 is not installed."""
        with self._lock:
            if self._s3 is None:
                self._s3 = S3Source(
                    endpoint_url=self._settings.s3_endpoint_url,
                    region=self._settings.s3_region,
                    connections=self._settings.s3_connections,
                    part_bytes=self._settings.s3_part_bytes,
                    timeout_s=self._settings.s3_timeout_s,
                )
            return self._s3

    def close(self) -> None:
        """See `ByteSource.close`."""
        with self._lock:
            if self._s3 is not None:
                self._s3.close()
                self._s3 = None

    def _of(self, location: str) -> ByteSource:
        if is_remote(location):
            return self.s3()
        if not location.startswith("/") or "\0" in location:
            raise MalformedLocation(f"{location!r} is neither an absolute path nor s3://bucket/prefix")
        return self._local
