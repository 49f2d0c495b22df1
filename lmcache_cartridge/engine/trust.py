"""Trust: which cartridges may answer prompts that do not name them. The one rule, for all that finds or lends chunks."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ..library.catalog import Catalog
from ..library.registry import Registry
from ..memory.described import Engine
from ..memory.store import CartridgeStore
from ..settings import Settings
from .withdrawals import Withdrawals

logger = logging.getLogger(__name__)

CONTEXT = "ctx-"
"""What the id of each context in a published library begins with, and of nothing else there."""


def private_places(settings: Settings) -> tuple[str, ...]:
    """Return what the locations of contexts begin with: what clients had made here, and what they had published."""
    return f"{settings.contexts_dir.resolve()}/", f"{settings.library}/cartridges/{CONTEXT}"


class Trust:
    """What one engine was seen to answer right from, and what has answered prompts since. Safe from any thread."""

    def __init__(self, settings: Settings, catalog: Catalog, registry: Registry) -> None:
        """`catalog` was refreshed. What answered prompts of an earlier process and was taken out since is withdrawn.

        Raises `OSError` where that cannot be noted.
        """
        self._plain_prompts, self._is_tried = settings.plain_prompts, bool(settings.canary)
        self._catalog, self._private = catalog, private_places(settings)
        self._trials: dict[str, dict[str, bool]] = {}
        """Of each digest that this engine was tried with, by its canary: whether the engine answered right."""
        self.wanted: set[str] = set()
        """Those that could have answered such a prompt, had the engine been tried with them."""
        self._withdrawals = Withdrawals(settings.quarantine_dir)
        earlier = self._withdrawals.earlier()
        registered = {row.digest for row in registry.having(earlier) if not row.location.startswith(self._private)}
        self._withdrawals.withdraw(earlier - (registered - catalog.quarantined))

    def may_answer(self, digest: str) -> bool:
        """Whether a cartridge may answer prompts that do not name it, as the setting `plain_prompts` says.

        By default this engine must have answered a canary of it right, and no copy's own that is wrong takes that away. What
        clients alone had made never may: others would hear that somebody has their text.
        """
        if self._plain_prompts == "none" or not self._catalog.serves(digest) or not self.names(digest):
            return False
        trials = self._trials.get(digest)
        return any(trials.values()) if trials else self._plain_prompts == "all"

    def may_be_tried(self, digest: str) -> bool:
        """Whether it may come to answer such prompts once the engine was tried with it."""
        is_wanted = self._is_tried and self._plain_prompts == "trusted" and bool(self.names(digest))
        return is_wanted and digest not in self._trials and self._catalog.serves(digest)

    def names(self, digest: str) -> list[str]:
        """Return the names that a digest has for everybody: those of contexts are their makers'."""
        return [one.name for one in self._catalog.registered(digest) if not one.location.startswith(self._private)]

    def want(self, digest: str) -> None:
        """Note one that could have answered such a prompt, had the engine been tried with it."""
        self.wanted.add(digest)

    def untried(self) -> list[str]:
        """Return the digests of those that were wanted since the last call."""
        untried, self.wanted = self.wanted, set()
        return sorted(untried)

    def tried(self, digest: str, canary: str, passed: bool) -> None:
        """Note whether this engine answers a canary of a cartridge right, of several copies each its own; "" for one that
        has none which could be asked.
        """
        self._trials[digest] = self._trials.get(digest, {}) | {canary: passed}
        self.wanted.discard(digest)
        self.withdraw()

    def begin_trials(self) -> None:
        """Forget how trials ended: the engine is another one from now on."""
        self._trials = {}

    def note(self, digests: Iterable[str]) -> bool:
        """Note who is about to answer a prompt that does not name it; False where it must not."""
        return self._withdrawals.note(digests)

    def withdraw(self) -> None:
        """Withdraw what has answered such prompts and is not registered any more, quarantined, or failed its canary."""

        def is_gone(digest: str) -> bool:
            failed = digest in self._trials and not any(self._trials[digest].values())
            return failed or digest in self._catalog.quarantined or not self.names(digest)

        self._withdrawals.withdraw(filter(is_gone, self._withdrawals.noted.copy()))


def opened(settings: Settings, engine: Engine) -> CartridgeStore:
    """Return a store for an engine, whose cartridges answer prompts by this rule."""
    store = CartridgeStore(settings, engine, Trust)
    chunk_bytes, tokens, budget = store.shape.size_bytes, engine.chunk_tokens, settings.cpu_bytes
    logger.info(
        "serving %d cartridges (%s) from %s: the cpu tier of %.2f GiB holds %d tokens of this model, chunks are %d tokens of %d "
        "bytes, rank %d of %d, %s", len(store.names()), ", ".join(store.names()[:8]), settings.home, budget / (1 << 30),
        budget // chunk_bytes * tokens, tokens, chunk_bytes, engine.rank % engine.world, engine.world, engine.layout,
    )  # fmt: skip
    return store
