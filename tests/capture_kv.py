"""Script: let vLLM prefill token ids and read the KV out of its own blocks. Run in a process of its own.

    python capture_kv.py MODEL_DIR TOKEN_IDS.npy KV.safetensors

vLLM's CPU blocks are packed for the instruction set and there is no op to read them, so the packing is found by
writing numbered elements through vLLM's own write op and seeing where each one lands.
"""

import os
import sys

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", OMP_NUM_THREADS="1", VLLM_NO_USAGE_STATS="1")

import numpy as np
import torch

BLOCK = 32


def write_codes(module, kv_cache, codes):
    """Write `codes` [BLOCK, heads, 2 * size] into block 0 of an empty cache like `kv_cache` and return that block."""
    scratch = torch.zeros_like(kv_cache[:1])
    keys, values = codes.to(kv_cache.dtype).chunk(2, dim=-1)
    module.impl.do_kv_cache_update(module, keys.contiguous(), values.contiguous(), scratch, torch.arange(BLOCK))
    return scratch[0].reshape(-1)


def packing(module, kv_cache):
    """Return, for each element of `[BLOCK, heads, 2 * size]`, its place in a block's memory."""
    heads, _, width = kv_cache.shape[1:]
    number = torch.arange(BLOCK * heads * width).view(BLOCK, heads, width)
    landed = torch.zeros(number.numel(), dtype=torch.int64)
    for digit in range(3):  # bfloat16 holds integers up to 256 exactly, so one base-128 digit a pass
        landed += write_codes(module, kv_cache, number // 128**digit % 128).to(torch.int64) * 128**digit
    return torch.argsort(landed).view(number.shape)


def main(model, ids_path, out):
    from safetensors.torch import save_file
    from vllm import LLM, SamplingParams

    ids = np.load(ids_path).tolist()
    llm = LLM(model, enforce_eager=True, max_model_len=8192, block_size=BLOCK, kv_cache_memory_bytes=64 << 20)
    llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    layers = runner.compilation_config.static_forward_context
    planes = []
    for name in sorted(layers):
        module = layers[name]
        kv_cache = module.kv_cache
        place = packing(module, kv_cache)
        blocks = -(-len(ids) // BLOCK)
        # Block 0 is vLLM's null block; the first request of a fresh engine gets the next ones in order.
        rows = [kv_cache[1 + b].reshape(-1)[place] for b in range(blocks)]
        planes.append(torch.stack(torch.cat(rows)[: len(ids)].chunk(2, dim=-1)))
    save_file({"kv": torch.stack(planes, dim=1).contiguous()}, out)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
