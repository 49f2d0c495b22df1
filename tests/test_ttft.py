"""`benchmarks/ttft.py` counts no sample that is not what its way means."""

from __future__ import annotations

from typing import Any

import pytest
import ttft


def _sample(way: str, **changes: Any) -> ttft.Sample:
    """Return a sample as it should be of two clients at p = 1024, with changes."""
    tokens = {"nowhere": (0, 0), "vllm": (2048, 0), "lmcache": (0, 2048), "cartridge": (0, 2048)}[ttft.WAYS[way].source]
    resident = (0 if ttft.WAYS[way].is_cold else 4, 4) if ttft.WAYS[way].source == "cartridge" else (0, 0)
    return ttft.Sample(way, 1024, 2, [0.1, 0.2], *tokens, resident)._replace(**changes)


@pytest.mark.parametrize("way", ttft.WAYS)
def test_a_sample_of_its_way_counts(way):
    ttft.check(_sample(way))


@pytest.mark.parametrize(("way", "lie"), [
    ("localcpu", {"connector": 0}), ("localcpu", {"vllm": 1024}), ("mp-l1", {"connector": 1024}), ("dense", {"connector": 256}),
    ("prefix", {"vllm": 0, "connector": 2048}), ("warm", {"connector": 1792}), ("warm", {"resident": (3, 4)}),
    ("warm", {"resident": (0, 0)}), ("disk", {"resident": (4, 4)}),
])  # fmt: skip
def test_a_way_that_lies_ends_the_run(way, lie):
    with pytest.raises(ttft.NotThisWay):
        ttft.check(_sample(way, **lie))


class Lying:
    """A server that computes every prompt, whatever it is asked."""

    def sample(self, way: str, p: int, c: int) -> ttft.Sample:
        return ttft.Sample(way, p, c, [0.1] * c, 0, 0)


def test_nothing_is_published_of_a_server_that_computes_everything(monkeypatch):
    monkeypatch.setattr(ttft, "SETTLE_S", 0.0)
    with pytest.raises(ttft.NotThisWay):
        ttft.measure(dict.fromkeys((False, True), Lying()), ttft.Plan([256], [1], 1, False))  # type: ignore[dict-item]


def test_a_figure_is_of_every_answer():
    [found] = ttft.figures([_sample("warm"), _sample("warm")])
    assert (found.what, found.value, found.n, found.case["p"], found.case["c"]) == (
        "first token",
        pytest.approx(0.15),
        4,
        1024,
        2,
    )
