"""Admin: `/v1/cartridges`, under the server's API key like every other `/v1` route."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI

from ..errors import CartridgeNotFound
from ..quarantine import Quarantine
from ..registry import Location, Registry
from .gate import error
from .request import Reference, Refusal

if TYPE_CHECKING:
    from .api import CartridgePlugin

_PATH = re.compile(r"/\S*/")
_ACTIONS = {"pin": "cartridge_pin", "unpin": "cartridge_unpin", "evict": "cartridge_evict"}


def add_routes(app: FastAPI, plugin: CartridgePlugin) -> None:
    """Add the routes. Those that change anything answer 403 unless the setting `admin` is on."""
    router = APIRouter(prefix="/v1/cartridges")

    @router.get("")
    async def every() -> Any:
        ranks = await plugin.rpc("cartridge_status")
        rows = await asyncio.to_thread(_registry(plugin).all)
        return {"object": "list", "data": [_state(row, ranks, plugin) for row in rows]}

    @router.get("/{name}")
    async def one(name: str) -> Any:
        try:
            row = await asyncio.to_thread(_registry(plugin).find, name)
        except CartridgeNotFound:
            return error(Refusal(404, f"no cartridge is called {name[:80]!r}"))
        return _state(row, await plugin.rpc("cartridge_status"), plugin)

    @router.post("/{name}/{action}")
    async def act(name: str, action: str) -> Any:
        if not plugin.settings.admin:
            return error(Refusal(403, "changing cartridges over HTTP is off; the setting `admin` switches it on"))
        if action not in ("preload", *_ACTIONS):
            return error(Refusal(404, f"no such action: {action[:80]!r}"))
        try:
            selection = await asyncio.to_thread(plugin.resolver.resolve, [Reference(id=name[:1024], source="registry")])
            if selection.tag is None:
                return error(Refusal(422, f"{selection.names} has no KV, so there is nothing to {action}"))
            if action in ("preload", "pin"):
                plugin.forget(selection.tag)
                await plugin.admit(selection)
        except Refusal as refusal:
            return error(refusal)
        if action == "preload":
            counts = [rank["resident"] for rank in await plugin.prepare(selection)]
        else:
            counts = await plugin.rpc(_ACTIONS[action], selection.manifests[0].digest)
        if action == "evict":
            plugin.forget()
        return {"id": selection.manifests[0].name, "action": action, "chunks": min(counts)}

    app.include_router(router)


def _registry(plugin: CartridgePlugin) -> Registry:
    return Registry(plugin.settings.registry_path, read_only=True)


def _state(row: Location, ranks: list[dict[str, Any]], plugin: CartridgePlugin) -> dict[str, Any]:
    """Describe one cartridge for a client, without a path."""
    quarantined = Quarantine(plugin.settings.quarantine_dir).reason(row.digest)
    reason = quarantined or next((rank["refused"][row.name] for rank in ranks if row.name in rank["refused"]), None)
    resident = min(rank["resident"].get(row.digest, 0) for rank in ranks)
    whole = row.positions // ranks[0]["chunk_tokens"] if row.kind != "tokens" else 0
    state = "quarantined" if quarantined else "refused" if reason else "resident" if resident >= whole else "cold"
    return {
        "object": "cartridge",
        "id": row.id,
        "version": row.version,
        "digest": row.digest,
        "kind": row.kind,
        "positions": row.positions,
        "bytes": row.bytes,
        "state": state,
        "reason": reason and _PATH.sub("", reason.replace(str(row.root), row.name)),
        "cpu": {"resident_chunks": resident, "chunks": whole},
    }
