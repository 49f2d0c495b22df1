"""Fixtures that several files of tests ask for."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

from homes import home  # noqa: F401
from s3 import bucket, s3_credentials, s3_server  # noqa: F401

# No test, nor a server that it starts, uses the download cache of the person who runs it.
os.environ["LMCACHE_CARTRIDGE_CACHE"] = tempfile.mkdtemp(prefix="lmcache-cartridge-cache-")
atexit.register(shutil.rmtree, os.environ["LMCACHE_CARTRIDGE_CACHE"], ignore_errors=True)
