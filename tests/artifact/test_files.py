"""Files are replaced whole or not at all, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_cartridge.artifact import files


def test_a_replaced_file_is_the_new_one_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before, and longer")
    files.replace(path, [b"af", memoryview(b"ter")], 0o600)
    assert path.read_bytes() == b"after"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    def parts() -> object:
        yield b"half"
        assert path.read_bytes() == b"before", "nobody sees it half-made"
        raise KeyError

    path = tmp_path / "file"
    path.write_bytes(b"before")
    with pytest.raises(KeyError):
        files.replace(path, parts())
    assert path.read_bytes() == b"before"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("taken", [False, True])
def test_a_directory_appears_whole_or_not_at_all(tmp_path: Path, taken: bool) -> None:
    path = tmp_path / "directory"
    if taken:
        (path / "below").mkdir(parents=True)
    try:
        with files.replacing(path) as partial:
            partial.mkdir()
            files.write(partial / "file", [b"new"])
            assert (path / "file").exists() is False
    except OSError:
        assert taken, "a directory that holds something does not give way"
    else:
        assert not taken
    assert [p.name for p in path.iterdir()] == (["below"] if taken else ["file"])
    assert [p.name for p in tmp_path.iterdir()] == ["directory"]


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"before")
    with pytest.raises(FileExistsError):
        files.write(tmp_path / "file", [b"after"])
    assert (tmp_path / "file").read_bytes() == b"before"
