"""What a fleet's service costs: score and pick at p = 16,384 before 8 servers, and through Envoy.

    python benchmarks/fleet.py [--full]

The servers are stubs that publish KV events by vLLM's own publisher; the service is `lmcache-cartridge fleet serve`, in a
process of its own, Envoy is Envoy. Requests go one after the other. Envoy alone and Envoy with the picker take turns.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import httpx
import report
from routers import Reply, Request, Stub, envoy
from waiting import until

from lmcache_cartridge.serve.launch import free_port

BLOCK = 16
POSITIONS, PODS = 16_384, 8


def ids_of(number: int) -> list[int]:
    """Return the token ids of a cartridge."""
    return [(number * 7919 + place * 31) % 100_000 for place in range(POSITIONS)]


class Publisher:
    """vLLM's own, for one stub."""

    def __init__(self) -> None:
        with warnings.catch_warnings():  # torch's
            warnings.simplefilter("ignore")
            from vllm.distributed import kv_events
        self._vllm = kv_events
        events, replay = free_port(), free_port()
        self.replay = f"tcp://127.0.0.1:{replay}"
        self._publisher = kv_events.ZmqEventPublisher(0, f"tcp://*:{events}", f"tcp://*:{replay}")

    def store(self, name: int, ids: Sequence[int]) -> None:
        """Publish whole blocks."""
        names = [name * 100_000 + block for block in range(len(ids) // BLOCK)]
        event = self._vllm.BlockStored(
            block_hashes=names, parent_block_hash=None, token_ids=list(ids), block_size=BLOCK, lora_id=None, medium="GPU",
            lora_name=None, extra_keys=None, group_idx=0,
        )  # fmt: skip
        self._publisher.publish(self._vllm.KVEventBatch(ts=time.time(), events=[event]))

    def close(self) -> None:
        """Publish no more."""
        self._publisher.shutdown()


@contextmanager
def served(pods: Sequence[tuple[Stub, Publisher]], directory: Path) -> Iterator[str]:
    """Run the service over stubs until it knows them; yield its address."""
    listen = f"127.0.0.1:{free_port()}"
    named = [{"name": stub.name, "url": stub.url, "replay": publisher.replay} for stub, publisher in pods]
    config = {"listen": listen, "pods": named}
    (directory / "fleet.json").write_text(json.dumps(config))  # which is YAML
    command = [sys.executable, "-m", "lmcache_cartridge.cli.main", "fleet", "serve", directory / "fleet.json"]
    with (directory / "service.log").open("wb") as log:
        process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log)
    try:

        def is_ready() -> bool:
            assert process.poll() is None, (directory / "service.log").read_text()[-2000:]
            try:
                return httpx.get(f"http://{listen}/health").status_code == 200
            except httpx.HTTPError:
                return False

        until(is_ready, timeout_s=120)
        yield f"http://{listen}"
    finally:
        process.terminate()
        process.wait(30)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    bench = report.Benchmark(__file__, __doc__, ["fleet"])
    options = bench.start(arguments)
    repeat = 5 if options.smoke else 5000 if options.full else 1000
    ids = ids_of(0)

    def answer(request: Request) -> Reply:
        if not request.path.endswith("/render"):
            return Reply(body={"choices": [{"text": "x"}]})
        [name] = json.loads(request.body)["cartridges"]
        shown = {"token_ids": [*ids_of(int(name.rpartition("-")[2])), 5]}
        return Reply(body=json.dumps([shown]).encode())

    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        directory = Path(scratch)
        pods = []
        for number in range(PODS):
            stub = stack.enter_context(Stub(f"pod-{number}", answer))
            publisher = Publisher()
            stack.callback(publisher.close)
            pods.append((stub, publisher))
            publisher.store(0, ids[: (number + 1) * POSITIONS // PODS])  # the last one has all of it
            publisher.store(number + 1, ids_of(number + 1))
        service = stack.enter_context(served(pods, directory))
        urls = [stub.url for stub, _ in pods]
        alone = stack.enter_context(envoy(urls, directory / "alone"))
        picked = stack.enter_context(envoy(urls, directory / "picked", picker=service, picker_timeout="0.25s"))
        http = stack.enter_context(httpx.Client(timeout=60))
        body = json.dumps({"model": "m", "cartridges": ["doc-0"], "prompt": " word" * POSITIONS})
        question = json.dumps({"model": "m", "prompt": ids})

        def post(url: str, content: str) -> Callable[[], httpx.Response]:
            return lambda: http.post(url, content=content).raise_for_status()

        calls = {
            "score": post(f"{service}/score", question),
            "pick": post(f"{service}/pick?path=/v1/completions", body),
            "Envoy alone": post(f"{alone}/v1/completions", body),
            "Envoy + picker": post(f"{picked}/v1/completions", body),
        }
        best = f"pod-{PODS - 1}"

        def timed(name: str) -> float:
            for stub, _ in pods:
                stub.requests.clear()
            until(lambda: http.get(f"{service}/health").is_success)  # a busy machine's servers may have been late
            return report.timed(calls[name])

        until(lambda: calls["pick"]().json()["pod"] == best)
        report.say(f"{repeat} turns")
        samples = report.in_turns({name: partial(timed, name) for name in calls}, repeat)
        through = [calls["Envoy + picker"]().json()["stub"] for _ in range(repeat // 5)]
    about = {"servers": PODS, "p": POSITIONS}
    figures = [
        made(seconds, "request", "s", asked=name, **about)
        for made in (report.Figure.of, report.Figure.tail) for name, seconds in samples.items()
    ]  # fmt: skip
    figures.append(report.Figure.share(through.count(best), len(through), "reached the server that has it", **about))
    bench.publish(figures)


if __name__ == "__main__":
    main()
