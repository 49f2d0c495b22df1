"""Script: answer after chains with vLLM's offline LLM in float32, each step's loads started as vLLM's Model Runner V2 starts
those of a step that it replays as one CUDA graph: by its own class, outside a forward context, the attention metadata as a
keyword. Prints JSON; run in a process of its own.

python replayed_offline.py HOME MODEL_DIR '[[["a", "b"], [5]], ...]'

Prints, for each chain and question, the log probability of every token that may follow and how many tokens were not
computed. The engine is in this process, so that it can be changed.
"""

import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1",
)  # fmt: skip

CHUNK = 64


@contextmanager
def as_v2_does(scheduler_output: Any, defer_finalize: bool = False) -> Iterator[Any]:
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from vllm.forward_context import get_forward_context, override_forward_context
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

    class Worker(ActiveKVConnector):
        def __init__(self) -> None:
            self.kv_connector = get_kv_transfer_group()
            self.vllm_config = self.kv_connector._vllm_config
            self._pending_load_kwargs, self._disabled = None, False

    worker, output = Worker(), KVConnectorOutput()
    attn_metadata = get_forward_context().attn_metadata
    with override_forward_context(None):
        worker.pre_forward(scheduler_output, SimpleNamespace(idx_mapping=[], req_ids=[], num_tokens=1), attn_metadata)
    yield output
    with override_forward_context(None):
        vars(output).update(vars(worker.post_forward(scheduler_output.finished_req_ids)))


def main(home: str, model: str, asked: str) -> None:
    from vllm import LLM, SamplingParams
    from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

    from lmcache_cartridge.serve.offline import engine_arguments, with_cartridges
    from lmcache_cartridge.settings import from_mapping

    KVConnectorModelRunnerMixin._get_kv_connector_output = staticmethod(as_v2_does)
    settings = from_mapping({"home": home, "cpu_bytes": 64 << 20})
    llm = LLM(
        model, dtype="float32", enforce_eager=True, max_model_len=1024, max_logprobs=-1, block_size=CHUNK // 2,
        kv_cache_memory_bytes=32 << 20, **engine_arguments(settings, chunk_tokens=CHUNK),
    )  # fmt: skip
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=-1)
    answers = []
    for cartridges, question in json.loads(asked):
        prompt, own = with_cartridges(llm, settings, cartridges, question, params)
        (output,) = llm.generate(prompt, own, use_tqdm=False)
        found = output.outputs[0].logprobs[0]
        answers.append([[found[token].logprob for token in sorted(found)], output.num_cached_tokens])
    print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    code = 1
    try:
        main(*sys.argv[1:])
        code = 0
    except Exception:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)  # LMCache's threads keep an engine in this process from ending
