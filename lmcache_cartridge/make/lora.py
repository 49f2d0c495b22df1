"""LoRA: a model that computes with an adapter, as an engine does that is asked for it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from ..artifact.weights import WEIGHTS, tensor_digests
from ..errors import UnsupportedModel


def add_adapter(model: Any, directory: Path) -> None:
    """Put a PEFT LoRA adapter beside the weights of a transformers model, in the model's dtype, as vLLM has it.

    It is not merged: weights would be rounded to the model's dtype together with it, and no engine's are. Raises
    `UnsupportedModel` where the adapter is of another model.
    """
    from peft import PeftModel, get_peft_model_state_dict

    def refuse(why: Any) -> UnsupportedModel:
        return UnsupportedModel(f"the LoRA adapter {directory.name} is not of this model: {why}")

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Found missing adapter keys")  # an error of ours, below
            adapted: Any = PeftModel.from_pretrained(model, str(directory), autocast_adapter_dtype=False)
    except (ValueError, RuntimeError, KeyError) as error:
        raise refuse(str(error).splitlines()[0]) from None
    adapted.eval().requires_grad_(False)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:  # alone: the frequencies of RoPE stay in float32
            parameter.data = parameter.data.to(model.dtype)
    loaded, stored = get_peft_model_state_dict(adapted).keys(), tensor_digests(directory / WEIGHTS, sampled=True).keys()
    if loaded != stored:
        raise refuse(f"{len(stored - loaded)} of its tensors are for layers that are not there")
