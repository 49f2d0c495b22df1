"""Metrics: what a fleet's service has done, and what it knows of the servers, for Prometheus."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from .index import TIERS, Index

if TYPE_CHECKING:
    from .pods import Pod

PREFIX = "lmcache_cartridge_fleet_"


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

    def collect(self) -> list[Metric]:
        """Return all series of the servers."""
        blocks = GaugeMetricFamily(PREFIX + "index_blocks", "Blocks in the index.", labels=["pod", "tier"])
        healthy = GaugeMetricFamily(PREFIX + "healthy", "Whether a server can be picked.", labels=["pod"])
        lost, malformed = (
            CounterMetricFamily(PREFIX + name, text, labels=["pod"])
            for name, text in (
                ("event_lost", "Times that a server's events were gone for good."),
                ("event_malformed", "A server's events that could not be read."),
            )
        )
        held = self._index.blocks()
        for pod in self._pods:
            followers, of = pod.followers.values(), [pod.name]
            for tier in TIERS:
                blocks.add_metric([*of, tier], held.get((pod.number, tier), 0))
            healthy.add_metric(of, pod.problem is None)
            lost.add_metric(of, sum(follower.lost for follower in followers))
            malformed.add_metric(of, sum(follower.malformed for follower in followers))
        return [blocks, healthy, lost, malformed]
