"""Metrics: what a fleet's service has done, and what it knows of the servers, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from .index import TIERS, Index

if TYPE_CHECKING:
    from .pods import Pod

PREFIX = "lmcache_cartridge_fleet_"
_OF_PODS: dict[str, tuple[Any, str, Callable[[Pod], float]]] = {
    "healthy": (GaugeMetricFamily, "Whether a server can be picked.", lambda pod: pod.problem is None),
    "event_lost": (CounterMetricFamily, "Times that a server's events were gone for good.", 
                   lambda pod: sum(one.lost for one in pod.followers.values())),
    "event_malformed": (CounterMetricFamily, "A server's events that could not be read.",
                        lambda pod: sum(one.malformed for one in pod.followers.values())),
}  # fmt: skip


class Metrics:
    """Counts picks and scores; a collector of what is known of the servers at the time of a scrape."""

    def __init__(self, index: Index, pods: Sequence[Pod]) -> None:
        self._index, self._pods = index, pods
        self.registry = CollectorRegistry()
        self.registry.register(self)
        of: dict[str, Any] = {"registry": self.registry}
        self.picks = Counter(PREFIX + "picks", "Requests, by the server picked and how.", ["pod", "by"], **of)
        self.asked = Counter(PREFIX + "asked_tokens", "Tokens looked for in picks.", **of)
        self.hit = Counter(PREFIX + "hit_tokens", "Those of them that the picked server had.", **of)

    def collect(self) -> Iterator[Metric]:
        """Return all series of the servers."""
        blocks = GaugeMetricFamily(PREFIX + "index_blocks", "Blocks in the index.", labels=["pod", "tier"])
        held = self._index.blocks()
        for pod in self._pods:
            for tier in TIERS:
                blocks.add_metric([pod.name, tier], held.get((pod.number, tier), 0))
        yield blocks
        for name, (family, text, value) in _OF_PODS.items():
            made = family(PREFIX + name, text, labels=["pod"])
            for pod in self._pods:
                made.add_metric([pod.name], value(pod))
            yield made
