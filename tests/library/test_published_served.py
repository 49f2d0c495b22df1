"""A real vLLM server follows a library on a real S3 server: every answer is that of the state it names."""

from __future__ import annotations

import random
import uuid

import openai
import pytest
from faulty_proxy import Answer as Sent
from faulty_proxy import FaultyProxy, Handler, sound
from recall.ward import ask, write_document
from waiting import until
from wards import MODEL, Asker, patients, prefill, save, sure

from lmcache_cartridge.library.published import INDEX
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.serve.launch import plan
from lmcache_cartridge.serve.processes import SMALL, ServerProcess
from lmcache_cartridge.settings import Settings
from lmcache_cartridge.sources.published import Library

CHUNK, POSITIONS = 128, 512
ARGS = ["--max-model-len", "1024", "--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20)]


@pytest.fixture
def made(tmp_path):
    """Artefacts by name, and a fact of each that the model knows with certainty, in both versions of a ward another."""
    model, roots, known = CausalModel(MODEL), {}, {}
    for name, version in (("ward", 1), ("ward", 2), ("doomed", 1)):
        document = write_document(random.Random(f"{name}{version}"), POSITIONS, patients(0, 4))
        ids = model.encode(document.text, special=True)[:POSITIONS]
        roots[f"{name}@{version}"] = root = tmp_path / "made" / name / str(version)
        save(model, root, ids, name=name, version=version, chunk_tokens=CHUNK)
        facts = sure(model, prefill(model, ids), document.facts)
        known[f"{name}@{version}"] = {(fact.patient, fact.attribute): fact for fact in facts}
    old, new = known["ward@1"], known["ward@2"]
    both = next(which for which in old.keys() & new.keys() if old[which].value != new[which].value)
    facts = {"ward@1": old[both], "ward@2": new[both], "doomed@1": next(iter(known["doomed@1"].values()))}
    return roots, facts


def test_a_publish_a_moved_label_and_a_removal_are_followed(moto_server, tmp_path, made, monkeypatch):
    (roots, facts), requests = made, []
    moto_server.client.create_bucket(Bucket="published")
    for name, value in moto_server.environment.items():
        monkeypatch.setenv(name, value)

    def watch(handler: Handler, answer: Sent) -> None:
        requests.append((handler.command, handler.path.partition("?")[0].rpartition("library/")[2], answer.status))
        sound(handler, answer)

    def settings(home: str, endpoint: str) -> Settings:
        return Settings(
            home=tmp_path / home, disk_dir=tmp_path / home, library="s3://published/library", cpu_bytes=64 << 20,
            s3_endpoint_url=endpoint, reload_s=0.2,
        )  # fmt: skip

    with FaultyProxy(moto_server.port) as proxy, Library(settings("author", moto_server.endpoint)) as author:
        proxy.always = watch
        author.publish(roots["ward@1"], label="current")
        author.publish(roots["doomed@1"])
        follower = settings("server", proxy.endpoint)
        launch = plan(MODEL, follower, chunk_tokens=CHUNK, on_load_failure="fail", vllm_args=ARGS, mode="multiprocess")
        with ServerProcess(launch, tmp_path / "log", environment=SMALL) as server, Asker(server.url) as asker:

            def used(name: str, expected: str) -> str | None:
                """Ask past vLLM's own prefix cache what `expected` knows, and return what answered, if that was right."""
                try:
                    answer = asker.complete(ask(facts[expected], 0), name, cache_salt=uuid.uuid4().hex)
                except openai.NotFoundError:
                    return None
                assert answer.cached_tokens == answer.injected == POSITIONS
                assert answer.text.strip() == facts[expected].value
                return str(answer.used).partition(";")[0]

            def follows(position: int) -> None:
                until(lambda: asker.http.get("/v1/cartridges").json()["library"]["position"] == position)

            follows(3)
            for name, expected in {"ward": "ward@1", "current": "ward@1", "doomed": "doomed@1"}.items():
                assert used(name, expected) == expected
            author.publish(roots["ward@2"])
            follows(4)
            assert (used("ward", "ward@2"), used("current", "ward@1")) == ("ward@2", "ward@1")
            author.registry.label("current", "ward@2")
            author.registry.remove("doomed@1")
            follows(6)
            assert (used("current", "ward@2"), used("doomed", "doomed@1")) == ("ward@2", None)
            metrics = asker.http.get("/metrics").text
    assert "lmcache_cartridge_library_position 6.0" in metrics and "lmcache_cartridge_library_failing 0.0" in metrics
    looks = [status for _, path, status in requests if path == INDEX]
    assert set(looks) == {200, 304} and looks.count(200) <= 2 * (3 + 2), "one for each change and to begin with, by two"
    assert {command for command, *_ in requests} <= {"GET", "HEAD"}, "credentials that may only read would not do"
