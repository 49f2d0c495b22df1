"""Cartridges on a real S3 server, served by a real vLLM server: found by name and location, waited for, never in the way."""

from __future__ import annotations

import json
import random
import select
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
from faulty_proxy import Answer as Sent
from faulty_proxy import FaultyProxy, Handler, flipped, sound
from recall.ward import ask, write_document
from s3 import S3Server
from waiting import until
from wards import MODEL, Answer, Asker, Ward, patients, prefill, save, sure

from lmcache_cartridge.cli.main import main
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.serve.launch import plan
from lmcache_cartridge.serve.processes import SMALL, ServerProcess
from lmcache_cartridge.settings import Settings, from_mapping

CHUNK, POSITIONS = 64, 1024
WHOLE = POSITIONS // CHUNK
ARGS = ["--max-model-len", "2304", "--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20)]
KINDS = {"hot": "prefill", "doc": "prefill", "trained": "trained"}


class Gate:
    """Lets a payload through only while it is open; manifests always pass."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.waiting = 0
        self.sent: list[str] = []
        """The ranges of those who were still there when it opened: whoever has waited too long asks again."""

    def __call__(self, handler: Handler, answer: Sent) -> None:
        if wanted := handler.headers.get("Range"):
            self.waiting += 1
            self.open.wait(60)
            readable, _, _ = select.select([handler.connection], [], [], 0)
            if not readable or handler.connection.recv(1, socket.MSG_PEEK):
                self.sent.append(wanted)
        sound(handler, answer)


class Served(NamedTuple):
    asker: Asker
    settings: Settings
    proxy: FaultyProxy
    bucket: str
    wards: dict[str, Ward]

    def state(self, name: str) -> dict[str, Any]:
        return self.asker.http.get(f"/v1/cartridges/{name}").json()

    def settle(self, name: str) -> None:
        """Wait until nothing of it is being loaded."""
        until(lambda: self.state(name)["state"] != "loading")

    def evict(self, name: str) -> None:
        assert self.asker.http.post(f"/v1/cartridges/{name}/evict").status_code == 200

    def ask(self, name: str, cartridge: Any = None, **extra: Any) -> Answer:
        """Ask for a fact past vLLM's own prefix cache."""
        ward = self.wards[name]
        salt = f"s{random.getrandbits(64)}"
        return self.asker.complete(ask(ward.facts[0], 0), cartridge or name, cache_salt=salt, **extra)

    def right(self, name: str, cartridge: Any = None) -> bool:
        reply = self.ask(name, cartridge)
        return reply.text.strip() == self.wards[name].facts[0].value and reply.cached_tokens == POSITIONS


@pytest.fixture(scope="module")
def served(s3_server, tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    model, bucket = CausalModel(MODEL), "served"
    s3_server.client.create_bucket(Bucket=bucket)
    wards = {}
    with FaultyProxy(s3_server.port) as proxy, pytest.MonkeyPatch.context() as environment:
        for name, value in (s3_server.environment | {"AWS_ENDPOINT_URL_S3": proxy.endpoint}).items():
            environment.setenv(name, value)
        for i, (name, kind) in enumerate(KINDS.items()):
            document = write_document(random.Random(name), POSITIONS, patients(i, 3))
            ids = model.encode(document.text, special=True)[:POSITIONS]
            wards[name] = Ward(document, ids, sure(model, prefill(model, ids), document.facts[:40]))
            root = tmp_path_factory.mktemp("made") / name
            save(model, root, ids, name=name, kind=kind, chunk_tokens=CHUNK)
            _push(s3_server, root, f"{bucket}/allowed/{name}")
            assert main(["import", f"s3://{bucket}/allowed/{name}", "--home", str(home)]) == 0
        root = tmp_path_factory.mktemp("made") / "other"
        save(model, root, wards["doc"].ids, name="other", chunk_tokens=CHUNK)
        _push(s3_server, root, f"{bucket}/elsewhere/other")
        settings = from_mapping(
            {"home": home, "cpu_bytes": 8 << 20, "admin": True, "buckets": [f"{bucket}/allowed"], "disk_bytes": 0,
             "ready_timeout_s": 20.0, "plain_prompts": "all"}
        )  # fmt: skip
        launch = plan(MODEL, settings, chunk_tokens=CHUNK, on_load_failure="fail", vllm_args=ARGS)
        with ServerProcess(launch, home / "log", environment=SMALL) as server, Asker(server.url) as asker:
            yield Served(asker, settings, proxy, bucket, wards)


def _push(server: S3Server, root: Path, prefix: str) -> None:
    bucket, _, key = prefix.partition("/")
    for path in root.iterdir():
        server.client.upload_file(str(path), bucket, f"{key}/{path.name}")


@pytest.fixture
def gate(served):
    """Hold every read of a payload; at the end let them go, and wait until nothing is loading."""
    gate = Gate()
    served.proxy.always = gate
    yield gate
    gate.open.set()
    served.proxy.always = None
    for name in KINDS:
        served.settle(name)


@pytest.mark.parametrize("name", KINDS)
def test_a_location_under_a_configured_bucket_is_the_same_cartridge(served, name):
    location = f"s3://{served.bucket}/allowed/{name}"
    for named in (location, {"id": location}, {"id": location, "source": "s3"}):
        assert served.right(name, [named])
    assert served.ask(name, location).used == f"{name}@1;positions={POSITIONS}"


@pytest.mark.parametrize(
    "location", ["elsewhere/other", "allowed/../elsewhere/other", "allowed/nope", "allowed", "allowed//doc", "allowedx"]
)
def test_any_other_location_is_not_found(served, location):
    with pytest.raises(openai.NotFoundError) as caught:
        served.ask("doc", f"s3://{served.bucket}/{location}")
    assert "testing" not in str(caught.value), "the secret key"


def test_a_cold_fetch_keeps_nobody_waiting_but_who_asked_for_it(served, gate):
    served.proxy.always = None
    assert served.right("hot")
    served.evict("trained")
    served.proxy.always = gate
    with ThreadPoolExecutor(1) as pool:
        cold = pool.submit(served.ask, "trained")
        until(lambda: gate.waiting)
        assert all(served.right("hot") for _ in range(5))
        plain = served.asker.complete(ask(served.wards["doc"].facts[0], 0))
        assert plain.used is None
        row = served.state("trained")
        assert row["state"] == "loading"
        assert row["loading"] == {"resident_chunks": 0, "chunks": WHOLE, "failing": False}
        assert not cold.done()
        gate.open.set()
        assert cold.result(60).text.strip() == served.wards["trained"].facts[0].value


def test_a_chunk_damaged_on_its_way_is_fetched_again(served):
    served.evict("trained")
    served.proxy.faults = [flipped]
    assert served.right("trained")
    assert served.state("trained")["state"] == "resident"


def test_what_is_wrong_on_s3_is_refused_until_it_is_mended_there_and_evicted(served):
    def refused() -> bool:
        body = {"model": str(MODEL), "prompt": "x", "max_tokens": 1, "cartridges": ["trained"]}
        return "quarantined" in served.asker.http.post("/v1/completions", json=body).text

    served.evict("trained")
    served.proxy.always = lambda handler, answer: (flipped if handler.headers.get("Range") else sound)(handler, answer)
    until(refused)
    served.proxy.always = None
    assert refused()
    served.evict("trained")
    assert served.right("trained")


def test_a_cartridge_replaced_at_its_location_is_served_as_what_it_is_now(served, s3_server, tmp_path):
    model, location = CausalModel(MODEL), f"s3://{served.bucket}/allowed/moving"
    for version, name in enumerate(("hot", "doc"), start=1):
        save(model, tmp_path / name, served.wards[name].ids, name="moving", version=version, chunk_tokens=CHUNK)
        _push(s3_server, tmp_path / name, f"{served.bucket}/allowed/moving")
        reply = served.ask(name, [{"id": location, "force_redownload": True}])
        assert reply.text.strip() == served.wards[name].facts[0].value
        assert reply.used == f"moving@{version};positions={POSITIONS}"


def test_a_manifest_that_does_not_come_holds_up_no_other_request(served):
    stuck, waiting = threading.Event(), set()

    def hold(handler: Handler, answer: Sent) -> None:
        waiting.add(handler.path)
        if stuck.wait(60):
            sound(handler, answer)

    served.proxy.always = hold
    try:
        with ThreadPoolExecutor(24) as pool:  # more than the 16 connections for chunks
            slow = [pool.submit(_status, served, f"s3://{served.bucket}/allowed/new{i}") for i in range(24)]
            until(lambda: len(waiting) > 16)
            assert served.state("hot")["state"] == "resident"
            assert all(served.right("hot") for _ in range(5))
            assert not any(each.done() for each in slow)
            stuck.set()
            assert {each.result(60) for each in slow} <= {404, 503}
    finally:
        stuck.set()
        served.proxy.always = None


def _status(served: Served, location: str) -> int:
    with pytest.raises(openai.APIStatusError) as caught:
        served.ask("hot", location)
    return caught.value.status_code


def _injected(served: Served, prompt: list[int], answer: str) -> None:
    """Ask until a resident document is injected, which it is once the engine was tried; each answer must be right."""
    replies: list[Answer] = []

    def is_injected() -> int:
        replies.append(served.asker.complete(prompt, cache_salt=f"{len(replies)}"))
        assert replies[-1].text.strip() == answer
        return replies[-1].cached_tokens

    until(is_injected)
    assert replies[-1].cached_tokens == POSITIONS


def test_a_version_registered_while_serving_is_found_by_plain_prompts_too(served, s3_server, tmp_path):
    model = CausalModel(MODEL)
    document = write_document(random.Random("late"), POSITIONS, patients(0, 2))
    ids = model.encode(document.text, special=True)[:POSITIONS]
    (fact, *_) = sure(model, prefill(model, ids), document.facts[:40])
    save(model, tmp_path / "late", ids, name="late", chunk_tokens=CHUNK)
    _push(s3_server, tmp_path / "late", f"{served.bucket}/allowed/late")
    home = str(served.settings.home)
    assert main(["import", f"s3://{served.bucket}/allowed/late", "--home", home]) == 0
    assert main(["label", "soon", "late", "--home", home]) == 0
    assert main(["label", "soon", "late@1", "--warm", "--home", home]) == 0
    until(lambda: served.state("late")["state"] == "resident")  # as the warm label says
    prompt = [*ids, *model.encode(" " + ask(fact, 0), special=False)]
    _injected(served, prompt, fact.value)
    assert main(["label", "soon", "--remove", "--home", home]) == 0
    assert main(["remove", "late@1", "--home", home]) == 0
    assert served.asker.http.get("/v1/cartridges/late").status_code == 404
    with pytest.raises(openai.NotFoundError):
        served.asker.complete(ask(fact, 0), "late")
    until(lambda: not served.asker.complete(prompt, cache_salt=f"{random.getrandbits(64)}").cached_tokens)


def test_serving_wrote_to_no_registry_and_no_bucket(served, s3_server):
    registry = served.settings.registry_path.read_bytes()
    objects = s3_server.client.list_objects_v2(Bucket=served.bucket, Prefix="allowed/hot")["Contents"]
    assert served.right("hot")
    assert served.settings.registry_path.read_bytes() == registry
    after = s3_server.client.list_objects_v2(Bucket=served.bucket, Prefix="allowed/hot")["Contents"]
    assert [o["ETag"] for o in objects] == [o["ETag"] for o in after]
    assert "testing" not in json.dumps(served.asker.http.get("/v1/cartridges").json())
    assert "testing" not in (served.settings.home / "log").read_text(), "the secret key is in the log"
