"""Admin: what the list of cartridges says, page by page, of real stores over HTTP; the rest is asked of vLLM in test_api."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from homes import read
from watching import CHUNK, Watched, serving

from lmcache_cartridge.errors import CartridgeExists, ManifestError, SourceTimeout
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.serve.contexts import Context, Contexts

NAMES = ["a@1", "b@1", "c@1", "d@1", "e@1"]


@pytest.fixture
def watched(tmp_path):
    watched = Watched(tmp_path, device=False)
    for seed, name in enumerate(NAMES):
        watched.make(name.partition("@")[0], positions=2 * CHUNK, seed=seed)
    watched.make("alien", seed=9, dtype="float16")
    yield watched
    watched.close()


@pytest.fixture
def url(watched):
    with serving(watched) as url:
        yield url


def _get(url: str, query: str = "") -> dict[str, Any]:
    return httpx.get(f"{url}/v1/cartridges{query}").json()


def _digests(watched: Watched) -> dict[str, str]:
    return {row.id: row.digest for row in Registry(watched.settings.registry_path).all()}


def _names(answer: dict[str, Any]) -> list[str]:
    return [f"{row['id']}@{row['version']}" for row in answer["data"]]


def test_pages_one_after_the_other_are_the_whole_list_in_order(url):
    whole = _get(url)
    assert _names(whole) == [*NAMES[:1], "alien@1", *NAMES[1:]]
    assert (whole["has_more"], whole["last_id"]) == (False, "e@1")
    listed, page = [], {"last_id": "", "has_more": True}
    while page["has_more"]:
        page = _get(url, f"?limit=2&after={page['last_id']}")
        listed += page["data"]
        assert len(listed) <= len(whole["data"])
    assert listed == whole["data"]
    assert _get(url, "?after=e@1")["data"] == []


def test_a_page_tells_nothing_of_others_contexts_not_even_where_it_ends(watched, url):
    table = Contexts(watched.settings, Registry(watched.settings.registry_path))
    table.create()
    for name in ("alien", "b", "d", "e"):
        hidden = Context(name, "another", name, 1.0, 1e12, 32, 100, digest="d")
        table.run(f"INSERT INTO contexts VALUES ({', '.join('?' * len(hidden))})", *hidden)
    pages = [_get(url, query) for query in ("?limit=1", "?limit=1&after=a@1", "?limit=2")]
    assert [(_names(page), page["last_id"], page["has_more"]) for page in pages] == [
        (["a@1"], "a@1", True), (["c@1"], "c@1", False), (["a@1", "c@1"], "c@1", False),
    ]  # fmt: skip


def test_active_are_those_of_which_something_is_held_wherever_they_stand_in_the_list(watched, url):
    digests = _digests(watched)
    claims = [store.claim(digests["d"], {}) for store in watched.stores]
    claims.append(read(watched.stores[0].claim(f"{digests['b']}.{digests['c']}", {})))
    assert not any(claim.poll().refused for claim in claims)
    watched.stores[0].pin(digests["e"])
    try:
        assert _names(_get(url, "?active=true&limit=1")) == ["b@1", "c@1", "d@1", "e@1"]
    finally:
        watched.stores[0].unpin(digests["e"])
        for claim in claims:
            claim.close()


def test_whether_to_ask_again_is_in_the_status_of_what_went_wrong(watched, url, monkeypatch):
    for error, status in ((SourceTimeout, 503), (ManifestError, 400), (CartridgeExists, 409)):
        monkeypatch.setattr(watched.stores[0], "status", Mock(side_effect=error("it went wrong")))
        reply = httpx.get(f"{url}/v1/cartridges")
        assert (reply.status_code, reply.json()["error"]["message"]) == (status, "it went wrong")


def test_why_the_registry_cannot_be_read_is_answered_and_logged(watched, url, vllm_log):
    path = watched.settings.registry_path
    path.write_bytes(b"no database" * 1000)
    for query in ("", "/a"):
        reply = httpx.get(f"{url}/v1/cartridges{query}")
        assert reply.status_code == 503
        assert "file is not a database" in reply.text and str(path.parent) not in reply.text
        assert f"{path}: file is not a database" in vllm_log.text
        vllm_log.clear()


@pytest.mark.parametrize("action", ["pin", "explode"])
def test_nothing_can_be_changed_over_http_unless_that_is_switched_on(url, action):
    reply = httpx.post(f"{url}/v1/cartridges/a/{action}")
    assert (reply.status_code, "`admin`" in reply.json()["error"]["message"]) == (403, True)
