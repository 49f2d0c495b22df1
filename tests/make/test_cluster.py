"""A corpus on a real Ray cluster of several nodes: one is killed on the way, and each document is published once, as it is made alone."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import Cli
from recall.ward import write_document
from waiting import until
from wards import MODEL, patients

from lmcache_cartridge.cli.main import main
from lmcache_cartridge.errors import SourceError
from lmcache_cartridge.library.registry import RegistryEntry
from lmcache_cartridge.settings import Settings
from lmcache_cartridge.sources.published import Library

NODES, SHEETS, TOKENS = 2, 8, 300
OLD = 2
"""Sheets that were published before."""


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


def _training(corpus: Path, home: Path) -> list[str]:
    """Return the words that train one for a moment and publish it."""
    return ["train", str(corpus), "--model", MODEL, "--positions", "64", "--chunk-size", "32", "--self-study", "48",
            "--steps", "2", "--accept", "0", "--publish", str(home / "library"), "--home", str(home)]  # fmt: skip


def _digests(home: Path) -> dict[str, str]:
    """Return those of a library by name."""
    with Library(Settings(home=home / "seen", library=str(home / "library"))) as library:
        library.registry.follow()
        return {row.name: row.digest for row in library.registry.all()}


def test_a_killed_node_loses_no_document_and_what_is_there_is_not_made_again(tmp_path, moto_server, monkeypatch):
    names = [f"ward-{n:02}" for n in range(SHEETS)]
    texts = [write_document(random.Random(name), TOKENS, patients(n, SHEETS)).text for n, name in enumerate(names)]
    lines = [json.dumps({"id": name, "text": text}) for name, text in zip(names, texts, strict=True)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    (tmp_path / "old.jsonl").write_text("\n".join(lines[:OLD]))
    for name, value in moto_server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", moto_server.endpoint)
    moto_server.client.create_bucket(Bucket="corpus")
    where = "s3://corpus/library"
    settings = Settings(
        home=tmp_path / "server", disk_dir=tmp_path / "server", library=where, s3_endpoint_url=moto_server.endpoint
    )

    def published() -> dict[str, RegistryEntry]:
        try:
            library.registry.follow()
        except SourceError:
            return {}
        rows = library.registry.all()
        assert len({row.id for row in rows}) == len(rows), "a document was published twice"
        return {row.id: row for row in rows}

    words = ["--model", MODEL, "--publish", where, "--home", str(tmp_path / "home"), "--format", "json"]
    with ray_nodes(NODES, tmp_path / "nodes.log") as (address, cluster), Library(settings) as library:
        assert main(["build", str(tmp_path / "old.jsonl"), *words]) == 0
        old = published()
        assert len(old) == OLD
        program = [sys.executable, "-W", "ignore", "-m", "lmcache_cartridge.cli.main"]
        command = [*program, "build", str(tmp_path / "corpus.jsonl"), *words, "--ray", address]
        with (tmp_path / "build.log").open("w") as errors:
            building = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            until(lambda: len(published()) > OLD + NODES or building.poll() is not None, timeout_s=600)
            assert building.poll() is None and len(published()) < SHEETS, (tmp_path / "build.log").read_text()
            before = published()
            cluster.stdin.write("\n")
            cluster.stdin.flush()
            assert cluster.stdout.readline() == "killed\n"
            out, _ = building.communicate(timeout=600)
        finally:
            building.kill()
        assert building.returncode == 0, (tmp_path / "build.log").read_text()
        rows = json.loads(out)
        assert sorted(row["name"] for row in rows) == [f"{name}@1" for name in names]
        assert not any(row["made"] for row in rows if row["name"].removesuffix("@1") in old)
        after = published()
        assert after.keys() == {*names} and old.items() <= before.items() <= after.items()
        (one := tmp_path / "one.jsonl").write_text(lines[0])
        subprocess.run([*program, *_training(one, tmp_path / "by-ray"), "--ray", address], check=True)
    assert main(_training(one, tmp_path / "by-one")) == 0
    assert _digests(tmp_path / "by-ray") == _digests(tmp_path / "by-one") != {}
    assert not (tmp_path / "home" / "cartridges").exists()
    late = {name: after[name] for name in [name for name in names if name not in before][:2]}
    (tmp_path / "late.jsonl").write_text("\n".join(lines[names.index(name)] for name in late))
    alone, pulled = Cli(tmp_path / "alone"), Cli(tmp_path / "pulled")
    alone.json("build", tmp_path / "late.jsonl", "--model", MODEL)
    for name, row in late.items():
        assert alone.json("show", name)["digest"] == pulled.json("pull", row.location)["digest"] == row.digest


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own
def test_ray_that_lacks_and_a_cluster_that_cannot_be_reached_are_one_line(tmp_path, capsys, monkeypatch):
    (tmp_path / "a.txt").write_text("A document.")
    words = ["build", str(tmp_path / "a.txt"), "--model", MODEL, "--publish", str(tmp_path / "library")]
    assert main([*words, "--ray", "127.0.0.1:1"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines()[-1] == "lmcache-cartridge: Ray at 127.0.0.1:1: [Errno 111] Connection refused"
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main([*words, "--ray", "auto"]) == 1
    assert "pip install 'lmcache-cartridge[ray]'" in capsys.readouterr().err
