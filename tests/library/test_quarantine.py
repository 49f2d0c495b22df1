"""A quarantine is seen by every process until it is lifted, and noting one never raises."""

from __future__ import annotations

from lmcache_cartridge.library.quarantine import ProcessQuarantine, Quarantine

DIGEST = "ab" * 32


def test_what_caused_a_quarantine_is_remembered_until_it_is_lifted(tmp_path):
    quarantine, where = Quarantine(tmp_path), "s3://bucket/a b"
    assert quarantine.put(DIGEST, "/mnt/\udcff is corrupt", where) is True
    assert Quarantine(tmp_path).notes() == {(DIGEST, where): "/mnt/\\udcff is corrupt"}
    quarantine.lift(DIGEST, "/elsewhere")
    assert quarantine.reason(DIGEST, where) and quarantine.reason(DIGEST, "/elsewhere") is None
    quarantine.put(DIGEST, "two\nlines", "/other")
    quarantine.drop(DIGEST, where)
    assert quarantine.notes() == {(DIGEST, "/other"): "two\nlines"}
    quarantine.lift(DIGEST)
    assert list(tmp_path.iterdir()) == []


def test_what_copies_on_s3_caused_is_forgiven_and_nothing_else(tmp_path):
    quarantine, there, here = Quarantine(tmp_path), (DIGEST, "s3://bucket/a"), (DIGEST, "/here")
    mine, other = ProcessQuarantine(quarantine), ProcessQuarantine(quarantine)
    assert mine.put(DIGEST, "chunk 3 is corrupt", there[1]) and mine.put(DIGEST, "it answers wrongly", here[1])
    assert not mine.put(DIGEST, "again", here[1])
    assert other.follow() == {DIGEST}
    assert other.notes == mine.notes == {there: "chunk 3 is corrupt", here: "it answers wrongly"}
    mine.forgive(DIGEST)
    assert other.follow() == {DIGEST} and other.follow() == set()
    assert other.notes == mine.notes == quarantine.notes() == {here: "it answers wrongly"}
