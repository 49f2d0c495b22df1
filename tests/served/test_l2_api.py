"""The request API in multiprocess mode: every test of `test_api`, on vLLM beside LMCache's server."""

from __future__ import annotations

import re

import pytest
from test_api import ApiTests, Served, ask, served  # noqa: F401
from waiting import until


@pytest.fixture(scope="module")
def mode():
    return "multiprocess"


def test_evicting_reaches_what_lmcaches_server_keeps(served):  # noqa: F811
    log = served.settings.home / "server.log"

    def sources() -> list[tuple[str, str]]:
        """Return from where LMCache had the chunks of each request so far: its own memory, and us."""
        return re.findall(r"\((\d+) L1, (\d+) L2\)", log.read_text(errors="replace"))

    def complete() -> tuple[str, str]:
        before = len(sources())
        # Of a tenant of its own: LMCache 0.5.7 does not look up what vLLM has in its prefix cache.
        reply = served.asker.complete(ask(served.wards["c"].facts[0], 0), "c", cache_salt=f"tenant {before}")
        assert reply.cached_tokens == reply.injected == 1024
        until(lambda: len(sources()) > before)
        return sources()[-1]

    complete()
    assert complete() == ("4", "0"), "the control: LMCache keeps what it loads"
    assert served.asker.http.post("/v1/cartridges/c/evict").json()["chunks"] == 4
    assert complete() == ("0", "4")


class TestApi(ApiTests):
    """After the one above: where a request was refused, LMCache 0.5.6 may hold on to its chunks for a while."""
