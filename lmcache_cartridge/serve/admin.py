"""Admin: `/v1/cartridges`, under the server's API key like every other `/v1` route."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from ..artifact.bytesource import ByteRange
from ..artifact.reading import MANIFEST, PAYLOAD
from ..artifact.writing import TOKENS
from ..engine import host_api
from ..errors import ArtifactError, CartridgeError, ManifestError, RegistryError, SourceError
from ..library.quarantine import Quarantine
from ..library.registry import RegistryEntry
from .adapters import Prefix
from .chat import begun
from .contexts import Context, Patched, Posted
from .http import current, error, tenants_of
from .request import Reference, Refusal, unreadable, without_paths

if TYPE_CHECKING:
    from .admission import Admission  # which loads vLLM
    from .making import Maker

logger = logging.getLogger("vllm.lmcache_cartridge.serve.admin")

Ranks = list[dict[str, Any]]
"""What each worker's store says of itself."""
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_PART_BYTES = 8 << 20
"""Most of a file that is in memory while it is sent."""
_ACTIONS = ("preload", "pin", "unpin", "evict")
_PAGE_ROWS = 1000
"""Most cartridges that one answer lists."""


def add_routes(app: FastAPI, admission: Admission) -> None:
    """Add the routes. Those that change anything answer 403 unless the setting `admin` is on."""
    router = APIRouter(prefix="/v1/cartridges")

    def allow() -> None:
        if not admission.settings.admin:
            raise Refusal(403, "this is off over HTTP; the setting `admin` switches it on")

    async def refused(request: Request, problem: Any) -> Response:
        """Answer what no route answers itself."""
        if isinstance(problem, RegistryError):
            logger.warning("the registry cannot be read: %s", problem)
            problem = unreadable(problem)
        elif isinstance(problem, CartridgeError):
            status, why = 400 if isinstance(problem, ManifestError) else 409, without_paths(str(problem), {})
            problem = Refusal(503, why, retry_after_s=5) if isinstance(problem, SourceError) else Refusal(status, why)
        return error(problem)

    for kind in (Refusal, CartridgeError):
        app.add_exception_handler(kind, refused)

    @router.get("")
    async def every(
        limit: int = Query(_PAGE_ROWS, ge=1, le=_PAGE_ROWS),
        after: str = Query("", max_length=1024),
        active: bool = False,
    ) -> Any:
        ranks = await admission.client.ask("status")
        return await asyncio.to_thread(_page, admission, ranks, limit, after, active)

    def maker() -> Maker:
        if admission.maker is None:
            raise Refusal(403, "clients may have nothing made here; --l1-bytes and the setting `contexts` allow it")
        return admission.maker

    async def made(name: str) -> Context:
        found = await asyncio.to_thread(maker().table.own, [name])
        if name not in found or not found[name].digest:
            raise Refusal(404, f"no context is called {name[:80]!r}, or it is still being made")
        return found[name]

    @router.post("")
    async def post(posted: Posted, request: Request) -> Any:
        """Have a cartridge made of a text."""
        text, ids, chat = posted.document, posted.token_ids or [], None
        if [text, posted.messages, posted.token_ids].count(None) != 2:
            raise Refusal(400, "give one of `document`, `messages` and `token_ids`")
        adapter = await admission.adapters.of(posted.model)
        if adapter is not None:
            adapter.check_digest()
        elif posted.model and posted.model not in admission.router.models:
            raise Refusal(404, f"no model is called {posted.model[:80]!r}")
        tokenized = partial(host_api.tokenized, request)
        try:
            if posted.messages is not None:
                ids, chat = await begun(tokenized, posted.messages, posted.chat_template_kwargs)
            elif text and text.strip():
                ids = await tokenized(prompt=text)
        except (ArtifactError, KeyError, TypeError) as error:
            raise Refusal(400, f"the text is not taken: {error}") from None
        current().tenants = tenants_of(posted.cache_salt, current().api_key)
        context = await maker().post(Prefix(ids, chat, adapter), posted, current().tenants[0])
        try:
            shown = await one(context.id)
        except Refusal as gone:  # it was deleted just now
            raise Refusal(503, str(gone), retry_after_s=1) from None
        return JSONResponse(shown, 200 if shown["digest"] else 202)

    @router.get("/{name}/files/{file}")
    async def part(name: str, file: str, request: Request) -> Any:
        """Send a file of a context, from wherever it lies, or the `Range: bytes=FIRST-LAST` of it."""
        place = (await asyncio.to_thread(admission.resolver.registry.find, f"{(await made(name)).id}@1")).location
        if file not in (MANIFEST, TOKENS, PAYLOAD):
            raise Refusal(404, "a context has no such file")
        source = admission.resolver.sources
        size = await asyncio.to_thread(source.size, place, file)
        asked = _RANGE.fullmatch(request.headers.get("range", ""))
        start, last = map(int, asked.groups()) if asked else (0, size - 1)
        if not start <= last < size:
            raise Refusal(416, f"the file has {size} bytes")

        async def read() -> AsyncIterator[bytes]:
            for at in range(start, last + 1, _PART_BYTES):
                where = ByteRange(at, min(at + _PART_BYTES, last + 1))
                data = bytearray(where.end - at)
                await asyncio.to_thread(source.read_into, place, file, where, memoryview(data))
                yield bytes(data)

        if not asked:
            return StreamingResponse(read())
        return StreamingResponse(read(), 206, {"content-range": f"bytes {start}-{last}/{size}"})

    @router.patch("/{name}")
    async def patch(name: str, patched: Patched) -> Any:
        maker().check(patched)
        context, shown = await made(name), await one(name)
        context = await asyncio.to_thread(maker().patch, context, patched)
        return shown | {"expires_at": context.expires_at}

    @router.delete("/{name}")
    async def delete(name: str) -> Any:
        await asyncio.to_thread(maker().remove, await made(name))
        return {"id": name, "object": "cartridge", "deleted": True}

    @router.get("/{name}")
    async def one(name: str) -> Any:
        found = await asyncio.to_thread(admission.resolver.contexts.own, [name])
        if name in found and not found[name].digest:
            return found[name].shown
        reference = Reference(id=name[:1024], source="registry")
        rows = (await asyncio.to_thread(admission.resolver.candidates, reference))[:1]
        ranks = await admission.client.ask("status")
        return (await asyncio.to_thread(_states, admission, ranks, rows))[0]

    @router.post("/tokens")
    async def tokens(asked: dict[str, Any]) -> Any:
        """Tell the token ids of the cartridges that a request names. Loads no KV."""
        params, model = asked.get("kv_transfer_params"), asked.get("model")
        references = admission.router.choose(asked, params, model, current().named)
        current().tenants = tenants_of(asked.get("cache_salt"), current().api_key)
        selection = await admission.resolve(references) if references else None
        return {"token_ids": list(selection.token_ids) if selection else []}

    @router.post("/{name}/{action}")
    async def act(name: str, action: str) -> Any:
        allow()
        if action not in _ACTIONS:
            raise Refusal(404, f"no such action: {action[:80]!r}")
        # Evicting lifts the quarantine for which it would be refused.
        reference = Reference(id=name[:1024], source="registry", force_redownload=action == "evict")
        selection = await admission.resolve([reference])
        if selection.tag is None:
            raise Refusal(422, f"{selection.names} has no KV, so there is nothing to {action}")
        result = {"id": selection.manifests[0].name, "action": action}
        if action == "preload":
            ranks = await admission.client.ask("preload", selection.tag, selection.located)
            if rank := next((rank for rank in ranks if rank["refused"]), None):
                raise Refusal(409, str(selection.refused(rank)))
            slowest = min(ranks, key=lambda rank: (not rank["opening"], rank["resident"]))
            body = result | {"chunks": slowest["chunks"], "resident_chunks": slowest["resident"]}
            done = slowest["resident"] == slowest["chunks"] and not slowest["opening"]
            return JSONResponse(body, 200 if done else 202)
        ranks = await admission.client.ask("status")
        if action == "evict" and any(selection.tag in rank["pinned"] for rank in ranks):
            raise Refusal(409, f"{selection.names} is pinned, so nothing of it was evicted; unpin it first")
        try:
            counts = await admission.client.ask(action, selection.tag)
        except CartridgeError as problem:
            if action == "pin":
                await admission.client.ask("unpin", selection.tag)
            raise Refusal(409, str(problem)) from None
        return result | {"chunks": min(counts)}

    app.include_router(router)


def _page(admission: Admission, ranks: Ranks, limit: int, after: str, active: bool) -> dict[str, Any]:
    """List cartridges by id and version, as OpenAI's lists are paged; the `active` ones all together. Blocks."""
    registry, seen = admission.resolver.registry, admission.resolver.contexts.seen
    if active:
        tags = {
            tag for rank in ranks for tag in (*rank["pinned"], *rank["loading"], *chain(*rank["resident"].values()))
        }
        digests = {digest for tag in tags for digest in tag.split(".")}
        rows, more = seen(registry.having(digests)), False
    else:
        rows = []
        while len(rows) <= limit and (found := registry.page(limit, after)):  # contexts of others fill no page
            rows, after = rows + seen(found), found[-1].name
        rows, more = rows[:limit], len(rows) > limit
    last, data = rows[-1].name if rows else None, _states(admission, ranks, rows)
    page = {"object": "list", "data": data, "has_more": more, "last_id": last}
    if (library := admission.library) is not None:
        problem = library.problem and without_paths(library.problem, {library.location: "the library"})
        page["library"] = {"position": library.position, "seen": library.seen_s, "problem": problem}
    return page


def _states(admission: Admission, ranks: Ranks, rows: list[RegistryEntry]) -> list[dict[str, Any]]:
    """Describe cartridges for a client, without a path. Blocks."""
    quarantine = Quarantine(admission.settings.quarantine_dir)
    current = admission.resolver.registry.current(row.id for row in rows)
    contexts = admission.resolver.contexts.of([row.id for row in rows])

    def described(row: RegistryEntry) -> dict[str, Any]:
        outcome, failed = admission.canaries.outcome(row.name, row.digest)
        refused = (rank["refused"][row.name] for rank in ranks if row.name in rank["refused"])
        quarantined = quarantine.reason(row.digest, row.location)
        reason = quarantined or next(refused, failed)
        whole, rest = divmod(row.positions * (row.kind != "tokens"), ranks[0]["chunk_tokens"])
        whole += row.kind == "trained" and rest > 0
        tiers = {
            tier: {"resident_chunks": min(rank["resident"][tier].get(row.digest, 0) for rank in ranks), "chunks": whole}
            for tier in ranks[0]["resident"]
        }
        resident = max(tier["resident_chunks"] for tier in tiers.values())
        loading = [rank["loading"][row.digest] for rank in ranks if row.digest in rank["loading"]]
        if reason:
            state = "quarantined" if quarantined else "refused"
        else:
            state = "resident" if resident >= whole else "loading" if loading else "cold"
        return (contexts[row.id].shown if row.id in contexts and row.version == 1 else {}) | {
            "object": "cartridge",
            **{name: getattr(row, name) for name in ("id", "version", "digest", "kind", "positions", "bytes")},
            "current": row.name in current,
            "state": state,
            "reason": reason and without_paths(reason, {row.location: row.name}),
            "pinned": all(row.digest in rank["pinned"] for rank in ranks),
            "tiers": tiers,
            "loading": _progress(loading),
            "canary": outcome,
        }

    return list(map(described, rows))


def _progress(ranks: Ranks) -> dict[str, Any] | None:
    """Describe how far the slowest rank is with loading; None where none is loading."""
    slowest = min(ranks, key=lambda rank: rank["resident"], default=None)
    return slowest and {
        "resident_chunks": slowest["resident"],
        "chunks": slowest["chunks"],
        "failing": slowest["problem"] is not None,
    }
