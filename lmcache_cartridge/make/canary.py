"""The questions that a server asks of its engine before it answers from a cartridge, and what transformers answers.

The answers are computed with the very KV that is served, and must say something about all of it. So there are several
candidates, words of the document from many places among them; each chunk in turn is damaged, and as few questions are
taken as notice every time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from ..artifact.canary import MAX_QUESTIONS, Asked, Expected, ServedCanary, compare
from ..errors import UnsupportedModel
from ..memory.layout import DTYPES
from ..memory.rope import rotate, shift
from .model import CausalModel
from .progress import Progress, silent
from .train.packing import Packed, prefix_mask

ANSWER = 8
"""Tokens of an answer."""
TOP = 10
"""Likeliest tokens at each, to be compared."""
_QUESTION = 12
_LONGEST = 32
_WINDOWS = (0.05, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95)
"""Where in the document a candidate begins: a model that reads words again looks there for what follows."""
TEXTS = ("\n\nQuestion: what does this document say?\nAnswer:", " In short, the most important of this is that")
_DAMAGED = 6
"""At most so many chunks, or layers, are damaged: spread over all, with the first and the last."""
_BEHIND = 6
"""Candidates for a cartridge behind itself, whose passes cost twice as much."""
_DRAWS = (1, 2, 2, 2, 2)
"""How coarse each draw of rounding noise is. The coarse ones count by what is fair, and show where a router of experts
is about to turn over, which would be no noise at all until it does."""
FP8 = torch.float8_e4m3fn, torch.float8_e5m2
"""What `--kv-cache-dtype fp8` may mean."""
_SEEN = 2.0
"""Damage that differs by so many bounds is noticed for sure."""


def make(
    model: CausalModel,
    kv: torch.Tensor,
    document: Sequence[int] | None,
    chunk_tokens: int,
    *,
    int8: torch.Tensor | None = None,
    questions: Sequence[list[int]] = (),
    progress: Progress = silent,
) -> ServedCanary | None:
    """Return the canary of canonical KV `[2, L, T, H, D]` as it is served, which `document` are the tokens of.

    `questions` are further candidates. `int8` is the KV as int8 gives it back: what that changes is measured for
    `compress`, which has no model. Takes some twenty short forward passes. None where the model's context has no room
    for a question.
    """
    kv = kv.to(model.model.dtype)
    rows, positions = _candidates(model, document, questions), kv.shape[2]
    if not _fits(model, positions) or not rows:
        return None
    progress("canary", 0, 2)
    after, sensitivity = _best(model, kv, rows, _damages(kv, chunk_tokens))
    if int8 is not None:
        apart = _apart(model, int8.to(kv.dtype), after)
        after = [msgspec.structs.replace(a, int8=round(float(n.mean()), 4)) for a, n in zip(after, apart, strict=True)]
    progress("canary", 1, 2)
    twice = 2 * positions
    reach = twice // chunk_tokens * chunk_tokens or twice
    moved = _moved(model, kv, reach)
    behind = [] if moved is None else _best(model, moved, rows[:_BEHIND], _misplaced(model, moved, positions))[0]
    progress("canary", 2, 2)
    cut = reach if behind and reach < twice else None
    return ServedCanary(tuple(after), round(sensitivity, 2), tuple(behind), cut)


def _best(
    model: CausalModel, kv: torch.Tensor, rows: Sequence[list[int]], damages: Iterable[torch.Tensor]
) -> tuple[list[Asked], float]:
    """Return the fewest questions whose answers change with each damage, and by how many bounds the least one shows.

    With those that show most in engines whose KV cache is fp8: other questions may come out there as if they were damaged.
    """
    asked = _ask(model, kv, rows)
    apart = [[float(each.mean()) for each in _apart(model, damaged, asked)] for damaged in damages]
    seen, in_fp8 = (
        [[n / each.expected(in_fp8=fp8).bound for n, each in zip(row, asked, strict=True)] for row in apart]
        for fp8 in (False, True)
    )
    chosen = _choose(seen)
    chosen = list(dict.fromkeys([*chosen[: MAX_QUESTIONS - 1], *_choose(in_fp8), *chosen]))[:MAX_QUESTIONS]
    return [asked[n] for n in chosen], min(max(row[n] for n in chosen) for row in seen)


def _moved(model: CausalModel, kv: torch.Tensor, reach: int) -> torch.Tensor | None:
    """Return `reach` positions of the cartridge and itself, moved behind it.

    None where the model cannot have that, or where nothing of the second copy is left.
    """
    positions = kv.shape[2]
    if not model.fingerprint.rope or not _fits(model, 2 * positions) or reach <= positions:
        return None
    try:
        return torch.cat([kv, shift(kv, model.fingerprint, positions)], dim=2)[:, :, :reach]
    except UnsupportedModel:
        return None


def _misplaced(model: CausalModel, moved: torch.Tensor, start: int) -> Iterator[torch.Tensor]:
    """Yield the KV with the keys of one layer from `start` on rotated wrongly, for a few layers."""
    last = moved.shape[1] - 1
    for layer in _spread(last):
        damaged = moved.clone()
        damaged[0, layer, start:] = rotate(moved[0, layer, start:], model.fingerprint.rope[0], start)
        yield damaged


def _candidates(model: CausalModel, document: Sequence[int] | None, questions: Sequence[list[int]]) -> list[list[int]]:
    bos, size = model.tokenizer.bos_token_id, _QUESTION
    found = [model.encode(text, special=False)[-size:] for text in TEXTS]
    found += [question[-_LONGEST:] for question in questions]
    if document is not None and len(document) > 2 * size:
        starts = [max(1, int(share * (len(document) - size))) for share in _WINDOWS]
        found += [list(document[start : start + size]) for start in starts]
    # A server takes leading BOS for one that a template put there.
    return [row for row in ([i for i in row if i != bos] for row in found) if row]


def _fits(model: CausalModel, positions: int) -> bool:
    return not model.context_tokens or positions + _LONGEST + ANSWER <= model.context_tokens


def _ask(model: CausalModel, kv: torch.Tensor, rows: Sequence[list[int]]) -> list[Asked]:
    """Return what follows each question after `kv`, up to the first token that rounding may turn into another, and what fp8
    makes of it.
    """
    asked = _greedy(model, kv, rows)
    apart: list[list[torch.Tensor]] = []
    with rounding(model) as again:
        for seed, coarse in enumerate(_DRAWS):
            again(seed, coarse)
            apart.append(_apart(model, kv, asked))
    for place, (each, drawn) in enumerate(zip(asked, zip(*apart, strict=True), strict=True)):
        unsure = torch.stack(drawn).amax((0, 2)).tolist()
        ends = (n for n, top in enumerate(each.answer.logprobs, 1) if top[0] - top[1] < 3 * unsure[n - 1])
        count = next(ends, ANSWER)
        noise = max(float(found[:count].mean()) / coarse for found, coarse in zip(drawn, _DRAWS, strict=True))
        answer = Expected(each.answer.tokens[:count], each.answer.logprobs[:count], round(max(noise, 1e-4), 4))
        asked[place] = Asked(each.question, answer)
    return _in_fp8(model, kv, asked)


def _greedy(model: CausalModel, kv: torch.Tensor, rows: Sequence[list[int]]) -> list[Asked]:
    """Return the likeliest answer to each row after `kv`, whose noise is yet to be measured."""
    found = []
    for row, logprobs in zip(rows, _read(model, kv, rows, ANSWER - 1), strict=True):
        best = logprobs[-ANSWER:].topk(min(TOP, logprobs.shape[1]))
        numbers = best.indices, best.values.double().round(decimals=4)
        likeliest, values = (tuple(map(tuple, each.tolist())) for each in numbers)
        found.append(Asked(tuple(row), Expected(likeliest, values, 1e-4)))
    return found


def _logprobs(model: CausalModel, kv: torch.Tensor, asked: Sequence[Asked]) -> list[torch.Tensor]:
    """Return float32 logprobs `[tokens, vocabulary]` where each answer's tokens are after `kv`."""
    rows = [[*each.question, *(tokens[0] for tokens in each.answer.tokens[:-1])] for each in asked]
    read = _read(model, kv, rows)
    return [found[-len(each.answer.tokens) :] for found, each in zip(read, asked, strict=True)]


@torch.inference_mode()
def _read(model: CausalModel, kv: torch.Tensor, rows: Sequence[list[int]], more: int = 0) -> list[torch.Tensor]:
    """Return float32 logprobs `[tokens, vocabulary]` after each of the last `ANSWER` tokens of each row behind `kv`, and of so
    many `more`, the likeliest.

    All rows stand in one, which has one copy of the KV, and a mask keeps them apart. Where layers have windows or
    distances, which that mask has not, those of one length go through one pass.
    """
    found: list[torch.Tensor] = [torch.empty(0)] * len(rows)
    together = not model.has_alibi and (model.sight or sys.maxsize) >= kv.shape[2] + _LONGEST + ANSWER
    for part in [list(range(len(rows)))] if together else model.passes(rows, kv):
        count, prefix = 1 if together else len(part), kv.shape[2]
        table = [(index, at, len(rows[index]) - at, token) for index in part for at, token in enumerate(rows[index])]
        owner, at, left, ids = torch.tensor(table, device=model.device).T
        cache, behind, told, steps, how = model.cache(kv, count), owner[:0], owner[:0], [], {}
        for _ in range(1 + more):
            behind = torch.cat([behind, owner])
            if together:
                allowed = (owner[:, None] == behind).tril(len(behind) - len(owner))
                packed = Packed([], ids[None], at[None], allowed[None])
                how = {"position_ids": packed.offsets + prefix, "attention_mask": prefix_mask(packed, prefix, kv.dtype)}
            wanted, last = left <= ANSWER, left == 1
            columns = wanted.view(count, -1)[0].nonzero()[:, 0]
            logits = model.model(
                input_ids=ids.view(count, -1), past_key_values=cache, use_cache=True, logits_to_keep=columns, **how
            ).logits
            steps.append(logits.flatten(0, 1)[:, : model.fingerprint.vocab_size].float().log_softmax(-1))
            told = torch.cat([told, owner[wanted]])
            ids, at, owner, left = steps[-1][last[wanted]].argmax(-1), at[last] + 1, owner[last], left[last]
        every = torch.cat(steps)
        for index in part:
            found[index] = every[told == index].cpu()
    return found


def _apart(model: CausalModel, kv: torch.Tensor, asked: Sequence[Asked]) -> list[torch.Tensor]:
    """Return for each question how far each logprob of its answer is from the expected one when the KV is `kv`."""
    return [
        (found.gather(1, torch.tensor(each.answer.tokens)) - torch.tensor(each.answer.logprobs)).abs()
        for found, each in zip(_logprobs(model, kv, asked), asked, strict=True)
    ]


def _in_fp8(model: CausalModel, kv: torch.Tensor, asked: Sequence[Asked]) -> list[Asked]:
    """Return the questions with what is made of their answers by fp8, the most of all ways in which engines write it."""
    most = [0.0] * len(asked)
    for written in in_fp8(kv):
        for n, (each, logprobs) in enumerate(zip(asked, _logprobs(model, written, asked), strict=True)):
            best = logprobs.topk(min(2 * TOP, logprobs.shape[1]))
            tokens = best.indices.tolist()
            listed = [dict(zip(*row, strict=True)) for row in zip(tokens, best.values.tolist(), strict=True)]
            most[n] = max(most[n], compare(each.answer, [row[0] for row in tokens], listed).difference)
    return [msgspec.structs.replace(each, fp8=round(n, 4)) for each, n in zip(asked, most, strict=True)]


def in_fp8(kv: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield KV as engines have it in fp8 with scale 1: of each dtype the nearest number, as GPUs write it, and the one that is left
    where digits are cut off, as vLLM 0.32 does on CPU."""
    numbers = kv.float()
    for dtype in FP8:  # the first has fewer small numbers, the second fewer digits
        largest = torch.finfo(dtype).max
        nearest = numbers.clamp(-largest, largest).to(dtype)
        yield nearest.to(kv.dtype)
        # The bits of an fp8 number without its sign grow with it.
        above = (nearest.float().abs() > numbers.abs()).to(torch.uint8)
        yield (nearest.view(torch.uint8) - above).view(dtype).to(kv.dtype)


def _damages(kv: torch.Tensor, chunk_tokens: int) -> Iterator[torch.Tensor]:
    """Yield the KV with one chunk damaged, for a few chunks."""
    last = max(0, kv.shape[2] // chunk_tokens - 1)
    for chunk in _spread(last):
        yield in_another_layout(kv, chunk * chunk_tokens, chunk_tokens)


def _spread(last: int) -> list[int]:
    """Return a few of the numbers from 0 to `last`, both among them."""
    return sorted({round(last * n / (_DAMAGED - 1)) for n in range(_DAMAGED)})


def in_another_layout(kv: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """Return canonical KV of which some positions are what the bytes of one layout are in another."""
    damaged, part = kv.clone(), kv[:, :, start : start + count]
    # One head's layouts are the same; there layers and tokens change places.
    order = (3, 0, 1, 2, 4) if kv.shape[3] > 1 else (3, 0, 2, 1, 4)
    damaged[:, :, start : start + count] = part.permute(order).reshape(part.shape)
    return damaged


def _choose(seen: Sequence[Sequence[float]]) -> list[int]:
    """Return the fewest candidates that notice each damage, `MAX_QUESTIONS` at most; `seen[damage][candidate]`."""
    chosen: list[int] = []
    while len(chosen) < MAX_QUESTIONS:

        def noticed(candidate: int) -> tuple[float, float]:
            best = [min(_SEEN, max(row[n] for n in (*chosen, candidate))) for row in seen]
            return sum(best), min(best)

        best = max(range(len(seen[0])), key=noticed)
        if chosen and noticed(best)[0] <= noticed(chosen[0])[0] + 0.05:
            break
        chosen.append(best)
    return chosen


@contextmanager
def rounding(model: CausalModel) -> Iterator[Callable[[int, float], None]]:
    """Have each matrix product of the model come out as another engine might round it.

    Call what it yields with a seed, and how much coarser than its dtype the engine is.
    """
    generator = torch.Generator(device=model.device)
    half, size = torch.finfo(DTYPES[model.fingerprint.dtype]).eps / 2, 0.0

    def again(seed: int, coarse: float) -> None:
        nonlocal size
        generator.manual_seed(seed)
        size = coarse * half

    def rounded(module: torch.nn.Module, given: object, out: Any) -> Any:
        # The scores and logits of Llama 4's router, which is a matrix product by inheritance.
        if isinstance(out, tuple):
            return tuple(rounded(module, given, each) for each in out)
        noise = torch.empty(out.shape, device=out.device).uniform_(1 - size, 1 + size, generator=generator)
        return noise.mul_(out).to(out.dtype)

    handles = [
        module.register_forward_hook(rounded)
        for module in model.model.modules()
        if isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"
    ]
    try:
        yield again
    finally:
        for handle in handles:
            handle.remove()


def in_int8(canary: ServedCanary | None) -> ServedCanary | None:
    """Return a plain cartridge's canary for its int8 copy, what was measured of int8 as noise; None if nothing was."""
    if canary is None or canary.after[0].int8 is None:
        return None
    most = max(each.int8 or 0.0 for each in canary.after)

    def noisier(asked: Asked) -> Asked:
        answer = msgspec.structs.replace(asked.answer, noise=round(asked.answer.noise + most, 4))
        return Asked(asked.question, answer, fp8=asked.fp8)

    after, behind = (tuple(map(noisier, part)) for part in (canary.after, canary.behind))
    return msgspec.structs.replace(canary, after=after, behind=behind)
