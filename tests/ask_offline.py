"""Script: answer questions with vLLM's offline LLM and cartridges, of which `odd` is refused. Prints JSON; run in a process
of its own.

python ask_offline.py HOME MODEL_DIR
"""

import json
import os
import sys

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")


def main(home: str, model: str) -> None:
    from vllm import LLM, SamplingParams

    from lmcache_cartridge.cli.recall import load_sheet
    from lmcache_cartridge.errors import CartridgeError
    from lmcache_cartridge.serve.offline import engine_arguments, with_cartridges
    from lmcache_cartridge.settings import from_mapping

    settings = from_mapping({"home": home, "cpu_bytes": 64 << 20})
    llm = LLM(
        model, enforce_eager=True, max_model_len=8192, kv_cache_memory_bytes=64 << 20, **engine_arguments(settings)
    )
    greedy = SamplingParams(max_tokens=4, temperature=0)
    answers = []
    for question in load_sheet("ward-a").questions[:6]:
        for asked in (question.text, [{"role": "user", "content": question.text[3:-3]}]):
            prompt, params = with_cartridges(llm, settings, ["ward-a"], asked, greedy)
            (output,) = llm.generate(prompt, params, use_tqdm=False)
            answers.append([output.outputs[0].text.strip(), question.answer, output.num_cached_tokens])
    for _ in range(2):
        try:
            with_cartridges(llm, settings, ["odd"], "Q: x? A:", greedy)
        except CartridgeError as error:
            print("refused:", error, flush=True)
    print(json.dumps(answers), flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
