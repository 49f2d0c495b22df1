"""Script: answer after chains with vLLM's offline LLM in float32. Prints JSON; run in a process of its own.

python chains_offline.py HOME MODEL_DIR '[[["a", "b"], [5, 6]], ...]' [WRONG]

Prints, for each chain and question, the log probability of every token that may follow and how many tokens were not
computed. From number WRONG on, the keys of every layer are rotated, as they once were, and by the first layer's frequencies.
After a chain of none, LMCache finds nothing, so that all that follows is computed.
The engine is in this process, so that it can be made wrong.
"""

import json
import os
import sys
import traceback

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1",
)  # fmt: skip

CHUNK = 64


def main(home: str, model: str, asked: str, wrong: str = "1000") -> None:
    from vllm import LLM, SamplingParams

    from lmcache_cartridge.memory import loader
    from lmcache_cartridge.memory.rope import rotate
    from lmcache_cartridge.serve.offline import engine_arguments, with_cartridges
    from lmcache_cartridge.settings import from_mapping

    settings = from_mapping({"home": home, "cpu_bytes": 64 << 20})
    llm = LLM(
        model, dtype="float32", enforce_eager=True, max_model_len=1024, max_logprobs=-1, block_size=CHUNK // 2,
        kv_cache_memory_bytes=32 << 20, **engine_arguments(settings, chunk_tokens=CHUNK),
    )  # fmt: skip
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=-1)
    answers = []
    for number, (cartridges, question) in enumerate(json.loads(asked)):
        if number == int(wrong):
            loader.shift_keys = lambda keys, shape, offset: rotate(keys, shape.rope[0], offset)
        if not cartridges:
            from lmcache_cartridge.engine.backend import CartridgeBackend  # vLLM does not start with it imported

            CartridgeBackend.batched_contains = lambda *_, **__: 0
            prompt, own = {"prompt_token_ids": question}, params
        else:
            prompt, own = with_cartridges(llm, settings, cartridges, question, params)
        (output,) = llm.generate(prompt, own, use_tqdm=False)
        found = output.outputs[0].logprobs[0]
        answers.append([[found[token].logprob for token in sorted(found)], output.num_cached_tokens])
    print(json.dumps(answers), flush=True)


def run() -> None:
    """Answer what the command line asks, and end the process."""
    code = 1
    try:
        main(*sys.argv[1:])
        code = 0
    except Exception:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)  # LMCache's threads keep an engine in this process from ending


if __name__ == "__main__":
    run()
