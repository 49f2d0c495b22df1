"""What tests need of the processor that they run on."""

from __future__ import annotations

import pytest
import torch

_HAS_AVX512 = torch.cpu._is_avx512_supported()
needs_avx512 = pytest.mark.skipif(
    not _HAS_AVX512,
    reason="without AVX-512 vLLM 0.32 has on a CPU no cache in fp8, no tiles for AMX and no op for W4A16, and computes W8A8 "
    "further from transformers than a canary takes for noise",
)


def noise(nats: float) -> float:
    """Return how far logprobs of a bfloat16 model may be apart by rounding, `nats` where the processor has AVX-512.

    Without it vLLM's CPU build rounds more often: up to 0.32 was seen where 0.25 is the bound elsewhere.
    """
    return nats if _HAS_AVX512 else 2 * nats


MAY_TURN = 0 if _HAS_AVX512 else 1
"""How many of some twenty greedy answers may turn over by rounding: without AVX-512 one was seen, `B+` for `B-`."""
