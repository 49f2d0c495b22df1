"""A file of token ids becomes a cartridge without KV; nothing in the file is executed, and nothing else is taken."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lmcache_cartridge.artifact.reading import load_manifest, load_token_ids, verify
from lmcache_cartridge.cli.main import main
from lmcache_cartridge.cli.recall import MODEL_DIR
from lmcache_cartridge.errors import ArtifactError
from lmcache_cartridge.make.tokens import read_token_ids


class _Bomb:
    """Runs a command when unpickled without care."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self._mark),)


def _json(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("ids", [[5, 6, 7], torch.tensor([5, 6, 7]), torch.tensor([[5, 6, 7]])])
def test_ids_are_read_from_a_pytorch_file(tmp_path: Path, ids: Any) -> None:
    torch.save({"token_ids": ids, "kv_cache": None}, tmp_path / "a.pt")
    assert read_token_ids(tmp_path / "a.pt") == [5, 6, 7]


def test_ids_are_read_from_json(tmp_path: Path) -> None:
    assert read_token_ids(_json(tmp_path / "a.json", {"token_ids": [5, 6, 7], "metadata": {}})) == [5, 6, 7]


@pytest.mark.parametrize(
    "content",
    [[], {}, {"token_ids": []}, {"token_ids": [1.5]}, {"token_ids": [True]}, {"token_ids": "5"}, {"token_ids": [[5]]},
     {"token_ids": [5], "kv_cache": [1]}],
)  # fmt: skip
def test_json_of_another_kind_is_refused(tmp_path: Path, content: Any) -> None:
    with pytest.raises(ArtifactError, match="a.json"):
        read_token_ids(_json(tmp_path / "a.json", content))


def test_a_pickle_that_would_run_something_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    torch.save({"token_ids": [5], "x": _Bomb(tmp_path / "ran")}, tmp_path / "a.pt")
    with pytest.raises(ArtifactError, match="not a PyTorch file of plain tensors"):
        read_token_ids(tmp_path / "a.pt")
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "a.pt", weights_only=False)
    assert (tmp_path / "ran").exists(), "the bomb was no bomb"


@pytest.mark.parametrize("content", [b"", b"{", b"\x80\x04junk", b"PK\x03\x04junk"])
@pytest.mark.parametrize("suffix", [".json", ".pt"])
def test_a_broken_file_is_refused(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=f"a{suffix}"):
        read_token_ids(path)


def test_register_makes_a_version_of_a_file_of_ids(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    ids = np.arange(4, 204).tolist()
    source = _json(tmp_path / "prefix.json", {"token_ids": ids})
    arguments = ["register", str(source), "--home", str(tmp_path / "home"), "--format", "json"]
    assert main(arguments) == 1
    assert "--id and --model" in capsys.readouterr().err
    for version in (1, 2):
        assert main([*arguments, "--id", "prefix", "--model", str(MODEL_DIR)]) == 0
        assert json.loads(capsys.readouterr().out)["name"] == f"prefix@{version}"
    root = tmp_path / "home" / "cartridges" / "prefix" / "2"
    manifest = load_manifest(root)
    assert (manifest.kind, manifest.payload, manifest.positions) == ("tokens", None, 200)
    assert load_token_ids(manifest, root).tolist() == ids
    assert list(verify(root)) == []
    assert main(["describe", "prefix", "--home", str(tmp_path / "home"), "--format", "json"]) == 0


def test_ids_outside_the_models_vocabulary_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source = _json(tmp_path / "prefix.json", {"token_ids": [5, 640]})
    assert main(["register", str(source), "--home", str(tmp_path), "--id", "p", "--model", str(MODEL_DIR)]) == 1
    assert "token id 640 is outside" in capsys.readouterr().err
