"""Metrics: names and values of what stores and requests count, on `/metrics` of a real server and in Grafana."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import runpy
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from making import sha256_hasher
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from recall.ward import ask
from serving import SERVER_ARGS
from waiting import Clock
from wards import MODEL, Asker, patients, register, write_ward
from watching import CHUNK, CHUNK_BYTES, CPU_CHUNKS, DEVICE_CHUNKS, DISK_CHUNKS, Watched, value

from lmcache_cartridge.artifact.local import LocalSource
from lmcache_cartridge.artifact.reading import load_token_ids
from lmcache_cartridge.cli.main import main
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.memory.layout import ChunkShape
from lmcache_cartridge.memory.loads import LOAD_SECONDS
from lmcache_cartridge.serve.launch import plan
from lmcache_cartridge.serve.metrics import (
    PREFIX,
    RESIDENT_LABELS,
    RESIDENTS,
    RequestMetrics,
    StatusCollector,
    follow,
)
from lmcache_cartridge.serve.processes import ServerProcess
from lmcache_cartridge.settings import from_mapping

with warnings.catch_warnings():  # torch's, while vLLM is imported
    warnings.simplefilter("ignore")
    from vllm.exceptions import GracefulHTTPError

    from lmcache_cartridge.engine.client import ControlClient
    from lmcache_cartridge.engine.control import ControlServer

ROOT = Path(__file__).parents[2]
GENERATE = runpy.run_path(str(ROOT / "docs" / "generate.py"))
DASHBOARD = ROOT / "configs" / "grafana.json"


@pytest.fixture
def watched(tmp_path, request):
    watched = Watched(tmp_path, device=getattr(request, "param", True))
    yield watched
    watched.close()


WITHOUT_DEVICE = pytest.mark.parametrize("watched", [False], indirect=True, ids=["without device"])


# Stores.


def _residents(watched: Watched) -> list[tuple[list[str], list[str], int]]:
    """Return what the gauge of residents says: the names that are whole, those that come, and how many there is room for."""
    families = text_string_to_metric_families(watched.exposition())
    found = [one.labels for family in families for one in family.samples if one.name == f"{PREFIX}resident_names"]
    assert all(one.keys() == set(RESIDENT_LABELS) for one in found)
    return [
        ([*filter(None, one["running_lora_adapters"].split(","))],
         [*filter(None, one["waiting_lora_adapters"].split(","))], int(one["max_lora"]))
        for one in found
    ]  # fmt: skip


def test_what_is_whole_in_memory_on_every_rank_is_told_by_name_the_last_used_first(tmp_path):
    watched = Watched(tmp_path, device=False, resident_names=3)
    watched.collector.model = "m"
    try:
        assert _residents(watched) == [([], [], 1)]
        for seed, name in enumerate("abc"):
            watched.look_up(watched.make(name, seed=seed), name)
        assert _residents(watched) == [(["m:c", "m:b", "m:a"], [], 4)], "room for one more of their size"
        last = watched.make("d", seed=9)
        keys = list(sha256_hasher(CHUNK)(load_token_ids(last.manifest, tmp_path / "cartridges" / "d" / "1").tolist()))
        assert watched.stores[0].lookup(keys) == 4
        assert [whole for whole, _, _ in _residents(watched)] == [["m:c", "m:b"]], (
            "d is on one rank only, and three are told"
        )
        assert sum(watched.stores[0].release(key) for key in keys) == 4
        watched.look_up(last, "d")
        assert [whole for whole, _, _ in _residents(watched)] == [["m:d", "m:c", "m:b"]]
        for store in watched.stores:
            store.evict(last.manifest.digest)
        assert [whole for whole, _, _ in _residents(watched)] == [["m:c", "m:b", "m:a"]], (
            "what is evicted is told no more"
        )
    finally:
        watched.close()


def test_hits_misses_loads_and_bytes_are_what_was_asked_of_each_tier(watched):
    made = watched.make("a")  # four whole chunks
    watched.look_up(made, "a")
    assert "resident_names{" not in watched.exposition(), "it was not asked for"
    assert watched.value("free_bytes", tier="cpu", rank="0") == (CPU_CHUNKS - 4) * CHUNK_BYTES
    while watched.value("promoted_total", tier="device", rank="0") != 4:
        time.sleep(0.01)  # the device is filled in the background
    for rank in ("0", "1"):
        cpu, device = ({"tier": tier, "rank": rank} for tier in ("cpu", "device"))
        assert watched.value("misses_total", **cpu) == watched.value("promoted_total", **cpu) == 4
        assert watched.value("resident_chunks", **cpu) == watched.value("load_seconds_count", **cpu) == 4
        assert watched.value("resident_bytes", **cpu) == 4 * CHUNK_BYTES
        assert watched.value("budget_bytes", **cpu) == CPU_CHUNKS * CHUNK_BYTES
        assert watched.value("budget_bytes", **device) == DEVICE_CHUNKS * CHUNK_BYTES
        assert watched.value("budget_bytes", tier="disk", rank=rank) == DISK_CHUNKS * CHUNK_BYTES
        assert watched.value("misses_total", tier="disk", rank=rank) == 4
        assert watched.value("read_bytes_total", tier="source", rank=rank) == 4 * CHUNK_BYTES
        assert watched.value("reads_total", tier="source", rank=rank) == 4
        assert watched.value("read_seconds_total", tier="source", rank=rank) > 0
        for name in ("failed_total", "evicted_total", "loading_chunks", "held_chunks", "leased_chunks", "lent_chunks"):
            assert watched.value(name, **cpu) == 0, name
    before = watched.value("hits_total", tier="device", rank="0")
    watched.look_up(made, "a")
    assert watched.value("hits_total", tier="device", rank="0") == before + 4
    assert watched.value("reads_total", tier="source", rank="0") == 4, "a hit reads nothing"


@WITHOUT_DEVICE
def test_evictions_pins_claims_refusals_and_quarantines_are_told(watched, monkeypatch):
    rank = {"rank": "0"}
    made = watched.make("a")
    watched.make("alien", dtype="float16")
    assert (watched.value("served_cartridges", **rank), watched.value("refused_cartridges", **rank)) == (1, 1)
    watched.look_up(made, "a")
    store = watched.stores[0]
    store.pin(made.manifest.digest)
    assert (watched.value("pinned_cartridges", **rank), watched.value("held_chunks", tier="cpu", **rank)) == (1, 4)
    store.unpin(made.manifest.digest)
    assert store.evict(made.manifest.digest) == 4
    assert watched.value("evicted_total", tier="cpu", **rank) == 4
    assert watched.value("resident_bytes", tier="cpu", **rank) == 0
    both = (made, watched.make("b", seed=1))
    go_on, read_into = threading.Event(), LocalSource.read_into

    def when_told(*arguments: Any) -> None:
        assert go_on.wait(60)
        read_into(*arguments)

    monkeypatch.setattr(LocalSource, "read_into", when_told)
    claims = [watched.stores[0].claim(m.manifest.digest, {}) for m in both]
    assert watched.value("waiting_claims", **rank) == 2
    go_on.set()
    for claim in claims:
        while not claim.poll().ready:
            time.sleep(0.01)
    again = watched.stores[0].claim(made.manifest.digest, {})
    assert watched.value("waiting_claims", **rank) == 0
    assert watched.value("open_claims", **rank) == 3
    assert watched.value("oldest_claim_seconds", **rank) > 0
    for claim in (*claims, again):
        claim.close()
    assert (watched.value("open_claims", **rank), watched.value("oldest_claim_seconds", **rank)) == (0, 0)
    for store in watched.stores:
        store.evict(made.manifest.digest)
    payload = watched.settings.cartridges_dir / "a" / "1" / "payload.safetensors"
    payload.write_bytes(bytes(reversed(payload.read_bytes())))
    broken = watched.stores[0].claim(made.manifest.digest, {})
    broken.poll()
    while watched.value("quarantined_cartridges", **rank) != 1:
        time.sleep(0.01)
    broken.close()
    assert watched.value("failed_total", tier="cpu", **rank) >= 1
    assert watched.value("corrupt_copies_total", tier="source", **rank) >= 1


def _collected(ranks: list[dict[str, Any]]) -> str:
    """Return what is exported of such statuses."""
    registry = CollectorRegistry()
    collector = StatusCollector(LOAD_SECONDS, registry=registry)
    collector.update(ranks)
    registry.register(collector)
    return generate_latest(registry).decode()


def test_names_are_prefixed_have_base_units_and_teach(watched):
    families = list(text_string_to_metric_families(watched.exposition()))
    assert len(families) > 30
    for family in families:
        assert re.fullmatch(PREFIX + r"[a-z_]+[a-z]", family.name)
        if family.name.endswith("_created"):  # prometheus_client's own
            continue
        assert not re.search(r"_(ms|milliseconds?|kb|mb|mib|kib|percent|ratio|count|total|info)(_|$)", family.name)
        assert family.type in ("counter", "gauge", "histogram"), family.name
        assert len(family.documentation) > 20 and family.documentation.endswith((".", "error."))
        for sample in family.samples:
            assert sample.labels.keys() <= {"tier", "rank", "outcome", "le"}, "unbounded labels"
            assert family.type != "counter" or sample.name.endswith("_total")
            assert sample.value >= 0


# What is missing or wrong.


def test_a_slow_load_is_in_its_bucket_and_a_number_that_a_tier_has_not_is_left_out():
    counts = [0] * (len(LOAD_SECONDS) + 1)
    counts[LOAD_SECONDS.index(0.3)], counts[-1] = 2, 1
    tiers = {"cpu": {"load_counts": counts, "load_seconds": 40.5}, "disk": {"hits": 1, "new": {"x": 1}}, "source": {}}
    text = _collected([{"rank": 3, "tiers": tiers}])
    cpu = {"tier": "cpu", "rank": "3"}
    found = {le: value(text, "load_seconds_bucket", le=le, **cpu) for le in ("0.1", "0.3", "30.0", "+Inf")}
    assert found == {"0.1": 0, "0.3": 2, "30.0": 2, "+Inf": 3}
    assert value(text, "load_seconds_sum", **cpu) == 40.5
    disk = {"tier": "disk", "rank": "3"}
    assert (value(text, "hits_total", **disk), value(text, "misses_total", **disk), "new" in text) == (1, None, False)


def test_a_status_that_cannot_be_read_leaves_the_last_numbers(watched):
    watched.make("a")
    before = watched.value("served_cartridges", rank="0")
    for wrong in (
        [{}],
        [{"rank": 0, "tiers": {"cpu": {"hits": "x"}}}],
        [{"rank": 0, "tiers": {"cpu": {"load_counts": [1]}}}],
        5,
    ):
        with pytest.raises((KeyError, TypeError, ValueError)):
            watched.collector.update(wrong)
    text = generate_latest(watched.registry).decode()
    assert value(text, "served_cartridges", rank="0") == before == 1


def test_the_age_of_the_numbers_grows_until_the_next_update():
    clock, registry = Clock(), CollectorRegistry()
    collector = StatusCollector(LOAD_SECONDS, clock=clock, registry=registry)
    registry.register(collector)
    ages = []
    for is_update, later in ((False, 0.0), (True, 0.0), (False, 2.5), (True, 0.0)):
        clock.now += later
        if is_update:
            collector.update([])
        ages.append(value(generate_latest(registry).decode(), "status_age_seconds"))
    assert ages == [None, 0, 2.5, 0]


def test_workers_that_die_cost_their_numbers_only_and_are_counted(watched, tmp_path):
    watched.make("a")
    control = ControlServer(lambda: watched.stores[0])
    alive, dead = ControlClient([control.path]), ControlClient([str(tmp_path / "nobody")])
    workers = [alive]

    async def status() -> Any:
        return await asyncio.to_thread(workers[0].call, "status")

    def scraped(name: str, **labels: str) -> float | None:
        return value(generate_latest(watched.registry).decode(), name, **labels)

    async def live() -> None:
        following = asyncio.create_task(follow(watched.collector, status, every_s=0.01))
        while scraped("served_cartridges", rank="0") != 1:
            await asyncio.sleep(0.01)
        assert scraped("status_failures_total") == 0
        workers[0] = dead
        while scraped("status_failures_total") < 3:
            await asyncio.sleep(0.01)
        assert scraped("served_cartridges", rank="0") == 1, "the last numbers stay"
        assert scraped("status_age_seconds") > 0.02
        watched.make("b", seed=1)
        workers[0] = alive
        while scraped("served_cartridges", rank="0") != 2:
            await asyncio.sleep(0.01)
        following.cancel()

    asyncio.run(asyncio.wait_for(live(), 30))
    alive.close()
    control.close()


# Requests.


def _counted(registry: CollectorRegistry) -> dict[str, float]:
    families = {f.name: f for f in text_string_to_metric_families(generate_latest(registry).decode())}
    return {
        s.labels["outcome"]: s.value for s in families[f"{PREFIX}requests"].samples if s.name.endswith("_total")
    }  # fmt: skip


def test_requests_are_counted_once_by_how_they_end():
    registry = CollectorRegistry()
    requests = RequestMetrics(registry)
    assert _counted(registry) == {"used": 0, "document": 0}, "there from the start, so that rates see the first"
    for outcome in ("used", "used", "document", None):
        with requests.request() as counted:
            counted.value = outcome
    for error in (
        GracefulHTTPError("x", HTTPStatus.NOT_FOUND),
        GracefulHTTPError("x", 503),
        ValueError(),
        asyncio.CancelledError(),
    ):
        with pytest.raises(type(error)), requests.request() as counted:
            counted.value = "used"
            raise error
    assert _counted(registry) == {
        "used": 2, "document": 1, "refused_404": 1, "refused_503": 1, "failed": 1, "abandoned": 1
    }  # fmt: skip
    with requests.paused(), pytest.raises(GracefulHTTPError), requests.request():
        raise GracefulHTTPError("x", HTTPStatus.BAD_REQUEST)
    assert "refused_400" not in _counted(registry)


def test_waits_are_measured_whatever_comes_of_them():
    registry = CollectorRegistry()
    requests = RequestMetrics(registry)

    def found(name: str, **labels: str) -> float | None:
        return value(generate_latest(registry).decode(), name, **labels)

    with requests.wait():
        time.sleep(0.02)
        assert found("waiting_requests") == 1
    with pytest.raises(KeyError), requests.wait():
        raise KeyError
    assert (found("waiting_requests"), found("request_wait_seconds_count")) == (0, 2)
    assert found("request_wait_seconds_sum") >= 0.02
    assert found("request_wait_seconds_bucket", le="0.01") == 1


# Several API servers of one engine.

_SECOND_SERVER = """
import asyncio, sys, warnings
warnings.simplefilter("ignore")
import httpx
from fastapi import FastAPI
from prometheus_client import Counter
from vllm.entrypoints.launchers.app import attach_endpoint_plugins
from vllm.entrypoints.serve.instrumentator.metrics import attach_router
from lmcache_cartridge.serve.metrics import requests
app = FastAPI()
attach_router(app)
attach_endpoint_plugins(app, ("generate",))
plugin, = app.state.endpoint_plugins
Counter("vllm:something", "Something of vLLM's.").inc()
requests().injected(7)
plugin.collector.update([{"rank": 0, "tiers": {"cpu": {"hits": 5}}}])
async def get():
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        reply = await client.get("/metrics")
        print(reply.headers["content-type"], reply.status_code)
        print(reply.text)
asyncio.run(get())
"""


def test_of_several_api_servers_requests_are_summed_and_workers_told_once(tmp_path):
    launch = plan("model", from_mapping({"home": tmp_path / "home"}))
    launch.write()
    environment = os.environ | launch.environment | {"PYTHONPATH": str(ROOT), "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    first = "from lmcache_cartridge.serve.metrics import requests; requests().injected(5)"
    outputs = [
        subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True).stdout
        for code in (first, _SECOND_SERVER)
    ]
    head, _, text = outputs[1][outputs[1].index("text/plain") :].partition("\n")
    assert head.endswith(" 200")
    assert value(text, "positions_total") == 12
    assert value(text, "hits_total", tier="cpu", rank="0") == 5
    assert "vllm:something_total 1.0" in text


# A real server.

KEY = "sk-test"


def test_on_a_real_server_counters_move_by_what_requests_did(tmp_path, capsys, monkeypatch):
    settings = from_mapping({"home": tmp_path, "cpu_bytes": 64 << 20})
    model = CausalModel(MODEL)
    ward = write_ward(model, patients(0, 4), "a")
    register(model, settings, ward.ids, name="a")
    shape, whole = model.fingerprint, len(ward.ids) // 256
    chunk_bytes = ChunkShape(shape.kv_heads, shape.layers, 256, shape.head_size, shape.dtype).size_bytes
    launch = plan(MODEL, settings, vllm_args=[*SERVER_ARGS, "--api-key", KEY])
    with ServerProcess(launch, tmp_path / "server.log") as server, Asker(server.url, KEY) as asker:
        cpu = {"tier": "cpu", "rank": "0"}

        def scraped() -> str:
            """Return what a scraper without the API key gets once the workers were asked after now."""
            now = time.monotonic()
            while True:
                reply = httpx.get(f"{server.url}/metrics")
                assert reply.status_code == 200
                # A status that was asked for before now has been taken in after half a second.
                if time.monotonic() - value(reply.text, "status_age_seconds") > now + 0.5:
                    return reply.text
                time.sleep(0.1)

        def moved(before: str, after: str, *names: str, **labels: str) -> list[float]:
            return [(value(after, n, **labels) or 0) - (value(before, n, **labels) or 0) for n in names]

        start = scraped()
        assert value(start, "served_cartridges", rank="0") == 1
        assert value(start, "status_failures_total") == 0
        assert value(start, "requests_total", outcome="refused_400") is None, "the server's own probe is not counted"
        assert value(start, "resident_bytes", **cpu) == value(start, "misses_total", **cpu) == 0
        assert value(start, "budget_bytes", **cpu) == (64 << 20) // chunk_bytes * chunk_bytes
        tiers = ("hits_total", "misses_total", "promoted_total", "load_seconds_count", "resident_bytes")
        used = {"outcome": "used"}

        assert asker.complete(ask(ward.facts[0], 0), "a", cache_salt="1").text.strip() == ward.facts[0].value
        cold = scraped()
        assert moved(start, cold, *tiers, **cpu) == [0, whole, whole, whole, whole * chunk_bytes]
        assert moved(start, cold, "requests_total", **used) == [1]
        assert moved(start, cold, "positions_total", "request_wait_seconds_count") == [len(ward.ids), 1]
        assert moved(start, cold, "reads_total", "read_bytes_total", tier="source", rank="0") == [
            whole,
            whole * chunk_bytes,
        ]

        assert asker.complete(ask(ward.facts[1], 0), "a", cache_salt="2").text.strip() == ward.facts[1].value
        hot = scraped()
        assert moved(cold, hot, *tiers, **cpu) == [whole, 0, 0, 0, 0]
        assert moved(cold, hot, "requests_total", **used) == [1]
        assert moved(cold, hot, "reads_total", tier="source", rank="0") == [0]

        asker.complete("Q: x? A:")
        with pytest.raises(openai.NotFoundError):
            asker.complete("Q: x? A:", "nope")
        end = scraped()
        assert moved(hot, end, "requests_total", **used) == [0], "one without cartridges is none of ours"
        assert moved(hot, end, "requests_total", outcome="refused_404") == [1]
        assert moved(hot, end, "positions_total", "request_wait_seconds_count", "waiting_requests") == [0, 0, 0]
        for theirs in ("vllm:request_success_total", "vllm:num_requests_running", "http_requests_total"):
            assert theirs in end

        monkeypatch.setenv("VLLM_API_KEY", KEY)
        assert main(["top", "--url", server.url, "--once", "--format", "json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert (shown["numbers"]["hits_total"]["cpu"], shown["rates"]) == (whole, None)
        assert [(row["id"], row["state"]) for row in shown["cartridges"]] == [("a", "resident")]


# Grafana.


def _panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def _exported(watched: Watched) -> dict[str, set[str]]:
    """Return the type-suffixed names of everything exported, and the labels of each."""
    suffixes = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
    return {
        family.name + suffix: {label for sample in family.samples for label in sample.labels} or {"tier", "rank"}
        for family in text_string_to_metric_families(watched.exposition())
        if not family.name.endswith("_created")
        for suffix in suffixes[family.type]
    }


def test_the_table_of_metrics_is_what_is_exported(watched):
    watched.look_up(watched.make("a"), "a")
    exported = {
        (
            family.name + "_total" * (family.type == "counter"),
            family.type,
            frozenset(label for sample in family.samples for label in sample.labels) - {"le"},
            family.documentation,
        )
        for family in text_string_to_metric_families(watched.exposition())
        if not family.name.endswith("_created")
    }
    told = PREFIX + RESIDENTS.name  # by those alone that were asked to
    table = [row for row in GENERATE["metrics_table"]() if row[0] != told]
    assert {(name, kind, frozenset(labels), text) for name, kind, labels, text in table} == exported


def test_the_dashboard_uses_metrics_that_exist_with_labels_that_they_have(watched):
    watched.requests.count("lost_prompts", "error")
    exported = _exported(watched)
    used = set()
    for panel in _panels():
        for target in panel["targets"]:
            expression = target["expr"]
            names = re.findall(PREFIX + r"\w+", expression)
            assert names, expression
            assert set(names) <= set(exported), expression
            used |= set(names)
            labels = set.union(*(exported[name] for name in names)) | {"instance"}
            grouped = {label.strip() for by in re.findall(r"by \(([^)]*)\)", expression) for label in by.split(",")}
            assert grouped | set(re.findall(r"(\w+)[!=]~?\"", expression)) <= labels, expression
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= grouped, (
                "a legend of a label summed away"
            )
            assert expression.count("(") == expression.count(")")
            for name in names:
                assert f'{name}{{instance=~"$instance"' in expression, "the choice of server would be ignored"
                counter = name.endswith(("_total", "_bucket", "_count", "_sum"))
                assert bool(re.search(rf"rate\({name}\{{", expression)) == counter, "counters need a rate, gauges none"
    families = {re.sub("_(bucket|sum|count)$", "", name) for name in exported if "seconds" in name} | {
        name for name in exported if not name.endswith(("_bucket", "_sum", "_count"))
    }
    shown = {re.sub("_(bucket|sum|count)$", "", name) for name in used}
    assert families - shown == set(), "a metric that no panel shows"


def test_the_dashboard_is_one_that_grafana_takes():
    dashboard, taken = json.loads(DASHBOARD.read_text()), Counter()
    assert "id" not in dashboard, "an id would be that of another Grafana"
    assert "datasource" in {variable["name"] for variable in dashboard["templating"]["list"]}
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        taken.update(itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])))
    assert max(taken.values()) == 1, "panels lie over one another"
    assert max(x for x, _ in taken) < 24
    assert max(Counter(panel["id"] for panel in dashboard["panels"]).values()) == 1
    for panel in _panels():
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["title"] and panel["description"] and panel["fieldConfig"]["defaults"]["unit"]
