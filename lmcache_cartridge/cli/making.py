"""What `bench` and `validate` make cartridges with, for a server of their own or for one that follows `--home`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .options import load_model

if TYPE_CHECKING:
    from ..make.model import CausalModel
    from ..make.trial.maker import Maker
    from ..settings import Settings


def maker_of(loaded: Any, settings: Settings, chunk: int, **more: Any) -> Maker:
    """Return what makes cartridges of `loaded()` for the server of such settings, in its registry."""
    from ..library.quarantine import Quarantine
    from ..library.registry import Registry
    from ..make.trial.maker import Home, Maker

    kept = Home(Registry(settings.registry_path), Quarantine(settings.quarantine_dir))
    return Maker(loaded, kept, settings.cartridges_dir, chunk=chunk, **more)


def load_for(vllm: list[str], model: str, dtype: str = "auto") -> tuple[CausalModel, list[str]]:
    """Return a model as a server with these options of vLLM has it, and the options: in the dtype of its cartridges."""
    from ..make.trial.own import eager
    from ..serve.arguments import Arguments

    args = vllm or eager()
    most, given = map(Arguments(args).get, ("max-model-len", "dtype"))
    loaded = load_model(model, dtype=dtype, max_model_len=int(most) if most and most.isdecimal() else None)
    return loaded, args if given else [*args, "--dtype", loaded.fingerprint.dtype]  # vLLM's own for float32 is 16 bits
