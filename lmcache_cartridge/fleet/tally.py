"""Tally: what a fleet's service has done, for Prometheus and for the log."""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from .events import Counts
from .index import TIERS, Index
from .scores import Score

if TYPE_CHECKING:
    from .pods import Pod

PREFIX = "lmcache_cartridge_fleet_"
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.05, 0.1, 0.5, 2.0)


class Tally:
    """Counts picks and scores."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def name(text: str) -> str:
            return PREFIX + text

        self._picks = Counter(
            name("picks"), "Requests, by the server picked and how.", ["pod", "by"], registry=self.registry
        )
        self._scores = Histogram(
            name("score"),
            "Scores given, by server.",
            ["pod"],
            buckets=[i / 4 for i in range(11)],
            registry=self.registry,
        )
        self._share = Histogram(
            name("hit_share"), "Share of a request's looked-for tokens that the picked server had.",
            buckets=[0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1], registry=self.registry,
        )  # fmt: skip
        self._asked = Counter(name("asked_tokens"), "Tokens looked for in picks.", registry=self.registry)
        self._hit = Counter(name("hit_tokens"), "Those of them that the picked server had.", registry=self.registry)
        self._seconds = Histogram(
            name("seconds"), "Time of a score or pick.", ["of"], buckets=_SECONDS, registry=self.registry
        )
        self._minute: Count[str] = Count()
        self._minute_tokens = [0.0, 0.0]

    def scored(self, scores: Mapping[str, Score], seconds: float) -> None:
        """Count a score."""
        self._seconds.labels("score").observe(seconds)
        for pod, one in scores.items():
            self._scores.labels(pod).observe(one.total)

    def picked(self, pod: str, by: str, one: Score, tokens: int, seconds: float) -> None:
        """Count a pick; `one` is the score of the picked."""
        self._seconds.labels("pick").observe(seconds)
        self._picks.labels(pod, by).inc()
        self._scores.labels(pod).observe(one.total)
        self._minute[pod] += 1
        if tokens:
            hit = one.share * tokens
            self._share.observe(one.share)
            self._asked.inc(tokens)
            self._hit.inc(hit)
            self._minute_tokens = [self._minute_tokens[0] + hit, self._minute_tokens[1] + tokens]

    def line(self, index: Index, pods: Sequence[Pod]) -> str:
        """Return the log line for the time since the last, and begin anew."""
        (hit, asked), picks = self._minute_tokens, sum(self._minute.values())
        rate = f"{hit / asked:.2f}" if asked else "-"
        blocks = index.blocks()
        held = ", ".join(
            f"{pod.name} " + "/".join(str(blocks.get((pod.number, tier), 0)) for tier in TIERS) for pod in pods
        )
        shares = ", ".join(f"{pod} {count}" for pod, count in self._minute.most_common()) or "none"
        out = ", ".join(f"{pod.name} ({pod.problem})" for pod in pods if pod.problem) or "none"
        total = Count({name: sum(getattr(pod.counts, name) for pod in pods) for name in Counts.__struct_fields__})
        self._minute.clear()
        self._minute_tokens = [0.0, 0.0]
        return (
            f"{picks} picks: {shares}; hit rate {rate}; blocks {'/'.join(TIERS)}: {held}; left out: {out}; in all "
            + ", ".join(f"{total[name]} {name}" for name in Counts.__struct_fields__)
        )


class Followed:
    """What is known of the servers, at the time of a scrape."""

    def __init__(self, index: Index, pods: Sequence[Pod]) -> None:
        self._index, self._pods = index, pods

    def collect(self) -> Iterator[Metric]:
        """Return all series."""
        blocks = GaugeMetricFamily(PREFIX + "index_blocks", "Blocks in the index.", labels=["pod", "tier"])
        held = self._index.blocks()
        gauges: dict[str, tuple[str, Any]] = {
            "healthy": ("Whether a server can be picked.", lambda pod: pod.problem is None),
            "waiting": ("Requests that wait at a server, as it told last.", lambda pod: pod.waiting),
            "known": ("Whether a server's past events are in the index, as far as they can be had.", lambda pod: pod.is_known),
            "whole": ("Whether none of them is missing.", lambda pod: pod.is_whole),
        }  # fmt: skip
        for pod in self._pods:
            for tier in TIERS:
                blocks.add_metric([pod.name, tier], held.get((pod.number, tier), 0))
        yield blocks
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["pod"])
            for pod in self._pods:
                gauge.add_metric([pod.name], value(pod))
            yield gauge
        counts = {pod.name: pod.counts for pod in self._pods}
        for name in Counts.__struct_fields__:
            counter = CounterMetricFamily(PREFIX + f"event_{name}", f"Of a server's events: {name}.", labels=["pod"])
            for pod_name, of in counts.items():
                counter.add_metric([pod_name], getattr(of, name))
            yield counter
