"""An artefact appears whole or not at all, private to its user, and is written once."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from making import heads_bytes, make_artifact, make_fingerprint, make_ids, make_kv

from lmcache_cartridge.artifact.manifest import Provenance
from lmcache_cartridge.artifact.reading import load_manifest
from lmcache_cartridge.artifact.writing import ArtifactWriter
from lmcache_cartridge.errors import ArtifactError, CartridgeExists, ManifestError

PROVENANCE = Provenance(tool="tests", created="2026-01-01T00:00:00Z")


def _writer(root: Path, positions: int = 40, chunk_tokens: int = 16, **changes: object) -> ArtifactWriter:
    arguments = {
        "cartridge_id": "doc",
        "version": 1,
        "kind": "prefill",
        "fingerprint": make_fingerprint(),
        "token_ids": np.asarray(make_ids(positions, 0), dtype="<u4"),
        "chunk_tokens": chunk_tokens,
    }
    return ArtifactWriter(root, **(arguments | changes))


def _chunks(positions: int = 40, chunk_tokens: int = 16) -> Iterator[bytes]:
    kv = make_kv(make_fingerprint(), positions, 0)
    for start in range(0, positions, chunk_tokens):
        yield heads_bytes(kv[:, :, start : start + chunk_tokens])


@contextmanager
def _file_size_limit(size_bytes: int) -> Iterator[None]:
    """Let writes beyond a size fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def made(tmp_path):
    return make_artifact(tmp_path / "doc", positions=40, chunk_tokens=16)


def test_a_writer_that_cannot_start_leaves_nothing_behind(tmp_path):
    with pytest.raises(ZeroDivisionError), _writer(tmp_path / "doc", chunk_tokens=0):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_leaves_nothing_behind(tmp_path):
    with _file_size_limit(10_000), pytest.raises(OSError, match="too large"), _writer(tmp_path / "doc") as writer:
        for chunk in _chunks():
            writer.write(chunk)
        writer.commit(PROVENANCE)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_at_the_place_of_an_artefact_before_it_is_committed(tmp_path):
    with _writer(tmp_path / "doc") as writer:
        for chunk in _chunks():
            writer.write(chunk)
            assert not (tmp_path / "doc").exists()
        manifest = writer.commit(PROVENANCE)
        assert load_manifest(tmp_path / "doc") == manifest
    assert [path.name for path in tmp_path.iterdir()] == ["doc"]


def test_a_second_writer_at_the_same_place_is_refused_at_once(made, tmp_path):
    with pytest.raises(CartridgeExists, match="written once"):
        _writer(tmp_path / "doc")
    assert load_manifest(tmp_path / "doc") == made.manifest


def test_the_slower_of_two_writers_at_the_same_place_is_refused_and_cleans_up(tmp_path):
    with pytest.raises(CartridgeExists, match="appeared"), _writer(tmp_path / "doc") as slower:
        for chunk in _chunks():
            slower.write(chunk)
        made = make_artifact(tmp_path / "doc", positions=40, seed=9)
        slower.commit(PROVENANCE)
    assert [path.name for path in tmp_path.iterdir()] == ["doc"]
    assert load_manifest(tmp_path / "doc") == made.manifest


def test_a_rename_that_fails_says_why_and_an_artefact_is_on_the_disk_by_its_name(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(Path(f"/proc/self/fd/{fd}").readlink()), fsync(fd)))
    make_artifact(tmp_path / "doc", positions=40)
    assert synced[-1] == tmp_path

    def rename(self: Path, target: Path) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(ArtifactError, match="other cannot be made: Permission denied"):
        make_artifact(tmp_path / "other", positions=40)
    assert [path.name for path in tmp_path.iterdir()] == ["doc"]


def test_a_chunk_of_the_wrong_size_or_beyond_the_last_is_refused(tmp_path):
    with _writer(tmp_path / "doc") as writer:
        whole = next(_chunks())
        for wrong in (whole[:-1], whole + b"\0", b""):
            with pytest.raises(ArtifactError, match="chunk 0 has"):
                writer.write(wrong)
        for chunk in _chunks():
            writer.write(chunk)
        with pytest.raises(ArtifactError, match="chunk 3 has"):
            writer.write(chunk)


def test_an_artefact_that_lacks_chunks_cannot_be_committed(tmp_path):
    with _writer(tmp_path / "doc") as writer:
        writer.write(next(_chunks()))
        with pytest.raises(ArtifactError, match="16 of 40 positions"):
            writer.commit(PROVENANCE)
    assert list(tmp_path.iterdir()) == []


def test_an_id_that_could_escape_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ManifestError, match="cannot be a cartridge id"):
        _writer(tmp_path / "doc", cartridge_id="../x")
    assert list(tmp_path.iterdir()) == []
