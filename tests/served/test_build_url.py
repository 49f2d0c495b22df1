"""`build --url`: a running server makes a cartridge as a context, which is brought here and removed there.

In the one mode: in the other `test_lora` and `test_quantised_weights_served` build by it too.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import posting
import pytest
from posting import CHUNK, KEYS, Served
from recall.ward import ask, encode
from waiting import until

from lmcache_cartridge.artifact.reading import load_manifest, load_token_ids, verify
from lmcache_cartridge.cli.main import main
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.settings import from_mapping

wards, served = posting.wards, posting.served
pytestmark = pytest.mark.parametrize("served", ["multiprocess"], indirect=True)


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", KEYS[0])


def _options(served: Served, home: Path, *options: str) -> list[str]:
    return ["build", "--url", str(served.asker.http.base_url), "--home", str(home), *options]


def _built(served: Served, home: Path, name: str, *options: str) -> Path:
    """Build a cartridge, have the server serve it too, and return where it lies here."""
    assert main(_options(served, home, "--id", name, *options)) == 0
    root = Path(Registry(from_mapping({"home": home}).registry_path).find(name).location)
    assert root.is_relative_to(home) and list(verify(root))
    assert not served.places() and served.named().isdisjoint({name}), "it is left on the server"
    Registry(served.settings.registry_path).register(root)
    return root


def test_a_document_that_a_server_made_answers_and_nothing_of_it_is_left_there(served, tmp_path):
    ward, document = served.wards["first"], tmp_path / "sheet.txt"
    document.write_text(ward.document.text)
    root = _built(served, tmp_path, "sheet", "--document", str(document))
    manifest = load_manifest(root)
    assert load_token_ids(manifest, root).tolist() == ward.ids and len(manifest.canary.after) == 4
    assert (manifest.name, manifest.provenance.document) == ("sheet@1", "sheet.txt")
    served.right(manifest.id, ward, 12)
    assert main(_options(served, tmp_path, "--id", manifest.id, "--document", str(document))) == 0
    rows = Registry(from_mapping({"home": tmp_path}).registry_path).all()
    assert len(rows) == 1, "the same content is no new version"


def test_token_ids_are_made_too_and_stored_in_int8(served, tmp_path):
    ward = served.wards["second"]
    (tmp_path / "ids.json").write_text(json.dumps(ward.ids))
    root = _built(served, tmp_path, "small", "--token-ids", str(tmp_path / "ids.json"), "--payload", "int8")
    manifest = load_manifest(root)
    assert (manifest.payload.encoding, manifest.canary, manifest.provenance.document) == ("int8", None, "ids.json")
    served.right("small", ward, 12)
    assert [path.name for path in root.parent.iterdir()] == ["1"]


@pytest.mark.parametrize("option", ["--chat", "--messages"])
def test_the_first_messages_of_a_chat_go_on_by_the_servers_template(served, tmp_path, option):
    ward, file = served.wards["third"], tmp_path / "file"
    said = [{"role": "system", "content": ward.document.text}]
    file.write_text(json.dumps(said) if option == "--messages" else ward.document.text)
    words = ["--messages", str(file)] if option == "--messages" else ["--chat", "system", "--document", str(file)]
    root = _built(served, tmp_path, option[2:], *words)
    assert load_manifest(root).chat is not None
    served.chats_right(option[2:], ward, 12)


def test_a_context_that_has_the_text_already_stays_as_it_is(served, tmp_path):
    ward, document = served.wards["fourth"], tmp_path / "sheet.txt"
    document.write_text(ward.document.text)
    there = served.made(document=ward.document.text, id="mine")
    try:
        assert main(_options(served, tmp_path, "--id", "copy", "--document", str(document))) == 0
        now = served.get("mine").json()
        assert (now["digest"], now["expires_at"]) == (there["digest"], there["expires_at"])
        served.right("mine", ward, 4)
        assert served.named() >= {"mine"} and len(served.places()) == 1
    finally:
        served.delete("mine")


def test_plain_prompts_are_answered_by_what_clients_had_made_too_and_nobody_hears_of_theirs(served, tmp_path):
    ward, document, registry = served.wards["fourth"], tmp_path / "sheet.txt", Registry(served.settings.registry_path)
    document.write_text(ward.document.text)
    root = _built(served, tmp_path, "open", "--document", str(document))
    theirs = served.made(document=ward.document.text, cache_salt="theirs")
    assert theirs["digest"] == load_manifest(root).digest, "the engine computes it alike"

    def asked() -> int:
        prompt = [*ward.ids, *encode(ask(ward.facts[0], 0))]
        found = served.other.complete(prompt, cache_salt=os.urandom(8).hex())
        assert found.text.strip() == ward.facts[0].value
        return found.cached_tokens

    saved = len(ward.ids) // CHUNK * CHUNK
    until(lambda: asked() == saved)
    registry.remove("open")
    until(lambda: asked() == 0)
    registry.register(root)  # behind theirs
    until(asked)
    assert {asked() for _ in range(4)} == {saved}
    served.right(theirs["id"], ward, 4, cache_salt="theirs")
    assert served.delete(theirs["id"], cache_salt="theirs") == 200


def test_what_is_killed_half_way_leaves_nothing_on_the_server(served, tmp_path):
    document = tmp_path / "sheet.txt"
    document.write_text(served.wards["second"].document.text)
    program = "import sys; from lmcache_cartridge.make import remote; from lmcache_cartridge.cli.main import main; "
    program += "remote.TTL_S = 1; main(sys.argv[1:])"
    words = _options(served, tmp_path, "--id", "killed", "--document", str(document))
    with served.failing(capture_s=0.5):
        building = subprocess.Popen([sys.executable, "-c", program, *words])
        until(served.places)
        building.send_signal(signal.SIGKILL)
        building.wait()
    until(lambda: not served.places())
    assert not (tmp_path / "cartridges").exists() or not list((tmp_path / "cartridges").glob("*/1"))


def test_a_disk_that_is_full_leaves_nothing_here_or_there(served, tmp_path, capsys):
    document, before = tmp_path / "sheet.txt", resource.getrlimit(resource.RLIMIT_FSIZE)
    document.write_text(served.wards["first"].document.text)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        assert main(_options(served, tmp_path, "--id", "large", "--document", str(document))) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "File too large" in capsys.readouterr().err
    assert not list((tmp_path / "cartridges" / "large").iterdir()) and not served.places()


def test_files_of_a_context_go_to_whoever_made_it_and_no_others(served):
    ward = served.wards["first"]
    made = served.made(document=ward.document.text)
    root = served.root(made["id"])
    for file in ("manifest.json", "payload.safetensors", "token_ids.npy"):
        sent = served.get(f"{made['id']}/files/{file}")
        assert sent.status_code == 200 and sent.content == (root / file).read_bytes()
        assert served.get(f"{made['id']}/files/{file}", served.other).status_code == 404
    (root.parent / "secret").write_text("secret")
    for file in (
        "secret",
        "..%2Fsecret",
        "%2E%2E/secret",
        "..%2F..%2F..%2Fregistry.sqlite",
        "manifest.json%00",
    ):
        sent = served.get(f"{made['id']}/files/{file}")
        assert sent.status_code == 404 and "secret" not in sent.text, file
    for name in ("..%2F", f"{made['id']}%2F.."):
        assert served.get(f"{name}/files/manifest.json").status_code == 404
    assert served.delete(made["id"]) == 200
    assert served.get(f"{made['id']}/files/manifest.json").status_code == 404
