"""Load: runs of vLLM's own load generator, `vllm bench serve`, in ways that take turns; one counts only where the server's
counters prove its way."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import io
import re
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Literal, NamedTuple

from ...errors import CartridgeError, SourceError, UnsupportedEngine
from ..progress import Progress, silent
from .places import Place, questions
from .target import Target, most
from .watch import memory_of

Way = Literal["dense", "prefix", "warm", "cold"]
WAYS: tuple[Way, ...] = ("dense", "prefix", "warm", "cold")
TOKENS = 16
"""Tokens of each answer."""
_COMPUTED = {"cartridges": False, "kv_transfer_params": {"lmcache.skip_save": True}}
_IDLE_S, _POLL_S = 10.0, 0.05
"""How long an evicted cartridge may be held by requests that have just ended."""
_COUNTER = re.compile(r"^vllm:(prefix_cache_hits|external_prefix_cache_hits)_total\{.*\} (\S+)$", re.M)
_BLOCK = re.compile(r'^vllm:cache_config_info\{.*\bblock_size="(\d+)"', re.M)


class Run(NamedTuple):
    """Requests that one way sent, no more than `c` at once."""

    p: int
    c: int
    way: Way
    seconds: float
    ttft_s: list[float]
    itl_s: list[list[float]]
    """Of each answer, between its tokens."""
    tokens: list[int]
    cached: tuple[int, int]
    """Prompt tokens that vLLM's own prefix cache had, and that its connector brought, by its counters."""
    wrong: list[str]
    """Why it is in no figure: errors, or that it is none of its way. Each reason once."""


class Measured:
    """What came of it so far."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.left_out: dict[str, None] = {}
        """Why ways are not there; in order, each once."""
        self.is_interrupted = False
        self.seconds = 0.0
        self.memory: list[tuple[float, float]] = []
        """Seconds from the start, and the server's bytes."""
        self.memory_of = ""
        """Whose memory is read and how, or why it is not."""


class Load:
    """Asks one server in every way."""

    def __init__(self, target: Target) -> None:
        """Raises `UnsupportedEngine` where vLLM is not installed here, whose load generator asks."""
        self._target, self._questions = target, questions(target)
        self._salts: dict[int, str] = {}
        self._benchmark = _vllm()

    def measure(
        self, places: Sequence[Place], concurrency: Sequence[int], repeat: int, progress: Progress = silent
    ) -> Measured:
        """Ask in all ways by turns. Interrupted, it returns what there is. Raises for no request, but where nothing is counted."""
        found, started = Measured(), time.monotonic()
        found.memory_of, memory = memory_of(self._target)
        ways = WAYS if self._target.has_cartridges else WAYS[:2]
        if not self._target.has_cartridges:
            found.left_out["no cartridges: the server has no route /v1/cartridges"] = None
        turns = [(place, c, way) for place in places for c in concurrency for _ in range(repeat) for way in ways]
        try:
            for done, (place, c, way) in enumerate(turns, 1):
                if why := self._prepare(way, place):
                    found.left_out[f"{way}, p = {place.p}: {why}"] = None
                else:
                    found.runs.append(self.run(way, place, c))
                    if memory:
                        found.memory.append((time.monotonic() - started, memory()))
                progress(f"p {place.p}, c {c}, {way}", done, len(turns))
        except KeyboardInterrupt:
            found.is_interrupted = True
        finally:
            found.seconds = time.monotonic() - started
        return found

    def run(self, way: Way, place: Place, c: int) -> Run:
        """Send twice `c` requests, `c` at once; of a cold cartridge those that find it so. Blocks to their end."""
        count = c if way == "cold" else 2 * c
        vllm, connector, block = self._counters()
        told = self._ask(way, place, c, count)
        had, brought, _ = self._counters()
        cached = had - vllm, brought - connector
        # vLLM's client tells a whole traceback, or what the server said.
        wrong = [each.strip().splitlines()[-1][:300] for each in told["errors"] if each.strip()]
        if why := not_so(way, place, count, cached, block):
            wrong.append(why)
        return Run(
            place.p, c, way, told["duration"], told["ttfts"], told["itls"], told["output_lens"], cached,
            list(dict.fromkeys(wrong)),
        )  # fmt: skip

    def _prepare(self, way: Way, place: Place) -> str | None:
        """Bring the server to where a way begins, or return why it cannot be there."""
        if way in ("warm", "cold") and place.cartridge is None:
            return "no cartridge of this length"
        if way != "cold":  # each time: what was asked between may have taken its place in memory
            self._ask(way, place, 1, 1)
        if place.cartridge is None or way in ("dense", "prefix"):
            return None
        try:
            if way == "cold":
                return self._cold(place.cartridge)
            is_warm = most(self._target.cartridge(place.cartridge), "resident_chunks") >= place.chunks
            return None if is_warm else f"{place.cartridge} was not in memory before"
        except CartridgeError as error:
            return str(error)

    def _cold(self, name: str) -> str | None:
        until = time.monotonic() + _IDLE_S
        while time.monotonic() < until:
            self._target.request("POST", f"/v1/cartridges/{name}/evict")
            if not most(self._target.cartridge(name), "resident_chunks"):
                return None
            time.sleep(_POLL_S)  # a request that has just ended lets go of it
        return f"{name} stays in memory: it is pinned, or others ask for it"

    def _ask(self, way: Way, place: Place, c: int, count: int) -> dict[str, Any]:
        """Send requests by vLLM's load generator and return its result."""
        from vllm.benchmarks.datasets import SampleRequest
        from vllm.benchmarks.serve import TaskType

        samples, target = [], self._target
        for question in islice(self._questions, count):
            ids, fields = self._request(way, place, question)
            samples.append(
                SampleRequest(prompt=ids, prompt_len=len(ids), expected_output_len=TOKENS, request_overrides=fields)
            )
        headers = {"Authorization": ""} | target.headers  # else it would send $OPENAI_API_KEY
        given: dict[str, Any] = {
            "task_type": TaskType.GENERATION, "endpoint_type": "openai",
            "api_url": f"{target.url}/v1/completions", "base_url": target.url, "model_id": target.model,
            "model_name": target.model, "tokenizer": None, "input_requests": samples, "logprobs": None,
            "request_rate": float("inf"), "burstiness": 1.0, "disable_tqdm": True, "num_warmups": 0, "profile": False,
            "selected_percentile_metrics": [], "selected_percentiles": [], "ignore_eos": True,
            "goodput_config_dict": {}, "max_concurrency": c, "lora_modules": None, "extra_headers": headers,
            "extra_body": {"temperature": 0}, "ready_check_timeout_sec": 0,
        }  # fmt: skip
        known = inspect.signature(self._benchmark).parameters
        with _quiet():  # that all have failed; each error is told
            try:
                return asyncio.run(self._benchmark(**{name: value for name, value in given.items() if name in known}))
            except (ValueError, OSError) as error:
                raise SourceError(f"{target.url}: {error}") from error

    def _request(self, way: Way, place: Place, question: list[int]) -> tuple[list[int], dict[str, Any]]:
        """Return a prompt, and the fields of its own."""
        own = uuid.uuid4().hex
        if way in ("warm", "cold"):
            return question, {"cartridges": [place.cartridge], "cache_salt": own}
        salt = {"cache_salt": self._salts.setdefault(place.p, own) if way == "prefix" else own}
        return [*place.document, *question], salt | (_COMPUTED if self._target.has_cartridges else {})

    def _counters(self) -> tuple[int, int, int]:
        """Return vLLM's counters of cached tokens, its own and the connector's, and its block size. Raises `SourceError`."""
        text = self._target.send("GET", "/metrics").text
        found = dict[str, float]()
        for name, value in _COUNTER.findall(text):
            found[name] = found.get(name, 0.0) + float(value)
        block = _BLOCK.search(text)
        if "prefix_cache_hits" not in found or block is None:
            raise SourceError(
                f"{self._target.url}/metrics has no counters of vLLM's, by which alone a run shows its way"
            )
        return int(found["prefix_cache_hits"]), int(found.get("external_prefix_cache_hits", 0)), int(block[1])


def not_so(way: Way, place: Place, count: int, cached: tuple[int, int], block: int) -> str | None:
    """Return why `count` requests are none of their way, by the tokens that came from vLLM's cache and by its connector."""
    vllm, connector = cached
    told = f"of {count * place.p} tokens vLLM's prefix cache had {vllm}, its connector brought {connector}"
    if way == "dense":
        is_so = not vllm and not connector
    elif way == "prefix":
        is_so = vllm > count * (place.p - block) and not connector
    else:  # whole chunks, of which the last is no shorter than what is behind it
        is_so = not vllm and count * place.p * place.chunks / (place.chunks + 1) < connector <= count * place.p
    return None if is_so else f"{told}; that is not {way}, unless others asked meanwhile"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _vllm() -> Callable[..., Any]:
    """Return vLLM's load generator. Raises `UnsupportedEngine` without vLLM."""
    try:
        with _quiet():
            from vllm.benchmarks.serve import benchmark
    except ImportError as error:
        raise UnsupportedEngine(
            f"bench asks by `vllm bench serve`, and vLLM's load generator cannot be imported here ({error}): install vLLM on "
            "this machine, or run bench where the server is"
        ) from None
    return benchmark
