"""Sources: where artefacts come from, local directories or S3, told apart by the form of their location."""

from __future__ import annotations

from ..artifact.bytesource import ByteRange, ByteSource, Seen, SmallFile
from ..artifact.local import LocalSource
from ..artifact.location import is_remote
from ..errors import MalformedLocation
from .s3 import S3Source


class Sources:
    """Local directories and S3 as one `ByteSource`, whose methods these are. Raises `MalformedLocation` for a location of another form."""

    def __init__(self, s3: S3Source | None = None) -> None:
        """Takes over `s3`, by default one that finds its server as every AWS tool does."""
        self.s3, self._local = s3 or S3Source(), LocalSource()

    def read_into(self, location: str, file: str, where: ByteRange, out: memoryview, seen: Seen | None = None) -> None:
        self._of(location).read_into(location, file, where, out, seen)

    def read(self, location: str, file: str, limit_bytes: int, *, known: str | None = None) -> SmallFile | None:
        return self._of(location).read(location, file, limit_bytes, known=known)

    def size(self, location: str, file: str) -> int:
        return self._of(location).size(location, file)

    def close(self) -> None:
        self.s3.close()

    def _of(self, location: str) -> ByteSource:
        if is_remote(location):
            return self.s3
        if not location.startswith("/") or "\0" in location:
            raise MalformedLocation(f"{location!r} is neither an absolute path nor s3://bucket/prefix")
        return self._local
