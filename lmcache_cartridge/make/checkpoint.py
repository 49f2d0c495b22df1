"""What transformers reads of a model's directory beside the weights: never by code that the directory brings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    DeepseekV3Config,
)

from ..artifact.hf_config import ALIKE
from ..artifact.weights import model_directory
from ..errors import UnsupportedModel

ARGUMENTS: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""For every `from_pretrained`. Without the second transformers asks whoever sits there, and runs the code on a y."""
SEEING = ("gemma3", "llama4", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Model types that read images beside text and whose answers to text were compared with an engine's. Qwen's rotate by three
positions of each token (mrope), which are one and the same for text."""
_CONFIGS: dict[str, Any] = {"deepseek_v3": DeepseekV3Config}


def locate_model(name: str) -> tuple[Path, str]:
    """Return where a model lies and what cartridges call it. Raises `UnsupportedModel` where it is not on this machine."""
    directory = model_directory(name)
    if directory is None:
        raise UnsupportedModel(f"{name} is neither a directory nor a model in the local Hub cache; download it first")
    return directory, directory.name if Path(name).is_dir() else name


def read_config(directory: Path) -> Any:
    """Return the config of a model. Raises `UnsupportedModel` where nothing but its own code could read it."""
    try:
        named = json.loads((directory / "config.json").read_text()).get("model_type")
    except (OSError, ValueError):
        named = None  # transformers says it better
    if named not in ALIKE:
        return _without_code(AutoConfig.from_pretrained, directory)
    config = _CONFIGS[ALIKE[named]].from_pretrained(directory, **ARGUMENTS)
    config.model_type = ALIKE[named]  # by it transformers finds how experts are stored; else it makes some up (5.19)
    return config


def read_tokenizer(directory: Path) -> Any:
    """Return a model's tokenizer. Raises `UnsupportedModel` where nothing but its own code could make it."""
    return _without_code(AutoTokenizer.from_pretrained, directory)


def _without_code(read: Callable[..., Any], directory: Path) -> Any:
    try:
        return read(directory, **ARGUMENTS)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise UnsupportedModel(
            f"transformers reads {directory.name} by code of the model's own alone, and no such code is run"
        ) from error


def auto_class(config: Any) -> Any:
    """Return what of transformers loads the models of a config."""
    return AutoModelForImageTextToText if config.model_type in SEEING else AutoModelForCausalLM


def outline(directory: Path, dtype: Any) -> Any:
    """Return a model whose weights are nowhere, and whose buffers, such as RoPE's frequencies, are computed."""
    config, register = read_config(directory), torch.nn.Module.register_parameter

    def nowhere(module: Any, name: str, parameter: torch.nn.Parameter | None) -> None:
        register(
            module,
            name,
            parameter if parameter is None else torch.nn.Parameter(parameter.to("meta"), requires_grad=False),
        )

    saved = getattr(config.get_text_config(), "dtype", None) or torch.float32
    try:
        torch.nn.Module.register_parameter = nowhere  # type: ignore[method-assign, assignment]
        return auto_class(config).from_config(config, dtype=saved if dtype == "auto" else dtype)
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]
