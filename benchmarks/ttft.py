"""Time to first token on a real vLLM server: dense prefill, vLLM's prefix cache, LMCache's own cache, and cartridges.

    python benchmarks/ttft.py [--full] [--positions 256,1024,4096,16384] [--concurrency 1,4,16] [--shape Qwen2.5-7B]

A model with random weights in the shape of Qwen2.5-0.5B (another by --shape) is made once (nothing is downloaded), and for each p a cartridge of
random KV: times do not depend on what the numbers are. One stock server, asked by the stock OpenAI client with a question
of 32 tokens after p others; every answer has 16 tokens. A second server runs beside it in multiprocess mode, with LMCache's
server beside that. The ways, in turns:

  dense     the document's tokens, every one computed
  prefix    the same prompt again: vLLM's own prefix cache has it, nothing is loaded
  localcpu  a document that is no cartridge: LMCache saved its KV when vLLM computed it, and has it in its CPU cache; vLLM
            has been told to forget it (/reset_prefix_cache)
  warm      the cartridge, resident in the cpu tier
  disk      the cartridge, evicted from memory and its file dropped from the page cache
  mp-...    in multiprocess mode: mp-l1 is LMCache's own cache there, mp-warm the cartridge

A sample counts only if the server says that all its tokens came from where its way means, by vLLM's counters; another one ends
the run. Dense prefill on CPU takes minutes at large p, so it has few samples, and at
c > 1 only up to p = 1024, as has what LMCache saves, which has to be computed once (all with --full).
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import report
from retrieval import drop, finite_bytes
from serving import serving
from sizes import SHAPES, TINY, Shape
from wards import Asker

from lmcache_cartridge.artifact.model import Fingerprint
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.serve.launch import on_cpu
from lmcache_cartridge.settings import Settings, from_mapping

MEASURES = ["artifact", "library", "sources", "memory", "engine", "serve"]
CHUNK = 256
QUESTION = 32
ANSWER = 16
SMALL = 1024
"""The largest p that is computed for several requests at once, but for `--full`."""

SETTLE_S = 2.0 if len(os.sched_getaffinity(0)) < 8 else 0.2
"""Pause before a request to the other server, and before one that loads. For a second after each request vLLM's workers wait
for more in a loop, which keeps a core and their Python interpreter from what loads."""


class Way(NamedTuple):
    """Where the KV of a document comes from."""

    source: Literal["nowhere", "vllm", "lmcache", "cartridge"]
    is_cold: bool = False
    is_multiprocess: bool = False


WAYS = {
    "dense": Way("nowhere"),
    "prefix": Way("vllm"),
    "localcpu": Way("lmcache"),
    "warm": Way("cartridge"),
    "disk": Way("cartridge", is_cold=True),
    "mp-l1": Way("lmcache", is_multiprocess=True),
    "mp-warm": Way("cartridge", is_multiprocess=True),
}


class Sample(NamedTuple):
    """One way, asked once by each of `c` clients at the same time, and what the server says of it."""

    way: str
    p: int
    c: int
    first_s: list[float]
    """Seconds from each request to its first token."""
    vllm: int
    """Tokens that vLLM's own prefix cache had, by its counter."""
    connector: int
    """Tokens that came by the connector, LMCache's and cartridges', by vLLM's counter."""
    resident: tuple[int, int] = (0, 0)
    """Chunks of the cartridge in memory before, and all."""


class NotThisWay(Exception):
    """A sample whose tokens came from elsewhere than its way means."""


def check(sample: Sample) -> None:
    """Raise `NotThisWay` unless every token of every document came from where the way means, and none from elsewhere."""
    way, whole = WAYS[sample.way], sample.p * sample.c
    held, chunks = sample.resident
    found = {"vLLM's prefix cache": sample.vllm, "the connector": sample.connector, "chunks in memory before": held}
    wanted = [
        whole * (way.source == "vllm"),
        whole * (way.source in ("lmcache", "cartridge")),
        chunks * (not way.is_cold),
    ]
    if [*found.values()] != wanted or (way.source == "cartridge") != (chunks > 0):
        raise NotThisWay(f"{sample.way}, p {sample.p}, c {sample.c}: {found} of {chunks} chunks, not {wanted}")


def make_model(root: Path, shape: Shape) -> Path:
    """Write a model of random weights and a tokenizer that knows every id; no change where it is already."""
    if (root / "tokenizer.json").exists():
        return root
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM

    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(json.dumps(shape.config()))
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(root), dtype=torch.bfloat16)
    model.save_pretrained(root)
    words = {"<s>": 0, "</s>": 1, **{f"w{i}": i for i in range(2, shape.vocabulary)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    about = {"backend": "tokenizers", "bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "TokenizersBackend"}
    (root / "tokenizer_config.json").write_text(json.dumps(about))
    tokenizer.save(str(root / "tokenizer.json"))
    return root


def document(name: str, p: int, vocabulary: int) -> list[int]:
    """Return the token ids of a document of p tokens."""
    seed = [p, *name.encode()]
    return np.random.default_rng(seed).integers(2, vocabulary, p).tolist()


def make_cartridge(root: Path, fingerprint: Fingerprint, name: str, ids: list[int]) -> Path:
    """Write a cartridge of small random KV."""
    data = np.frombuffer(finite_bytes(CHUNK * fingerprint.token_bytes), "<u2") & 0x3FFF  # magnitudes below 2
    report.write_artifact(root / name, fingerprint, np.array(ids), CHUNK, data.tobytes())
    return root / name


class Server:
    """Asks one server in every way of its mode."""

    def __init__(self, asker: Asker, model: Path, vocabulary: int, payloads: dict[str, Path]) -> None:
        """`payloads` are the files on this machine to drop from its page cache, by cartridge."""
        self._asker, self._client = asker, asker.openai.with_options(timeout=3600)
        self._model, self._vocabulary, self._payloads = str(model), vocabulary, payloads
        self._random = np.random.default_rng(7)
        self._saved: set[tuple[int, int]] = set()

    def sample(self, way: str, p: int, c: int) -> Sample:
        """Ask in one way by `c` clients at once, having brought the server to where that begins."""
        is_named = WAYS[way].source == "cartridge"
        resident = self._cartridge(f"doc-{p}", cold=WAYS[way].is_cold) if is_named else (0, 0)
        bodies = [self._body(way, p, client) for client in range(c)]
        self._fill(way, p, c)
        before = self._counters()
        first_s = self._together(bodies)
        vllm, connector = (now - then for now, then in zip(self._counters(), before, strict=True))
        return Sample(way, p, c, first_s, vllm, connector, resident)

    def _fill(self, way: str, p: int, c: int) -> None:
        """Have vLLM or LMCache keep the document of each client, untimed."""
        source = WAYS[way].source
        if source == "vllm":
            self._together([self._body(way, p, 0)])
        elif source == "lmcache":
            missing = [client for client in range(c) if (p, client) not in self._saved]
            self._together([self._body(way, p, client) for client in missing])
            self._saved |= {(p, client) for client in missing}
            self._asker.forget()

    def _together(self, bodies: Sequence[dict[str, Any]]) -> list[float]:
        with ThreadPoolExecutor(max(len(bodies), 1)) as pool:
            return list(pool.map(self._ask, bodies))

    def _body(self, way: str, p: int, client: int) -> dict[str, Any]:
        question = self._random.integers(2, self._vocabulary, QUESTION).tolist()
        source, salt = WAYS[way].source, uuid.uuid4().hex
        if source == "cartridge":
            return {"prompt": question, "cartridges": [f"doc-{p}"], "cache_salt": salt}
        if source != "nowhere":
            salt = f"{way}-{p}-{0 if source == 'vllm' else client}"
        text = document("saved" if source == "lmcache" else "doc", p, self._vocabulary)
        body = {"prompt": text + question, "cache_salt": salt}
        if source != "lmcache":  # what vLLM keeps LMCache is not to keep too
            body |= {"cartridges": False, "kv_transfer_params": {"lmcache.skip_save": True}}
        return body

    def _ask(self, body: dict[str, Any]) -> float:
        """Return the seconds to the first token of an answer, once it has ended."""
        started = time.perf_counter()
        # As `prompt` itself the client would look at each id.
        with self._client.completions.create(
            model=self._model, prompt="", max_tokens=ANSWER, temperature=0, stream=True,
            extra_body={"ignore_eos": True, **body},
        ) as events:  # fmt: skip
            next(events)
            first_s = time.perf_counter() - started
            for _ in events:
                pass
        return first_s

    def _counters(self) -> tuple[int, int]:
        vllm, connector = (self._asker.metric(f"vllm:{of}prefix_cache_hits_total") for of in ("", "external_"))
        return int(vllm), int(connector)

    def _cartridge(self, name: str, *, cold: bool) -> tuple[int, int]:
        """Return how many chunks of a cartridge are in memory, and all; of a cold one once it is out of it."""
        if cold:
            self._asker.http.post(f"/v1/cartridges/{name}/evict").raise_for_status()
            drop([self._payloads[name]])
        tiers = self._asker.state(name)["tiers"]
        found = [tiers[tier] for tier in ("device", "cpu") if tier in tiers]
        return max(tier["resident_chunks"] for tier in found), found[0]["chunks"]


class Plan(NamedTuple):
    """What is asked."""

    positions: list[int]
    concurrency: list[int]
    repeat: int
    full: bool

    def samples(self, way: str, p: int, c: int) -> int:
        """Return how many samples this cell gets; none where it would take too long."""
        source = WAYS[way].source
        most = SMALL if on_cpu() else 4 * SMALL
        if c > 1 and p > most and not self.full and (source == "lmcache" or source == "nowhere" and on_cpu()):
            return 0
        if source == "nowhere":
            return self.repeat if p * c <= SMALL or not on_cpu() else 1 if p * c > 4096 else 2
        return max(2, self.repeat // (2 if c > 1 else 1))


def touch(servers: dict[bool, Server], plan: Plan) -> None:
    """Have each server write to its blocks: what is written to for the first time the system has to give it first.

    Where 7 MiB were written to for the first time that took 5 to 8 ms here, longer than to inject them.
    """
    for way in ("warm", "mp-warm"):
        # One alone first: of many that are cold at once LMCache's server has memory for four, and the others are computed.
        for c in (1, *2 * [max(plan.concurrency) + 1]):
            servers[WAYS[way].is_multiprocess].sample(way, max(plan.positions), c)


def measure(servers: dict[bool, Server], plan: Plan) -> list[Sample]:
    """Ask in all ways, by turns within each p and c; `servers` by whether a way is of multiprocess mode.

    Raises `NotThisWay` for the first sample whose tokens came from elsewhere.
    """
    found, last = [], None
    touch(servers, plan)
    for p in plan.positions:
        for way in WAYS:
            if way != "dense":  # the first of each way warms up
                servers[WAYS[way].is_multiprocess].sample(way, p, 1)
        for c in plan.concurrency:
            for turn in range(max(plan.samples(way, p, c) for way in WAYS)):
                for way in WAYS:
                    if turn < plan.samples(way, p, c):
                        server = servers[WAYS[way].is_multiprocess]
                        if server is not last or WAYS[way].is_cold:
                            time.sleep(SETTLE_S)
                        last = server
                        sample = server.sample(way, p, c)
                        check(sample)
                        found.append(sample)
                        report.say(f"p {p}, c {c}, {way}: first token after {statistics.median(sample.first_s):.3f} s")
    return found


def figures(samples: Sequence[Sample]) -> list[report.Figure]:
    """Return the figures of each p, c and way."""
    cells: dict[tuple[str, int, int], list[float]] = {}
    for sample in samples:
        cells.setdefault((sample.way, sample.p, sample.c), []).extend(sample.first_s)
    return [report.Figure.of(first_s, "first token", "s", way=way, p=p, c=c) for (way, p, c), first_s in cells.items()]


def started(model: Path, settings: Settings, log: Path, plan: Plan, token_bytes: int, mode: str) -> Any:
    """Return what starts a stock server with our plugin in a mode, LMCache saving beside it."""
    longest, largest = max(plan.positions) + QUESTION + ANSWER, max(plan.concurrency)
    saving = "mp-l1" if mode == "multiprocess" else "localcpu"
    saved = sum(p * max([c for c in plan.concurrency if plan.samples(saving, p, c)] or [1]) for p in plan.positions)
    l1_tokens = 2 * saved + (8 * longest if mode == "multiprocess" else 0)
    blocks_bytes = (largest + 2) * (longest + 256) * token_bytes
    options = [
        "--max-model-len",
        str(longest + 64),
        "--dtype",
        "bfloat16",
        "--kv-cache-memory-bytes",
        str(blocks_bytes),
        *([] if on_cpu() else ["--gpu-memory-utilization", "0.4", "--no-enforce-eager"]),  # two servers on one GPU
    ]
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_SERVER_DEV_MODE": "1"}  # the latter for /reset_prefix_cache
    return serving(
        settings, log, str(model), *options, environment=environment, mode=mode, saves=True,
        l1_bytes=(256 << 20) + l1_tokens * token_bytes,
    )  # fmt: skip


def make_plan(options: Any) -> Plan:
    """Return what is asked for."""
    if options.smoke:
        return Plan([256], [1, 2], 2, False)
    positions = options.positions or [256, 1024, 4096, 16_384] + ([32_768] if options.full else [])
    return Plan(positions, options.concurrency, options.repeat or (15 if options.full else 5), options.full)


def prepare(plan: Plan, shape: Shape, model: Path, settings: Settings, scratch: Path) -> dict[str, Path]:
    """Make and register the cartridges; return the payloads here by name."""
    from lmcache_cartridge.make.model import CausalModel

    fingerprint = CausalModel(str(model)).fingerprint
    registry, payloads = Registry(settings.registry_path), {}
    for p in plan.positions:
        root = make_cartridge(scratch, fingerprint, f"doc-{p}", document("doc", p, shape.vocabulary))
        registry.register(root)
        payloads[root.name] = root / "payload.safetensors"
    return payloads


def numbers(text: str) -> list[int]:
    """Parse `1,2,3`."""
    return [int(number) for number in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    bench = report.Benchmark(__file__, __doc__, MEASURES)
    bench.parser.add_argument("--positions", type=numbers, help="values of p, multiples of 256")
    bench.parser.add_argument("--concurrency", type=numbers, default=[1, 4, 16])
    bench.parser.add_argument("--repeat", type=int, help="samples of each way but dense")
    bench.parser.add_argument("--shape", choices=SHAPES, default="Qwen2.5-0.5B", help="of the model")
    bench.parser.add_argument("--model", type=Path, help="where the model is, or is made and kept")
    options = bench.start(arguments)
    plan, shape = make_plan(options), TINY if options.smoke else SHAPES[options.shape]
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cartridge-ttft-")))
        os.environ["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
        report.say(f"making the model ({shape.name}) and cartridges of {plan.positions} positions")
        model = make_model(options.model or scratch / "model", shape)
        settings = from_mapping(
            {
                "home": scratch / "home", "disk_dir": scratch / "cache", "admin": True, "ready_timeout_s": 600,
                "cpu_bytes": (2 * sum(plan.positions) + CHUNK) * shape.token_bytes,
            }
        )  # fmt: skip
        payloads, servers = prepare(plan, shape, model, settings, scratch), {}
        for mode in ("in-process", "multiprocess"):
            report.say(f"starting vLLM, {mode}")
            asker = stack.enter_context(started(model, settings, scratch / mode, plan, shape.token_bytes, mode))
            servers[mode == "multiprocess"] = Server(asker, model, shape.vocabulary, payloads)
        samples = measure(servers, plan)
    bench.publish(figures(samples))


if __name__ == "__main__":
    main()
