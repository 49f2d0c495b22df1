"""Locations cannot be spelled around, secrets are never told, and any S3 server will do."""

from __future__ import annotations

import logging
import subprocess
import sys
import traceback

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lmcache_cartridge.artifact.bytesource import ByteRange
from lmcache_cartridge.artifact.location import allowed, parse
from lmcache_cartridge.errors import MalformedLocation, SettingsError, SourceError
from lmcache_cartridge.settings import from_mapping
from lmcache_cartridge.sources.s3 import S3Source
from lmcache_cartridge.sources.s3_client import make_client

MALFORMED = [
    "", "s3:///key", "s3://bucket", "s3://bucket/key/", "s3://bucket//key", "s3://bucket/../other/key", "s3://bucket/./a",
    "s3://bucket/a/..", "s3://bucket/%2e%2e/b", "s3://bucket/a?versionId=1", "s3://bucket/a#b", "s3://bucket/a\\..\\b",
    "s3://bucket/a\nb", "s3://bucket/\ud800", "s3://../key", "s3://user:secret@bucket/key", "s3://-bucket/key", "S3://bucket/key",
    "https://bucket/key", " s3://bucket/key", "s3://bucket/" + "k" * 1001, "s3://bu/\u202ekey", "s3://bücket/key",
]  # fmt: skip
PARTS = st.sampled_from("bucket other pre prefix prefix2 a .. . %2e%2e %2F é \\ \0 PRE ?".split() + ["", " ", "pre "])
LOCATIONS = st.one_of(
    st.builds(lambda parts: "s3://" + "/".join(parts), st.lists(PARTS, max_size=6)),
    st.builds("s3://{}/{}".format, st.sampled_from(["bucket", "other"]), st.text(max_size=20)),
    st.text(max_size=30),
)
BUCKETS = st.lists(
    st.sampled_from(["bucket", "bucket/pre", "bucket/prefix", "other/a/b", "other/a", "third"]), max_size=3
)


@pytest.mark.parametrize("location", MALFORMED, ids=ascii)
def test_a_location_with_anything_to_resolve_is_malformed(location):
    with pytest.raises(MalformedLocation) as caught:
        parse(location)
    assert isinstance(caught.value, ValueError)
    assert not allowed(location, ["bucket", "bucket/a", "..", "", "."])


@settings(max_examples=300, deadline=None)
@given(LOCATIONS, BUCKETS)
@example("s3://bucket/pre/../other", ["bucket/pre"])
@example("s3://bucket/prefix2", ["bucket/pre", "bucket/prefix"])
@example("s3://bucket/pre/a", ["bucket/pre/"])
@example("s3://bucket/a", ["", "/"])
def test_what_is_allowed_is_exactly_what_lies_under_a_bucket_or_prefix_however_it_is_spelled(location, buckets):
    try:
        bucket, key = parse(location)
    except MalformedLocation:
        assert not allowed(location, buckets)
        return
    # What the server is asked for, `bucket/key/file`, begins with an allowed root, literally and at a border.
    asked = f"{bucket}/{key}/manifest.json"
    assert allowed(location, buckets) == any(asked.startswith(f"{root.rstrip('/')}/") for root in buckets)
    assert not {"", ".", ".."} & set(asked.split("/")) and "%" not in asked


@pytest.mark.parametrize(
    "url",
    "minio:9000 ftp://minio http:// http://key:hush@minio http://minio/path http://minio?a=hush http://m:x".split(),
)
def test_an_endpoint_that_is_none_is_refused_and_its_secrets_not_repeated(url):
    with pytest.raises(SettingsError, match="s3_endpoint_url.*credentials do not belong") as caught:
        from_mapping({"s3_endpoint_url": url})
    assert "hush" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "environment",
    [
        {"AWS_ACCESS_KEY_ID": "hush-key", "AWS_SECRET_ACCESS_KEY": "hush-hush"}, {"AWS_SESSION_TOKEN": "hush-token"},
        {"AWS_SESSION_TOKEN": "hush\ntoken"}, {"AWS_ACCESS_KEY_ID": "hush\nkey"},
    ],
)  # fmt: skip
def test_an_error_tells_no_secret(s3_credentials, bucket, environment, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    source, told = S3Source(endpoint_url=s3_credentials.endpoint, attempts=2, backoff_s=0.01), ""
    for call, *rest in (("read_into", ByteRange(0, 1), memoryview(bytearray(1))), ("read", 10), ("size",)):
        with pytest.raises(SourceError, match=f"s3://{bucket}/a/f at {s3_credentials.endpoint}") as caught:
            getattr(source, call)(f"s3://{bucket}/a", "f", *rest)
        told += "".join(traceback.format_exception(caught.value))
    source.close()
    told += caplog.text
    assert "hush" not in told and "Signature=" not in told


def test_a_broken_file_of_credentials_is_not_quoted(s3_credentials, tmp_path, monkeypatch):
    (tmp_path / "config").write_text("aws_secret_access_key = hush\n[default")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "config"))
    with pytest.raises(SourceError, match="no S3 client can be made") as caught:
        S3Source(endpoint_url=s3_credentials.endpoint).size("s3://bucket/a", "f")
    assert "hush" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("endpoint", "style"),
    [(None, "auto"), ("https://s3.eu-west-1.amazonaws.com", "auto"), ("http://minio:9000", "path"),
     ("https://amazonaws.com.evil.example", "path")],
)  # fmt: skip
def test_servers_other_than_amazons_are_addressed_by_path(s3_credentials, endpoint, style):
    client = make_client(endpoint, "eu-west-1")
    assert (client.meta.config.s3 or {}).get("addressing_style", "auto") == style
    client.close()


def test_a_missing_boto3_says_how_to_get_it():
    code = (
        "import sys; sys.modules['boto3'] = None\n"
        "from lmcache_cartridge.sources.sources import Sources\n"
        "Sources().size('s3://bucket/key', 'file')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "pip install lmcache-cartridge[s3]" in done.stderr.splitlines()[-1]


def test_a_process_with_a_stuck_read_can_end(s3_credentials):
    code = (
        "import socket, threading\nfrom lmcache_cartridge.sources.s3 import S3Source\nserver = socket.create_server(('127.0.0.1', 0))\n"
        "source = S3Source(endpoint_url=f'http://127.0.0.1:{server.getsockname()[1]}', timeout_s=300)\n"
        "threading.Thread(target=source.size, args=('s3://bucket/key', 'f'), daemon=True).start()\n"
        "server.accept(); print('stuck')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("stuck\n", 0)
