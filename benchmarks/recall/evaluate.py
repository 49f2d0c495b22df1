"""Measure the recall model on unseen sheets: `python -m recall.evaluate [MODEL_DIR]`, in `benchmarks/`.

Every fact of every sheet is asked in every phrasing, with the sheet in context and without it. Right means
the value and then `</s>`, each the model's first choice, which is what greedy generation emits. The score
without the sheet is a guard: anything above chance says that answers leak into the measurement.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from lmcache_cartridge.cli.recall import MODEL_DIR

from .figures import Figures, Generation, Run, Score, run_from
from .train import RECORD, hardware
from .ward import BOS, EOS, QUESTIONS, VOCABULARY, Document, Fact, ask, encode, write_document

_BATCH = 64
_BOS_ID, _EOS_ID = VOCABULARY[BOS], VOCABULARY[EOS]


def encode_questions(facts: Sequence[Fact], template: int) -> Tensor:
    """Return [n, T] ids of question, value and `</s>`; one template asks for every fact in as many tokens."""
    return torch.tensor([[*encode(ask(fact, template)), VOCABULARY[fact.value], _EOS_ID] for fact in facts])


@torch.inference_mode()
def answered(model: LlamaForCausalLM, prefix: Sequence[int], questions: Tensor) -> Tensor:
    """Return for each row of `questions` whether the model, after `prefix`, answers it: [n] bool.

    The prefix is computed once and its KV shared; the rows are then computed causally after it.
    """
    layers = model(torch.tensor([prefix])).past_key_values.layers
    right = []
    for rows in questions.split(_BATCH):
        # A cache grows in place, so every batch gets its own, with one row per question.
        shape = (len(rows), -1, -1, -1)
        shared = DynamicCache([(layer.keys.expand(shape), layer.values.expand(shape)) for layer in layers])
        logits = model(rows[:, :-1], past_key_values=shared, logits_to_keep=2).logits
        right.append((logits.argmax(-1) == rows[:, -2:]).all(-1))
    return torch.cat(right)


@torch.inference_mode()
def answered_plainly(model: LlamaForCausalLM, prefix: Sequence[int], question: Tensor) -> bool:
    """Return what `answered` says of one question, by one forward pass over everything without a cache."""
    tokens = torch.cat([torch.tensor(prefix), question])[None]
    logits = model(tokens[:, :-1], use_cache=False).logits[0, -2:]
    return bool((logits.argmax(-1) == question[-2:]).all())


def check_prefix_sharing(model: LlamaForCausalLM, document: Document) -> None:
    """Raise `RuntimeError` unless `answered` and `answered_plainly` agree on some questions of `document`.

    Wants a float32 model: in bfloat16 the two may round a close call differently.
    """
    prefix = [_BOS_ID, *encode(document.text)]
    for template in range(len(QUESTIONS)):
        questions = encode_questions(document.facts[::20], template)
        plainly = [answered_plainly(model, prefix, question) for question in questions]
        if answered(model, prefix, questions).tolist() != plainly:
            raise RuntimeError("answers differ between a shared prefix and a plain forward pass")


def score(model: LlamaForCausalLM, documents: Sequence[Document]) -> Score:
    """Ask every fact of `documents` in every phrasing, with and without the document."""
    lengths, shares, blind, count = [], [], [], 0
    for document in documents:
        prefix = [_BOS_ID, *encode(document.text)]
        asked = [encode_questions(document.facts, template) for template in range(len(QUESTIONS))]
        lengths.append(len(prefix))
        shares.append([_share(answered(model, prefix, questions)) for questions in asked])
        blind.append(statistics.mean(_share(answered(model, [_BOS_ID], questions)) for questions in asked))
        count += sum(map(len, asked))
    by_document = [statistics.mean(row) for row in shares]
    return Score(
        dtype=str(model.dtype).removeprefix("torch."),
        min_tokens=min(lengths),
        max_tokens=max(lengths),
        documents=len(documents),
        questions=count,
        with_document=statistics.mean(by_document),
        worst_document=min(by_document),
        by_template=tuple(statistics.mean(column) for column in zip(*shares, strict=True)),
        without_document=statistics.mean(blind),
    )


def _share(right: Tensor) -> float:
    return right.float().mean().item()


@torch.inference_mode()
def generate(model: LlamaForCausalLM, documents: Sequence[Document], count: int, rng: random.Random) -> Generation:
    """Let HF's `generate` answer `count` questions, of each document in turn. Advances `rng`."""
    right = ended = 0
    for turn in range(count):
        document = documents[turn % len(documents)]
        fact = rng.choice(document.facts)
        question = encode(ask(fact, rng.randrange(len(QUESTIONS))))
        prompt = torch.tensor([[_BOS_ID, *encode(document.text), *question]])
        seen = torch.ones_like(prompt)
        output = model.generate(prompt, attention_mask=seen, max_new_tokens=8, do_sample=False)
        answer = output[0, prompt.shape[1] :].tolist()
        ended += len(answer) == 2 and answer[-1] == _EOS_ID
        right += answer == [VOCABULARY[fact.value], _EOS_ID]
    return Generation(count, right, ended)


def evaluate(options: argparse.Namespace) -> Figures:
    """Measure `options.model` and return the figures; prints each score as it comes."""
    torch.set_num_threads(options.threads)
    start_s, rng = time.monotonic(), random.Random(f"evaluation {options.seed}")
    documents = {tokens: [write_document(rng, tokens) for _ in range(options.documents)] for tokens in options.tokens}
    scores = []
    for dtype in (torch.float32, torch.bfloat16):
        model = LlamaForCausalLM.from_pretrained(options.model, dtype=dtype).eval()
        if dtype == torch.float32:
            check_prefix_sharing(model, documents[options.tokens[0]][0])
        for tokens in options.tokens:
            scores.append(score(model, documents[tokens]))
            print(scores[-1], flush=True)
    mixed = [document for group in zip(*documents.values(), strict=True) for document in group]
    generation = generate(model, mixed, options.generate, rng)
    print(generation)
    stages = json.loads((options.model / RECORD).read_text(encoding="utf-8"))
    evaluation = Run(
        command="python -m recall.evaluate " + " ".join(sys.argv[1:]),
        date=date.today().isoformat(),
        hardware=hardware(),
        seed=options.seed,
        threads=options.threads,
        wall_s=round(time.monotonic() - start_s),
        cpu_s=round(time.process_time()),
    )
    return Figures(tuple(scores), generation, tuple(map(run_from, stages)), evaluation)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m recall.evaluate", description=__doc__)
    add = parser.add_argument
    add("model", type=Path, nargs="?", default=MODEL_DIR, help="directory that train.py wrote")
    add("--documents", type=int, default=20, help="per length")
    add("--tokens", type=int, nargs="+", default=[512, 1024], help="least lengths of documents")
    add("--generate", type=int, default=30, help="questions for `generate`, on each length in turn")
    add("--seed", type=int, default=2026)
    add("--threads", type=int, default=2)
    add("--out", type=Path, default=Path(__file__).parent, help="where figures.json and FIGURES.md go")
    options = parser.parse_args()
    disable_progress_bar()
    evaluate(options).write(options.out)


if __name__ == "__main__":
    main()
