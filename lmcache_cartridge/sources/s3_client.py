"""The boto3 client of an S3 server."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

from ..errors import SourceError


def make_client(endpoint_url: str | None, region: str | None, **options: Any) -> Any:
    """Return a boto3 client with these `botocore.config.Config` options. Raises `SourceError` where none can be made."""
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
