"""Admission: which cartridges a request gets, and when their KV may be used."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.engine.protocol import EngineClient
from vllm.logger import init_logger

from ..artifact.model import from_plain
from ..artifact.weights import model_directory
from ..engine import host_api
from ..engine.client import ControlClient
from ..errors import CartridgeError, UnsupportedEngine
from ..library.published import Following
from ..library.workers import Workers
from ..settings import Settings
from ..sources.published import follower_of
from .adapters import Adapters, check_made_with
from .canary import Canaries
from .claim import Claim
from .drain import Drain
from .http import current
from .imported import Served
from .making import Maker
from .metrics import requests
from .request import NeedsReading, Reference, Refusal, Router, StillMade, Unservable
from .resolve import MAX_READS, Found, Resolver, Selection

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

logger = init_logger("vllm.lmcache_cartridge.serve.admission")

_POLL_S = 0.1


class Counted(host_api.Around):
    """vLLM's engine client, for what the server asks itself."""

    admission: Admission

    async def generate(self, prompt: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """Generate. Each request has one output. Raises `Refusal` where another adapter may have computed a part of it."""
        async for output in self.inner.generate(prompt, *args, **kwargs):
            if adapter := kwargs["lora_request"]:
                await self.admission.adapters.check_unchanged(adapter)
            cached = output.num_cached_tokens or 0
            requests().count("own_tokens", "cached", cached)
            requests().count("own_tokens", "computed", len(prompt["prompt_token_ids"]) - cached)
            yield output


class Admission:
    """What the parts of one API server share. `start` comes before everything that asks the workers."""

    client: ControlClient
    canaries: Canaries

    def __init__(self, settings: Settings) -> None:
        """Raises `SettingsError` for a secret that is none."""
        self.settings, self.drain = settings, Drain(settings.drain_s)
        self.follower = follower_of(settings)
        """What follows the published library, where settings name one."""
        self.router, self.resolver = Router(settings), Resolver(settings)
        self.secret = settings.salt_secret() or secrets.token_bytes(32)
        """Makes the salts of this server's requests differ from all that a client can send."""
        self._pool = ThreadPoolExecutor(8, thread_name_prefix="cartridge-request")
        self._reads = Workers("cartridge-read", MAX_READS, one_a_group=True)
        self.adapters = Adapters({})
        self.maker: Maker | None = None
        """What makes contexts, where clients may have any made."""

    async def start(self, engine: EngineClient, adapters: Mapping[str, LoRARequest] | None = None) -> None:
        """Connect to the engine's workers. Raises `UnsupportedEngine` where they have no cartridges.

        `adapters` are those that vLLM serves, by name, as it goes on changing them.
        """
        self.adapters = Adapters({} if adapters is None else adapters)
        await self.adapters.start()
        try:
            paths = await host_api.control_paths(engine)
        except Exception as error:
            raise UnsupportedEngine(
                f"the workers have no cartridges: {error}. Start vLLM with the options that `lmcache-cartridge serve "
                "MODEL --print` shows, or without LMCACHE_CONFIG_FILE"
            ) from error
        self.client = ControlClient(paths)
        ranks = await self.client.ask("numbers")
        chunk_tokens = ranks[0]["chunk_tokens"]
        for rank in ranks:
            logger.info("rank %d serves %d cartridges", rank["rank"], rank["served"])
        served = from_plain((await self.client.ask("fingerprint"))[0])
        config = engine.model_config
        if directory := model_directory(str(config.model)):
            dtype = str(config.dtype).removeprefix("torch.")
            self.resolver.imports.served = Served(str(directory.resolve()), dtype, chunk_tokens, served)
        self.resolver.model, self.resolver.context = served, config.max_model_len
        asked: Any = Counted(engine)
        asked.admission = self
        self.canaries = Canaries(self.settings, asked, self.client, self.resolve, chunk_tokens, served)
        if self.settings.contexts:
            self.maker = Maker(self, asked, chunk_tokens, served)
            await self.maker.start()

    @property
    def library(self) -> Following | None:
        """How far the published library is followed; None where settings name none. Does not block."""
        return None if self.follower is None else self.follower.latest

    async def numbers(self) -> list[Any]:
        """Return every worker's numbers; cartridges whose text came in prompts that do not name them are tried, and contexts
        removed whose time is over.
        """
        if self.maker is not None:
            try:
                await asyncio.to_thread(self.maker.tidy)
            except CartridgeError as error:  # it is tried again
                logger.warning_once(f"contexts cannot be tidied up: {error}")
        ranks = await self.client.ask("numbers")
        self.canaries.follow(ranks)
        return ranks

    async def resolve(self, references: Sequence[Reference]) -> Selection:
        """Return the selection; only those whose manifest is not at hand wait for it to be read, and those that name a context
        until it is made.

        Raises `Refusal`, 503 where that takes longer than `ready_timeout_s`.
        """
        loop = asyncio.get_running_loop()
        found: dict[Reference, Found] = {}
        late = Refusal(503, "the cartridge's manifest is still being read", retry_after_s=5)
        try:
            async with asyncio.timeout(self.settings.ready_timeout_s):
                while True:
                    try:
                        return await loop.run_in_executor(
                            self._pool, copy_context().run, self.resolver.resolve, references, found
                        )
                    except NeedsReading as needed:
                        found[needed.reference] = await self._read(needed)
                    except StillMade as made:
                        late = made
                        await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise late from None

    async def _read(self, needed: NeedsReading) -> Found:
        """Read a manifest that is not at hand, together with all others that want it. Raises `Refusal`."""
        read = partial(copy_context().run, self.resolver.find, needed.reference)
        reading = self._reads.submit((needed.reference, current().tenants), read, [needed.location])
        return await asyncio.shield(asyncio.wrap_future(reading))  # whoever leaves does not end it for others

    @asynccontextmanager
    async def admit(
        self, selection: Selection, check_request: Callable[[Selection], None], model: str | None
    ) -> AsyncIterator[Claim]:
        """Lend a claim on the KV once it may be used, or one that says that the documents' text takes its place.

        Of an id it is on the newest version that the engine serves; `check_request` may raise `Refusal` for each. What
        the request names as its `model` decides which LoRA adapter they must be of. The first time of a cartridge the engine's canary is awaited too; where it fails, it is as if there were no KV. It is
        released on leaving unless it was granted. Raises `Refusal`.
        """
        refusals: dict[str | None, Unservable] = {}
        adapter = await self.adapters.of(model)
        while True:
            check_request(selection)
            check_made_with(selection, adapter)
            selection = selection._replace(adapter=adapter and adapter.request)
            async with Claim(self.client, selection) as claim:
                try:
                    with requests().wait():
                        await self._prepare(claim)
                except Unservable as error:
                    refusal = error
                else:
                    yield claim
                    return
            refusals[selection.tag] = refusal
            newest = next(iter(refusals.values()))
            if refusal.digest is None:
                raise newest
            self.resolver.pass_over(refusal.digest)
            selection = await self.resolve(selection.references)
            if selection.tag in refusals:
                raise newest
            logger.warning_once(f"{selection.names} answers instead: {refusal}")

    async def _prepare(self, claim: Claim) -> None:
        """Wait until a claim's KV may be used, or its documents' text takes its place. Raises `Refusal`."""
        selection = claim.selection
        if self.settings.admin and selection.afresh and selection.tag:
            for tag in dict.fromkeys((*selection.afresh, selection.tag)):
                await self.client.ask("evict", tag)
        problem = self.canaries.known(selection)
        if problem is None and await claim.wait(self.settings):
            problem = await self.canaries.check(selection)
        if problem is None:
            return
        must_inject = selection.must_inject and self.settings.on_miss != "document"
        if selection.document_ids is None or must_inject:
            raise problem
        claim.use_text()
