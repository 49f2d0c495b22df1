"""S3Source: artefacts in S3 buckets, read by ranged GETs in parallel, retried, given up where nothing comes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from ..artifact.bytesource import ByteRange, Seen, Small
from ..artifact.location import parse
from ..errors import SourceError, TruncatedPayload
from .s3_call import Broken, Call, Progress, cause_of, final, status_of
from .workers import Workers

_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")
_STEP_BYTES = 1 << 20
"""Most that is taken from a connection at once; between two steps a read notices that it was given up. Measured: 1.6 GB/s,
1.3 with a quarter of it, 1.4 with four times as much, from a server on the same machine."""


class S3Source:
    """Objects of any S3 server. See `ByteSource`.

    Credentials are found as every AWS tool finds them: environment, profile, role. At most `connections` requests run
    at once, on as many threads, however many callers wait, and the client keeps as many connections, so that a request
    neither waits for one nor has to open it. A read that was given up leaves its threads at their next byte.
    """

    def __init__(
        self,
        *,
        endpoint_url: str | None = None,
        region: str | None = None,
        connections: int = 16,
        part_bytes: int = 8 << 20,
        timeout_s: float = 60.0,
        attempts: int = 8,
        backoff_s: float = 0.1,
    ) -> None:
        """`attempts` is how often in a row a request may fail before it is an error; between two of them it waits
        `backoff_s`, twice that, and so on, less a random part. Raises `SourceError` where boto3 is not installed.
        """
        self._part_bytes, self._timeout_s, self._attempts, self._backoff_s = part_bytes, timeout_s, attempts, backoff_s
        # Retries of reads are ours, since botocore's end where a body begins; those of uploads are botocore's.
        self._new_client = partial(_client, endpoint_url, region)
        self._client = self._new_client(
            max_pool_connections=connections,
            connect_timeout=min(5.0, timeout_s),
            read_timeout=min(10.0, timeout_s),
            retries={"total_max_attempts": 1},
        )
        self._endpoint = f"at {self._client.meta.endpoint_url}"
        self._workers, self._progress = Workers(connections, "s3"), Progress()
        self._closed = False

    def read_into(self, location: str, file: str, where: ByteRange, out: memoryview, seen: Seen | None = None) -> None:
        """See `ByteSource.read_into`."""
        target = _target(location, file)
        if not len(out):
            return
        with self._call(location, file) as call:
            starts = range(0, len(out), self._part_bytes)
            parts = [out[start : start + self._part_bytes] for start in starts]
            call.run(
                [
                    partial(self._fill, call, target, where.start + start, [part])
                    for start, part in zip(starts, parts, strict=True)
                ]
            )
        if seen:
            seen(out)

    def read_each(self, location: str, file: str, start: int, outs: Sequence[memoryview]) -> None:
        """See `ByteSource.read_each`."""
        target = _target(location, file)
        with self._call(location, file) as call:
            call.run([partial(self._fill, call, target, start, outs)])

    def read(self, location: str, file: str, limit_bytes: int, *, known: str | None = None) -> Small | None:
        """See `ByteSource.read`."""
        target = _target(location, file)
        if known:
            target["IfNoneMatch"] = known
        with self._call(location, file) as call:
            return call.run([partial(call.retry, partial(self._whole, call, target, limit_bytes))])[0]

    def size(self, location: str, file: str) -> int:
        """See `ByteSource.size`."""
        return self._head(location, file)["ContentLength"]

    def revision(self, location: str, file: str) -> str:
        """Return what changes whenever a file does; compare for equality only. Raises as `size` does."""
        return self._head(location, file)["ETag"]

    def _head(self, location: str, file: str) -> dict[str, Any]:
        target = _target(location, file)
        with self._call(location, file) as call:
            return call.run([partial(call.retry, lambda: self._client.head_object(**target))])[0]

    def upload(self, location: str, file: str, data: BinaryIO, progress: Callable[[int], None] | None = None) -> None:
        """Store an open file, a large one in parts. Blocks as long as it takes; `progress` gets bytes as they go."""
        target = _target(location, file)
        from boto3.s3.transfer import TransferConfig

        parts = TransferConfig(multipart_threshold=16 << 20, multipart_chunksize=16 << 20, max_concurrency=8)
        self._once(location, file, lambda: self._uploader.upload_fileobj(
            data, target["Bucket"], target["Key"], Callback=progress, Config=parts
        ))  # fmt: skip

    def delete(self, location: str, file: str) -> None:
        """Remove an object; no change if there is none."""
        target = _target(location, file)
        self._once(location, file, lambda: self._uploader.delete_object(**target))

    def close(self) -> None:
        """See `ByteSource.close`."""
        if not self._closed:
            self._closed = True
            self._workers.close()
            self._client.close()
            if "_uploader" in vars(self):
                self._uploader.close()

    @cached_property
    def _uploader(self) -> Any:
        return self._new_client(retries={"mode": "standard", "total_max_attempts": self._attempts})

    def _call(self, location: str, file: str) -> Call:
        if self._closed:
            raise SourceError(f"{location}/{file}: the source was closed")
        return Call(
            f"{location}/{file} {self._endpoint}", self._workers, self._timeout_s, self._attempts, self._backoff_s,
            self._progress,
        )  # fmt: skip

    def _once(self, location: str, file: str, request: Callable[[], object]) -> None:
        """Run a request that botocore repeats where it may pass."""
        try:
            request()
        except Exception as error:
            raise final(error, f"{location}/{file} {self._endpoint}") from cause_of(error)

    def _fill(self, call: Call, target: dict[str, str], start: int, outs: Sequence[memoryview]) -> None:
        """Fill `outs` from `start` of an object, going on from where a connection broke."""
        done, size = 0, sum(map(len, outs))

        def rest() -> None:
            nonlocal done
            end = start + size
            response = self._client.get_object(**target, Range=f"bytes={start + done}-{end - 1}")
            with response["Body"] as body:
                _check_range(response, start + done, end, call.name)
                while done < size and (data := body.read1(min(_STEP_BYTES, size - done))):
                    call.write(outs, done, data)
                    done += len(data)
            if done < size:
                raise Broken("the answer ended early")

        call.retry(rest, lambda: done)

    def _whole(self, call: Call, target: dict[str, str], limit_bytes: int) -> Small | None:
        try:
            response = self._client.get_object(**target)
        except Exception as error:
            if status_of(error) == 304:
                return None
            raise
        data, length = bytearray(), response.get("ContentLength")
        with response["Body"] as body:
            while len(data) <= limit_bytes >= (length or 0):
                piece = body.read1(min(_STEP_BYTES, limit_bytes + 1 - len(data)))
                call.came(len(piece))
                if not piece:
                    break
                data += piece
        if max(len(data), length or 0) > limit_bytes:
            raise SourceError(f"{call.name} has more than the {limit_bytes} bytes that it may have")
        if length is not None and len(data) != length:
            raise Broken("the answer ended early")
        return Small(bytes(data), response.get("ETag", ""))


def _client(endpoint_url: str | None, region: str | None, **options: Any) -> Any:
    """Return a boto3 client with these `botocore.config.Config` options."""
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise SourceError(f"S3 needs boto3 ({error}): pip install lmcache-cartridge[s3]") from error
    # Checksums of whole objects are of no use to ranges, and botocore's newer defaults are refused by older servers
    # (Ceph, Swift); a chunk has its own.
    options |= {"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"}
    try:
        session = boto3.session.Session()
        where = {"endpoint_url": endpoint_url, "region_name": region}
        probe = session.client("s3", **where)
        # Few servers but AWS's have a host name for each bucket.
        host = urlsplit(probe.meta.endpoint_url).hostname or ""
        probe.close()
        if not re.search(r"\.amazonaws\.com(\.cn)?$", host):
            options["s3"] = {"addressing_style": "path"}
        return session.client("s3", config=Config(**options), **where)
    except (BotoCoreError, ValueError) as error:
        # A message may quote a line of a file of credentials.
        raise SourceError(
            f"no S3 client can be made ({type(error).__name__}); check AWS_PROFILE, the files under ~/.aws, "
            "s3_endpoint_url and s3_region"
        ) from None


def _target(location: str, file: str) -> dict[str, str]:
    bucket, key = parse(location)
    return {"Bucket": bucket, "Key": f"{key}/{file}"}


def _check_range(response: dict, start: int, end: int, name: str) -> None:
    """Raise unless the answer is bytes `start` to `end`: `TruncatedPayload` where the object ends before."""
    status, length = response["ResponseMetadata"]["HTTPStatusCode"], response.get("ContentLength")
    match = _CONTENT_RANGE.fullmatch(response.get("ContentRange") or "")
    if status == 206 and match:
        first, last, total = map(int, match.groups())
        if first == start and last == min(end, total) - 1:
            if total < end:
                raise TruncatedPayload(f"{name} ends at byte {total}, {end - total} bytes early")
            return
    elif status == 200 and start == 0 and length is not None and length <= end:
        if length < end:
            raise TruncatedPayload(f"{name} ends at byte {length}, {end - length} bytes early")
        return
    raise SourceError(
        f"{name}: asked for bytes {start} to {end}, the server answered {status} with other ones; it or a proxy before "
        "it does not support ranges"
    )
