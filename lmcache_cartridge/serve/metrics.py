"""Metrics: what the workers' stores and the request layer count, for Prometheus. The one place that names them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

PREFIX = "lmcache_cartridge_"


class Number(NamedTuple):
    """One metric made of a worker's status."""

    name: str
    """Without the prefix, and a counter's without `_total`."""
    kind: Literal["counter", "gauge"]
    help: str
    key: str
    """Where it stands in the status; where that is not there, neither is the metric."""


TIER_NUMBERS = (
    Number("hits", "counter", "Chunks asked of a tier that it held; of the disk cache, one rank's part of them.", "hits"),
    Number("misses", "counter", "Chunks asked of a tier that it did not hold, or not yet. Hit rate: hits / (hits + misses).", "misses"),
    Number("promoted", "counter", "Chunks that came into a tier. promoted - evicted = resident in device and cpu.", "promoted"),
    Number("evicted", "counter", "Chunks dropped from a tier: to make room, or on request. Many a second: too small a budget.", "evicted"),
    Number("failed", "counter", "Loads into device or cpu, or reads of a source, that failed. They are tried again.", "failed"),
    Number("reads", "counter", "Reads of a source, each of one rank's part of a chunk.", "reads"),
    Number("read_bytes", "counter", "Bytes read from a tier.", "read_bytes"),
    Number("written_bytes", "counter", "Bytes written to a tier.", "written_bytes"),
    Number("read_seconds", "counter", "Time spent in reads of a source and their checks, all threads together.", "read_seconds"),
    Number("corrupt_copies", "counter", "Copies from a source, or from the disk tier before it, whose checksum was wrong. Any is worth a look.", "corrupt"),
    Number("resident_chunks", "gauge", "Chunks a tier holds now.", "resident"),
    Number("resident_bytes", "gauge", "Bytes a tier holds now, never above its budget. The disk tier's ranks share one directory: take max, not sum.", "resident_bytes"),
    Number("budget_bytes", "gauge", "Bytes a tier may hold. The disk tier's ranks share one directory: take max, not sum.", "budget_bytes"),
    Number("loading_chunks", "gauge", "Loads into a tier in flight or queued.", "loading"),
    Number("held_chunks", "gauge", "Chunks that may not be evicted, since a request, pin or preload claims them.", "held"),
    Number("leased_chunks", "gauge", "Chunks promised to the scheduler for a request that has not come for them yet.", "leased"),
    Number("lent_chunks", "gauge", "Chunks whose bytes are being injected now.", "lent"),
)  # fmt: skip
"""By tier and rank."""
RANK_NUMBERS = (
    Number("served_cartridges", "gauge", "Registered cartridges, by version, that this rank serves.", "served"),
    Number("refused_cartridges", "gauge", "Registered cartridges that this rank does not serve; `/v1/cartridges` says why.", "refused"),
    Number("quarantined_cartridges", "gauge", "Cartridges set aside since their bytes were wrong; `lmcache-cartridge verify` lifts it.", "quarantined"),
    Number("pinned_cartridges", "gauge", "Cartridges pinned into memory.", "pinned"),
    Number("waiting_claims", "gauge", "Cartridges and chains that are claimed and not whole in memory yet.", "loading"),
    Number("open_claims", "gauge", "Claims that requests have on cartridges and chains, so that these stay in memory.", "claims"),
    Number("oldest_claim_seconds", "gauge", "Age of the oldest of these claims; far above the longest answer: a leak.", "oldest_claim_s"),
)  # fmt: skip
"""By rank."""
_LOAD_HELP = "Time a load of one chunk into a tier took, failed ones too."
_WAIT_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0)


class StatusCollector:
    """A custom collector of what the workers said last: a scrape asks nobody, so it neither waits nor fails."""

    def __init__(
        self,
        load_bounds: Sequence[float],
        *,
        clock: Callable[[], float] = time.monotonic,
        registry: CollectorRegistry | None = None,
    ) -> None:
        """`load_bounds` are those of `load_counts`: `residency.LOAD_SECONDS`. It does not register itself."""
        from prometheus_client import REGISTRY, Counter

        self._bounds, self._clock = tuple(load_bounds), clock
        self._families: list[Metric] = []
        self._updated_at: float | None = None
        self._failures = Counter(
            f"{PREFIX}status_failures", "Times the workers did not tell their numbers.", registry=registry or REGISTRY
        )

    def update(self, ranks: Iterable[Mapping[str, Any]]) -> None:
        """Take in the statuses of all ranks. Where one is not as it should be it raises, and the last ones stay."""
        self._families = _families(ranks, self._bounds)
        self._updated_at = self._clock()

    def fail(self) -> None:
        """Count an update that could not be had."""
        self._failures.inc()

    def collect(self) -> Iterator[Metric]:
        """Yield the last numbers and how old they are; does not block."""
        from prometheus_client.core import GaugeMetricFamily

        yield from self._families
        age = GaugeMetricFamily(
            f"{PREFIX}status_age_seconds", "Age of the numbers that have a rank. More than some seconds: workers hang."
        )
        if self._updated_at is not None:
            age.add_metric([], self._clock() - self._updated_at)
        yield age


def _families(ranks: Iterable[Mapping[str, Any]], bounds: Sequence[float]) -> list[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
    by_tier = [(n, kinds[n.kind](PREFIX + n.name, n.help, labels=["tier", "rank"])) for n in TIER_NUMBERS]
    by_rank = [(n, kinds[n.kind](PREFIX + n.name, n.help, labels=["rank"])) for n in RANK_NUMBERS]
    loads = HistogramMetricFamily(f"{PREFIX}load_seconds", _LOAD_HELP, labels=["tier", "rank"])
    for status in ranks:
        rank = str(status["rank"])
        for number, family in by_rank:
            if (value := status.get(number.key)) is not None:
                family.add_metric([rank], float(value) if isinstance(value, int | float) else len(value))
        for tier, counters in status["tiers"].items():
            for number, family in by_tier:
                if (value := counters.get(number.key)) is not None:
                    family.add_metric([tier, rank], float(value))
            if counts := counters.get("load_counts"):
                buckets, total = [], 0
                for bound, count in zip((*map(str, bounds), "+Inf"), counts, strict=True):
                    total += count
                    buckets.append((bound, total))
                loads.add_metric([tier, rank], buckets, float(counters["load_seconds"]))
    return [family for _, family in (*by_tier, *by_rank)] + [loads]


class Outcome:
    """How one request ended; `None` is not counted."""

    value: str | None = None


class RequestMetrics:
    """What the API server itself counts. Of several API servers of one engine, Prometheus gets the sum."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """Register the metrics, in prometheus_client's own registry by default; twice in one raises `ValueError`."""
        from prometheus_client import REGISTRY, Counter, Gauge, Histogram

        registry = registry or REGISTRY
        self._paused = False
        self._requests = Counter(
            f"{PREFIX}requests",
            "Requests that named cartridges: used, document (its text took their place), refused_STATUS, failed (vLLM "
            "refused the rest of it), abandoned (the client left).",
            ["outcome"], registry=registry,
        )  # fmt: skip
        self._lost = Counter(
            f"{PREFIX}lost_prompts",
            "Prompts counted as used whose KV the engine lost after all: document (its text took their place) or error.",
            ["outcome"], registry=registry,
        )  # fmt: skip
        self._canaries = Counter(
            f"{PREFIX}canaries",
            "Cartridges that the engine was asked about before their first request: passed, failed (set aside on this "
            "engine) or unfinished (asked again by the next request).",
            ["outcome"], registry=registry,
        )  # fmt: skip
        for outcome in ("passed", "failed", "unfinished"):
            self._canaries.labels(outcome)
        for outcome in ("used", "document"):
            self._requests.labels(outcome)
        for outcome in ("document", "error"):
            self._lost.labels(outcome)
        self._positions = Counter(
            f"{PREFIX}positions",
            "Prompt positions that cartridges with KV took in used requests: what was not prefilled, but for incomplete "
            "last chunks and lost prompts.",
            registry=registry,
        )  # fmt: skip
        self._waits = Histogram(
            f"{PREFIX}request_wait_seconds", "Time a request waited in the API server for its cartridges to be loaded.",
            buckets=_WAIT_SECONDS, registry=registry,
        )  # fmt: skip
        self._waiting = Gauge(
            f"{PREFIX}waiting_requests", "Requests that wait in the API server for their cartridges now.",
            multiprocess_mode="livesum", registry=registry,
        )  # fmt: skip

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count no requests meanwhile: the server asks itself."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

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
            if outcome.value is not None and not self._paused:
                self._requests.labels(outcome.value).inc()

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Measure how long a request waits for its cartridges, whatever comes of it."""
        with self._waiting.track_inprogress(), self._waits.time():
            yield

    def injected(self, positions: int) -> None:
        """Count positions that the engine gets the KV of."""
        self._positions.inc(positions)

    def canary(self, outcome: Literal["passed", "failed", "unfinished"]) -> None:
        """Count an engine asked about a cartridge."""
        self._canaries.labels(outcome).inc()

    def lost(self, outcome: Literal["document", "error"]) -> None:
        """Count a prompt whose KV was lost on the way."""
        self._lost.labels(outcome).inc()


@cache
def requests() -> RequestMetrics:
    """Return the one of this process."""
    return RequestMetrics()
