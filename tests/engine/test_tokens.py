"""`import` makes a cartridge without KV of a file of token ids."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from lmcache_cartridge.artifact.reading import load_manifest, load_token_ids, verify
from lmcache_cartridge.cli.main import main
from lmcache_cartridge.cli.recall import MODEL_DIR


def test_import_makes_a_version_of_a_file_of_ids(tmp_path, capsys):
    ids = np.arange(4, 204).tolist()
    source = tmp_path / "prefix.json"
    source.write_text(json.dumps({"token_ids": ids}))
    arguments = ["import", str(source), "--home", str(tmp_path / "home"), "--format", "json"]
    assert main(arguments) == 1
    assert "--id and --model" in capsys.readouterr().err
    for version, given in ((1, ids[1:]), (1, ids[1:]), (2, ids)):  # the same again is no new version
        source.write_text(json.dumps({"token_ids": given}))
        assert main([*arguments, "--id", "prefix", "--model", str(MODEL_DIR)]) == 0
        assert json.loads(capsys.readouterr().out)["name"] == f"prefix@{version}"
    root = tmp_path / "home" / "cartridges" / "prefix" / "2"
    manifest = load_manifest(root)
    assert (manifest.kind, manifest.payload, manifest.positions) == ("tokens", None, 200)
    assert load_token_ids(manifest, root).tolist() == ids
    assert list(verify(root)) == []
    assert main(["show", "prefix", "--home", str(tmp_path / "home"), "--format", "json"]) == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [({"token_ids": [5, 640]}, "token id 640 is outside"), ({"token_ids": [True]}, "not a list of at least one whole number")],
)  # fmt: skip
def test_what_is_no_file_of_ids_of_the_model_is_refused(tmp_path, capsys, content, message):
    torch.save(content, tmp_path / "a.pt")
    argv = ["import", str(tmp_path / "a.pt"), "--home", str(tmp_path), "--id", "p", "--model", str(MODEL_DIR)]
    assert main(argv) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "cartridges").exists()
