"""Serve prepared KV caches (cartridges) through unmodified vLLM and unmodified LMCache.

What a program may rely on is in `__all__`, by subject:

- make: `CausalModel` loads a model; `build` computes a document's KV with it; `build_compact` makes a short cartridge of
  a document, and `compact_cartridge` one of a prefill cartridge, as a `CompactionWanted` says; `train` trains a shorter one, as a `Task`
  with a `Recipe` says; `from_cache` takes what a KV compression left of a transformers cache; `recognise` reads what PEFT and others saved and `import_cartridge` makes a cartridge of it;
  `compress` stores one in int8.
- keep: `Registry` knows which cartridges there are; `Manifest` describes one, and `load_manifest` reads it; `Library`
  publishes them to a fleet of servers.
- serve offline: `engine_arguments` is for vLLM's `LLM`, `with_cartridges` for its prompts.
- `Settings` says where all this lies and how it is served. Every error is a `CartridgeError`.

A name is imported when it is first used: `import lmcache_cartridge` loads no torch. The functions that make a cartridge
write an artefact into a directory and register nothing; `train` registers what it made.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import CartridgeError

if TYPE_CHECKING:
    from .artifact.manifest import Manifest
    from .artifact.reading import load_manifest
    from .library.registry import Registry
    from .make.cache import from_cache
    from .make.compact.job import build_compact, compact_cartridge
    from .make.compact.wanted import Wanted as CompactionWanted
    from .make.foreign.convert import import_ as import_cartridge
    from .make.foreign.recognise import recognise
    from .make.model import CausalModel
    from .make.prefill import build
    from .make.train.job import Task, train
    from .make.train.trainer import Recipe
    from .make.write import compress
    from .serve.offline import engine_arguments, with_cartridges
    from .settings import Settings
    from .sources.published import Library

__version__ = "0.1.0"
__all__ = [
    "CartridgeError",
    "CausalModel",
    "CompactionWanted",
    "Library",
    "Manifest",
    "Recipe",
    "Registry",
    "Settings",
    "Task",
    "__version__",
    "build",
    "build_compact",
    "compact_cartridge",
    "compress",
    "engine_arguments",
    "from_cache",
    "import_cartridge",
    "load_manifest",
    "recognise",
    "train",
    "with_cartridges",
]
_LAZY = {
    "CausalModel": "make.model",
    "CompactionWanted": "make.compact.wanted",
    "Library": "sources.published",
    "Manifest": "artifact.manifest",
    "Recipe": "make.train.trainer",
    "Registry": "library.registry",
    "Settings": "settings",
    "Task": "make.train.job",
    "build": "make.prefill",
    "build_compact": "make.compact.job",
    "compact_cartridge": "make.compact.job",
    "compress": "make.write",
    "engine_arguments": "serve.offline",
    "from_cache": "make.cache",
    "import_cartridge": "make.foreign.convert",
    "load_manifest": "artifact.reading",
    "recognise": "make.foreign.recognise",
    "train": "make.train.job",
    "with_cartridges": "serve.offline",
}
"""The module of each that is imported when it is first used."""
_RENAMED = {"CompactionWanted": "Wanted", "import_cartridge": "import_"}
"""What a name is called in its module, where that is not the same."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f".{_LAZY[name]}", __name__), _RENAMED.get(name, name))
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
