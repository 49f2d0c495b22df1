"""Time to first token on a real vLLM server: dense prefill, vLLM's prefix cache, LMCache LocalCPU, and cartridges.

    python benchmarks/ttft.py [--full] [--s3] [--positions 256,1024,4096,16384] [--concurrency 1,4,16] [--threads N]

A model with random weights in the shape of Qwen2.5-0.5B is made once (nothing is downloaded), and for each p a cartridge of
random KV: times do not depend on what the numbers are. One stock server, asked by the stock OpenAI client with a question
of 32 tokens after p others; every answer has 16 tokens. Each request has a `cache_salt` of its own, but `prefix` repeats
one. A second server runs beside it in multiprocess mode, with LMCache's server beside that. The ways, in turns:

  dense     the document's tokens, every one computed
  prefix    the same prompt again: vLLM's own prefix cache has it, nothing is loaded; nothing can be faster
  own       the same, but that no two of the requests share blocks: what is left of a hit where nothing is loaded, and
            each has keys and values of its own to read
  localcpu  LMCache's LocalCPU backend holds the chunks. LMCache 0.5.6 has no connector for CPU, so it is filled by
            `localcpu.py` and injected by our connector; its own path cannot run here
  warm      the cartridge, resident in the cpu tier
  disk      the cartridge, evicted from memory and its file dropped from the page cache
  s3        the same from an S3 server (--s3), evicted from memory and the disk tier
  s3-raw    no request: the same bytes by ranged GETs of the same client
  mp-warm   the cartridge in multiprocess mode: LMCache's server has kept its own copy
  mp-cpu    the same, LMCache's server told to forget what it has: resident in the adapter's cpu tier only
  mp-disk   the same, evicted from there too, and its file dropped from the page cache

Dense prefill on CPU takes minutes at large p, so it has few samples, and at c > 1 only up to p = 1024 (all with --full).
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import tempfile
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import report
from chunks import drop, finite_bytes, push, start_s3, written
from sizes import SHAPES, Shape

from lmcache_cartridge.artifact.fingerprint import Fingerprint
from lmcache_cartridge.artifact.location import parse
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.settings import Settings, from_mapping

CHUNK = 256
QUESTION = 32
ANSWER = 16
COMMON = ["dense", "prefix", "localcpu", "warm", "disk"]
MULTIPROCESS = ["mp-warm", "mp-cpu", "mp-disk"]
DENSE_ALONE = 1024
"""The largest p that is computed for several requests at once, but for `--full`."""
TINY = Shape("tiny", 2, 128, 2, 2, 64, 256, 2000)


class Answer(NamedTuple):
    """Times of one streamed answer, in seconds from its request."""

    first_s: float
    last_s: float
    tokens: int
    cached_tokens: int


class Sample(NamedTuple):
    """One way, asked once by each of `c` clients at the same time."""

    way: str
    p: int
    c: int
    wall_s: float
    answers: list[Answer]


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
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(root), dtype=torch.bfloat16)
    model.save_pretrained(root)
    words = {"<s>": 0, "</s>": 1, **{f"w{i}": i for i in range(2, shape.vocabulary)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    about = {"backend": "tokenizers", "bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "TokenizersBackend"}
    (root / "tokenizer_config.json").write_text(json.dumps(about))
    tokenizer.save(str(root / "tokenizer.json"))
    return root


def document_ids(p: int, vocabulary: int) -> list[int]:
    """Return the token ids of the document of p tokens."""
    return np.random.default_rng(p).integers(2, vocabulary, p).tolist()


def make_cartridge(root: Path, fingerprint: Fingerprint, name: str, ids: list[int]) -> Path:
    """Write a cartridge of small random KV."""
    data = np.frombuffer(finite_bytes(CHUNK * fingerprint.token_bytes), "<u2") & 0x3FFF  # magnitudes below 2
    report.write_artifact(root / name, fingerprint, np.array(ids), CHUNK, data.tobytes())
    return root / name


class Memory:
    """Resident memory of a process group over time, in the background."""

    def __init__(self, group: int, every_s: float = 0.5) -> None:
        self.phase, self.samples = "start", []
        self._group, self._every_s, self._stop = group, every_s, threading.Event()
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            self.samples.append((round(time.monotonic() - self._started, 1), self.phase, resident_bytes(self._group)))


def resident_bytes(group: int) -> int:
    """Return the resident memory of a process group; shared pages count once for each process."""
    pages = 0
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            if entry.name.isdigit() and os.getpgid(int(entry.name)) == group:
                pages += int((entry / "statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


class Asker:
    """Asks one server in every way of its mode."""

    def __init__(
        self, url: str, model: Path, vocabulary: int, payloads: dict[int, Path], lmcache: str | None = None
    ) -> None:
        """`lmcache` is where LMCache's server, in multiprocess mode, answers HTTP."""
        from openai import OpenAI

        self._client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=3600)
        self._url, self._model, self._vocabulary, self._payloads = url, str(model), vocabulary, payloads
        self._lmcache = lmcache
        self._random = np.random.default_rng(7)
        self._salts: dict[int, str] = {}

    def sample(self, way: str, p: int, c: int) -> Sample:
        """Ask in one way by `c` clients at once."""
        if way in ("mp-cpu", "mp-disk"):
            _post(f"{self._lmcache}/cache/clear")
        if way in LOADING:
            self._evict(way, p)
        if way == "prefix" and p not in self._salts:
            self._salts[p] = uuid.uuid4().hex
        bodies = [self._body(way, p, client) for client in range(c)]
        if way == "own":
            with ThreadPoolExecutor(c) as pool:
                list(pool.map(self._ask, [self._body(way, p, client, fills=True) for client in range(c)]))
        with ThreadPoolExecutor(c) as pool:
            started = time.perf_counter()
            answers = list(pool.map(self._ask, bodies))
            wall_s = time.perf_counter() - started
        return Sample(way, p, c, wall_s, answers)

    def _body(self, way: str, p: int, client: int, *, fills: bool = False) -> dict[str, Any]:
        question = self._random.integers(2, self._vocabulary, QUESTION).tolist()
        own = uuid.uuid4().hex
        document = document_ids(p, self._vocabulary)
        if way == "dense":
            return {
                "prompt": document + question,
                "extra": {"cache_salt": own, "kv_transfer_params": {"lmcache.tag.bench": "computed"}},
            }
        if way == "localcpu" or fills:
            params = {"kv_transfer_params": {"lmcache.tag.bench": "localcpu"}}
            return {"prompt": document + question, "extra": {"cache_salt": f"own-{client}" if fills else own, **params}}
        if way == "own":
            return {"prompt": document + question, "extra": {"cache_salt": f"own-{client}"}}
        if way == "prefix":
            return {"prompt": document + question, "extra": {"cache_salt": self._salts[p]}}
        name = f"s3-{p}" if way == "s3" else f"doc-{p}"
        return {"prompt": question, "extra": {"cache_salt": own, "cartridges": [name]}}

    def _ask(self, body: dict[str, Any]) -> Answer:
        started = time.perf_counter()
        first, last, usage = None, None, None
        # As `prompt` itself the client would look at each id: 300 ms for 16,384 of them, where the server parses in 2.
        given = {"ignore_eos": True, "prompt": body["prompt"], **body["extra"]}
        for event in self._client.completions.create(
            model=self._model, prompt="", max_tokens=ANSWER, temperature=0, stream=True,
            stream_options={"include_usage": True}, extra_body=given,
        ):  # fmt: skip
            if event.choices:
                last = time.perf_counter() - started
                first = first or last
            usage = event.usage or usage
        cached = (usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens) or 0
        return Answer(first, last, usage.completion_tokens, cached)

    def _evict(self, way: str, p: int) -> None:
        name = f"s3-{p}" if way == "s3" else f"doc-{p}"
        _post(f"{self._url}/v1/cartridges/{name}/evict")
        if way != "s3":
            drop([self._payloads[p]])


def _post(url: str) -> None:
    urllib.request.urlopen(urllib.request.Request(url, method="POST", data=b""), timeout=60).close()


SETTLE_S = 2.0
"""Pause before a request to the other server, and before one that loads. For a second after each request vLLM's workers wait
for more in a loop, which keeps a core and their Python interpreter from what loads."""
LOADING = ("disk", "s3", "mp-disk")


class Plan(NamedTuple):
    """What is asked."""

    positions: list[int]
    concurrency: list[int]
    ways: list[str]
    repeat: int
    full: bool

    def samples(self, way: str, p: int, c: int) -> int:
        """Return how many samples this cell gets; none where it would take too long."""
        if way == "dense":
            if c > 1 and p > DENSE_ALONE and not self.full:
                return 0
            return self.repeat if p * c <= DENSE_ALONE else 1 if p * c > 4096 else 2
        if c > 1 and way in ("mp-cpu", "mp-disk"):
            return 0  # LMCache's server stages a copy for each request, and tells a miss where they do not all fit
        return max(2, self.repeat // (2 if c > 1 else 1))


def touch(askers: dict[bool, Asker], plan: Plan) -> None:
    """Have each server write to its blocks: what is written to for the first time the system has to give it first.

    Where 7 MiB were written to for the first time that took 5 to 8 ms here, longer than to inject them.
    """
    for way in {"warm", "mp-warm"} & set(plan.ways):
        # One alone first: of many that are cold at once LMCache's server has memory for four, and the others are computed.
        for c in (1, *2 * [max(plan.concurrency) + 1]):
            askers[way in MULTIPROCESS].sample(way, max(plan.positions), c)


class RawGets:
    """The bytes of a cartridge by ranged GETs, of the sizes and as many at once as the settings allow, into one buffer."""

    def __init__(self, settings: Settings) -> None:
        from lmcache_cartridge.sources.s3_client import make_client

        self._settings, self._buffers = settings, {}
        self._client = make_client(
            settings.s3_endpoint_url, settings.s3_region, max_pool_connections=settings.s3_connections
        )

    def sample(self, p: int) -> Sample:
        """Fetch the cartridge of `p` positions once."""
        location = Registry(self._settings.registry_path, read_only=True).find(f"s3-{p}").location
        bucket, prefix = parse(location)
        key, part = f"{prefix}/payload.safetensors", self._settings.s3_part_bytes
        if p not in self._buffers:
            self._buffers[p] = written(self._client.head_object(Bucket=bucket, Key=key)["ContentLength"])
        buffer = self._buffers[p]

        def get(start: int) -> None:
            out = buffer[start : start + part]
            body = self._client.get_object(Bucket=bucket, Key=key, Range=f"bytes={start}-{start + len(out) - 1}")[
                "Body"
            ]
            done = 0
            while done < len(out):
                done += body.readinto(out[done:])

        with ThreadPoolExecutor(self._settings.s3_connections) as pool:
            took_s = report.timed(lambda: list(pool.map(get, range(0, len(buffer), part))))
        return Sample("s3-raw", p, 1, took_s, [Answer(took_s, took_s, 0, 0)])


def measure(askers: dict[bool, Asker], plan: Plan, memory: Memory, raw: RawGets | None = None) -> list[Sample]:
    """Ask in all ways, by turns within each p and c; `askers` by whether a way is of multiprocess mode.

    `raw` fetches the same bytes after each request to S3 alone.
    """
    found, last = [], None
    touch(askers, plan)
    for p in plan.positions:
        for way in plan.ways:
            if way != "dense" and not (way == "s3" and p != plan.positions[0] and not plan.full):
                askers[way in MULTIPROCESS].sample(
                    way, p, 1
                )  # the first of each way warms up, and fills what the others find
        for c in plan.concurrency:
            for turn in range(max(plan.samples(way, p, c) for way in plan.ways)):
                for way in plan.ways:
                    if turn < plan.samples(way, p, c):
                        asker = askers[way in MULTIPROCESS]
                        if asker is not last or way in LOADING:
                            time.sleep(SETTLE_S)
                        last = asker
                        memory.phase = f"{way}, p {p}, c {c}"
                        sample = asker.sample(way, p, c)
                        found.append(sample)
                        if way == "s3" and c == 1 and raw is not None:
                            time.sleep(SETTLE_S)
                            found.append(raw.sample(p))
                        report.say(
                            f"p {p}, c {c}, {way}: first token after "
                            f"{statistics.median(a.first_s for a in sample.answers):.3f} s, "
                            f"{statistics.median(a.cached_tokens for a in sample.answers):.0f} of {p + QUESTION} cached"
                        )
        memory.phase = "between"
    return found


def rows(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Return one row for each p, c and way."""
    cells: dict[tuple[int, int, str], list[Sample]] = {}
    for sample in samples:
        cells.setdefault((sample.p, sample.c, sample.way), []).append(sample)
    made = []
    for (p, c, way), found in cells.items():
        first = [1000 * answer.first_s for sample in found for answer in sample.answers]
        decode = [
            (answer.tokens - 1) / (answer.last_s - answer.first_s)
            for sample in found
            for answer in sample.answers
            if answer.last_s > answer.first_s
        ]
        rate = [sum(answer.tokens for answer in sample.answers) / sample.wall_s for sample in found]
        made.append(
            {
                "p": p,
                "c": c,
                "way": way,
                "TTFT ms, p50": round(statistics.median(first), 1),
                "p95": round(float(np.quantile(first, 0.95)), 1),
                "tokens/s in all": report.Spread.of(rate).text(),
                "decode tokens/s": report.Spread.of(decode).text() if decode else "-",
                "cached": int(min(answer.cached_tokens for sample in found for answer in sample.answers)),
                "requests": len(first),
                "_first": report.Spread.of(first),
                "_decode": statistics.median(decode) if decode else None,
            }
        )
    return made


def figures(made: Sequence[dict[str, Any]]) -> list[str]:
    """Return the figures of issue 6 as lines, at the largest p."""
    at = {(row["p"], row["c"], row["way"]): row for row in made}
    lines, p = [], max(row["p"] for row in made)

    def ttft(way: str, c: int = 1) -> float | None:
        row = at.get((p, c, way))
        return row and row["_first"].median

    def ratio(what: str, over: float | None, under: float | None, goal: str) -> None:
        if over and under:
            lines.append(f"p = {p}: {what}: {over / under:.2f} ({goal})")

    ratio("TTFT dense / warm, c = 1", ttft("dense"), ttft("warm"), "at least 10.6 at 16,384")
    ratio("TTFT warm / prefix-cache hit, c = 1", ttft("warm"), ttft("prefix"), "at most 1.10")
    ratio("TTFT warm / LMCache LocalCPU hit, c = 1", ttft("warm"), ttft("localcpu"), "at most 1.00")
    ratio("TTFT warm at c = 16 / c = 1", ttft("warm", 16), ttft("warm"), "at most 3.1")
    ratio("TTFT warm / prefix-cache hit, c = 16", ttft("warm", 16), ttft("prefix", 16), "at most 1.05")
    ratio(
        "TTFT warm / prefix-cache hit that shares no blocks, c = 16", ttft("warm", 16), ttft("own", 16), "at most 1.05"
    )
    ratio("TTFT cold from disk / warm, c = 1", ttft("disk"), ttft("warm"), "at most 1.30")
    if (raw := ttft("s3-raw")) and (warm := ttft("warm")):
        ratio("TTFT from S3 / (warm + raw GETs of the bytes), c = 1", ttft("s3"), warm + raw, "at most 1.15")
    ratio("TTFT warm, multiprocess / in-process, c = 1", ttft("mp-warm"), ttft("warm"), "at most 1.10")
    ratio("TTFT warm, multiprocess / in-process, c = 16", ttft("mp-warm", 16), ttft("warm", 16), "at most 1.05")
    ratio("TTFT disk, multiprocess / in-process, c = 1", ttft("mp-disk"), ttft("disk"), "no goal")
    for p in sorted({row["p"] for row in made if row["p"] <= DENSE_ALONE}):  # where dense has more than a sample or two
        dense, warm = at.get((p, 1, "dense")), at.get((p, 1, "warm"))
        if dense and warm:
            ratio("decode tokens/s warm / dense", warm["_decode"], dense["_decode"], "0.98 to 1.02")
    return lines


@contextlib.contextmanager
def server(model: Path, settings: Settings, scratch: Path, plan: Plan, token_bytes: int) -> Iterator[Any]:
    """Start a stock server with our plugin, LocalCPU beside it, and stop it."""
    launch = _launch(model, settings, plan, token_bytes, "in-process")
    pool_gb = 0.1 + 1.1 * sum(plan.positions) * token_bytes / 2**30
    yaml = launch.yaml.replace("max_local_cpu_size: 0.1 ", f"max_local_cpu_size: {pool_gb:.2f} ")
    yaml = yaml.replace('"lmcache_cartridge.engine.backend"', '"localcpu"')
    assert '"localcpu"' in yaml and f"{pool_gb:.2f}" in yaml, "the launch has another YAML than this was written for"
    here = str(Path(__file__).parent)
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))}
    with _running(launch._replace(yaml=yaml, environment=launch.environment | environment), scratch / "log") as process:
        yield process


@contextlib.contextmanager
def multiprocess_server(
    model: Path, settings: Settings, scratch: Path, plan: Plan, token_bytes: int
) -> Iterator[tuple[Any, str]]:
    """Start a stock server and LMCache's, lend both the process and where the latter answers HTTP, and stop them."""
    launch = _launch(model, settings, plan, token_bytes, "multiprocess")
    port = launch.lmcache[launch.lmcache.index("--http-port") + 1]
    with _running(launch, scratch / "log-multiprocess") as process:
        yield process, f"http://127.0.0.1:{port}"


def _launch(model: Path, settings: Settings, plan: Plan, token_bytes: int, mode: str) -> Any:
    from lmcache_cartridge.serve.launch import plan as launch_plan

    longest = max(plan.positions) + QUESTION + ANSWER
    together = max(plan.concurrency) + 2
    kv_bytes = together * (longest + 256) * token_bytes
    arguments = [
        "--max-model-len", str(longest + 64), "--enforce-eager", "--kv-cache-memory-bytes", str(kv_bytes),
        "--dtype", "bfloat16",
    ]  # fmt: skip
    return launch_plan(str(model), settings, vllm_args=arguments, mode=mode)


@contextlib.contextmanager
def _running(launch: Any, log: Path) -> Iterator[Any]:
    from lmcache_cartridge.serve.processes import ServerProcess

    offline = launch._replace(environment=launch.environment | {"HF_HUB_OFFLINE": "1"})
    with ServerProcess(offline, log, environment={}, timeout_s=600) as process:
        yield process


def make_plan(options: Any) -> Plan:
    """Return what is asked for."""
    if options.smoke:
        return Plan([256], [1, 2], [*COMMON, *MULTIPROCESS], 2, False)
    positions = options.positions or [256, 1024, 4096, 16_384] + ([32_768] if options.full else [])
    ways = options.ways or [*COMMON, *(["s3"] if options.s3 else []), *MULTIPROCESS]
    return Plan(positions, options.concurrency, ways, options.repeat or (15 if options.full else 5), options.full)


def prepare(plan: Plan, shape: Shape, model: Path, settings: Settings, scratch: Path, s3: Any) -> dict[int, Path]:
    """Make and register the cartridges, on S3 too where there is a server; return their payloads by p."""
    from lmcache_cartridge.make.model import CausalModel

    fingerprint = CausalModel(str(model)).fingerprint
    registry, payloads = Registry(settings.registry_path), {}
    for p in plan.positions:
        root = make_cartridge(scratch, fingerprint, f"doc-{p}", document_ids(p, shape.vocabulary))
        registry.register(root)
        payloads[p] = root / "payload.safetensors"
        if s3 is not None:
            ids = document_ids(p + 1, shape.vocabulary)[:p]
            push(make_cartridge(scratch, fingerprint, f"s3-{p}", ids), settings, registry, s3)
    return payloads


def numbers(text: str) -> list[int]:
    """Parse `1,2,3`."""
    return [int(number) for number in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = report.parser(__doc__, "ttft")
    parser.add_argument("--positions", type=numbers, help="values of p, multiples of 256")
    parser.add_argument("--concurrency", type=numbers, default=[1, 4, 16])
    parser.add_argument("--ways", type=lambda text: text.split(","))
    parser.add_argument("--repeat", type=int, help="samples of each way but dense")
    parser.add_argument("--s3", action="store_true", help="also serve from an S3 server, started here (tests/s3.py)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the engine")
    parser.add_argument("--model", type=Path, help="where the model is made, or is from an earlier run")
    options = parser.parse_args(arguments)
    plan, shape = make_plan(options), TINY if options.smoke else SHAPES["Qwen2.5-0.5B"]
    machine = report.hardware()
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cartridge-ttft-")))
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
        report.say(f"making the model ({shape.name}) and cartridges of {plan.positions} positions")
        model = make_model(options.model or scratch / "model", shape)
        s3 = start_s3(stack, scratch) if "s3" in plan.ways else None
        settings = from_mapping(
            {
                "home": scratch / "home", "disk_dir": scratch / "cache", "admin": True, "ready_timeout_s": 600,
                "cpu_bytes": (2 * sum(plan.positions) + CHUNK) * shape.token_bytes,
            }
            | ({"s3_endpoint_url": s3.endpoint, "s3_region": "us-east-1"} if s3 else {})
        )  # fmt: skip
        payloads = prepare(plan, shape, model, settings, scratch, s3)
        report.say("starting vLLM")
        process = stack.enter_context(server(model, settings, scratch, plan, shape.token_bytes))
        memory = stack.enter_context(Memory(process._process.pid))
        askers = {False: Asker(process.url, model, shape.vocabulary, payloads)}
        if not set(MULTIPROCESS).isdisjoint(plan.ways):
            report.say("starting vLLM in multiprocess mode")
            beside = multiprocess_server(model, settings, scratch, plan, shape.token_bytes)
            second, lmcache = stack.enter_context(beside)
            askers[True] = Asker(second.url, model, shape.vocabulary, payloads, lmcache)
        try:
            samples = measure(askers, plan, memory, RawGets(settings) if s3 else None)
        except Exception:
            for log in scratch.glob("log*"):
                report.say(log.read_text(errors="replace")[-4000:])
            raise
    made = rows(samples)
    curves: dict[str, list[report.Point]] = {}
    for row in made:
        if row["c"] == 1:
            curves.setdefault(row["way"], []).append(report.Point(row["p"], row["_first"]))
    at_once: dict[str, list[report.Point]] = {}
    for row in made:
        if row["p"] == max(plan.positions):
            at_once.setdefault(row["way"], []).append(report.Point(row["c"], row["_first"]))
    panels = [
        report.Panel("one request", "p", "TTFT, ms", curves),
        report.Panel(f"p = {max(plan.positions)}", "requests at once", "TTFT, ms", at_once),
    ]
    memory_lines = [
        f"memory of the in-process server: at most {max(m[2] for m in memory.samples) / 2**20:.0f} MiB resident"
    ]
    details = {"samples": [sample._asdict() for sample in samples], "memory": memory.samples}
    lines = figures(made) + (memory_lines if memory.samples else [])
    report.publish("ttft", made, options, machine, panels=panels, details=details, lines=lines)


if __name__ == "__main__":
    main()
