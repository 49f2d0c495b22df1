"""Packing: several questions after one prefix in one row, each as if it stood there alone.

A prefix as `past_key_values` is copied in every layer for every row. So a row holds many questions, which the mask keeps
apart and whose positions all start where the prefix ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..model import ROWS_BYTES

ROW_TOKENS = 256
"""Tokens of questions a row holds at most, give or take one question."""


class Example(NamedTuple):
    """One question with its answer, and where the teacher's predictions for it lie."""

    prompt: list[int]
    answer: list[int]
    """With the end token, if the model has one."""
    first: int
    """Row of its first answer token in the lesson's targets; the others follow."""


class Packed(NamedTuple):
    """Examples as rows of tokens, for a forward pass after a prefix."""

    rows: list[list[Example]]
    ids: torch.Tensor
    """[R, T], padded on the right."""
    offsets: torch.Tensor
    """[R, T]: how far behind the prefix each token stands."""
    allowed: torch.Tensor
    """[R, T, T]: which tokens of its row a token may see, beside all of the prefix."""


def pack_examples(examples: Sequence[Example], device: torch.device, gaps: Sequence[int] = ()) -> Packed:
    """Return examples packed in their order, each `gaps` positions behind the prefix, 0 by default.

    The last token of each answer predicts nothing and is left out.
    """
    lengths = [len(example.prompt) + len(example.answer) - 1 for example in examples]
    wanted = sum(lengths) / math.ceil(sum(lengths) / ROW_TOKENS)  # rows of about one length, for little padding
    rows: list[list[Example]] = []
    filled = math.inf
    for example, length in zip(examples, lengths, strict=True):
        if filled >= wanted:
            rows.append([])
            filled = 0
        rows[-1].append(example)
        filled += length
    texts = [[[*e.prompt, *e.answer[:-1]] for e in row] for row in rows]
    gap = iter(gaps or [0] * len(examples))
    width = max(sum(map(len, row)) for row in texts)
    ids, offsets, owner = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(3))
    for r, row in enumerate(texts):
        start = 0
        for number, text in enumerate(row, 1):
            at = slice(start, start + len(text))
            ids[r, at], owner[r, at] = torch.tensor(text), number
            offsets[r, at] = torch.arange(len(text)) + next(gap)
            start += len(text)
    allowed = (owner[:, :, None] == owner[:, None, :]).tril()
    return Packed(rows, ids.to(device), offsets.to(device), allowed.to(device))


def passes(packed: Packed, kv: torch.Tensor) -> Iterator[tuple[torch.Tensor, Packed]]:
    """Yield some rows at a time, which and their examples, that go through one forward pass after canonical `kv`.

    Each row has a copy of it in every layer: of one that is larger than `ROWS_BYTES` there is one copy at a time.
    """
    most = max(1, min(64, ROWS_BYTES // (kv.nbytes + 1)))
    for rows in torch.arange(len(packed.rows)).split(most):
        here = rows.to(packed.ids.device)
        part = [packed.rows[i] for i in rows.tolist()]
        yield rows, Packed(part, packed.ids[here], packed.offsets[here], packed.allowed[here])


def answer_logits(model: Any, past: Any, packed: Packed) -> torch.Tensor:
    """Return float32 logits [answer tokens, vocabulary] before each answer token, in the order of the examples.

    `past`, a cache of transformers, holds the prefix for as many rows as `packed` has; the forward pass adds to it.
    """
    prefix = past.get_seq_length()
    row, column = answer_places(packed)
    columns, kept = torch.unique(column, return_inverse=True)
    logits = model(
        input_ids=packed.ids,
        position_ids=packed.offsets + prefix,
        attention_mask=prefix_mask(packed, prefix, model.dtype),
        past_key_values=past,
        use_cache=True,
        logits_to_keep=columns.to(packed.ids.device),
    ).logits
    return logits[row.to(logits.device), kept.to(logits.device)].float()


def prefix_mask(packed: Packed, prefix: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the additive mask `[R, 1, T, prefix + T]` of rows that all see a prefix of so many positions."""
    seen = torch.ones(*packed.ids.shape, prefix, dtype=torch.bool, device=packed.ids.device)
    hidden = ~torch.cat([seen, packed.allowed], dim=2)[:, None]
    mask = torch.zeros(hidden.shape, dtype=dtype, device=packed.ids.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min)


def answer_ids(packed: Packed) -> torch.Tensor:
    """Return the answer tokens in the order of `answer_logits`."""
    found = [token for row in packed.rows for example in row for token in example.answer]
    return torch.tensor(found, device=packed.ids.device)


def target_rows(packed: Packed) -> torch.Tensor:
    """Return which rows of a lesson's targets belong to the answer tokens, on the CPU."""
    return torch.tensor([e.first + i for row in packed.rows for e in row for i in range(len(e.answer))])


def answer_places(packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
    """Return row and column of the token before each answer token, in the order of the examples, on the CPU."""
    places = []
    for r, row in enumerate(packed.rows):
        start = 0
        for example in row:
            before = start + len(example.prompt) - 1
            places += [(r, before + i) for i in range(len(example.answer))]
            start += len(example.prompt) + len(example.answer) - 1
    row, column = torch.tensor(places).T
    return row, column
