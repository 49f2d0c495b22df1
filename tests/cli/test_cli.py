"""The command line: every command explains itself, fails in one line, and tells programs what it tells people."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from commands import Cli, understood
from making import files_under, flip_bit, make_artifact

from lmcache_cartridge.artifact.reading import MANIFEST, PAYLOAD, chunk_range, load_manifest
from lmcache_cartridge.cli.main import COMMANDS, main
from lmcache_cartridge.cli.recall import MODEL_DIR
from lmcache_cartridge.library.quarantine import Quarantine
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.settings import HOME_VARIABLE


def _make(tmp_path: Path, name: str = "doc", **arguments: Any) -> Path:
    root = tmp_path / "artefacts" / f"{name}-{arguments.get('version', 1)}-{arguments.get('seed', 0)}"
    make_artifact(root, positions=40, cartridge_id=name, **arguments)
    return root


def _refused(cli: Cli, *words: object) -> str:
    """Return what a command says in the one line that it ends with."""
    said = cli.refused(*words)
    assert re.fullmatch(r"lmcache-cartridge: [^\n]+\n", said), said
    return said


def _commands(group: Any = COMMANDS, before: str = "") -> dict[str, Any]:
    """Return every command by its name, those of a group as `fleet serve`."""
    found = {}
    for name, command in group.commands.items():
        found |= _commands(command, f"{name} ") if hasattr(command, "commands") else {before + name: command}
    return found


@pytest.mark.parametrize("name", _commands())
def test_a_command_explains_itself_in_a_sentence_and_an_example_that_is_understood(capsys, tmp_path, monkeypatch, name):
    assert main([*name.split(), "--help"]) == 0
    paragraphs = [" ".join(p.split()) for p in capsys.readouterr().out.split("\n\n")]
    assert re.fullmatch(r"[A-Z].{15,}\.", paragraphs[1]), paragraphs[1]
    text = " ".join(paragraphs)
    assert "--format <text|json> for people or programs" in text and "--home <path>" in text
    example = paragraphs[-1].removeprefix("example: ")
    assert example.startswith(f"lmcache-cartridge {name}") and example.count("lmcache-cartridge") == 1
    monkeypatch.chdir(tmp_path)
    understood(example)


def test_there_are_about_twenty_commands_with_at_most_120_options():
    own = [p for c in _commands().values() for p in c.params if p.opts[0].startswith("--")]
    assert len(_commands()) <= 21
    assert sum(param.name not in ("home", "form") for param in own) <= 120
    spelled = {option for param in own for option in param.opts}
    assert not spelled & {"--server", "--out", "--output-format", "--json"}, "one spelling everywhere"


_EACH = """
import sys
from lmcache_cartridge.cli.main import main
print([main(argv.split()) for argv in sys.argv[1:]])
"""


def test_what_goes_into_a_pipe_is_plain(cli, tmp_path):
    """Run as programs do, with a terminal that could do colours but is not there, and variables that ask for none."""
    root = _make(tmp_path)
    environment = os.environ | {"TERM": "xterm-256color", "COLORTERM": "truecolor", HOME_VARIABLE: str(cli.home)}
    commands = (f"import {root}", "verify doc", "list", "serve m --print --format json", "fly")
    ran = subprocess.run([sys.executable, "-c", _EACH, *commands], env=environment, capture_output=True, text=True)
    assert ran.stdout.endswith("[0, 0, 0, 0, 2]\n"), ran.stderr
    assert "\x1b" not in ran.stdout + ran.stderr
    assert "\r" not in ran.stderr, "progress is shown where nobody watches"


@pytest.mark.parametrize(
    "argv", ["list --wings", "show", "list --format yaml", "build --document none", "bench --url http://x --c 0"]
)
def test_wrong_usage_ends_with_status_2(cli, argv):
    ran = cli(*argv.split())
    assert ran.status == 2
    assert ran.err.startswith("Usage: lmcache-cartridge")


def test_a_cartridge_is_registered_labelled_listed_and_described(cli, tmp_path):
    root = _make(tmp_path)
    digest = json.loads((root / MANIFEST).read_bytes())["digest"]
    registered = cli.json("import", root)
    assert (registered["name"], registered["promoted"], registered["digest"]) == ("doc@1", True, digest)
    assert cli.json("label", "current", "doc") == {"label": "current", "name": "doc@1"}
    (row,) = cli.json("list")
    assert row == {
        "id": "doc", "version": 1, "current": True, "kind": "prefill", "positions": 40, "bytes": registered["bytes"],
        "model": None, "registered": row["registered"], "lora": None, "labels": ["current"],
        "quarantined": False, "digest": digest,
    }  # fmt: skip
    assert datetime.fromisoformat(row["registered"]).utcoffset() == timedelta(0)
    assert cli("list").out.splitlines()[2].split()[:6] == ["doc", "1", "yes", "prefill", "40", "64.0"]
    for name in ("doc", "doc@1", "current"):
        described = cli.json("show", name)
        assert (described["digest"], described["location"]) == (digest, str(root))
    added = cli.json("import", _make(tmp_path, version=2, seed=2), "--no-promote")
    assert (added["name"], added["promoted"]) == ("doc@2", False)
    assert [(row["version"], row["current"]) for row in cli.json("list")] == [(1, True), (2, False)]
    assert cli.json("label", "doc", "doc@2") == {"label": "doc", "name": "doc@2"}
    assert cli.json("show", "doc")["version"] == 2


def test_what_is_made_again_unchanged_is_there_already_and_no_new_version(cli, tmp_path):
    (tmp_path / "doc.txt").write_text("Patient Mora: ward 7. Patient Lind: ward 8.")
    cli.json("import", _make(tmp_path))
    built = ["build", "--model", MODEL_DIR, "--document", tmp_path / "doc.txt", "--id", "built"]
    small = ["build", "--from", "doc", "--payload", "int8", "--id", "small"]
    for made in (built, small):
        first, again = cli.json(*made), cli.json(*made)
        assert again == first | {"unchanged": True} != first
        assert f"{first['name']} is there already" in cli(*made).err
        assert [path.name for path in (cli.home / "cartridges" / made[-1]).iterdir()] == ["1"]
    assert cli.json(*built, "--canary", "Question: who?")["name"] == "built@2", "another one to its servers"
    assert cli.json(*built)["name"] == "built@1" and cli.json("show", "built")["version"] == 1
    (cli.home / "cartridges" / "small" / "1" / PAYLOAD).write_bytes(b"cut")
    assert cli.json(*small)["name"] == "small@2", "what is broken is made again"


def test_what_was_removed_keeps_its_version_also_in_a_home_that_is_a_symbolic_link(cli, tmp_path):
    (tmp_path / "real").mkdir()
    cli.home.symlink_to(tmp_path / "real")
    files, other = cli.home / "cartridges" / "doc", _make(tmp_path, "other", seed=2)
    make_artifact(files / "1", positions=40)
    for root in (files / "1", other):
        cli.json("import", root)
    assert cli.json("remove", "doc")["files_deleted"] is False
    assert cli.json("build", "--from", "other", "--payload", "int8", "--id", "doc")["name"] == "doc@2"
    for name in ("doc@1", "../doc@2"):
        assert name in _refused(cli, "remove", name, "--delete-files")
    assert cli.json("remove", "doc@2", "--delete-files")["files_deleted"] is True
    assert [path.name for path in files.iterdir()] == ["1"]
    assert cli.json("remove", "other", "--delete-files")["files_deleted"] is False
    assert (other / PAYLOAD).is_file(), "an artefact that was not built here is not ours to delete"
    assert cli.json("list") == []


def test_verify_finds_what_is_damaged_and_tells_programs(cli, tmp_path):
    sound, flipped, replaced, gone = (_make(tmp_path, name) for name in "abcd")
    for root in (sound, flipped, replaced, gone):
        cli.json("import", root)
    flip_bit(flipped / PAYLOAD, chunk_range(load_manifest(flipped), 2, range(1, 2)).start)
    shutil.rmtree(replaced)
    _make(tmp_path, "c", seed=9).rename(replaced)
    (gone / MANIFEST).unlink()
    right, *wrong = cli.json("verify", *"abcd", status=1)
    assert right == {"name": "a@1", "sound": True, "problem": None}
    damages = {"b@1": "chunk 2, KV head 1", "c@1": "was replaced", "d@1": "is this the directory of a cartridge?"}
    assert [row["name"] for row in wrong if not row["sound"] and damages[row["name"]] in row["problem"]] == [*damages]
    assert "was replaced" in _refused(cli, "show", "c")


def test_a_quarantine_is_shown_and_lifted_by_verify_once_the_cartridge_is_sound(cli, tmp_path):
    made = make_artifact(tmp_path / "doc", positions=40)
    cli.json("import", tmp_path / "doc")
    Quarantine(cli.home / "quarantine").put(made.manifest.digest, "chunk 2 was corrupt", str(tmp_path / "doc"))
    for status, reason in ((1, "chunk 2 was corrupt"), (0, None)):
        flip_bit(tmp_path / "doc" / PAYLOAD, 9000)
        assert cli("verify", "doc").status == status
        assert (cli.json("list")[0]["quarantined"], cli.json("show", "doc")["quarantined"]) == (bool(status), reason)


@pytest.mark.parametrize(
    "argv, said",
    [
        ("show nobody", "'nobody'; `lmcache-cartridge list`"), ("show x@99999999999999999999", "'x@99999999999999999999'"),
        ("label ../x doc", "cannot be a cartridge id"), ("import .", ". is no cartridge yet"), ("list --home file", "registry"),
        ("list --home other", "registry.sqlite: file is not a database"),
        ("build --model nowhere --document file --id ../escape", "cannot be a cartridge id"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_in_one_line(cli, tmp_path, monkeypatch, argv, said):
    monkeypatch.chdir(tmp_path)
    cli.json("import", _make(tmp_path))
    (tmp_path / "file").write_text("not a directory")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "registry.sqlite").write_bytes(b"no database" * 1000)
    before = files_under(tmp_path)
    assert said in _refused(cli, *argv.split())
    assert files_under(tmp_path) == before


@pytest.mark.parametrize(
    "options, said",
    [
        ("", "takes one of --document"), ("--messages x.json --token-ids x.json", "takes one of"),
        ("--messages x.json --chat system", "--chat needs --document"), ("--document x --chat system --compact 4x", "--compact excludes --chat"),
        ("--document x --url http://x", "--url excludes --model"), ("--document x --accept 0.5", "need --compact"),
        ("--document x --compact 2048", "give fewer"),
    ],
)  # fmt: skip
def test_options_of_build_that_do_not_go_together_are_refused_before_anything_is_written(
    cli, tmp_path, monkeypatch, options, said
):
    monkeypatch.chdir(tmp_path)
    Path("x.json").write_text("[]")
    Path("x").write_text("A document.")
    ran = cli("build", "--model", MODEL_DIR, "--id", "a", *options.split())
    assert ran.status and said in ran.err
    assert not (cli.home / "cartridges").exists()


def test_a_version_with_a_label_is_not_removed(cli, tmp_path):
    cli.json("import", _make(tmp_path))
    cli.json("label", "current", "doc")
    assert "current" in _refused(cli, "remove", "doc")
    cli.json("label", "current", "--remove")
    assert "current" in _refused(cli, "label", "current", "--remove")
    cli.json("remove", "doc")


@pytest.mark.parametrize("argv", ["publish doc s3://bucket/elsewhere", "export doc --to peft --output out"])
def test_what_needs_the_files_here_says_how_to_bring_them_from_s3(cli, tmp_path, argv, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Registry(cli.home / "registry.sqlite").register(_make(tmp_path), "s3://bucket/doc")
    said = _refused(cli, *argv.split())
    assert "doc@1 lies on S3; `lmcache-cartridge pull s3://bucket/doc` brings it here first" in said
    assert not Path("out").exists()


def test_bash_completes_the_installed_command():
    command = Path(sys.executable).with_name("lmcache-cartridge")
    asked = {"COMP_WORDS": "lmcache-cartridge la", "COMP_CWORD": "1", "_LMCACHE_CARTRIDGE_COMPLETE": "complete_bash"}
    assert subprocess.run(command, env=os.environ | asked, capture_output=True, timeout=60).stdout.split() == [b"label"]
