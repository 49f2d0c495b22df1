"""CartridgeWorker: what the API server asks of vLLM's workers, through `--worker-extension-cls` and `collective_rpc`.

The calls run between two steps of the engine, so none of them waits for anything.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


class CartridgeWorker:
    """Methods that vLLM mixes into its worker class. Each returns plain values that msgpack can carry."""

    def cartridge_status(self) -> dict[str, Any]:
        """Return what this rank serves and holds. Raises `UnsupportedEngine` if the plugin is not there."""
        store = _store()
        return {
            "rank": store.engine.rank,
            "chunk_tokens": store.engine.chunk_tokens,
            "allow_trained": store.engine.allow_trained,
            "served": store.names(),
            "refused": store.refused(),
            "resident": store.resident_chunks(),
            "stats": store.stats()._asdict(),
        }

    def cartridge_prepare(self, tag: str, roots: dict[str, str]) -> dict[str, Any]:
        """Start bringing a cartridge or chain into memory; return how far it is. See `CartridgeStore.prepare`."""
        return _store().prepare(tag, {digest: Path(root) for digest, root in roots.items()})._asdict()

    def cartridge_pin(self, digest: str) -> int:
        """Pin a cartridge's resident chunks and return how many there are."""
        return _store().pin(digest)

    def cartridge_unpin(self, digest: str) -> int:
        """Undo `cartridge_pin` and return how many chunks it concerned."""
        return _store().unpin(digest)

    def cartridge_evict(self, digest: str) -> int:
        """Drop a cartridge's chunks that nobody relies on and return how many."""
        return _store().evict(digest)


def _store() -> Any:
    from ..errors import UnsupportedEngine
    from .backend import stores

    found = stores()
    if len(found) != 1:
        raise UnsupportedEngine(f"this worker has {len(found)} cartridge stores; there must be one")
    return found[0]
