"""Quantised copies of the shipped model, as checkpoints that people publish: every number rounded to the nearest."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from lmcache_cartridge.cli.recall import MODEL_DIR

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it compiles as it is imported, by what torch will drop
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        QuantizationStatus,
    )
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

GROUP = 32
"""Inputs that share a scale where weights have 4 bits: it divides all of the shipped model's shapes."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_LINEAR = re.compile(r"model\.layers\.\d+\.\w+\.\w+_proj\.weight")
Tensors = dict[str, torch.Tensor]


def quantised(form: str, root: Path, source: Path = MODEL_DIR) -> Path:
    """Write a Llama's checkpoint at `root` with the weights of its layers in a form of `FORMS`; return `root`.

    Embeddings and norms stay as they are.
    """
    make, config = FORMS[form]
    shutil.copytree(source, root, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors: Tensors = {}
    for name, value in load_file(source / "model.safetensors").items():
        if _LINEAR.fullmatch(name):
            stem = name.removesuffix("weight")
            tensors |= {stem + part: each.contiguous() for part, each in make(value).items()}
        else:
            tensors[name] = value
    save_file(tensors, root / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((root / "config.json").read_text())
    (root / "config.json").write_text(json.dumps(fields | {"quantization_config": config}, indent=1))
    return root


def _scheme(preset: str) -> QuantizationScheme:
    scheme = preset_name_to_scheme(preset, ["Linear"])
    if scheme.weights.group_size is not None:
        scheme.weights.group_size = GROUP
    return scheme


def _stored(preset: str, form: str) -> tuple[Callable[[torch.Tensor], Tensors], dict[str, Any]]:
    """Return how compressed-tensors stores a weight `[out, in]`, in its own code, and the config that says so."""
    scheme = _scheme(preset)

    def make(weight: torch.Tensor) -> Tensors:
        scale, _ = _scales(weight, scheme.weights)
        return BaseCompressor.get_value_from_registry(form).compress({"weight": weight, "weight_scale": scale}, scheme)

    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=form, ignore=["lm_head"],
        quantization_status=QuantizationStatus.COMPRESSED,
    )  # fmt: skip
    return make, config.to_dict()


def _scales(weight: torch.Tensor, arguments: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and zero points `[out, groups]` of a weight, as compressed-tensors finds them."""
    groups = weight.unflatten(1, (-1, arguments.group_size or weight.shape[1]))
    return calculate_qparams(groups.amin(2), groups.amax(2), arguments)


def _gptq(weight: torch.Tensor) -> Tensors:
    """Eight inputs in an int32, the first in its lowest bits; zero points less 1: `QuantLinear.pack` of AutoGPTQ 0.7."""
    scale, _ = _scales(weight, _scheme("W4A16").weights)
    whole = torch.round(weight.float() / scale.float().repeat_interleave(GROUP, 1)).clamp(-8, 7).int() + 8  # [out, in]
    zeros = torch.full((scale.shape[1], scale.shape[0]), 8 - 1)
    return {
        "qweight": _packed(whole.unflatten(1, (-1, 8))).T,
        "qzeros": _packed(zeros.unflatten(1, (-1, 8))),
        "scales": scale.T.half(),
        "g_idx": (torch.arange(weight.shape[1]) // GROUP).int(),
    }


def _awq(weight: torch.Tensor) -> Tensors:
    """Eight outputs in an int32, in an order of their own: `WQLinear_GEMM.from_linear` of AutoAWQ 0.2."""
    scale, zero = _scales(weight, _scheme("W4A16_ASYM").weights)
    zero = zero.int() + 8  # compressed-tensors counts from -8
    steps = torch.round(weight.float() / scale.float().repeat_interleave(GROUP, 1)).int()
    whole = (steps + zero.repeat_interleave(GROUP, 1)).clamp(0, 15)
    return {
        "qweight": _packed(whole.T.unflatten(1, (-1, 8))[..., _AWQ_ORDER]),
        "qzeros": _packed(zero.T.unflatten(1, (-1, 8))[..., _AWQ_ORDER]),
        "scales": scale.T.half(),
    }


def _packed(eights: torch.Tensor) -> torch.Tensor:
    """Return whole numbers below 16, eight in a row, as int32s: the first in the lowest bits."""
    as_one = (eights.long() << 4 * torch.arange(8)).sum(-1)
    return torch.where(as_one < 1 << 31, as_one, as_one - (1 << 32)).int()


FORMS: dict[str, tuple[Callable[[torch.Tensor], Tensors], dict[str, Any]]] = {
    "W8A8": _stored("W8A8", "int-quantized"),
    "W4A16": _stored("W4A16", "pack-quantized"),
    "GPTQ": (_gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True,
                     "lm_head": False, "checkpoint_format": "gptq"}),
    "AWQ": (_awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
}  # fmt: skip
"""How weights are stored, with the `quantization_config` of the checkpoint."""
