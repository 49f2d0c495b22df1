"""Cartridges on a real S3 server, served by a real vLLM server: found by name and location, waited for, never in the way."""

from __future__ import annotations

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from faulty_proxy import Answer as Sent
from faulty_proxy import FaultyProxy, Handler, flipped, sound
from recall.ward import ask
from s3 import S3Server
from serving import serving
from waiting import until
from wards import MODEL, Answer, Asker, Ward, patients, save, write_ward

from lmcache_cartridge.cli.main import main
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.settings import Settings, from_mapping

CHUNK, POSITIONS, BUCKET = 64, 1024, "served"
KINDS = {"hot": "prefill", "cold": "trained"}


class Served(NamedTuple):
    asker: Asker
    settings: Settings
    proxy: FaultyProxy
    wards: dict[str, Ward]

    def ask(self, name: str, cartridge: Any = None) -> Answer:
        """Ask for a fact past vLLM's own prefix cache."""
        salt = f"s{random.getrandbits(64)}"
        return self.asker.complete(ask(self.wards[name].facts[0], 0), cartridge or name, cache_salt=salt)

    def right(self, name: str, cartridge: Any = None) -> bool:
        reply = self.ask(name, cartridge)
        return (reply.text.strip(), reply.cached_tokens) == (self.wards[name].facts[0].value, POSITIONS)


@pytest.fixture(scope="module")
def served(s3_server, tmp_path_factory):
    home, model, wards = tmp_path_factory.mktemp("home"), CausalModel(MODEL), {}
    s3_server.client.create_bucket(Bucket=BUCKET)
    with FaultyProxy(s3_server.port) as proxy, pytest.MonkeyPatch.context() as environment:
        for name, value in (s3_server.environment | {"AWS_ENDPOINT_URL_S3": proxy.endpoint}).items():
            environment.setenv(name, value)
        for i, (name, kind) in enumerate(KINDS.items()):
            wards[name] = write_ward(model, patients(i, 3), name, tokens=POSITIONS, positions=POSITIONS, facts=40)
            _put(s3_server, home / "made" / name, name, wards[name], kind=kind)
            assert main(["import", f"s3://{BUCKET}/allowed/{name}", "--home", str(home)]) == 0
        settings = from_mapping(
            {"home": home, "cpu_bytes": 8 << 20, "admin": True, "buckets": [f"{BUCKET}/allowed"], "disk_bytes": 0,
             "ready_timeout_s": 20.0}
        )  # fmt: skip
        with serving(settings, home / "log", chunk_tokens=CHUNK, on_load_failure="fail") as asker:
            yield Served(asker, settings, proxy, wards)


def _put(server: S3Server, root: Path, name: str, ward: Ward, **options: Any) -> None:
    save(CausalModel(MODEL), root, ward.ids, name=name, chunk_tokens=CHUNK, **options)
    for path in root.iterdir():
        server.client.upload_file(str(path), BUCKET, f"allowed/{name}/{path.name}")


@pytest.mark.parametrize("name", KINDS)
def test_a_location_under_a_configured_bucket_is_the_same_cartridge(served, name):
    location = f"s3://{BUCKET}/allowed/{name}"
    for named in (location, {"id": location}, {"id": location, "source": "s3"}):
        assert served.right(name, [named])
    assert served.ask(name, location).used == f"{name}@1;positions={POSITIONS}"


def test_a_cold_fetch_keeps_nobody_waiting_but_who_asked_for_it(served):
    assert served.right("hot") and served.asker.http.post("/v1/cartridges/cold/evict").is_success
    is_open, waiting = threading.Event(), threading.Event()

    def gate(handler: Handler, answer: Sent) -> None:
        """Hold every read of a payload; manifests pass."""
        if handler.headers.get("Range"):
            waiting.set()
            is_open.wait(60)
        sound(handler, answer)

    served.proxy.always = gate
    try:
        with ThreadPoolExecutor(1) as pool:
            cold = pool.submit(served.ask, "cold")
            until(waiting.is_set)
            assert all(served.right("hot") for _ in range(5))
            assert served.asker.complete(ask(served.wards["hot"].facts[0], 0)).used is None
            row = served.asker.state("cold")
            held = {"resident_chunks": 0, "chunks": POSITIONS // CHUNK, "failing": False}
            assert (row["state"], row["loading"], cold.done()) == ("loading", held, False)
            is_open.set()
            assert cold.result(60).text.strip() == served.wards["cold"].facts[0].value
    finally:
        is_open.set()
        served.proxy.always = None


def test_a_chunk_damaged_on_its_way_is_fetched_again(served):
    served.asker.http.post("/v1/cartridges/cold/evict").raise_for_status()
    served.proxy.faults = [flipped]
    assert served.right("cold")
    assert served.asker.state("cold")["state"] == "resident"


def test_a_cartridge_replaced_at_its_location_is_served_as_what_it_is_now(served, s3_server, tmp_path):
    for version, name in enumerate(KINDS, start=1):
        _put(s3_server, tmp_path / name, "moving", served.wards[name], version=version)
        reply = served.ask(name, [{"id": f"s3://{BUCKET}/allowed/moving", "force_redownload": True}])
        assert reply.text.strip() == served.wards[name].facts[0].value
        assert reply.used == f"moving@{version};positions={POSITIONS}"


def test_serving_wrote_to_no_registry_and_no_bucket(served, s3_server):
    def there() -> tuple[bytes, list[str]]:
        objects = s3_server.client.list_objects_v2(Bucket=BUCKET)["Contents"]
        return served.settings.registry_path.read_bytes(), [each["ETag"] for each in objects]

    before = there()
    assert served.right("hot") and there() == before
    assert "testing" not in json.dumps(served.asker.http.get("/v1/cartridges").json())
    assert "testing" not in (served.settings.home / "log").read_text(), "the secret key is in the log"
