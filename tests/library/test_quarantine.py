"""A quarantine is seen by every process until it is lifted, and noting one never raises."""

from __future__ import annotations

from lmcache_cartridge.library.quarantine import Quarantine

DIGEST = "ab" * 32


def test_what_caused_a_quarantine_is_remembered_until_it_is_lifted(tmp_path):
    quarantine, where = Quarantine(tmp_path), "s3://bucket/a b"
    assert quarantine.put(DIGEST, "/mnt/\udcff is corrupt", where)
    quarantine.put(DIGEST, "two\nlines", "/other")
    reader = Quarantine(tmp_path)
    assert (reader.follow(), reader.reason(DIGEST, "/elsewhere")) == ({DIGEST}, None)
    assert reader.notes == {(DIGEST, where): "/mnt/\\udcff is corrupt", (DIGEST, "/other"): "two\nlines"}
    quarantine.lift(DIGEST, where)
    assert [reader.reason(DIGEST, each) for each in (where, "/other", None)] == [None, "two\nlines", "two\nlines"]
    quarantine.lift(DIGEST)
    assert list(tmp_path.iterdir()) == []


def test_what_copies_on_s3_caused_is_forgiven_and_nothing_else(tmp_path):
    there, here = (DIGEST, "s3://bucket/a"), (DIGEST, "/here")
    mine, other = Quarantine(tmp_path), Quarantine(tmp_path)
    assert mine.put(DIGEST, "chunk 3 is corrupt", there[1]) and mine.put(DIGEST, "it answers wrongly", here[1])
    assert not mine.put(DIGEST, "again", here[1])
    assert other.follow() == {DIGEST}
    assert other.notes == mine.notes == {there: "chunk 3 is corrupt", here: "it answers wrongly"}
    mine.forgive(DIGEST)
    assert other.follow() == {DIGEST} and other.follow() == set()
    assert other.notes == mine.notes == {here: "it answers wrongly"}
