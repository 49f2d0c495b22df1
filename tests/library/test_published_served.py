"""A real vLLM server follows a library on a real S3 server while it answers: every answer is that of the state it names."""

from __future__ import annotations

import itertools
import random
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import openai
import pytest
from faulty_proxy import Answer as Sent
from faulty_proxy import FaultyProxy, Handler, sound
from recall.ward import ask, write_document
from traffic import Traffic
from waiting import answered, until
from wards import MODEL, Asker, patients, prefill, save, sure

from lmcache_cartridge.library.published import INDEX
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.serve.launch import plan
from lmcache_cartridge.serve.processes import SMALL, ServerProcess
from lmcache_cartridge.settings import Settings
from lmcache_cartridge.sources.published import Library

CHUNK, POSITIONS = 128, 512
ARGS = ["--max-model-len", "1024", "--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20)]
Question = tuple[str, str]


class Asked(NamedTuple):
    """A request under load: what it named, what answered, and whether that was right; `used` is None for a 404."""

    name: str
    used: str | None
    right: bool


class Client(NamedTuple):
    """Asks the server, and knows the answers of each version."""

    asker: Asker
    answers: dict[str, dict[Question, Any]]
    questions: list[Question]
    """Those that both versions answer, each otherwise."""

    def ask(self, name: str, question: Question) -> Asked:
        """Ask past vLLM's own prefix cache."""
        fact = self.answers["doomed@1" if name == "doomed" else "ward@1"][question]
        try:
            answer = self.asker.complete(ask(fact, 0), name, cache_salt=uuid.uuid4().hex)
        except openai.NotFoundError:
            return Asked(name, None, True)
        used = str(answer.used).partition(";")[0]
        known = answer.cached_tokens == POSITIONS and answer.injected == POSITIONS
        return Asked(name, used, known and answer.text.strip() == self.answers[used][question].value)

    def asking(self, name: str) -> Iterator[Asked]:
        """Yield answers of one cartridge without end."""
        for question in itertools.cycle(self.answers["doomed@1"] if name == "doomed" else self.questions):
            yield self.ask(name, question)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Artefacts by name, and what each answers to the questions that all of them know with certainty."""
    model, roots, known = CausalModel(MODEL), {}, {}
    for name, version in (("ward", 1), ("ward", 2), ("doomed", 1)):
        document = write_document(random.Random(f"{name}{version}"), POSITIONS, patients(0, 4))
        ids = model.encode(document.text, special=True)[:POSITIONS]
        root = tmp_path_factory.mktemp("made") / name
        save(model, root, ids, name=name, version=version, chunk_tokens=CHUNK)
        roots[f"{name}@{version}"] = root
        facts = sure(model, prefill(model, ids), document.facts)
        known[f"{name}@{version}"] = {(fact.patient, fact.attribute): fact for fact in facts}
    return roots, known


def test_a_publish_a_moved_label_and_a_removal_under_load(moto_server, tmp_path, made):
    roots, known = made
    questions = [
        question
        for question, fact in known["ward@1"].items()
        if (other := known["ward@2"].get(question)) is not None and other.value != fact.value
    ]
    assert len(questions) >= 3, "the answers would not tell the versions apart"
    bucket, requests = "published", []
    moto_server.client.create_bucket(Bucket=bucket)

    def watch(handler: Handler, answer: Sent) -> None:
        requests.append((handler.command, handler.path.partition("?")[0].rpartition("library/")[2], answer.status))
        sound(handler, answer)

    def looks() -> Counter[int]:
        return Counter(status for _, path, status in requests if path == INDEX)

    library = f"s3://{bucket}/library"
    author_settings = Settings(
        home=tmp_path / "author", disk_dir=tmp_path / "author", library=library, s3_endpoint_url=moto_server.endpoint
    )
    with pytest.MonkeyPatch.context() as environment, FaultyProxy(moto_server.port) as proxy:
        for name, value in moto_server.environment.items():
            environment.setenv(name, value)
        proxy.always = watch
        with Library(author_settings) as author:
            author.publish(roots["ward@1"], label="current")
            author.publish(roots["doomed@1"])
            settings = Settings(
                home=tmp_path / "server", disk_dir=tmp_path / "server", library=library, cpu_bytes=64 << 20,
                s3_endpoint_url=proxy.endpoint, reload_s=0.2,
            )  # fmt: skip
            launch = plan(
                MODEL, settings, chunk_tokens=CHUNK, on_load_failure="fail", vllm_args=ARGS, mode="multiprocess"
            )
            with (
                ServerProcess(launch, tmp_path / "log", environment=SMALL) as server,
                Asker(server.url) as asker,
                Traffic(map(Client(asker, known, questions).asking, ("ward", "current", "doomed"))) as load,
            ):
                client = Client(asker, known, questions)

                def state() -> dict[str, Any]:
                    answer = answered(lambda: asker.http.get("/v1/cartridges"))  # a commit may wait for a slow disk
                    assert answer.status_code == 200, answer.text
                    return answer.json()["library"]

                def follows(position: int) -> None:
                    until(lambda: state()["position"] == position)
                    assert state()["problem"] is None

                follows(3)
                load.until(lambda: {one.name for one in load.asked} == {"ward", "current", "doomed"})
                author.publish(roots["ward@2"])
                follows(4)
                assert client.ask("ward", questions[0]) == Asked("ward", "ward@2", True)
                assert client.ask("current", questions[0]) == Asked("current", "ward@1", True)
                author.registry.label("current", "ward@2")
                follows(5)
                assert client.ask("current", questions[1]) == Asked("current", "ward@2", True)
                author.registry.remove("doomed@1")
                follows(6)
                assert client.ask("doomed", next(iter(known["doomed@1"]))) == Asked("doomed", None, True)
                assert asker.http.get("/v1/cartridges/doomed").status_code == 404
                load.goes_on(12)
                until(lambda: looks()[304] > 6)
                metrics = asker.http.get("/metrics").text
    assert all(one.right for one in load.asked), [one for one in load.asked if not one.right]
    counts = Counter((one.name, one.used) for one in load.asked)
    assert set(counts) <= {
        ("ward", "ward@1"), ("ward", "ward@2"), ("current", "ward@1"), ("current", "ward@2"),
        ("doomed", "doomed@1"), ("doomed", None),
    }  # fmt: skip
    used = [one.used for one in load.asked if one.name == "ward"]
    assert used == sorted(used), "an older version answered after a newer one"
    assert "lmcache_cartridge_library_position 6.0" in metrics and "lmcache_cartridge_library_failing 0.0" in metrics
    assert looks().keys() == {200, 304} and looks()[200] <= 2 * (4 + 2), (
        "one for each change and to begin with, of the API and of the engine"
    )
    assert {command for command, _, _ in requests} <= {"GET", "HEAD"}, "credentials that may only read would not do"
