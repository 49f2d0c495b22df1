"""Making: a text that a client sent is computed by the engine once, kept as a cartridge, and tried before anybody hears of it."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3
from vllm.logger import init_logger

from ..artifact.manifest import Provenance, check_id
from ..artifact.model import Fingerprint
from ..artifact.reading import load_manifest
from ..artifact.writing import ArtifactWriter
from ..engine.computed import ANSWER, QUESTION, canary, kv_of
from ..engine.trust import CONTEXT
from ..errors import ArtifactError, CartridgeError, CartridgeExists, CartridgeNotFound, UnsupportedEngine
from ..library.quarantine import Quarantine
from ..library.registry import Registry
from ..sources.locks import locked
from ..sources.published import Library
from .adapters import Prefix
from .contexts import STATE, Context, Patched, Posted
from .marks import Mark
from .metrics import requests
from .request import Refusal, without_paths
from .resolve import Selection

logger = init_logger("vllm.lmcache_cartridge.serve.making")

_MOST = 32
"""Contexts that are made, one after the other, or wait for it."""
_ANSWER_S, _LEASE_S = 5.0, 15.0
"""How long whoever posts a context waits for it, and its trial for memory; after what time one is removed whose maker was killed."""
_SPARE = 1.2
"""By how much longer marks keep what is published, so that an index is not written for each request."""
_PROGRESS = "UPDATE contexts SET expires_at = ?, done = min(?, tokens) WHERE id = ? AND digest = ''"
_MADE = "UPDATE contexts SET digest = ?, bytes = ?, expires_at = ?, done = tokens WHERE id = ? RETURNING 1"
_FAILED = "UPDATE contexts SET error = ?, digest = '', expires_at = ? WHERE id = ? AND key = ?"
_ROOM = "(SELECT count(*) < ? AND total(bytes) + ? <= ? FROM contexts)"
_LIVING = "SELECT * FROM contexts WHERE (key = ? OR id = ?) AND expires_at > ?"
_OVER = "UPDATE contexts SET expires_at = 0 WHERE expires_at <= ? AND (? IN (key, '') OR id = ?) RETURNING *"
"""Of a key or id, or with an empty key of all, what nobody can keep any longer."""
_ENDED = """UPDATE contexts SET expires_at = 0 WHERE id = ? AND created_at = ? AND ifnull(nullif(?, 0), expires_at) >= expires_at
RETURNING 1"""
_LONGEST = """SELECT * FROM contexts WHERE key IN (SELECT value FROM json_each(?)) AND digest != '' AND expires_at > ?
ORDER BY tokens DESC LIMIT 1"""


def _started(work: Coroutine[Any, Any, Context]) -> asyncio.Task[Context]:
    """Return a task that nobody has to wait for."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return task


class Maker:
    """Makes contexts, and removes those whose time is over. Lives in one event loop."""

    def __init__(self, admission: Any, engine: Any, chunk_tokens: int, model: Fingerprint) -> None:
        """`admission` is what the parts of the API server share, `engine` vLLM's client, `chunk_tokens` LMCache's chunk size, `model` what the engine runs."""
        self._admission, self._engine, self._settings = admission, engine, admission.settings
        self.chunk, self._model, self._turn = chunk_tokens, model, asyncio.Lock()
        self.table, self._run = admission.resolver.contexts, admission.resolver.contexts.run
        self._making: dict[str, asyncio.Task[Context]] = {}
        self._done: Counter[str] = Counter()
        """Tokens whose KV is written, of those that are made."""
        self._library = Library(self._settings) if self._settings.library else None
        self._registry = self._library.registry if self._library else Registry(self._settings.registry_path)
        self._longest = (admission.resolver.context - QUESTION - ANSWER) // chunk_tokens * chunk_tokens

    async def start(self) -> None:
        """Make what is needed. Raises `UnsupportedEngine` where KV cannot be had, and `SourceError` where it cannot be published."""
        config = self._engine.vllm_config
        if config.parallel_config.data_parallel_size > 1 or config.kv_transfer_config.kv_role == "kv_consumer":
            raise UnsupportedEngine("contexts: LMCache has to save (--l1-bytes), in the one engine of a server")
        try:
            await self._admission.client.ask("captured", "", [], 0)
        except CartridgeError as error:
            raise UnsupportedEngine(f"contexts: {error}") from error
        self.table.create()
        if self._library:
            await asyncio.to_thread(self._library.registry.begin)

    async def post(self, prefix: Prefix, posted: Posted, tenant: str) -> Context:
        """Have a context made unless there is one, and wait a while.

        Raises `Refusal` and `CartridgeError`.
        """
        context, is_new = await self._begun(prefix, posted, tenant)
        if context.digest:
            try:
                return await asyncio.to_thread(self.patch, context, posted)
            except CartridgeNotFound:  # another server has removed it meanwhile
                return await self.post(prefix, posted, tenant)
        if making := self._making.get(context.id):
            if not is_new:  # what is posted meanwhile holds as well, whoever waits for it
                making = _started(self._patched(making, posted))
            done, _ = await asyncio.wait([making], timeout=_ANSWER_S)
            return making.result() if done else context
        return context

    async def _patched(self, making: asyncio.Task[Context], posted: Posted) -> Context:
        return await asyncio.to_thread(self.patch, await asyncio.shield(making), posted)

    async def _begun(self, prefix: Prefix, posted: Posted, tenant: str) -> tuple[Context, bool]:
        """Return the context of a prefix, and whether it was none and is made from now on. Raises as `post` does."""
        try:
            self.check(posted)
            context, is_new = await asyncio.to_thread(self._add, prefix, posted, tenant)
        except (Refusal, CartridgeError):
            requests().count("contexts", "refused")
            raise
        if is_new:
            self._making[context.id] = task = _started(self._make(context, prefix, posted))
            if self._admission.drain.enter():  # a server that is to stop waits for it as for a request
                task.add_done_callback(lambda ended: self._admission.drain.leave())
        return context, is_new

    async def keep(self, prefix: Prefix, marks: Sequence[Mark], tenant: str) -> int:
        """Have contexts made of what is marked of a prefix, or kept longer where there are; return how many tokens the longest
        has that is made from now on. What settings leave no room for is not made.
        """
        most = 0
        for tokens, ttl_s in marks:
            with suppress(Refusal, CartridgeError):
                most_s = self._settings.contexts_ttl_s
                posted = Posted(ttl=min(ttl_s * (_SPARE if self._library else 1), most_s))
                context, is_new = await self._begun(
                    prefix._replace(ids=prefix.ids[: min(tokens, self._longest)]), posted, tenant
                )
                if is_new:
                    most = context.tokens
                elif context.digest and context.expires_at < time.time() + min(ttl_s, most_s):
                    await asyncio.to_thread(self.patch, context, posted)
        return most

    def longest(self, prefix: Prefix, tenant: str) -> Context | None:
        """Return the longest context of a tenant that a prefix begins with, as far as it ends with a chunk. Blocks."""
        digest, keys = blake3(tenant.encode()), []
        for start in range(0, len(prefix.ids), self.chunk):
            digest.update(np.array(prefix.ids[start : start + self.chunk], "<u4").tobytes())
            keys.append(digest.copy().update(prefix.apart).hexdigest())
        return next((Context(*row) for row in self._run(_LONGEST, json.dumps(keys), time.time())), None)

    def check(self, patched: Patched) -> None:
        """Raise `Refusal` for no time, for longer than settings allow, and for labels that are not a client's."""
        if any(label.startswith(STATE) for label in patched.labels or ()):
            raise Refusal(400, f"no label of yours may begin with {STATE}")
        if patched.ttl is not None and not 0 < patched.ttl <= self._settings.contexts_ttl_s:
            raise Refusal(400, f"ttl is above 0 seconds, {self._settings.contexts_ttl_s:g} at most")

    def _add(self, prefix: Prefix, posted: Posted, tenant: str) -> tuple[Context, bool]:
        """Return the context of a prefix, and whether it is a new one. Raises `Refusal` and `CartridgeError`."""
        ids = prefix.ids
        if not 0 < len(ids) <= self._longest or not 0 <= min(ids) <= max(ids) < self._model.vocab_size:
            raise Refusal(
                400,
                f"a context has 1 to {self._longest} tokens, each below {self._model.vocab_size}; this has {len(ids)}",
            )
        now, name = time.time(), posted.id
        key = blake3(tenant.encode() + np.array(ids, "<u4").tobytes() + prefix.apart).hexdigest()
        for over in map(Context._make, self._run(_OVER, now, key, name)):
            if over.id in self._making:
                self._renew(now)
            else:  # what is made of the text again lies in the same place
                self.remove(over, now)
        for there in map(Context._make, self._run(_LIVING, key, name, now)):
            if there.key != key or name not in (None, there.id):
                raise Refusal(409, f"{there.id} is in use, or has this text; choose another id, or delete it first")
            return there, False
        if name is not None:
            if self._library and not name.startswith(CONTEXT):
                raise Refusal(
                    400, f"in a published library the id of a context begins with {CONTEXT}; or give it a label"
                )
            with suppress(CartridgeNotFound):
                self._registry.find(check_id(name))
                raise Refusal(409, f"{name} is in use; choose another id")
        if len(self._making) >= _MOST:
            raise Refusal(503, "other contexts are being made", retry_after_s=5)
        size, settings = len(ids) * self._model.token_bytes, self._settings
        new = Context(name or CONTEXT + uuid.uuid4().hex[:20], tenant, key, now, now + _LEASE_S, len(ids), size)
        room = settings.contexts_count, size, settings.contexts_bytes
        added = f"""INSERT INTO contexts SELECT {", ".join("?" * len(new))}
        WHERE NOT EXISTS (SELECT 1 FROM contexts WHERE key = ? OR id = ?) AND {_ROOM} RETURNING 1"""
        if self._run(added, *new, key, new.id, *room):
            return new, True
        if self._run(f"SELECT 1 WHERE {_ROOM}", *room):  # another began to make it, or to remove it, meanwhile
            return self._add(prefix, posted, tenant)
        own = self._run("SELECT id FROM contexts WHERE tenant = ? ORDER BY coalesce(last_used_at, 0) LIMIT 5", tenant)
        raise Refusal(
            507,
            f"settings leave no room for one more context, of {size} bytes; delete of yours: {[i for (i,) in own]}",
        )

    def patch(self, context: Context, patched: Patched) -> Context:
        """Keep a context for so long from now on, let these labels point at it and no others, and return it.

        Raises `Refusal` where a label points at something else, and where it is being removed.
        """
        name = f"{context.id}@1"
        if patched.labels is not None:
            known, wanted = self._registry.labels(), set(patched.labels)
            for label in wanted:
                if known.get(label, name) != name:
                    raise Refusal(409, f"the label {label} is in use; choose another")
            for label in wanted - known.keys():
                self._registry.label(label, name)
            for label in known.keys() - wanted:
                if known[label] == name and not label.startswith(STATE):
                    with suppress(CartridgeNotFound):  # another server was first
                        self._registry.unlabel(label)
        if patched.ttl is None:
            return context
        context = context._replace(expires_at=time.time() + patched.ttl)
        if self._library:
            self._registry.label(context.label, name, instead=STATE)
        kept = "UPDATE contexts SET expires_at = ? WHERE id = ? AND expires_at > 0 RETURNING 1"
        if not self._run(kept, context.expires_at, context.id):
            raise Refusal(503, f"{context.id} is being removed", retry_after_s=1)
        return context

    async def _make(self, context: Context, prefix: Prefix, posted: Posted) -> Context:
        """Make a context and return it; what was not made is soon removed. Raises `Refusal` and `CartridgeError`."""
        try:
            async with self._turn:
                context = await self._written(context, prefix)
            context = await asyncio.to_thread(self._registered, context, posted)
            requests().count("contexts", "made")
            requests().context_seconds.observe(time.time() - context.created_at)
            return context
        except Exception as error:
            logger.exception("%s was not made", context.id)
            requests().count("contexts", "failed")
            if isinstance(error, CartridgeExists):
                error = Refusal(409, f"{context.id} is in use; choose another id")
            elif type(error) is OSError:
                error = Refusal(507, f"the context cannot be written: {error.strerror}")
            why, soon = without_paths(str(error), {}), time.time() + _LEASE_S
            await asyncio.to_thread(self._run, _FAILED, why, soon, context.id, context.key)
            # Another may have removed it and have made it anew, in the same place unless it is published.
            if self._library or not await asyncio.to_thread(
                self._run, "SELECT 1 FROM contexts WHERE key = ? AND id != ?", context.key, context.id
            ):
                with suppress(CartridgeError):
                    await asyncio.to_thread(self._withdraw, context)
            raise error from None
        finally:
            del self._making[context.id], self._done[context.id]

    def _registered(self, context: Context, posted: Posted) -> Context:
        """Let others know of a context that is made, and return it. Raises as `patch` does, and `SourceError`."""
        root, context = self.root(context), context._replace(expires_at=time.time() + posted.ttl)
        if self._library:
            self._library.publish(root, label=context.label)
            shutil.rmtree(root.parent)
        if not self._run(_MADE, context.digest, context.bytes, context.expires_at, context.id):
            raise Refusal(503, f"{context.id} took too long and was removed", retry_after_s=1)
        return self.patch(context, Patched(labels=posted.labels))

    def root(self, context: Context) -> Path:
        """Return where a context lies."""
        # The same text again lies where it lay: workers look there for KV of its digest that they have just heard of.
        return self._settings.contexts_dir / context.key / "1"

    async def _written(self, context: Context, prefix: Prefix) -> Context:
        """Have the engine compute a prefix, write what it has, and try that. Raises `CartridgeError` and `Refusal`."""
        name, root, ids = uuid.uuid4().hex, self.root(context), prefix.ids
        adapter = prefix.adapter and prefix.adapter.request
        model = msgspec.structs.replace(self._model, lora=prefix.lora)
        with ArtifactWriter(
            root, cartridge_id=context.id, version=1, kind="prefill", fingerprint=model, token_ids=np.array(ids),
            chunk_tokens=self.chunk, chat=prefix.chat,
        ) as writer:  # fmt: skip
            async for raw in kv_of(self._engine, self._admission.client, ids, name, model, self.chunk, adapter):
                await asyncio.to_thread(writer.write, raw)
                self._done[context.id] += self.chunk
            served = await canary(self._engine, ids, name, model.dtype, adapter)
            manifest = await asyncio.to_thread(
                writer.commit, Provenance("POST /v1/cartridges", time.strftime("%FT%TZ", time.gmtime())), served
            )
        # What lay here before may have had the same content, and wrong bytes.
        Quarantine(self._settings.quarantine_dir).lift(manifest.digest, str(root.resolve()))
        if self._library is None:
            await asyncio.to_thread(self._registry.register, root)
            # Workers may know of this KV, and look for it where another context of the text was until lately.
            await self._admission.client.ask("refresh")
        selection = Selection((manifest,), ((str(root), str(root)),), tuple(ids), tuple(ids), adapter=adapter)
        until = time.monotonic() + _ANSWER_S
        while refusal := await self._admission.canaries.check(selection):
            if refusal.retry_after_s is None or time.monotonic() > until:
                raise refusal
            await asyncio.sleep(0.2)  # requests may have all the memory at the moment
        return context._replace(digest=manifest.digest, bytes=manifest.payload_bytes, done=len(ids))

    def tidy(self) -> None:
        """Note what was used and what is still being made, and remove what has expired."""
        now, used = time.time(), self.table.used
        self.table.used = Counter()
        for context_id, count in used.items():
            self._run("UPDATE contexts SET uses = uses + ?, last_used_at = ? WHERE id = ?", count, now, context_id)
        self._renew(now)
        for row in self._run(_OVER, now, "", None):
            with suppress(CartridgeError):  # it is tried again
                self.remove(Context(*row), now)
        for (total,) in self._run("SELECT total(bytes) FROM contexts"):
            requests().context_bytes.set(total)

    def _renew(self, now: float) -> None:
        """Note how far those are that are made here, so that nobody removes them."""
        for context_id in [*self._making]:
            self._run(_PROGRESS, now + _LEASE_S, self._done[context_id], context_id)

    def remove(self, context: Context, until: float = 0) -> None:
        """Take a context out of the registry, the disk and the table. No change where it is to be kept longer than `until`.

        Whoever tidies up next ends what is begun here and fails.

        Requests that have it in memory end as they began, and others compute its text. Waits for others that remove one.
        """
        with locked(self._settings.registry_path.parent):
            if self._library and until:
                self._library.registry.follow()  # another server may keep it longer since
            # One that another has removed may be there again.
            if self._run(_ENDED, context.id, context.created_at, until):
                self._withdraw(context)
                self._run("DELETE FROM contexts WHERE id = ?", context.id)

    def _withdraw(self, context: Context) -> None:
        """Take a context out of the registry or the library, and the disk."""
        root, name = self.root(context), f"{context.id}@1"
        with suppress(CartridgeNotFound, ArtifactError):
            if self._library:
                if root.exists():
                    self._library.withdraw(load_manifest(root))
                if (row := self._registry.find(name)).digest == context.digest:  # else it is another server's
                    self._library.withdraw(row)
            elif self._registry.find(name).location == str(root.resolve()):
                self._registry.remove(name, labels=True)
        shutil.rmtree(root.parent, ignore_errors=True)
