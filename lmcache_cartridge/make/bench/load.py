"""Load: runs of vLLM's own load generator, `vllm bench serve`, in ways that take turns; one counts only where the server's
counters prove its way."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import io
import os
import re
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ...errors import CartridgeError, SourceError, UnsupportedEngine
from ..progress import Progress, silent
from .places import Place
from .target import Target, most
from .watch import memory_of

Way = Literal["dense", "prefix", "warm", "cold"]
WAYS: tuple[Way, ...] = ("dense", "prefix", "warm", "cold")
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
    turn: int
    seconds: float
    ttft_s: list[float]
    itl_s: list[list[float]]
    """Of each answer, between its tokens."""
    tokens: list[int]
    texts: list[str]
    errors: list[str]
    """Why there are no answers, each reason once."""
    cached: tuple[int, int] | None
    """Prompt tokens that vLLM's own prefix cache had, and that its connector brought, by its counters; None without these."""
    wrong: str | None
    """Why it is none of its way, so that it is in no figure."""

    @property
    def is_good(self) -> bool:
        """Whether it is in the figures."""
        return not self.errors and self.wrong is None


class Plan(NamedTuple):
    """What is asked."""

    places: Sequence[Place]
    concurrency: Sequence[int]
    repeat: int
    tokens: int
    budget_s: float

    @property
    def questions(self) -> int:
        """How many questions it takes: a turn's ways share theirs, and no two turns do."""
        return 1 + 2 * self.repeat * sum(self.concurrency)


class Measured:
    """What came of it so far."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.left_out: dict[str, None] = {}
        """Why ways are not there; in order, each once."""
        self.stopped: str | None = None
        """Why it ended before its end."""
        self.seconds = 0.0
        self.memory: list[tuple[float, float]] = []
        """Seconds from the start, and the server's bytes."""
        self.memory_of = ""
        """Whose memory is read and how, or why it is not."""


class Load:
    """Asks one server in every way."""

    def __init__(self, target: Target, questions: Sequence[list[int]], tokens: int) -> None:
        """Raises `UnsupportedEngine` where vLLM is not installed here, whose load generator asks."""
        self._target, self._questions, self._tokens = target, questions, tokens
        self._kept: dict[int, str] = {}
        self._benchmark = _vllm()

    def measure(self, plan: Plan, progress: Progress = silent) -> Measured:
        """Ask in all ways by turns. Out of time or interrupted, it returns what there is. Never raises for a request."""
        found, started, done = Measured(), time.monotonic(), 0
        found.memory_of, memory = memory_of(self._target)
        number = len(plan.places) * len(plan.concurrency) * plan.repeat * len(WAYS)
        try:
            for place in plan.places:
                ways = [way for way in WAYS if self._is_to_be_had(way, place, found)]
                question = 1
                for c in plan.concurrency:
                    for turn in range(plan.repeat):
                        for way in ways:
                            if time.monotonic() - started > plan.budget_s:
                                found.stopped = (
                                    f"the budget of {plan.budget_s:g} s was used up; what is missing was not measured"
                                )
                                return found
                            count = c if way == "cold" else 2 * c  # of a cold cartridge those that find it so
                            found.runs.append(self.run(way, place, c, turn, count, question))
                            done += 1
                            if memory:
                                found.memory.append((time.monotonic() - started, memory()))
                            progress(f"p {place.p}, c {c}, {way}", done, number)
                        question += 2 * c
        except KeyboardInterrupt:
            found.stopped = "interrupted; what is missing was not measured"
        finally:
            found.seconds = time.monotonic() - started
        return found

    def _is_to_be_had(self, way: Way, place: Place, found: Measured) -> bool:
        """Whether a way can be measured at a place; its first requests are over then. Why it cannot be is noted."""
        why = None
        if way in ("warm", "cold"):
            if not self._target.has_cartridges:
                why = f"{way}: no cartridges: the server has no route /v1/cartridges"
            elif place.cartridge is None:
                why = f"{way}: p = {place.p}: no cartridge of this length"
            elif way == "cold" and (refused := self._target.evict(place.cartridge)):
                why = f"cold, p = {place.p}: {refused}"
        if why is None:
            self._ask(way, place, 1, 1, 0)
        else:
            found.left_out[why] = None
        return why is None

    def run(self, way: Way, place: Place, c: int, turn: int, count: int, question: int) -> Run:
        """Bring the server to where a way begins, untimed, and send `count` requests, `c` at once. Blocks to their end."""
        wrong, before = self._prepare(way, place), self._counters()
        told = self._ask(way, place, c, count, question)
        after = self._counters()
        # vLLM's client tells a whole traceback, or what the server said.
        errors = list(dict.fromkeys(each.strip().splitlines()[-1][:300] for each in told["errors"] if each.strip()))
        if not errors and not all(told["ttfts"]):
            errors = ["a stream ended without a token"]
        cached = None
        if before and after:
            cached = after[0] - before[0], after[1] - before[1]
            wrong = wrong or not_so(way, place, count, cached, after[2])
        return Run(
            place.p, c, way, turn, told["duration"], told["ttfts"], told["itls"], told["output_lens"],
            told["generated_texts"], errors, cached, wrong,
        )  # fmt: skip

    def _prepare(self, way: Way, place: Place) -> str | None:
        """Return why the requests to come cannot be of their way."""
        if way == "prefix":  # again, since the dense prompts between may have taken its blocks
            self._ask(way, place, 1, 1, 0)
        if place.cartridge is None or way not in ("warm", "cold"):
            return None
        try:
            if way == "cold":
                return self._cold(place.cartridge, place.files)
            is_warm = most(self._target.cartridge(place.cartridge), "resident_chunks") >= place.chunks
            return None if is_warm else f"{place.cartridge} was not in memory before"
        except CartridgeError as error:
            return str(error)

    def _cold(self, name: str, files: Sequence[Path]) -> str | None:
        until = time.monotonic() + _IDLE_S
        while True:
            if refused := self._target.evict(name):
                return refused
            if not most(self._target.cartridge(name), "resident_chunks"):
                for file in files:
                    drop(file)
                return None
            if time.monotonic() > until:
                return f"{name} stays in memory: it is pinned, or others ask for it"
            time.sleep(_POLL_S)  # a request that has just ended lets go of it

    def _ask(self, way: Way, place: Place, c: int, count: int, question: int) -> dict[str, Any]:
        """Send requests by vLLM's load generator and return its result."""
        from vllm.benchmarks.datasets import SampleRequest
        from vllm.benchmarks.serve import TaskType

        samples, target = [], self._target
        for asked in self._questions[question : question + count]:
            ids, fields = self._request(way, place, asked)
            samples.append(
                SampleRequest(
                    prompt=ids, prompt_len=len(ids), expected_output_len=self._tokens, request_overrides=fields
                )
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
        salt = {"cache_salt": self._kept.setdefault(place.p, own) if way == "prefix" else own}
        return [*place.document, *question], salt | (_COMPUTED if self._target.has_cartridges else {})

    def _counters(self) -> tuple[int, int, int] | None:
        """Return vLLM's counters of cached tokens, its own and the connector's, and its block size; None without them."""
        try:
            text = self._target.send("GET", "/metrics").text
        except SourceError:
            return None
        found = dict[str, float]()
        for name, value in _COUNTER.findall(text):
            found[name] = found.get(name, 0.0) + float(value)
        block = _BLOCK.search(text)
        if "prefix_cache_hits" not in found or block is None:
            return None
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


def drop(file: Path) -> None:
    """Have the system forget what it keeps of a file; no change where it cannot."""
    with contextlib.suppress(OSError, AttributeError):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
