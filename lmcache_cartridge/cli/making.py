"""What `bench` and `validate` make cartridges with, for a server of their own or for one that follows `--home`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..make.ladder.maker import Maker
    from ..settings import Settings


def maker_of(loaded: Any, settings: Settings, chunk: int, **more: Any) -> Maker:
    """Return what makes cartridges of `loaded()` for the server of such settings, in its registry."""
    from ..library.quarantine import Quarantine
    from ..library.registry import Registry
    from ..make.ladder.maker import Home, Maker

    kept = Home(Registry(settings.registry_path), Quarantine(settings.quarantine_dir))
    return Maker(loaded, kept, settings.cartridges_dir, chunk=chunk, **more)


def vllm_args(given: list[str], loaded: Any) -> list[str]:
    """Return vLLM's options for a server of a model: those given, in the dtype of its cartridges."""
    from ..make.ladder.own import eager

    args = given or eager()
    if any(word.partition("=")[0] == "--dtype" for word in args):
        return args
    return [*args, "--dtype", loaded.fingerprint.dtype]  # vLLM's own choice for float32 is 16 bits
