"""Compress sheets by kvpress, in an environment of its own, and leave what it kept for `quality.py --pressed DIR`.

    python -m venv press && press/bin/pip install kvpress==0.5.5 safetensors
    press/bin/python benchmarks/press.py --out DIR [--model DIR] [--presses SnapKVPress ...]

kvpress wants transformers < 5.3. A file holds each layer's keys and values as kvpress left them, keys where they were rotated
among the document's tokens.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvpress
import torch
from recall.ward import UNSEEN_SHEETS, ask, encode, write_document
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

MODEL = Path(__file__).parents[1] / "lmcache_cartridge/cli/recall/model"


def main() -> None:
    """Write `DIR/SHEET PRESS FACTORx.safetensors` for every sheet, press and factor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for the files")
    parser.add_argument("--model", type=Path, default=MODEL, help="a recall model (default: the shipped one)")
    parser.add_argument("--presses", nargs="*", default=["SnapKVPress", "ExpectedAttentionPress", "KeyDiffPress"])
    parser.add_argument("--factors", nargs="*", type=int, default=[4, 8, 16], help="tokens a position")
    parser.add_argument(
        "--asked", type=int, default=0, help="questions whose first tokens' log probabilities are kept (default: none)"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()
    exact = copy.deepcopy(model).float()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    for seed, tokens in UNSEEN_SHEETS.items():
        document = write_document(random.Random(seed), tokens)
        ids = tokenizer(document.text, return_tensors="pt").input_ids
        for name in options.presses:
            for factor in options.factors:
                cache = DynamicCache()
                with torch.no_grad(), getattr(kvpress, name)(compression_ratio=1 - 1 / factor)(model):
                    model(ids, past_key_values=cache)
                layers = [(number, what) for number in range(len(cache.layers)) for what in ("keys", "values")]
                tensors = {f"{what}.{n}": getattr(cache.layers[n], what).contiguous() for n, what in layers}
                about = {
                    "model": options.model.name, "sheet": seed, "document_tokens": str(ids.shape[1]), "press": f"{name} {factor}x",
                    "by": " ".join(f"{package} {version(package)}" for package in ("kvpress", "transformers", "torch")),
                }  # fmt: skip
                asked = [encode(ask(fact, 1)) for fact in document.facts[: options.asked]]
                about["asked"] = json.dumps([[each, after(exact, cache, each, ids.shape[1])] for each in asked])
                save_file(tensors, place := options.out / f"{seed} {name} {factor}x.safetensors", about)
                print(place, flush=True)


@torch.no_grad()
def after(model: Any, cache: DynamicCache, question: list[int], position: int) -> dict[int, float]:
    """Return the likeliest first tokens of an answer behind a compressed document, whose end is at `position`."""
    places = torch.arange(position, position + len(question))
    cache = DynamicCache([(layer.keys.float(), layer.values.float()) for layer in cache.layers])
    logits = model(torch.tensor([question]), past_key_values=cache, position_ids=places[None]).logits
    found = logits[0, -1].float().log_softmax(0).topk(20)
    return dict(zip(found.indices.tolist(), found.values.tolist(), strict=True))


if __name__ == "__main__":
    main()
