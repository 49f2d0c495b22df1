"""Files are replaced whole or not at all, and nothing is left behind."""

from __future__ import annotations

import pytest

from lmcache_cartridge.artifact import files


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
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
def test_a_directory_appears_whole_or_not_at_all(tmp_path, taken):
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
