"""Metrics: what the workers' stores and the API server count, for Prometheus. Every name is in the tables here."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

if TYPE_CHECKING:
    from fastapi import FastAPI
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

    from ..library.published import Following

logger = logging.getLogger("vllm.lmcache_cartridge.serve.metrics")

PREFIX = "lmcache_cartridge_"
EVERY_S = 1.0
"""How often the workers are asked for their numbers."""
_WAIT_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0)


class Number(NamedTuple):
    """One metric."""

    name: str
    """Without the prefix, and a counter's without `_total`."""
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    key: str = ""
    """Where it stands in a worker's status, if not under its name; where that is not there, neither is the metric."""


TIER_NUMBERS = (
    Number("hits", "counter", "Chunks asked of a tier that it held."),
    Number("misses", "counter", "Chunks asked of a tier that it did not hold, or not yet."),
    Number("promoted", "counter", "Chunks that came into a tier."),
    Number("evicted", "counter", "Chunks dropped from a tier. Many a second: too small a budget."),
    Number("failed", "counter", "Loads and reads that failed; they are tried again."),
    Number("load_seconds", "counter", "Time of loads, failed ones too, all threads together."),
    Number("reads", "counter", "Reads of parts of chunks from a source."),
    Number("read_bytes", "counter", "Bytes read from a tier."),
    Number("written_bytes", "counter", "Bytes written to a tier."),
    Number("read_seconds", "counter", "Time of reads of a source, all threads together."),
    Number("corrupt_copies", "counter", "Copies from a source or the disk whose checksum was wrong.", "corrupt"),
    Number("resident_chunks", "gauge", "Chunks a tier holds now.", "resident"),
    Number("resident_bytes", "gauge", "Bytes a tier holds. Ranks share the disk: take max, not sum."),
    Number("budget_bytes", "gauge", "Bytes a tier may hold. Ranks share the disk: take max, not sum."),
    Number("loading_chunks", "gauge", "Loads into a tier in flight or queued.", "loading"),
    Number("held_chunks", "gauge", "Chunks that may not be evicted now.", "held"),
    Number("leased_chunks", "gauge", "Chunks found by a lookup and not read yet.", "leased"),
    Number("lent_chunks", "gauge", "Chunks that are being injected.", "lent"),
)  # fmt: skip
"""By tier and rank."""
RANK_NUMBERS = (
    Number("served_cartridges", "gauge", "Registered cartridges, by version, that are served.", "served"),
    Number("refused_cartridges", "gauge", "Registered cartridges that are not served; `/v1/cartridges` says why.", "refused"),
    Number("quarantined_cartridges", "gauge", "Cartridges whose bytes were wrong.", "quarantined"),
    Number("pinned_cartridges", "gauge", "Cartridges pinned into memory.", "pinned"),
    Number("waiting_claims", "gauge", "Cartridges claimed and not whole in memory yet.", "loading"),
    Number("open_claims", "gauge", "Requests' claims, which keep cartridges in memory.", "claims"),
    Number("oldest_claim_seconds", "gauge", "Age of the oldest claim; far above the longest answer: a leak.", "oldest_claim_s"),
    Number("background_errors", "counter", "Errors of background threads, by process: take max, not sum."),
)  # fmt: skip
"""By rank."""
SERVER_NUMBERS = (
    Number("requests", "counter", "Requests that named cartridges: used, document (text in their place), refused_STATUS, failed (in vLLM), abandoned (by the client)."),
    Number("lost_prompts", "counter", "Used requests whose KV was lost after all: document (text in its place) or error."),
    Number("canaries", "counter", "Canaries asked: passed, accepted (`accept_weights`), failed (set aside) or unfinished (asked again)."),
    Number("own_tokens", "counter", "Prompt tokens of contexts and canaries, which no client is billed: computed or cached."),
    Number("contexts", "counter", "Contexts asked for that were not there: made, failed or refused."),
    Number("context_seconds", "histogram", "Time that a context took to be made, behind others too."),
    Number("context_bytes", "gauge", "Bytes of the contexts there are; of servers that share a library take max, not sum."),
    Number("positions", "counter", "Prompt positions that cartridges with KV took in used requests."),
    Number("request_wait_seconds", "histogram", "Time a request waited for its cartridges to be loaded."),
    Number("waiting_requests", "gauge", "Requests that wait for their cartridges now."),
    Number("status_age_seconds", "gauge", "Age of the numbers with a rank. More than some seconds: workers hang."),
)  # fmt: skip
"""Of the API server itself."""
_OF_SERVER = {row.name: row for row in SERVER_NUMBERS}
LIBRARY_NUMBERS = (
    Number("library_position", "gauge", "The published library's last change that is known."),
    Number("library_age_seconds", "gauge", "Time since the published library was last read."),
    Number("library_failing", "gauge", "1 where the published library could not be read; `/v1/cartridges` says why."),
)  # fmt: skip
"""Of the published library, where one is followed."""
OUTCOMES = {
    "requests": ("used", "document"),
    "lost_prompts": ("document", "error"),
    "canaries": ("passed", "accepted", "failed", "unfinished"),
    "own_tokens": ("computed", "cached"),
    "contexts": ("made", "failed", "refused"),
}
"""Metrics with the label `outcome`, and its values that are exported from the start, so that rates see the first."""


def _metric(name: str, registry: CollectorRegistry | None, **options: Any) -> Any:
    """Make a metric of the API server. Raises `ValueError` where the registry has it."""
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram

    row = _OF_SERVER[name]
    kind = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}[row.kind]
    outcomes = OUTCOMES.get(name, ())
    metric = kind(PREFIX + name, row.help, ["outcome"] * bool(outcomes), registry=registry or REGISTRY, **options)
    for outcome in outcomes:
        metric.labels(outcome)
    return metric


class StatusCollector:
    """A custom collector of what the workers said last: a scrape asks nobody, so it neither waits nor fails."""

    def __init__(self, library: Callable[[], Following | None] = lambda: None) -> None:
        """It does not register itself."""
        self._library = library
        self._families: list[Metric] = []
        self._updated_at: float | None = None

    def update(self, ranks: Iterable[Mapping[str, Any]]) -> None:
        """Take in the statuses of all ranks. Where one is not as it should be it raises, and the last ones stay."""
        self._families = _families(ranks)
        self._updated_at = time.monotonic()

    def collect(self) -> Iterator[Metric]:
        """Yield the last numbers and how old they are; does not block."""
        from prometheus_client.core import GaugeMetricFamily

        yield from self._families
        known = self._library()
        age_s = None if self._updated_at is None else time.monotonic() - self._updated_at
        since_s = known and known.seen_s and max(0.0, time.time() - known.seen_s)
        of_library = (known.position, since_s, known.problem is not None) if known else (None, None, None)
        rows = (_OF_SERVER["status_age_seconds"], *LIBRARY_NUMBERS)
        for row, value in zip(rows, (age_s, *of_library), strict=True):
            number = GaugeMetricFamily(PREFIX + row.name, row.help)
            if value is not None:
                number.add_metric([], value)
            yield number


def _families(ranks: Iterable[Mapping[str, Any]]) -> list[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kinds: dict[str, Any] = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}

    def family(row: Number, *labels: str) -> Any:
        return kinds[row.kind](PREFIX + row.name, row.help, labels=labels)

    by_tier = [(row, family(row, "tier", "rank")) for row in TIER_NUMBERS]
    by_rank = [(row, family(row, "rank")) for row in RANK_NUMBERS]
    for status in ranks:
        rank = str(status["rank"])
        for row, metric in by_rank:
            if (value := status.get(row.key or row.name)) is not None:
                metric.add_metric([rank], float(value))
        for tier, counters in status["tiers"].items():
            for row, metric in by_tier:
                if (value := counters.get(row.key or row.name)) is not None:
                    metric.add_metric([tier, rank], float(value))
    return [metric for _, metric in (*by_tier, *by_rank)]


class Outcome:
    """How one request ended; `None` is not counted."""

    value: str | None = None


class RequestMetrics:
    """What the API server itself counts. Of several API servers of one engine, Prometheus gets the sum."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """Register the metrics, in prometheus_client's own registry by default; twice in one raises `ValueError`."""
        self._outcomes = {name: _metric(name, registry) for name in OUTCOMES}
        self.context_seconds = _metric("context_seconds", registry, buckets=_WAIT_SECONDS)
        self.context_bytes = _metric("context_bytes", registry, multiprocess_mode="mostrecent")
        self.positions = _metric("positions", registry)
        self._waits = _metric("request_wait_seconds", registry, buckets=_WAIT_SECONDS)
        self._waiting = _metric("waiting_requests", registry, multiprocess_mode="livesum")

    @contextmanager
    def request(self) -> Iterator[Outcome]:
        """Count one request by the outcome that is set meanwhile, or by the error that leaves."""
        outcome = Outcome()
        try:
            yield outcome
        except Exception as error:
            status = getattr(error, "http_status", None)
            outcome.value = "failed" if status is None else f"refused_{int(status)}"
            raise
        except BaseException:
            outcome.value = "abandoned"
            raise
        finally:
            if outcome.value is not None:
                self.count("requests", outcome.value)

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Measure how long a request waits for its cartridges, whatever comes of it."""
        with self._waiting.track_inprogress(), self._waits.time():
            yield

    def count(self, name: str, outcome: str, by: int = 1) -> None:
        """Count, of a metric in `OUTCOMES`, what came out so."""
        self._outcomes[name].labels(outcome).inc(by)


@cache
def requests() -> RequestMetrics:
    """Return the one of this process."""
    return RequestMetrics()


def attach(app: FastAPI, collector: StatusCollector) -> None:
    """Have `/metrics` show what `collector` has.

    A single API server shows its process's registry. With several, or where `$PROMETHEUS_MULTIPROC_DIR` is set, vLLM
    0.32 makes a registry for each scrape, of what all of them wrote to files, and no custom collector gets into it; so
    the route is replaced, as vLLM lets endpoint plugins, by one that does the same and adds ours. All servers ask the
    same workers, so whichever answers, a worker's numbers are there once.
    """
    from fastapi import Response
    from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
    from prometheus_client.multiprocess import MultiProcessCollector

    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        REGISTRY.register(collector)
        return

    @app.get("/metrics")
    def metrics() -> Any:
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        registry.register(collector)
        return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


async def follow(collector: StatusCollector, status: Callable[[], Awaitable[Any]]) -> NoReturn:
    """Keep `collector` up to date until cancelled. A failure is logged once and tried again; the numbers grow old."""
    complaint = None
    while True:
        try:
            collector.update(await status())
            complaint = None
        except Exception as error:
            if str(error) != complaint:
                logger.warning("the metrics are not up to date: %s", error)
            complaint = str(error)
        await asyncio.sleep(EVERY_S)
