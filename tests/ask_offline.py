"""Script: answer questions with vLLM's offline LLM and cartridges, of which `odd` fails its canary, and `nurse` is of a LoRA
adapter. Prints JSON; run in a process of its own.

python ask_offline.py HOME MODEL_DIR ADAPTER_DIR
"""

import json
import os
import sys

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")


def main(home: str, model: str, adapter: str) -> None:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    from lmcache_cartridge.cli.recall import load_sheet
    from lmcache_cartridge.errors import CartridgeError
    from lmcache_cartridge.serve.offline import engine_arguments, with_cartridges
    from lmcache_cartridge.settings import from_mapping

    settings = from_mapping({"home": home, "cpu_bytes": 64 << 20})
    llm = LLM(
        model,
        enforce_eager=True,
        max_model_len=8192,
        kv_cache_memory_bytes=64 << 20,
        enable_lora=True,
        max_lora_rank=8,
        **engine_arguments(settings),
    )
    greedy = SamplingParams(max_tokens=4, temperature=0)
    answers = []
    for question in load_sheet("ward-a").questions[:6]:
        for asked in (question.text, [{"role": "user", "content": question.text[3:-3]}]):
            prompt, params = with_cartridges(llm, settings, ["ward-a"], asked, greedy)
            (output,) = llm.generate(prompt, params, use_tqdm=False)
            answers.append([output.outputs[0].text.strip(), question.answer, output.num_cached_tokens])
    for question in load_sheet("ward-b").questions[:6]:
        prompt, params = with_cartridges(llm, settings, ["odd"], question.text, greedy)
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        answers.append([output.outputs[0].text.strip(), question.answer, output.num_cached_tokens])
    try:
        with_cartridges(llm, settings, ["short"], "Q: x? A:", greedy)
    except CartridgeError as error:
        print("refused:", error, flush=True)
    print(json.dumps(answers), flush=True)
    nurse, question = LoRARequest("nurse", 1, adapter), load_sheet("ward-a").questions[0].text
    top = SamplingParams(max_tokens=1, temperature=0, logprobs=20)
    asked = with_cartridges(llm, settings, ["nurse"], question, top, nurse)
    base = with_cartridges(llm, settings, ["ward-a"], question, top)
    plain = {"prompt_token_ids": base[0]["prompt_token_ids"], "cache_salt": "mine"}, top
    found = {}
    for name, (prompt, params), lora in (
        ("nurse's", asked, nurse), ("base's", base, None), ("nurse's without it", asked, None),
        ("base's with it", base, nurse), ("dense with it", plain, nurse),
    ):  # fmt: skip
        (output,) = llm.generate(prompt, params, use_tqdm=False, lora_request=lora)
        logprobs = {str(token): each.logprob for token, each in output.outputs[0].logprobs[0].items()}
        found[name] = [output.num_cached_tokens, logprobs]
    for name, lora in (("nurse", None), ("ward-a", nurse)):
        try:
            with_cartridges(llm, settings, [name], question, top, lora)
        except CartridgeError as error:
            print("refused:", error, flush=True)
    print(json.dumps(found), flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
