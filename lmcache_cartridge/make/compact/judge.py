"""Judge: how near compact KV is to its document's, by layer and in what the model says first."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..model import CausalModel
from ..train.packing import Example
from ..train.retention import LEAST_GAIN, first_choices
from .closed import compacted, fit_errors, token_weights
from .references import References

HELD_OUT = 10
"""Every such answer token is left out of a compaction that is made only to tell the fit error by it."""
MOST_COMPARED = 256
"""Examples that are asked again to see what a compaction has kept."""


def held_out_errors(kv: torch.Tensor, references: References, positions: int) -> list[float]:
    """Return for each layer the relative error of the attention output of answer tokens that a fit has not seen.

    That of a compaction of the document's `kv` in closed form which is made for this and thrown away.
    """
    held = torch.zeros_like(references.answers)
    held[references.answers.nonzero()[::HELD_OUT, 0]] = True
    part = compacted(kv, references, positions, token_weights(references).masked_fill(held, 0.0))
    return fit_errors(part, references, held)


def share_kept(
    model: CausalModel, document: torch.Tensor, kv: torch.Tensor, examples: Sequence[Example]
) -> float | None:
    """Return which share of what a document adds to the model's first choices its compact form keeps.

    At the answer tokens of `examples`, 256 at most, the right ones before them given: (agreement of `kv` - agreement of
    the first position alone) / (1 - the latter), each with the choices behind canonical `document`. None where the
    document changes less than 5% of them.
    """
    places = torch.linspace(0, len(examples) - 1, min(len(examples), MOST_COMPARED)).long().tolist()
    some = [examples[i] for i in places]
    wanted, nothing, found = (first_choices(model, each, some) for each in (document, document[:, :, :1], kv))
    alone, agreed = (float((choices == wanted).float().mean()) for choices in (nothing, found))
    return (agreed - alone) / (1 - alone) if 1 - alone >= LEAST_GAIN else None
