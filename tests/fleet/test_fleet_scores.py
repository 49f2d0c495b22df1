"""Scores and picks of a fleet's service: over servers that are stubs, and events that vLLM's own publisher sends."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer
from routers import Reply, Request, Stub
from test_fleet_events import Engine, seen
from test_fleet_events import stored as stored_event

from lmcache_cartridge.errors import NoTokens, NotReplayed, SettingsError
from lmcache_cartridge.fleet import index, tokens
from lmcache_cartridge.fleet.config import FleetConfig, of_mapping, read_config
from lmcache_cartridge.fleet.service import Fleet, best, owner, score
from lmcache_cartridge.fleet.web import app

SIZE = 16
CARTRIDGES = {name: [ord(name) * 100 + i for i in range(8 * SIZE)] for name in "abcd"}
"""The tokens that the stubs put before a prompt."""


class Pod(Stub):
    """It renders cartridges as a server would, and publishes what a test says that it holds."""

    def __init__(self, directory: Path, name: str) -> None:
        super().__init__(name, self._render)
        directory.mkdir()
        self.engine = Engine(directory)
        self.healthy, self.waiting, self.status = True, 0, 200

    def get(self, path: str) -> Reply:
        if path == "/health":
            return Reply(200 if self.healthy else 503)
        if path == "/metrics":
            text = f'vllm:num_requests_waiting{{engine="0",model_name="m"}} {self.waiting}.0\n'
            return Reply(body=f'{text}vllm:num_requests_waiting_by_reason{{engine="0"}} 99.0\n'.encode())
        assert path == "/kv_event_sources"
        told = {"publisher": "zmq", "enable_kv_cache_events": True, "replay_endpoint": self.engine.replay}
        return Reply(body=json.dumps({"0": told}).encode())

    def _render(self, request: Request) -> Reply:
        assert request.path == "/v1/completions/render"
        body = json.loads(request.body)
        names = body.get("cartridges") or request.headers["x-cartridges"].split(",")
        if self.status == 200 and (unknown := set(names) - set(CARTRIDGES)):
            return Reply(404, body={"error": {"message": f"no cartridge is called {unknown}"}})
        ids = [token for name in names for token in CARTRIDGES.get(name, [])] + body["prompt"]
        return Reply(self.status, body=json.dumps([{"token_ids": ids}]).encode())

    def hold(self, name: str, blocks: int, medium: str = "GPU") -> None:
        event = stored_event(ord(name), medium)
        event.block_hashes = [ord(name) * 100 + i for i in range(blocks)]
        event.token_ids = CARTRIDGES[name][: blocks * SIZE]
        self.engine.tell([event])


class Running:
    def __init__(self, pods: Mapping[str, Pod], fleet: Fleet, client: TestClient[Any, Any]) -> None:
        self.pods, self.fleet, self.client = pods, fleet, client

    async def pick(self, body: Mapping[str, Any], **headers: str) -> tuple[str, dict[str, Any]]:
        picked = await self.fleet.pick({k.replace("_", "-"): v for k, v in headers.items()}, msgspec.json.encode(body))
        return picked.pod.name, picked.receipt

    async def hold(self, holder: str, name: str, blocks: int = 8, **how: Any) -> None:
        """Have a server hold a cartridge, and wait until that is in the index."""
        before = sum(self.fleet.index.blocks().values())
        self.pods[holder].hold(name, blocks, **how)
        await seen(lambda: sum(self.fleet.index.blocks().values()) == before + blocks)

    async def known(self) -> None:
        await seen(lambda: all(pod.problem is None and pod.is_known for pod in self.fleet.pods))


@pytest.fixture
async def start(tmp_path):
    """Start a service over so many servers, and wait until it knows them."""
    async with AsyncExitStack() as stack:

        async def started(count: int = 2) -> Running:
            pods = {name: Pod(tmp_path / name, name) for name in (f"engine-{number}" for number in range(count))}
            for pod in pods.values():
                stack.enter_context(pod)
                stack.callback(pod.engine.close)
            named = [{"name": name, "url": pod.url} for name, pod in pods.items()]
            fleet = Fleet(of_mapping({"pods": named, "poll_s": 0.05}))
            made = Running(pods, fleet, await stack.enter_async_context(TestClient(TestServer(app(fleet)))))
            await made.known()
            return made

        yield started


def test_a_score_is_llm_ds_and_a_tier_further_away_counts_less():
    assert score({"gpu": 64}, 128, 64) == (1.25, {"gpu": 64}, 0.5, 64)
    both = score({"gpu": 32, "cpu": 64, "disk": 128}, 128, 4000)
    assert both.total == pytest.approx(2.0 * (32 + 0.75 * 32 + 0.25 * 64) / 128) and both.share == 1.0
    assert score({"gpu": 64, "disk": 32}, 128, 0).total == 1.5


def test_of_equal_scores_any_is_picked():
    even = {name: score({}, 0, name == "c") for name in "abc"}
    assert {best(even) for _ in range(100)} == {"a", "b"}


def test_a_key_has_one_owner_and_a_server_that_goes_moves_its_own_keys_only():
    servers, keys = [f"engine-{i}" for i in range(8)], [f"cartridge-{i}" for i in range(2000)]
    before = {key: owner(key, servers) for key in keys}
    assert min(map(Counter(before.values()).__getitem__, servers)) > 180
    gone = {key for key in keys if owner(key, set(servers) - {"engine-3"}) != before[key]}
    assert gone == {key for key in keys if before[key] == "engine-3"}


async def test_who_holds_a_cartridge_is_picked_and_the_receipt_and_metrics_say_why(start):
    fleet = await start(3)
    await fleet.hold("engine-1", "a")
    await fleet.hold("engine-2", "b", medium="CPU")
    await fleet.hold("engine-0", "a", medium="STORAGE", blocks=4)
    for naming in ({"cartridges": ["a"]}, {"cartridges": ["a"], "prompt": "x"}):
        name, receipt = await fleet.pick(naming)
        assert (name, receipt["by"]) == ("engine-1", "score")
    assert receipt["scores"]["engine-1"]["matched"] == {"gpu": 128}
    assert receipt["scores"]["engine-0"]["matched"] == {"disk": 64}
    assert (await fleet.pick({}, x_cartridges="b"))[0] == "engine-2"
    assert sum(len(pod.requests) for pod in fleet.pods.values()) == 2, "once for every way of naming"
    await fleet.pick({"cartridges": ["c"]})
    text = await (await fleet.client.get("/metrics")).text()
    for line in (
        'index_blocks{pod="engine-0",tier="disk"} 4.0', 'picks_total{by="score",pod="engine-1"} 2.0',
        "asked_tokens_total 512.0", "hit_tokens_total 384.0", 'event_lost_total{pod="engine-1"} 0.0',
    ):  # fmt: skip
        assert f"lmcache_cartridge_fleet_{line}\n" in text, text
    assert (await fleet.client.get("/health")).status == 200


async def test_a_cartridge_that_nobody_holds_has_one_owner_and_other_requests_go_by_load(start):
    fleet = await start(3)
    for name in "abcd":
        picked = [await fleet.pick({"cartridges": [name]}) for _ in range(5)]
        assert {(one, receipt["by"]) for one, receipt in picked} == {(owner(name, fleet.pods), "owner")}
    name, receipt = await fleet.pick({"cartridges": ["unheard-of"]})
    assert name == owner("unheard-of", fleet.pods) and "404" in receipt["problem"]
    fleet.pods["engine-0"].waiting, fleet.pods["engine-2"].waiting = 3, 200
    await seen(lambda: [pod.waiting for pod in fleet.fleet.pods] == [3, 0, 200])
    for body in (b'{"prompt": "x"}', b'{"cartridges": 5}', b'{"cartridges": ["a"], "prompt": "'):
        assert (await fleet.fleet.pick({}, body)).pod.name == "engine-1"
    assert (await fleet.fleet.pick({"x-cartridges": "a"}, body)).pod.name == owner("a", fleet.pods)
    await fleet.hold("engine-2", "a")
    assert (await fleet.pick({"cartridges": ["a"]}))[0] == "engine-2", "under any queue"


async def test_a_first_block_that_many_share_does_not_move_a_cartridge_from_its_owner(start):
    """A chat template or a letterhead: whoever loaded one cartridge has the beginning of all."""
    fleet = await start(3)
    home = owner("a", fleet.pods)
    [other, third] = sorted(set(fleet.pods) - {home})
    for holder, blocks, expected in (
        (other, 1, (home, "owner")),  # an eighth of it is not the cartridge
        (third, 4, (third, "score")),  # half of it is
    ):
        await fleet.hold(holder, "a", blocks)
        picked, receipt = await fleet.pick({"cartridges": ["a"]})
        assert (picked, receipt["by"]) == expected


async def test_a_server_that_is_not_healthy_is_left_out_until_it_is_again(start):
    fleet = await start()
    await fleet.hold("engine-1", "a")
    fleet.pods["engine-1"].healthy = False
    await seen(lambda: fleet.fleet.pods[1].problem)
    name, receipt = await fleet.pick({"cartridges": ["a"]})
    assert name == "engine-0" and receipt["left_out"] == {"engine-1": "/health answers 503"}
    fleet.pods["engine-0"].close()
    await seen(lambda: fleet.fleet.pods[0].problem)
    reply = await fleet.client.post("/pick", json={"cartridges": ["a"]})
    error = (await reply.json())["error"]
    assert (reply.status, error["type"], "engine-0: no answer" in error["message"]) == (503, "NoPod", True)
    fleet.pods["engine-1"].healthy = True
    await seen(lambda: fleet.fleet.pods[1].problem is None)
    assert (await fleet.pick({"cartridges": ["a"]}))[0] == "engine-1"


async def test_a_score_is_of_a_requests_cartridges_and_the_tokens_of_its_prompt(start):
    fleet = await start()
    await fleet.hold("engine-1", "a")
    half = [9] * 128
    for request, headers, count, part in (
        ({"cartridges": ["a"], "prompt": half}, {}, 256, 1.0), ({"prompt": CARTRIDGES["a"]}, {}, 128, 2.0),
        ({"prompt": half}, {}, 128, 0.0), ({"prompt": "text"}, {"X-Cartridges": "a"}, 128, 2.0),
    ):  # fmt: skip
        told = await (await fleet.client.post("/score", json=request, headers=headers)).json()
        assert told["receipt"]["tokens"] == count, request
        assert told["scores"] == {"engine-0": 0.5, "engine-1": part + 0.5}, request


async def test_a_name_is_asked_for_once_by_all_who_wait_and_again_when_it_is_old(start, monkeypatch):
    monkeypatch.setattr(tokens, "TTL_S", 0.001)
    fleet = await start(1)
    (pod,) = fleet.pods.values()
    many = await asyncio.gather(*[fleet.pick({"cartridges": ["a"]}) for _ in range(20)])
    assert ([receipt["tokens"] for _, receipt in many], len(pod.requests)) == ([128] * 20, 1)
    await asyncio.sleep(0.01)
    for pod.status, told in ((500, 0), (200, 128)):
        receipt = (await fleet.pick({"cartridges": ["a"]}))[1]
        assert (receipt["tokens"], "problem" in receipt) == (told, told == 0)


async def test_errors_say_what_is_wrong(start):
    fleet = await start()

    async def refused(body: bytes) -> tuple[int, str, str]:
        reply = await fleet.client.post("/score", data=body)
        error = (await reply.json())["error"]
        return reply.status, error["type"], error["message"]

    for body in (b"[]", b"{", b'{"prompt": "x"}', b'{"prompt": [-1]}', b'{"cartridges": ["e"]}'):
        status, kind, message = await refused(body)
        words = "404" if b"cartridges" in body else "token ids"
        assert (status, kind, words in message) == (400, NoTokens.__name__, True), (body, message)
    for pod in fleet.fleet.pods:
        for follower in pod.followers.values():
            follower.known = False
    assert (await refused(b'{"prompt": [1]}'))[:2] == (503, NotReplayed.__name__)


async def test_a_server_whose_events_raise_once_is_followed_again(start, monkeypatch):
    apply, raised = index.Index.apply, []

    def failing(self: index.Index, *event: Any) -> bool:
        if not raised:
            raised.append(event)
            raise RuntimeError("odd")
        return apply(self, *event)

    monkeypatch.setattr(index.Index, "apply", failing)
    fleet = await start(1)
    await fleet.hold("engine-0", "a")
    await fleet.known()  # the replay of which the blocks are the first may not be over
    assert (await fleet.pick({"cartridges": ["a"]}))[1]["scores"]["engine-0"]["total"] == 2.5
    assert raised


def test_a_wrong_configuration_is_refused_with_the_key(tmp_path):
    pod = {"name": "a", "url": "http://a:8000"}
    for wrong, words in (
        ([], "the file"), ({"pods": [pod], "port": 1}, "port"), ({"pods": [pod, pod]}, "one name"),
        ({"pods": [pod, pod | {"name": "b"}]}, "one address"), ({"pods": [pod | {"url": "a:8000"}]}, "pods.0.url"),
    ):  # fmt: skip
        with pytest.raises(SettingsError, match=words):
            of_mapping(wrong)
    (tmp_path / "f.yaml").write_text("pods: [")
    with pytest.raises(SettingsError, match="f.yaml"):
        read_config(tmp_path / "f.yaml")


def test_the_shipped_configuration_is_read():
    config = read_config(Path(__file__).parents[2] / "configs" / "fleet.yaml")
    assert [pod.address for pod in config.pods] == ["engine-0:8000", "engine-1:8000"]
    assert config == FleetConfig(pods=config.pods), "what it shows is the default"


async def test_remembered_tokens_are_bounded(start, monkeypatch):
    monkeypatch.setattr(tokens, "_MAX_KEPT_TOKENS", 800)
    fleet = await start(1)
    (pod,) = fleet.pods.values()
    for name in "abacab":
        await fleet.pick({"cartridges": [name]})
    asked = "".join(json.loads(request.body)["cartridges"][0] for request in pod.requests)
    assert asked == "abcb", "two fit; what was asked for last stays"
