"""What tests need of the processor that they run on."""

from __future__ import annotations

import pytest
import torch

needs_avx512 = pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(),
    reason="without AVX-512 vLLM 0.32 has neither a cache in fp8 nor tiles for AMX on a CPU",
)
