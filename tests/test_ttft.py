"""`benchmarks/ttft.py` counts no sample that is not what its way means."""

from __future__ import annotations

from typing import Any

import pytest
import ttft

A = ttft.Answer(0.1, 1024, None)


def _sample(way: str, **changes: Any) -> ttft.Sample:
    """Return a sample as it should be of two clients at p = 1024, with changes; those of an answer in the second one."""
    known = {
        "nowhere": (0, None, 0, 0), "vllm": (1024, None, 2048, 0), "lmcache": (1024, None, 0, 2048),
        "cartridge": (1024, 1024, 0, 2048),
    }  # fmt: skip
    cached, injected, vllm, connector = known[ttft.WAYS[way].source]
    answer = A._replace(cached=cached, injected=injected)
    other = answer._replace(**{name: changes.pop(name) for name in ("cached", "injected") if name in changes})
    resident = (0 if ttft.WAYS[way].is_cold else 4, 4) if ttft.WAYS[way].source == "cartridge" else None
    return ttft.Sample(way, 1024, 2, [answer, other], vllm, connector, resident)._replace(**changes)


@pytest.mark.parametrize("way", ttft.WAYS)
def test_a_sample_of_its_way_counts(way):
    ttft.check(_sample(way))


LIES = [
    ("localcpu", {"cached": 0, "connector": 0}), ("localcpu", {"vllm": 1024}), ("mp-l1", {"connector": 1024}),
    ("dense", {"cached": 256}), ("dense", {"injected": 0}), ("prefix", {"vllm": 0, "connector": 2048}), ("warm", {"injected": 768}),
    ("warm", {"resident": (3, 4)}), ("warm", {"resident": None}), ("warm", {"resident": (0, 0)}), ("disk", {"resident": (4, 4)}),
]  # fmt: skip


@pytest.mark.parametrize(("way", "lie"), LIES)
def test_a_way_that_lies_ends_the_run(way, lie):
    with pytest.raises(ttft.NotThisWay):
        ttft.check(_sample(way, **lie))


class Lying:
    """A server that computes every prompt, whatever it is asked."""

    def sample(self, way: str, p: int, c: int) -> ttft.Sample:
        return ttft.Sample(way, p, c, [A._replace(cached=0)] * c, 0, 0, None)


def test_nothing_is_published_of_a_server_that_computes_everything(monkeypatch):
    monkeypatch.setattr(ttft, "SETTLE_S", 0.0)
    with pytest.raises(ttft.NotThisWay):
        ttft.measure(dict.fromkeys((False, True), Lying()), ttft.Plan([256], [1], 1, False))  # type: ignore[dict-item]


def test_a_figure_says_what_was_cached():
    found = {figure.what: figure for figure in ttft.figures([_sample("warm")])}
    first = found["first token"]
    assert (found["cached"].value, first.value, first.n, first.case["p"], first.case["c"]) == (1024, 0.1, 2, 1024, 2)
