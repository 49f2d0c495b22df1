"""A cartridge can be stored in int8 when it is built, imported or later (`test_train`, `test_convert`: trained, imported); every command says so."""

from __future__ import annotations

import pytest
from making import files_under, flip_bit, make_artifact
from wards import MODEL

from lmcache_cartridge.artifact.manifest import Origin
from lmcache_cartridge.artifact.reading import PAYLOAD, chunk_range
from lmcache_cartridge.cli.recall import load_sheet
from lmcache_cartridge.errors import CorruptChunk
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make.write import compress
from lmcache_cartridge.memory import codec


@pytest.fixture
def build(tmp_path):
    """The command for the first characters of a sheet."""

    def words(*options: object, size: int = 1500) -> list[object]:
        (tmp_path / "sheet.txt").write_text(load_sheet("ward-a").text[:size])
        return ["build", "--model", MODEL, "--document", tmp_path / "sheet.txt", *options]

    return words


@pytest.mark.parametrize("size, is_short", [(60, True), (1500, False)])
def test_a_document_that_servers_would_not_inject_is_built_with_a_warning(cli, build, size, is_short):
    made = cli.json(*build("--id", "short", size=size))
    assert (f"{made['positions']} positions fill no chunk of 256" in str(made["warnings"])) == is_short
    assert bool(made["warnings"]) == is_short


def test_a_canary_that_fails_on_int8_alone_leaves_nothing(cli, build, monkeypatch):
    decode = codec.decode
    monkeypatch.setattr(codec, "decode", lambda *a: (decode(*a), a[1].zero_()))
    common = build("--id", "small")
    assert "after the stored KV the model's next token differs" in cli.refused(*common, "--payload", "int8")
    assert cli.json(*common)["canary_top1_equal"]


@pytest.mark.parametrize("kind", ["prefill", "trained"])
def test_of_a_registered_cartridge_the_same_is_made(cli, tmp_path, kind):
    made = make_artifact(tmp_path / "doc", positions=80, kind=kind).manifest
    Registry(cli.home / "registry.sqlite").register(tmp_path / "doc")
    before, common = files_under(tmp_path / "doc"), ("build", "--from", "doc", "--payload", "int8", "--id")
    cli.json(*common, "small")
    manifest, _ = cli.artefact("small")
    assert manifest.digest == make_artifact(tmp_path / "x", positions=80, kind=kind, encoding="int8").manifest.digest
    assert manifest.provenance.origin == Origin("cartridge", "doc@1", made.digest)
    assert files_under(tmp_path / "doc") == before
    assert cli.json(*common, "doc")["name"] == "doc@2"
    assert "doc@2 is in int8 already" in cli.refused(*common, "again")


def test_a_corrupt_cartridge_is_not_compressed(tmp_path):
    made = make_artifact(tmp_path / "doc", positions=80)
    flip_bit(tmp_path / "doc" / PAYLOAD, chunk_range(made.manifest, 4, range(1)).start)
    with pytest.raises(CorruptChunk, match="chunk 4"):
        compress(tmp_path / "doc", tmp_path / "new", cartridge_id="new", version=1)
    assert [path.name for path in tmp_path.iterdir()] == ["doc"]
