"""Export: a cartridge's KV in the formats that others read."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from ...artifact import files, reading
from ...artifact.manifest import Manifest
from ...errors import ArtifactError, CartridgeExists
from ..payload import read_kv
from ..progress import Progress, silent
from .ids import DOCUMENT_IDS, IDS
from .peft import TENSOR, WEIGHTS, to_peft

CHECKPOINT = "cartridge.pt"
FROZEN = 1
"""Positions that count as frozen: the attention sink. HazyResearch's loader refuses a checkpoint with none."""


def export(root: Path, form: str, output: Path, *, progress: Progress = silent) -> Manifest:
    """Write the KV of the artefact at `root` to the new directory `output` and return its manifest.

    `peft` is an adapter directory for `PeftModel.from_pretrained`; `hazy` a checkpoint for HazyResearch's
    `TrainableCache.from_pretrained`. What a prefill cartridge's token ids were, and
    a trained one's document, lie beside it, so that an import gives the same cartridge. What is stored in int8 is
    written in the model's dtype, as it is served. Raises `CartridgeExists` unless `output` is new or empty,
    `ArtifactError` for a corrupt artefact or one without KV; leaves nothing then.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise CartridgeExists(f"{output} is there and not empty; export writes to a new directory")
    for done, total in reading.verify(root):
        progress("verify", done, total)
    manifest = reading.load_manifest(root)
    if manifest.fingerprint.lora is not None:
        raise ArtifactError(
            f"cartridge {manifest.name} was made with a LoRA adapter, which no format of others can say"
        )
    base = manifest.provenance.model or manifest.fingerprint.architecture
    output.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(output) as partial:
        partial.mkdir()
        {"peft": _peft, "hazy": _hazy}[form](manifest, read_kv(manifest, root), base, partial)
        if manifest.kind == "prefill":
            (partial / IDS).write_text(json.dumps(reading.load_token_ids(manifest, root).tolist()))
        if (document := reading.load_document_ids(manifest, root)) is not None:
            (partial / DOCUMENT_IDS).write_text(json.dumps(document.tolist()))
    return manifest


def _peft(manifest: Manifest, kv: torch.Tensor, base: str, directory: Path) -> None:
    from peft import CartridgeConfig, TaskType

    shape = manifest.fingerprint
    config = CartridgeConfig(
        task_type=TaskType.CAUSAL_LM, base_model_name_or_path=base, inference_mode=True, num_frozen_tokens=FROZEN,
        num_virtual_tokens=manifest.positions, num_layers=shape.layers, num_attention_heads=shape.kv_heads,
        token_dim=shape.kv_heads * shape.head_size, num_transformer_submodules=1,
    )  # fmt: skip
    config.save_pretrained(str(directory))
    save_file({TENSOR: to_peft(kv).contiguous()}, directory / WEIGHTS, metadata={"format": "pt"})


def _hazy(manifest: Manifest, kv: torch.Tensor, base: str, directory: Path) -> None:
    planes = {}
    for plane, name in enumerate(("keys", "values")):
        layers = [layer.transpose(0, 1)[None] for layer in kv[plane]]
        for part, span in (("frozen", slice(0, FROZEN)), ("trainable", slice(FROZEN, None))):
            planes[f"{part}_{name}"] = torch.nn.ParameterList(
                torch.nn.Parameter(layer[:, :, span].contiguous(), requires_grad=part == "trainable")
                for layer in layers
            )
    torch.save(planes, directory / CHECKPOINT)
    (directory / "meta.json").write_text(json.dumps({"model": base}))
