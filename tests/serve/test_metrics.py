"""Metrics: names and values of what stores and requests count, and what Grafana makes of them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import runpy
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import closing
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from waiting import Clock, until
from watching import CHUNK_BYTES, CPU_CHUNKS, DEVICE_CHUNKS, DISK_CHUNKS, Watched, value

from lmcache_cartridge.artifact.local import LocalSource
from lmcache_cartridge.memory.loads import LOAD_SECONDS
from lmcache_cartridge.memory.store import CartridgeStore
from lmcache_cartridge.serve import metrics
from lmcache_cartridge.serve.launch import plan
from lmcache_cartridge.serve.metrics import PREFIX, RESIDENTS, RequestMetrics, StatusCollector, follow
from lmcache_cartridge.settings import from_mapping

with warnings.catch_warnings():  # torch's, while vLLM is imported
    warnings.simplefilter("ignore")
    from vllm.exceptions import GracefulHTTPError

ROOT = Path(__file__).parents[2]
GENERATE = runpy.run_path(str(ROOT / "docs" / "generate.py"))
DASHBOARD = json.loads((ROOT / "configs" / "grafana.json").read_text())


@pytest.fixture
def watched(tmp_path, request):
    watched = Watched(tmp_path, device=getattr(request, "param", True))
    yield watched
    watched.close()


def _values(text: str, *names: str, **labels: str) -> list[float | None]:
    return [value(text, name, **labels) for name in names]


# Stores.


def _residents(watched: Watched) -> list[str]:
    """Return what the gauge of residents says: the names that are whole, those that come, and how many there is room for."""
    families = text_string_to_metric_families(watched.exposition())
    [found] = [one.labels for family in families for one in family.samples if one.name == f"{PREFIX}resident_names"]
    return [found.pop(name) for name in ("running_lora_adapters", "waiting_lora_adapters", "max_lora")] + list(found)


def _claim(stores: list[CartridgeStore], digest: str) -> None:
    """Have all of a cartridge in memory."""
    for store in stores:
        claim = store.claim(digest, {})
        until(lambda: claim.poll().ready)  # noqa: B023
        claim.close()


def test_what_is_whole_in_memory_on_every_rank_is_told_by_name_the_last_used_first(tmp_path):
    with closing(Watched(tmp_path, device=False, resident_names=3)) as watched:
        watched.collector.model = "m"
        assert _residents(watched) == ["", "", "1"]
        made = {name: watched.make(name, seed=seed) for seed, name in enumerate("abcd")}
        for name in "abc":
            watched.look_up(made[name], name)
        assert _residents(watched) == ["m:c,m:b,m:a", "", "4"], "room for one more of their size"
        digest = made["d"].manifest.digest
        _claim(watched.stores[:1], digest)
        assert _residents(watched)[0] == "m:c,m:b", "d is on one rank only, and three are told"
        watched.look_up(made["d"], "d")
        assert _residents(watched)[0] == "m:d,m:c,m:b"
        for store in watched.stores:
            store.evict(digest)
        assert _residents(watched)[0] == "m:c,m:b,m:a", "what is evicted is told no more"
        _claim(watched.stores, watched.make("theirs", within="contexts", seed=4).manifest.digest)
        assert _residents(watched)[0] == "m:c,m:b,m:a", "a context's name is its maker's"


def test_hits_misses_loads_and_bytes_are_what_was_asked_of_each_tier(watched):
    made = watched.make("a")  # four whole chunks
    watched.look_up(made, "a")
    for rank in "01":  # it is filled in the background, by chunks that are lent
        until(lambda rank=rank: watched.value("promoted_total", tier="device", rank=rank) == 4)
        until(lambda rank=rank: watched.value("held_chunks", tier="cpu", rank=rank) == 0)
    text = watched.exposition()
    assert "resident_names{" not in text, "it was not asked for"
    none = "failed_total", "evicted_total", "loading_chunks", "held_chunks", "leased_chunks", "lent_chunks"
    fours = "misses_total", "promoted_total", "resident_chunks", "load_seconds_count"
    told = {
        "cpu": {"resident_bytes": 4 * CHUNK_BYTES, "budget_bytes": CPU_CHUNKS * CHUNK_BYTES}
        | dict.fromkeys(fours, 4) | dict.fromkeys(none, 0),
        "device": {"budget_bytes": DEVICE_CHUNKS * CHUNK_BYTES},
        "disk": {"misses_total": 4, "budget_bytes": DISK_CHUNKS * CHUNK_BYTES},
        "source": {"reads_total": 4, "read_bytes_total": 4 * CHUNK_BYTES},
    }  # fmt: skip
    for rank in "01":
        for tier, expected in told.items():
            assert {name: value(text, name, tier=tier, rank=rank) for name in expected} == expected
        assert value(text, "read_seconds_total", tier="source", rank=rank) > 0
    watched.look_up(made, "a")
    hit = {"tier": "device", "rank": "0"}
    assert watched.value("hits_total", **hit) == value(text, "hits_total", **hit) + 4
    assert watched.value("reads_total", tier="source", rank="0") == 4, "a hit reads nothing"


@pytest.mark.parametrize("watched", [False], indirect=True, ids=["without device"])
def test_evictions_pins_claims_refusals_and_quarantines_are_told(watched, monkeypatch):
    made = watched.make("a")
    watched.make("alien", dtype="float16")
    store, digest = watched.stores[0], made.manifest.digest

    def told(*names: str, **labels: str) -> list[float | None]:
        return _values(watched.exposition(), *names, rank="0", **labels)

    assert told("served_cartridges", "refused_cartridges") == [1, 1]
    watched.look_up(made, "a")
    store.pin(digest)
    claim = store.claim(digest, {})
    assert told("pinned_cartridges", "open_claims") + told("held_chunks", tier="cpu") == [1, 1, 4]
    assert told("oldest_claim_seconds")[0] > 0
    claim.close()
    store.unpin(digest)
    assert told("open_claims", "oldest_claim_seconds") == [0, 0]
    for each in watched.stores:
        each.evict(digest)
    assert told("evicted_total", "resident_bytes", tier="cpu") == [4, 0]
    payload = watched.settings.cartridges_dir / "a" / "1" / "payload.safetensors"
    payload.write_bytes(bytes(reversed(payload.read_bytes())))
    go_on, read_into = threading.Event(), LocalSource.read_into
    monkeypatch.setattr(LocalSource, "read_into", lambda *given: go_on.wait(60) and read_into(*given))
    broken = store.claim(digest, {})
    assert told("waiting_claims") == [1]
    go_on.set()
    until(lambda: told("quarantined_cartridges") == [1])
    broken.close()
    assert min(told("failed_total", tier="cpu") + told("corrupt_copies_total", tier="source")) >= 1


# What is missing or wrong.


def _collecting(clock: Clock) -> tuple[StatusCollector, CollectorRegistry]:
    registry = CollectorRegistry()
    collector = StatusCollector(LOAD_SECONDS, clock=clock)
    registry.register(collector)
    return collector, registry


def test_a_slow_load_is_in_its_bucket_and_a_number_that_a_tier_has_not_is_left_out():
    counts = [0] * (len(LOAD_SECONDS) + 1)
    counts[LOAD_SECONDS.index(0.3)], counts[-1] = 2, 1
    collector, registry = _collecting(Clock())
    tiers = {"cpu": {"load_counts": counts, "load_seconds": 40.5}, "disk": {"hits": 1, "new": {"x": 1}}, "source": {}}
    collector.update([{"rank": 3, "tiers": tiers}])
    text, cpu = generate_latest(registry).decode(), {"tier": "cpu", "rank": "3"}
    found = [value(text, "load_seconds_bucket", le=le, **cpu) for le in ("0.1", "0.3", "30.0", "+Inf")]
    assert (found, value(text, "load_seconds_sum", **cpu)) == ([0, 2, 2, 3], 40.5)
    assert _values(text, "hits_total", "misses_total", tier="disk", rank="3") == [1, None]
    assert "new" not in text


@pytest.mark.parametrize(
    "wrong",
    [[{}], [{"rank": 0, "tiers": {"cpu": {"hits": "x"}}}], [{"rank": 0, "tiers": {"cpu": {"load_counts": [1]}}}], 5],
)
def test_a_status_that_cannot_be_read_leaves_the_last_numbers_which_grow_old(wrong):
    clock = Clock()
    collector, registry = _collecting(clock)

    def told() -> list[float | None]:
        text = generate_latest(registry).decode()
        return [value(text, "served_cartridges", rank="0"), value(text, "status_age_seconds")]

    assert told() == [None, None]
    collector.update([{"rank": 0, "served": 1, "tiers": {}}])
    clock.move(2.5)
    with pytest.raises((KeyError, TypeError, ValueError)):
        collector.update(wrong)
    assert told() == [1, 2.5]
    collector.update([])
    assert told() == [None, 0]


def test_workers_that_do_not_answer_cost_their_numbers_only(watched, monkeypatch):
    told = []

    async def status() -> Any:
        text = generate_latest(watched.registry).decode()
        told.append(value(text, "served_cartridges", rank="0"))
        if len(told) in (2, 3):
            raise OSError("no worker answers")
        if len(told) == 5:
            raise asyncio.CancelledError
        watched.make(f"name{len(told)}", seed=len(told))
        return watched.status()

    monkeypatch.setattr(metrics, "EVERY_S", 0.01)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(follow(watched.collector, status))
    assert told == [None, 1, 1, 1, 2], "the last numbers stay"


# Requests.


def test_requests_are_counted_once_by_how_they_end():
    registry = CollectorRegistry()
    requests = RequestMetrics(registry)

    def counted() -> dict[str, float]:
        families = text_string_to_metric_families(generate_latest(registry).decode())
        samples = [sample for family in families for sample in family.samples]
        return {s.labels["outcome"]: s.value for s in samples if s.name == f"{PREFIX}requests_total"}

    assert counted() == {"used": 0, "document": 0}, "there from the start, so that rates see the first"
    for outcome in ("used", "used", "document", None):
        with requests.request() as ended:
            ended.value = outcome
    for error in (GracefulHTTPError("x", HTTPStatus.NOT_FOUND), ValueError(), asyncio.CancelledError()):
        with pytest.raises(type(error)), requests.request() as ended:
            ended.value = "used"
            raise error
    with requests.paused(), requests.request() as ended:
        ended.value = "used"
    assert counted() == {"used": 2, "document": 1, "refused_404": 1, "failed": 1, "abandoned": 1}


def test_waits_are_measured_whatever_comes_of_them():
    registry = CollectorRegistry()
    requests = RequestMetrics(registry)

    def found(*names: str, **labels: str) -> list[float | None]:
        return _values(generate_latest(registry).decode(), *names, **labels)

    with pytest.raises(KeyError), requests.wait():
        time.sleep(0.02)
        assert found("waiting_requests") == [1]
        raise KeyError
    assert found("waiting_requests", "request_wait_seconds_count") == [0, 1]
    assert found("request_wait_seconds_sum")[0] >= 0.02
    assert found("request_wait_seconds_bucket", le="0.01") == [0]


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
requests().positions.inc(7)
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
    first = "from lmcache_cartridge.serve.metrics import requests; requests().positions.inc(5)"
    outputs = [
        subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True).stdout
        for code in (first, _SECOND_SERVER)
    ]
    head, _, text = outputs[1][outputs[1].index("text/plain") :].partition("\n")
    assert head.endswith(" 200")
    assert value(text, "positions_total") == 12
    assert value(text, "hits_total", tier="cpu", rank="0") == 5
    assert "vllm:something_total 1.0" in text


# Grafana.


def _families(watched: Watched) -> Iterator[Any]:
    """Yield everything exported but what prometheus_client adds of its own."""
    for family in text_string_to_metric_families(watched.exposition()):
        if not family.name.endswith("_created"):
            yield family


def test_the_table_of_metrics_is_what_is_exported(watched):
    watched.look_up(watched.make("a"), "a")
    exported = {
        (
            family.name + "_total" * (family.type == "counter"),
            family.type,
            frozenset(label for sample in family.samples for label in sample.labels) - {"le"},
            family.documentation,
        )
        for family in _families(watched)
    }
    told = PREFIX + RESIDENTS.name  # by those alone that were asked to
    table = [row for row in GENERATE["metrics_table"]() if row[0] != told]
    assert {(name, kind, frozenset(labels), text) for name, kind, labels, text in table} == exported


def test_the_dashboard_uses_metrics_that_exist_with_labels_that_they_have(watched):
    watched.requests.count("lost_prompts", "error")
    suffixes = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
    exported = {
        family.name + suffix: {label for sample in family.samples for label in sample.labels} or {"tier", "rank"}
        for family in _families(watched)
        for suffix in suffixes[family.type]
    }
    used = set()
    for target in (target for panel in _panels() for target in panel["targets"]):
        expression = target["expr"]
        names = set(re.findall(PREFIX + r"\w+", expression))
        assert names and names <= set(exported), expression
        used |= names
        labels = set.union(*(exported[name] for name in names)) | {"instance"}
        grouped = {label.strip() for by in re.findall(r"by \(([^)]*)\)", expression) for label in by.split(",")}
        assert grouped | set(re.findall(r"(\w+)[!=]~?\"", expression)) <= labels, expression
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= grouped, "a legend of a label summed away"
        for name in names:
            assert f'{name}{{instance=~"$instance"' in expression, "the choice of server would be ignored"
            counter = name.endswith(("_total", "_bucket", "_count", "_sum"))
            assert (f"rate({name}{{" in expression) == counter, "counters need a rate, gauges none"
    shown, there = ({re.sub("_(bucket|sum|count)$", "", name) for name in names} for names in (used, exported))
    assert there == shown, "a metric that no panel shows"


def _panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def test_the_dashboard_goes_into_any_grafana():
    assert "id" not in DASHBOARD, "an id would be that of another Grafana"
    assert {panel["datasource"]["uid"] for panel in _panels()} == {"${datasource}"}
