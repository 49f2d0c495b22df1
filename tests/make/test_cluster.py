"""A corpus on a real Ray cluster of several nodes: one is killed on the way, and each document is published once, as it is made alone."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from commands import Cli
from recall.ward import write_document
from waiting import until
from wards import MODEL, patients

from lmcache_cartridge.cli.main import main
from lmcache_cartridge.errors import SourceNotFound
from lmcache_cartridge.settings import Settings
from lmcache_cartridge.sources.published import Library

NODES, SHEETS, TOKENS = 2, 8, 300


@contextmanager
def ray_nodes(count: int, log: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Lend the address of a cluster and what kills a node for each line that it reads."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__).parents[1] / "ray_nodes.py"), str(count)]
    with log.open("w") as errors:
        cluster = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert cluster.stdout is not None and cluster.stdin is not None
    try:
        address = cluster.stdout.readline().strip()
        assert address, log.read_text()
        yield address, cluster
    finally:
        cluster.stdin.close()
        cluster.wait(600)
        cluster.stdout.close()


def _digests(home: Path) -> dict[str, str]:
    """Return those of the library in a home, by name."""
    with Library(Settings(home=home / "seen", library=str(home / "library"))) as library:
        with suppress(SourceNotFound):  # nothing is published yet
            library.registry.follow()
        return {row.name: row.digest for row in library.registry.all()}


def _words(command: str, corpus: Path, home: Path, *more: object) -> list[str]:
    """Return a command for a corpus, whose cartridges go to the library in a home."""
    return [
        command,
        str(corpus),
        "--model",
        MODEL,
        "--home",
        str(home),
        "--publish",
        str(home / "library"),
        *map(str, more),
    ]


def test_a_killed_node_loses_no_document_and_none_is_made_twice(tmp_path):
    names = [f"ward-{n:02}" for n in range(SHEETS)]
    texts = [write_document(random.Random(name), TOKENS, patients(n, SHEETS)).text for n, name in enumerate(names)]
    lines = [json.dumps({"id": name, "text": text}) for name, text in zip(names, texts, strict=True)]
    (corpus := tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    (one := tmp_path / "one.jsonl").write_text(lines[0])
    home, log = tmp_path / "home", tmp_path / "build.log"
    program = [sys.executable, "-W", "ignore", "-m", "lmcache_cartridge.cli.main"]
    training = ["--positions", 64, "--chunk-size", 32, "--self-study", 48, "--steps", 2, "--accept", 0]
    with ray_nodes(NODES, tmp_path / "nodes.log") as (address, cluster):
        with log.open("w") as errors:
            words = _words("build", corpus, home, "--ray", address, "--format", "json")
            building = subprocess.Popen([*program, *words], stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            until(lambda: len(_digests(home)) > NODES or building.poll() is not None, timeout_s=600)
            before = _digests(home)
            assert building.poll() is None and len(before) < SHEETS, log.read_text()
            cluster.stdin.write("\n")
            cluster.stdin.flush()
            assert cluster.stdout.readline() == "killed\n"
            out, _ = building.communicate(timeout=600)
        finally:
            building.kill()
        assert building.returncode == 0, log.read_text()
        subprocess.run([*program, *_words("train", one, tmp_path / "by-ray", *training, "--ray", address)], check=True)
    assert sorted(row["name"] for row in json.loads(out)) == [f"{name}@1" for name in names]
    after = _digests(home)
    assert after.keys() == {f"{name}@1" for name in names} and before.items() <= after.items()
    assert not (home / "cartridges").exists()
    assert main(_words("train", one, tmp_path / "by-one", *training)) == 0
    assert _digests(tmp_path / "by-ray") == _digests(tmp_path / "by-one") != {}
    late = next(name for name in names if f"{name}@1" not in before)
    (tmp_path / "late.jsonl").write_text(lines[names.index(late)])
    alone = Cli(tmp_path / "alone")
    alone.json("build", tmp_path / "late.jsonl", "--model", MODEL)
    assert alone.json("show", late)["digest"] == after[f"{late}@1"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own
def test_a_cluster_that_cannot_be_reached_is_one_line(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("A document.")
    assert main(_words("build", tmp_path / "a.txt", tmp_path, "--ray", "127.0.0.1:1")) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines()[-1] == "lmcache-cartridge: Ray at 127.0.0.1:1: [Errno 111] Connection refused"
