"""Metrics: names and values of what stores and requests count, and what Grafana makes of them."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
import warnings
from collections.abc import Iterator
from contextlib import closing
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from watching import Watched, value

from lmcache_cartridge.serve import metrics
from lmcache_cartridge.serve.metrics import PREFIX, RequestMetrics, follow

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


@pytest.mark.parametrize("watched", [False], indirect=True, ids=["without device"])
def test_pins_claims_refusals_and_evictions_are_told(watched):
    made = watched.make("a")
    watched.make("alien", dtype="float16")
    store, digest = watched.stores[0], made.manifest.digest

    def told(*names: str, **labels: str) -> list[float | None]:
        return _values(watched.exposition(), *names, rank="0", **labels)

    watched.look_up(made, "a")
    store.pin(digest)
    with closing(store.claim(digest, {})):
        assert told("served_cartridges", "refused_cartridges", "pinned_cartridges", "open_claims") == [1] * 4
        assert told("held_chunks", tier="cpu") == [4] and told("oldest_claim_seconds")[0] > 0
    store.unpin(digest)
    store.evict(digest)
    assert told("evicted_total", "resident_bytes", tier="cpu") + told("open_claims") == [4, 0, 0]


# What is missing or wrong.


def test_workers_that_do_not_answer_cost_their_numbers_only(watched, monkeypatch):
    told = []

    async def status() -> Any:
        text = generate_latest(watched.registry).decode()
        told.append(value(text, "served_cartridges", rank="0"))
        if len(told) == 2:
            raise OSError("no worker answers")
        if len(told) == 4:
            raise asyncio.CancelledError
        watched.make(f"name{len(told)}", seed=len(told))
        return [store.numbers() for store in watched.stores]

    monkeypatch.setattr(metrics, "EVERY_S", 0.01)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(follow(watched.collector, status))
    assert told == [None, 1, 1, 2], "the last numbers stay"


# Requests.


def test_requests_are_counted_once_by_how_they_end():
    registry = CollectorRegistry()
    requests = RequestMetrics(registry)

    def counted() -> dict[str, float]:
        families = text_string_to_metric_families(generate_latest(registry).decode())
        samples = [sample for family in families for sample in family.samples]
        return {s.labels["outcome"]: s.value for s in samples if s.name == f"{PREFIX}requests_total"}

    assert counted() == {"used": 0, "document": 0}, "there from the start, so that rates see the first"
    for outcome in ("used", None):
        with requests.request() as ended:
            ended.value = outcome
    for error in (GracefulHTTPError("x", HTTPStatus.NOT_FOUND), ValueError(), asyncio.CancelledError()):
        with pytest.raises(type(error)), requests.request() as ended:
            ended.value = "used"
            raise error
    assert counted() == {"used": 1, "document": 0, "refused_404": 1, "failed": 1, "abandoned": 1}


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
    table = GENERATE["metrics_table"]()
    assert {(name, kind, frozenset(labels), text) for name, kind, labels, text in table} == exported


def test_the_dashboard_shows_every_metric_and_none_that_there_is_not(watched):
    watched.requests.count("lost_prompts", "error")
    suffixes = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
    exported = {family.name + suffix for family in _families(watched) for suffix in suffixes[family.type]}
    used = set()
    for expression in (target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())):
        names = set(re.findall(PREFIX + r"\w+", expression))
        assert names and names <= exported, expression
        used |= names
        for name in names:
            assert f'{name}{{instance=~"$instance"' in expression, "the choice of server would be ignored"
            counter = name.endswith(("_total", "_bucket", "_count", "_sum"))
            assert (f"rate({name}{{" in expression) == counter, "counters need a rate, gauges none"
    shown, there = ({re.sub("_(bucket|sum|count)$", "", name) for name in names} for names in (used, exported))
    assert there == shown, "a metric that no panel shows"
