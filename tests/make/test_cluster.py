"""A corpus on a real Ray cluster of several nodes: one is killed on the way, and each document is published once and answers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from s3 import MotoServer
from serving import serving
from waiting import until
from wards import MODEL, Asker, patients, write_ward

from lmcache_cartridge.cli.main import main
from lmcache_cartridge.errors import SourceError
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.settings import Settings
from lmcache_cartridge.sources.published import Library

NODES, SHEETS, TOKENS = 2, 11, 300
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


def test_a_killed_node_loses_no_document_and_what_is_there_is_not_made_again(
    tmp_path: Path, moto_server: MotoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = CausalModel(MODEL)
    wards = {f"ward-{n:02}": write_ward(model, patients(n, SHEETS), f"ray {n}", tokens=TOKENS) for n in range(SHEETS)}
    lines = [json.dumps({"id": name, "text": ward.document.text}) for name, ward in wards.items()]
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

    def published() -> dict[str, tuple[int, str]]:
        try:
            library.registry.follow()
        except SourceError:
            return {}
        rows = library.registry.all()
        assert len({row.id for row in rows}) == len(rows), "a document was published twice"
        return {row.id: (row.version, row.registered) for row in rows}

    words = ["--model", MODEL, "--publish", where, "--home", str(tmp_path / "home"), "--format", "json"]
    with ray_nodes(NODES, tmp_path / "nodes.log") as (address, cluster), Library(settings) as library:
        assert main(["build", str(tmp_path / "old.jsonl"), *words]) == 0
        old = published()
        assert len(old) == OLD
        command = [sys.executable, "-W", "ignore", "-m", "lmcache_cartridge.cli.main", "build",
                   str(tmp_path / "corpus.jsonl"), *words, "--ray", address]  # fmt: skip
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
        assert sorted(row["name"] for row in rows) == [f"{name}@1" for name in wards]
        assert not any(row["made"] for row in rows if row["name"].removesuffix("@1") in old)
        after = published()
        assert after.keys() == wards.keys() and old.items() <= before.items() <= after.items()
    assert not (tmp_path / "home" / "cartridges").exists()
    late = [name for name in wards if name not in before]
    with serving(settings, tmp_path / "log") as client, Asker(client.url) as asker:
        for name in [*sorted(before)[:2], *late[:3]]:
            facts = wards[name].facts
            assert facts and sum(asker.right(fact, name) for fact in facts) == len(facts), name
            other = next(ward for key, ward in wards.items() if key != name)
            assert not all(asker.right(fact, name) for fact in other.facts), "the sheet does not matter"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own
def test_ray_that_lacks_and_a_cluster_that_cannot_be_reached_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("A document.")
    words = ["build", str(tmp_path / "a.txt"), "--model", MODEL, "--publish", str(tmp_path / "library")]
    assert main([*words, "--ray", "127.0.0.1:1"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines()[-1] == "lmcache-cartridge: Ray at 127.0.0.1:1: [Errno 111] Connection refused"
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main([*words, "--ray", "auto"]) == 1
    assert "pip install 'lmcache-cartridge[ray]'" in capsys.readouterr().err
