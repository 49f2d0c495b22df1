"""The questions that a server asks of its engine before it answers from a cartridge, and what transformers answers.

The answers are computed with the very KV that is served, and must say something about all of it. So there are several
candidates, words of the document from many places among them; each chunk in turn is damaged, and as few questions are
taken as notice every time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from ..artifact.canary import MAX_QUESTIONS, Asked, Expected, ServedCanary, compare
from ..artifact.model import rotating_layers
from ..errors import UnsupportedModel
from ..memory.layout import DTYPES
from ..memory.rope import rotate, shift
from .model import CausalModel
from .progress import Progress, silent

ANSWER = 8
"""Tokens of an answer."""
TOP = 10
"""Likeliest tokens at each, to be compared."""
_QUESTION = 12
_LONGEST = 32
_WINDOWS = (0.05, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95)
"""Where in the document a candidate begins: a model that reads words again looks there for what follows."""
_SNIPPETS = (0.1, 0.5, 0.9)
TEXTS = ("\n\nQuestion: what does this document say?\nAnswer:", " In short, the most important of this is that")
_DAMAGED = 6
"""At most so many chunks, or layers, are damaged: spread over all, with the first and the last."""
_BEHIND = 6
"""Candidates for a cartridge behind itself, whose passes cost twice as much."""
_DRAWS = (1, 1, 1, 2, 2, 2, 2)
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
    `compress`, which has no model. Takes some thirty short forward passes. None where the model's context has no room
    for a question.
    """
    kv = kv.to(model.model.dtype)
    rows = _candidates(model, document, questions)
    if not _fits(model, kv.shape[2]) or not rows:
        return None
    progress("canary", 0, 2)
    after, sensitivity = _best(model, kv, rows, _damages(kv, chunk_tokens))
    if int8 is not None:
        measured = _differences(model, int8.to(kv.dtype), after)
        after = [msgspec.structs.replace(each, int8=round(n, 4)) for each, n in zip(after, measured, strict=True)]
    progress("canary", 1, 2)
    twice = 2 * kv.shape[2]
    reach = twice // chunk_tokens * chunk_tokens or twice
    behind = _behind(model, kv, rows, reach)
    progress("canary", 2, 2)
    cut = reach if behind and reach < twice else None
    return ServedCanary(tuple(after), round(sensitivity, 2), tuple(behind), cut)


def _best(
    model: CausalModel, kv: torch.Tensor, rows: Sequence[list[int]], damages: Iterable[torch.Tensor]
) -> tuple[list[Asked], float]:
    """Return the fewest questions whose answers change with each damage, and by how many bounds the least one shows.

    With those that show most in engines whose KV cache is fp8: other questions may come out there as if they were damaged.
    """
    asked = [Asked(tuple(row), answer) for row, answer in zip(rows, _ask(model, kv, rows), strict=True)]
    asked = _in_fp8(model, kv, asked)
    apart = [_differences(model, damaged, asked) for damaged in damages]
    seen, in_fp8 = (
        [[n / each.expected(in_fp8=fp8).bound for n, each in zip(row, asked, strict=True)] for row in apart]
        for fp8 in (False, True)
    )
    chosen = _choose(seen)
    chosen = list(dict.fromkeys([*chosen[: MAX_QUESTIONS - 1], *_choose(in_fp8), *chosen]))[:MAX_QUESTIONS]
    return [asked[n] for n in chosen], min(max(row[n] for n in chosen) for row in seen)


def _behind(model: CausalModel, kv: torch.Tensor, rows: Sequence[list[int]], reach: int) -> list[Asked]:
    """Return questions after `reach` positions of the cartridge and itself, moved behind it.

    None where the model cannot have that, or where nothing of the second copy is left.
    """
    positions, layers, rope = kv.shape[2], kv.shape[1], model.fingerprint.rope
    if not rope or not _fits(model, 2 * positions) or reach <= positions:
        return []
    try:
        behind = shift(kv, model.fingerprint, positions)
        moved = torch.cat([kv, behind], dim=2)[:, :, :reach]
    except UnsupportedModel:
        return []

    def damages() -> Iterator[torch.Tensor]:
        layers_tried = sorted({round((layers - 1) * n / (_DAMAGED - 1)) for n in range(_DAMAGED)})
        for layer in layers_tried:
            damaged = moved.clone()
            # A layer that rotates is left where it was, one that does not is rotated.
            wrong = kv[0, layer] if layer in (rotating_layers(rope) or ()) else rotate(kv[0, layer], rope[0], positions)
            damaged[0, layer, positions:] = wrong[: reach - positions]
            yield damaged

    return _best(model, moved, rows[:_BEHIND], damages())[0]


def _candidates(model: CausalModel, document: Sequence[int] | None, questions: Sequence[list[int]]) -> list[list[int]]:
    bos, size = model.tokenizer.bos_token_id, _QUESTION
    texts = [model.encode(text, special=False)[-size:] for text in TEXTS]
    found = [*texts, *(question[-_LONGEST:] for question in questions)]
    if document is not None and len(document) > 2 * size:
        starts = [max(1, int(share * (len(document) - size))) for share in _WINDOWS]
        found += [list(document[start : start + size]) for start in starts]
        each = size // len(_SNIPPETS)
        starts = [max(1, int(share * (len(document) - each))) for share in _SNIPPETS]
        found.append([i for start in starts for i in document[start : start + each]])
    # A server takes leading BOS for one that a template put there.
    return [row for row in ([i for i in row if i != bos] for row in found) if row]


def _fits(model: CausalModel, positions: int) -> bool:
    return not model.context_tokens or positions + _LONGEST + ANSWER <= model.context_tokens


def _ask(model: CausalModel, kv: torch.Tensor, rows: Sequence[list[int]]) -> list[Expected]:
    """Return what follows each question after `kv`, up to the first token that rounding may turn into another."""
    ids = [list(row) for row in rows]
    for _ in range(ANSWER - 1):
        for row, logprobs in zip(ids, _logprobs(model, kv, ids), strict=True):
            row.append(int(logprobs[-1].argmax()))
    found = [each[-ANSWER:] for each in _logprobs(model, kv, ids)]
    best = [each.topk(min(TOP, each.shape[1])) for each in found]
    apart: list[list[torch.Tensor]] = []
    with rounding(model) as again:
        for draw, coarse in enumerate(_DRAWS):
            again(draw, coarse)
            drawn = _logprobs(model, kv, ids)
            apart.append([
                (each[-ANSWER:].gather(1, top.indices) - top.values).abs() for each, top in zip(drawn, best, strict=True)
            ])  # fmt: skip
    answers = []
    for row, (values, indices), draws in zip(ids, best, zip(*apart, strict=True), strict=True):
        margins, unsure = (values[:, 0] - values[:, 1]).tolist(), torch.stack(draws).amax((0, 2)).tolist()
        fed = [*row[1 - ANSWER :], int(indices[-1, 0])]
        ends = (n for n in range(ANSWER) if margins[n] < 3 * unsure[n] or fed[n] != indices[n, 0])
        count = next(ends, ANSWER - 1) + 1
        noise = max(float(each[:count].mean()) / coarse for each, coarse in zip(draws, _DRAWS, strict=True))
        answers.append(Expected(
            tuple(map(tuple, indices[:count].tolist())),
            tuple(tuple(round(value, 4) for value in values) for values in values[:count].tolist()),
            round(max(noise, 1e-4), 4),
        ))  # fmt: skip
    return answers


@torch.inference_mode()
def _logprobs(model: CausalModel, kv: torch.Tensor, rows: Sequence[list[int]]) -> list[torch.Tensor]:
    """Return float32 logprobs `[tokens, vocabulary]` of each row after `kv`."""
    found: list[torch.Tensor] = [torch.empty(0)] * len(rows)
    for part in model.passes(rows, kv):
        ids = torch.tensor([rows[index] for index in part], device=model.device)
        logits = model.model(input_ids=ids, past_key_values=model.cache(kv, len(part)), use_cache=True).logits
        for index, each in zip(part, logits, strict=True):
            found[index] = each[:, : model.fingerprint.vocab_size].float().cpu().log_softmax(-1)
    return found


def _differences(model: CausalModel, kv: torch.Tensor, asked: Sequence[Asked]) -> list[float]:
    """Return for each question how far its answer is from the expected one when the KV is `kv`."""
    return [
        float((
            logprobs[-len(each.answer.tokens) :].gather(1, torch.tensor(each.answer.tokens))
            - torch.tensor(each.answer.logprobs)
        ).abs().mean())
        for logprobs, each in zip(_logprobs(model, kv, _fed(asked)), asked, strict=True)
    ]  # fmt: skip


def _fed(asked: Sequence[Asked]) -> list[list[int]]:
    """Return the questions with their answers, but for the last token."""
    return [[*each.question, *(tokens[0] for tokens in each.answer.tokens[:-1])] for each in asked]


def _in_fp8(model: CausalModel, kv: torch.Tensor, asked: Sequence[Asked]) -> list[Asked]:
    """Return the questions with what is made of their answers by fp8 as the coarsest engine writes it."""
    most = [0.0] * len(asked)
    for dtype in FP8:
        for n, (each, logprobs) in enumerate(
            zip(asked, _logprobs(model, cut_off(kv, dtype), _fed(asked)), strict=True)
        ):
            best = logprobs[-len(each.answer.tokens) :].topk(min(2 * TOP, logprobs.shape[1]))
            listed = [
                dict(zip(*row, strict=True)) for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)
            ]
            most[n] = max(most[n], compare(each.answer, best.indices[:, 0].tolist(), listed).difference)
    return [msgspec.structs.replace(each, fp8=round(n, 4)) for each, n in zip(asked, most, strict=True)]


def cut_off(kv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return KV as an fp8 `dtype` with scale 1 has it where numbers are cut off towards 0, as vLLM 0.32 does on CPU."""
    numbers, largest = kv.float(), torch.finfo(dtype).max
    nearest = numbers.clamp(-largest, largest).to(dtype)
    # The bits of an fp8 number without its sign grow with it.
    above = (nearest.float().abs() > numbers.abs()).to(torch.uint8)
    return (nearest.view(torch.uint8) - above).view(dtype).to(kv.dtype)


def _damages(kv: torch.Tensor, chunk_tokens: int) -> Iterator[torch.Tensor]:
    """Yield the KV with one chunk damaged, for a few chunks."""
    last = max(0, kv.shape[2] // chunk_tokens - 1)
    for chunk in sorted({round(last * n / (_DAMAGED - 1)) for n in range(_DAMAGED)}):
        yield in_another_layout(kv, chunk * chunk_tokens, chunk_tokens)


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
        noise = torch.rand(out.shape, generator=generator, device=out.device) * 2 - 1
        return (out.float() * (1 + size * noise)).to(out.dtype)

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
    if canary is None:
        return None
    measured = [each.int8 for each in canary.after if each.int8 is not None]
    if len(measured) < len(canary.after) or not measured:
        return None
    most = max(measured)
    after, behind = ([_noisier(each, most) for each in part] for part in (canary.after, canary.behind))
    return msgspec.structs.replace(canary, after=tuple(after), behind=tuple(behind))


def _noisier(asked: Asked, more: float) -> Asked:
    answer = msgspec.structs.replace(asked.answer, noise=round(asked.answer.noise + more, 4))
    return Asked(asked.question, answer, fp8=asked.fp8)
