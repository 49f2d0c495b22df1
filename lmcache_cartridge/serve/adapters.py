"""Adapters: which LoRA adapter computes a request, by its content, and whether cartridges are of the same one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..artifact.chat import Chat
from ..artifact.weights import CONFIG, WEIGHTS, adapter_digest, model_directory
from ..errors import UnsupportedModel
from .request import Refusal
from .resolve import Selection

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest


class Adapter(NamedTuple):
    """A LoRA adapter as vLLM has loaded it."""

    request: LoRARequest
    digest: str | None
    """`adapter_digest` of its files; None where no cartridge can be of it."""
    problem: str = ""
    """Why there is no digest."""
    stamp: Any = None
    """What its files looked like when they were loaded."""
    retry_after_s: float | None = None
    """When to ask again, where that has yet to be found out."""

    def check_digest(self) -> None:
        """Raise `Refusal` where it has no digest."""
        if self.digest is None:
            raise Refusal(503 if self.retry_after_s else 422, self.problem, retry_after_s=self.retry_after_s)


class Prefix(NamedTuple):
    """What a context is made of: the first tokens of prompts, as one model computes them."""

    ids: list[int]
    chat: Chat | None = None
    """How a chat goes on that they begin."""
    adapter: Adapter | None = None
    """What computes them; None for the base model."""

    @property
    def lora(self) -> str | None:
        """The digest of the adapter."""
        return self.adapter and self.adapter.digest

    @property
    def apart(self) -> bytes:
        """What tells it from others of the same tokens."""
        return f"{self.chat or ''}{self.lora or ''}".encode()


_Load = Callable[["LoRARequest"], Awaitable[Any]]


class Adapters:
    """The LoRA adapters of one API server.

    An adapter is what its files held when vLLM loaded it. vLLM reads them again at times without saying so, so one whose
    files have changed since is of no cartridge until it is loaded again.
    """

    def __init__(self, served: Mapping[str, LoRARequest]) -> None:
        """`served` is vLLM's own, by the name that requests give as their model; it changes."""
        self._served = served
        self._loaded: dict[str, Adapter | None] = {}
        self.loads: Counter[str] = Counter()
        """How often vLLM was asked to load each name. Neither its cache nor LMCache's keys know what was loaded in place."""

    async def start(self) -> None:
        """Read the files of the adapters that were loaded before there was this."""
        for request in list(self._served.values()):
            await self._note(request)

    async def load(self, load: _Load, request: LoRARequest) -> Any:
        """Have vLLM load an adapter, or another one in its place, and return what it does. Raises what it raises."""
        name = request.lora_name
        before, stamp = self._loaded.get(name), await asyncio.to_thread(_stamp, request)
        self._loaded[name] = _loading(request)
        try:
            result = await load(request)
        except BaseException:
            self._loaded[name] = before
            raise
        self.loads[name] += 1
        await self._note(request, stamp)
        return result

    async def _note(self, request: LoRARequest, stamp: Any = None) -> Adapter:
        self._loaded[request.lora_name] = found = await asyncio.to_thread(read, request, stamp)
        return found

    async def of(self, model: str | None) -> Adapter | None:
        """Return the adapter that a request names as its model, None for the base model. Looks at its files."""
        request = self._served.get(model or "")
        if request is None:
            return None
        found = self._loaded.get(request.lora_name) or await self._note(request)
        if found.request is not request:
            return _loading(request)
        if found.digest is not None and await asyncio.to_thread(_stamp, request) != found.stamp:
            why = f"the files of the LoRA adapter {request.lora_name} were changed after it was loaded; load it again"
            return Adapter(request, None, why)
        return found

    async def check_unchanged(self, request: LoRARequest) -> None:
        """Raise `Refusal` unless what a name stands for is what it did, of a request for it."""
        found = await self.of(request.lora_name)
        if found is None or found.request is not request:
            raise Refusal(503, f"the LoRA adapter {request.lora_name} was loaded again meanwhile", retry_after_s=1)
        found.check_digest()


def _loading(request: LoRARequest) -> Adapter:
    return Adapter(request, None, f"the LoRA adapter {request.lora_name} is being loaded", retry_after_s=1)


def check_made_with(selection: Selection, adapter: Adapter | None) -> None:
    """Raise `Refusal` unless cartridges were made with the adapter that computes the request; None is the base model.

    Those without KV go with any.
    """
    if selection.tag is None:
        return
    if adapter is not None:
        adapter.check_digest()
    if (adapter and adapter.digest) != selection.lora:
        base = "the base model, whose KV no LoRA adapter computes; ask that, or make one by `build --lora`"
        other = "a LoRA adapter that the `model` does not name, or with other weights of it"
        raise Refusal(422, f"{selection.names} was made with {other if selection.lora else base}")


def _directory(request: LoRARequest) -> Path:
    directory = model_directory(str(Path(request.lora_path).expanduser()))
    if directory is None:
        raise UnsupportedModel(f"the LoRA adapter {request.lora_name} is not in a local directory")
    return directory


def _stamp(request: LoRARequest) -> Any:
    """Return what changes when an adapter's files do; None where there are none. Blocks."""
    try:
        found = [(_directory(request) / name).stat() for name in (CONFIG, WEIGHTS)]
    except (OSError, UnsupportedModel):
        return None
    return tuple((file.st_mtime_ns, file.st_ctime_ns, file.st_size, file.st_ino) for file in found)


@lru_cache(maxsize=256)
def _digest(directory: Path, stamp: Any) -> str:
    return adapter_digest(directory)


def read(request: LoRARequest, before: Any = None) -> Adapter:
    """Read an adapter's files, which looked like `before` when it began to be loaded. Blocks."""
    try:
        stamp = before or _stamp(request)
        digest = _digest(_directory(request), stamp)
    except UnsupportedModel as error:
        return Adapter(request, None, str(error))
    if _stamp(request) != stamp:
        return Adapter(request, None, f"the files of the LoRA adapter {request.lora_name} changed while it was loaded")
    return Adapter(request, digest, stamp=stamp)
