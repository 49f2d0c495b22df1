"""Fixtures that several files of tests ask for."""

from __future__ import annotations

from s3 import bucket, s3_credentials, s3_server  # noqa: F401
