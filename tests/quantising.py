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
        QuantizationConfig,
        QuantizationStatus,
    )
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

GROUP = 32
"""Inputs that share a scale where weights have 4 bits: it divides all of the shipped model's shapes."""
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


def _stored(preset: str, form: str) -> tuple[Callable[[torch.Tensor], Tensors], dict[str, Any]]:
    """Return how compressed-tensors stores a weight `[out, in]`, in its own code, and the config that says so."""
    scheme = preset_name_to_scheme(preset, ["Linear"])
    if scheme.weights.group_size is not None:
        scheme.weights.group_size = GROUP

    def make(weight: torch.Tensor) -> Tensors:
        groups = weight.unflatten(1, (-1, scheme.weights.group_size or weight.shape[1]))
        scale, _ = calculate_qparams(groups.amin(2), groups.amax(2), scheme.weights)
        return BaseCompressor.get_value_from_registry(form).compress({"weight": weight, "weight_scale": scale}, scheme)

    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=form, ignore=["lm_head"],
        quantization_status=QuantizationStatus.COMPRESSED,
    )  # fmt: skip
    return make, config.to_dict()


def _as_it_is(weight: torch.Tensor) -> Tensors:
    return {"weight": weight}


FORMS: dict[str, tuple[Callable[[torch.Tensor], Tensors], dict[str, Any]]] = {
    "W8A8": _stored("W8A8", "int-quantized"),
    "W4A16": _stored("W4A16", "pack-quantized"),
    "GPTQ": (_as_it_is, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True,
                         "lm_head": False, "checkpoint_format": "gptq"}),
    "AWQ": (_as_it_is, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
}  # fmt: skip
"""How weights are stored, with the `quantization_config` of the checkpoint; GPTQ's and AWQ's only say so: nothing here can read them."""
