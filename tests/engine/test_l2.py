"""The adapter in LMCache's own StorageManager: exactly a cartridge's KV in LMCache's buffers, or an honest miss, in time."""

from __future__ import annotations

import json
import logging
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
import uvicorn
from blocks import quietly
from fastapi import FastAPI
from making import Made, make_artifact, make_fingerprint, make_ids, make_rope
from waiting import run_threads, until

with quietly():
    from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
    from lmcache.v1.distributed.config import (
        EvictionConfig,
        L1ManagerConfig,
        L1MemoryManagerConfig,
        StorageManagerConfig,
    )
    from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
    from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import _object_key_to_filename
    from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
    from lmcache.v1.distributed.storage_manager import StorageManager
    from lmcache.v1.multiprocess.cache_control.object_service import ObjectService
    from lmcache.v1.multiprocess.http_apis import cache_api
    from lmcache.v1.multiprocess.http_apis.dependencies import MPHTTPContext
    from lmcache.v1.multiprocess.token_hasher import TokenHasher
    from vllm.lora.request import LoRARequest

    from lmcache_cartridge.engine import l2

from lmcache_cartridge.artifact.reading import load_token_ids
from lmcache_cartridge.engine.client import ControlClient, RemoteClaim
from lmcache_cartridge.engine.contract import GRANT, TAG
from lmcache_cartridge.engine.report import Report, check_ids, confirm, key_name
from lmcache_cartridge.engine.salts import (
    adapter_name,
    adapter_salt,
    check_salt,
    is_apart,
    key_salt,
    own_shifts,
    shared_salt,
    shifted,
    tag_part,
    tag_salt,
)
from lmcache_cartridge.errors import SettingsError, UnsupportedEngine
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.memory import tiles
from lmcache_cartridge.memory.layout import VIEWS, ChunkShape, rank_heads
from lmcache_cartridge.memory.store import CartridgeStore
from lmcache_cartridge.serve.launch import free_port

CHUNK = 64
BLOCK = 32
LAYOUT = tiles.layout("vec", BLOCK)
MODEL = key_name("/models/small", "facts")
ANYBODY = ""
"""The salt of a request whose client has none."""
NOBODY = key_salt({"lmcache.tag.x": "y"})
CARTRIDGES = {
    "doc": {"positions": 4 * CHUNK + 9, "chunk_tokens": CHUNK},
    "other": {"positions": 3 * CHUNK, "chunk_tokens": 256, "seed": 5},
    "trained": {"positions": 3 * CHUNK, "kind": "trained", "seed": 7},
}
WHOLE = {"doc": 4, "other": 3, "trained": 3}
FINGERPRINT = make_fingerprint(rope=msgspec.structs.replace(make_rope(), pairing="half"))
DESC = MemoryLayoutDesc([torch.Size((3, CHUNK, 256))], [torch.bfloat16])
"""Of the objects that LMCache makes for a chunk."""


class Home(NamedTuple):
    """Registered artefacts."""

    path: Path
    registry: Registry
    made: dict[str, Made]

    def root(self, name: str) -> Path:
        return self.path / "cartridges" / name / "1"

    def ids(self, name: str) -> list[int]:
        return load_token_ids(self.made[name].manifest, self.root(name)).tolist()

    def make(self, name: str, **options: Any) -> None:
        self.made[name] = make_artifact(self.root(name), cartridge_id=name, fingerprint=FINGERPRINT, **options)
        self.registry.register(self.root(name))


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home", Registry(tmp_path / "home" / "registry.sqlite"), {})
    for name, options in CARTRIDGES.items():
        home.make(name, **options)
    return home


class Server:
    """LMCache's storage with the adapter as its one L2, as LMCache's server builds it from its command line."""

    def __init__(self, home: Home, l1_bytes: int, policy: str, **params: Any) -> None:
        self.home = home
        self.socket = home.path.parent / "s" / "control"
        adapter = PluginL2AdapterConfig(
            "lmcache_cartridge.engine.l2", "CartridgeL2Adapter",
            {"home": str(home.path), "control": str(self.socket), "cpu_bytes": 4 << 20, "lookup_timeout_s": 5, "plain_prompts": "all"} | params,
        )  # fmt: skip
        with quietly():
            self.manager = StorageManager(
                StorageManagerConfig(
                    L1ManagerConfig(L1MemoryManagerConfig(l1_bytes, False)),
                    EvictionConfig("LRU"),
                    L2AdaptersConfig([adapter]),
                    prefetch_policy=policy,
                )
            )
        self.hasher = TokenHasher(CHUNK)
        self.engines: list[socket.socket] = []
        """Connections of those who have confirmed, which are there as long as these are."""

    @property
    def adapter(self) -> l2.CartridgeL2Adapter:
        return self.manager.l2_adapters()[0][1]

    def cpu(self) -> dict[str, int]:
        """Return the counters of the one engine's cpu tier."""
        (engine,) = self.adapter.report_status()["engines"]
        return engine["tiers"]["cpu"]

    def report(self, **changes: Any) -> Report:
        """Return what a fitting engine of one rank would report."""
        fingerprint = changes.get("fingerprint") or FINGERPRINT
        world, rank = changes.get("world", 1), changes.get("rank", 0)
        fitting = {
            "model_name": MODEL, "fingerprint": fingerprint, "chunk_tokens": CHUNK, "layout": LAYOUT, "rank": rank,
            "world": world, "heads": len(rank_heads(fingerprint.kv_heads, rank, world)), "allow_trained": True,
        }  # fmt: skip
        return Report(**fitting | changes)

    def confirm(self, **changes: Any) -> str:
        report = self.report(**changes)
        confirmed = confirm(str(self.socket), report, self.check(report.chunk_tokens))
        self.engines.append(confirmed.connection)
        return confirmed.control

    def check(self, chunk_tokens: int = CHUNK, algorithm: str = "blake3") -> str:
        """Look a check up as LMCache's server would that names chunks by an algorithm; return its salt."""
        salt = check_salt()
        with quietly():
            (chunk_hash,) = TokenHasher(chunk_tokens, algorithm).compute_chunk_hashes(check_ids(chunk_tokens))
        key = ObjectKey(chunk_hash, MODEL, ObjectKey.ComputeKVRank(1, 0, 1, 0), 0, salt)
        assert self.look_up([[key]], DESC) == 0
        return salt

    def keys(self, ids: list[int], salt: str, rank: int = 0, world: int = 1, model: str = MODEL) -> list[ObjectKey]:
        kv_rank = ObjectKey.ComputeKVRank(world, rank, world, rank)
        return [ObjectKey(h, model, kv_rank, 0, salt) for h in self.hasher.compute_chunk_hashes(ids)]

    def ask(self, ids: list[int], salt: str = ANYBODY, **options: Any) -> int:
        """Return how many leading chunks of a prompt LMCache finds and brings into its memory, locked."""
        keys, hits = self.prefetch(ids, salt, **options)
        if hits:
            self.manager.finish_read_prefetched([key for row in keys for key in row[:hits]])
        return hits

    def prefetch(
        self, ids: list[int], salt: str = ANYBODY, *, shape: tuple[int, ...] | None = None, world: int = 1,
        dtype: torch.dtype = torch.bfloat16, model: str = MODEL, group: int = 0,
    ) -> tuple[list[list[ObjectKey]], int]:  # fmt: skip
        shape = shape or (3, CHUNK, 2 // world * 128)
        desc = MemoryLayoutDesc([torch.Size(shape)], [dtype])
        rows = [self.keys(ids, salt, rank, world, model) for rank in range(world)]
        if group:
            rows = [[ObjectKey(k.chunk_hash, k.model_name, k.kv_rank, group, salt) for k in row] for row in rows]
        return rows, self.look_up(rows, desc, group)

    def look_up(self, rows: list[list[ObjectKey]], desc: MemoryLayoutDesc, group: int = 0) -> int:
        """Return how many leading keys LMCache finds in every row."""
        spec = PrefetchTaskSpec([GroupedObjectKeys(row, group, desc) for row in rows])
        handle = self.manager.submit_prefetch_task(spec)
        deadline = time.monotonic() + 60
        while (result := self.manager.query_prefetch_status(handle)) is None:
            assert time.monotonic() < deadline, "the request hangs"
            time.sleep(0.002)
        return min((row.count_leading_ones() for row in result.hit_cells), default=0)

    def bytes(self, keys: list[ObjectKey]) -> list[torch.Tensor]:
        """Return what LMCache has in its memory under some keys that it holds locked, as flat uint8."""
        with self.manager.read_prefetched_results(keys) as objects:
            assert objects is not None
            return [o.raw_tensor.view(torch.uint8)[: o.get_size()].clone() for o in objects]


@contextmanager
def serving(home: Home, *, l1_bytes: int = 8 << 20, policy: str = "retain", **params: Any) -> Iterator[Server]:
    server = Server(home, l1_bytes, policy, **params)
    try:
        yield server
    finally:
        server.manager.close()
        for connection in server.engines:
            connection.close()


def prompt(home: Home, name: str) -> list[int]:
    """Return a cartridge's ids and a question of two chunks."""
    return home.ids(name)[: WHOLE[name] * CHUNK] + make_ids(2 * CHUNK, 99)


def packed(made: Made, chunk: int, layout: str = LAYOUT, heads: slice = slice(None)) -> torch.Tensor:
    """Return the bytes that LMCache must get for a chunk."""
    kv = made.kv[:, :, chunk * CHUNK : (chunk + 1) * CHUNK, heads]
    shape = ChunkShape(kv.shape[3], kv.shape[1], CHUNK, kv.shape[4], "bfloat16")
    out = torch.empty(shape.size_bytes, dtype=torch.uint8)
    if tiles.is_tiled(layout):
        tiles.pack(kv, out, shape, layout)
    else:
        VIEWS[layout](out, shape)[:] = kv
    return out


def claimed(server: Server, tag: str) -> str:
    """Claim a cartridge or chain as the API server does, and return the salt of its keys."""
    workers = ControlClient([server.confirm()])
    assert asked(workers, tag, 20)["ready"]
    workers.close()
    return tag_salt(tag)


def asked(workers: ControlClient, tag: str, wait_s: float = 0.0) -> dict[str, Any]:
    """Return how far a claim is, which ends."""
    claim = RemoteClaim(workers, tag, {})
    (state,) = claim.begin(wait_s).result()
    return state


# What is served.


@pytest.mark.parametrize(
    "layout",
    [
        LAYOUT,
        tiles.layout("amx", BLOCK),
        f"{LAYOUT}/blocks",
        tiles.layout("amx", BLOCK, blocks=True),
        "fused",
    ],
)
@pytest.mark.parametrize("name", ["doc", "other"])
def test_lmcache_gets_a_documents_whole_chunks_bit_by_bit(home: Home, name: str, layout: str) -> None:
    in_words = layout.endswith("/blocks")
    shape = (3, CHUNK, 256 // 4 if in_words else 256)
    dtype = torch.int64 if in_words else torch.bfloat16
    with serving(home) as server:
        server.confirm(layout=layout)
        (keys,), hits = server.prefetch(prompt(home, name), shape=shape, dtype=dtype)
        assert hits == WHOLE[name]
        for chunk, found in enumerate(server.bytes(keys[:hits])):
            assert torch.equal(found, packed(home.made[name], chunk, layout)), chunk


def test_each_tensor_parallel_rank_gets_its_heads(home: Home) -> None:
    with serving(home) as server:
        for rank in range(2):
            server.confirm(rank=rank, world=2)
            assert server.ask(prompt(home, "other"), world=2) == 3 * rank, "it counts only where every rank has it"
        rows, hits = server.prefetch(prompt(home, "doc"), world=2)
        assert hits == 4
        for rank, keys in enumerate(rows):
            for chunk, found in enumerate(server.bytes(keys[:4])):
                assert torch.equal(found, packed(home.made["doc"], chunk, heads=slice(rank, rank + 1)))


@pytest.mark.parametrize("shape", [(3, CHUNK, 80), (1, 3, CHUNK, 80)])
def test_latent_vectors_go_out_once_for_all_ranks_of_an_engine(home: Home, shape: tuple[int, ...]) -> None:
    """LMCache keeps one copy of them, under the keys of one rank, and every rank reads it."""
    latent = msgspec.structs.replace(FINGERPRINT, kv_heads=1, head_size=80, latent=64)
    kv = torch.randn((1, 3, 2 * CHUNK, 1, 80), generator=torch.Generator().manual_seed(3)).bfloat16()
    root = home.root("latent")
    made = make_artifact(
        root, positions=2 * CHUNK, cartridge_id="latent", fingerprint=latent, kv=kv, chunk_tokens=CHUNK, seed=11
    )
    home.registry.register(root)
    with serving(home) as server:
        controls = {server.confirm(fingerprint=latent, layout="heads") for _ in range(2)}
        assert len(controls) == 1, "two ranks have one store"
        ids = load_token_ids(made.manifest, root).tolist() + make_ids(CHUNK, 99)
        (keys,), hits = server.prefetch(ids, shape=shape)
        assert hits == 2
        for chunk, found in enumerate(server.bytes(keys[:hits])):
            assert torch.equal(found.view(torch.bfloat16).view(shape[-3:]), kv[0, :, chunk * CHUNK :, 0][:, :CHUNK])
        for wrong in ((2, 3, CHUNK, 40), (3, CHUNK, 160)):
            assert server.prefetch(ids[:-1], "one tenant's", shape=wrong)[1] == 0


_LISTEN = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
os.seteuid(65534)
listener.listen()
print("listening", flush=True)
sys.exit(len(listener.accept()[0].recv(1)))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root to listen as another user at a socket that is ours")
def test_nothing_is_reported_to_another_users_process_though_the_socket_is_ours(home: Home, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with (
        serving(home) as server,
        subprocess.Popen([sys.executable, "-c", _LISTEN, path], stdout=subprocess.PIPE, text=True) as other,
    ):
        assert other.stdout.readline() == "listening\n"
        assert path.stat().st_uid == os.geteuid()
        with pytest.raises(UnsupportedEngine, match="another user listens at"):
            confirm(str(path), server.report(), "check")
        assert other.wait(60) == 0, "it got nothing"


def test_many_requests_at_once_get_their_own(home: Home) -> None:
    with serving(home, l1_bytes=32 << 20) as server:
        server.confirm()
        prompts = {name: prompt(home, name) for name in ("doc", "other")}

        def ask(number: int) -> None:
            name = ("doc", "other")[number % 2]
            for _ in range(4):
                # LMCache 0.5.6 misses what another request brings in between its two looks; then it is asked again.
                for _ in range(20):
                    (keys,), hits = server.prefetch(prompts[name])
                    if hits == WHOLE[name]:
                        break
                assert hits == WHOLE[name]
                for chunk, found in enumerate(server.bytes(keys[:hits])):
                    assert torch.equal(found, packed(home.made[name], chunk))
                server.manager.finish_read_prefetched(keys[:hits])

        run_threads(6, ask, timeout_s=60)
        assert (server.cpu()["leased"], server.cpu()["lent"]) == (0, 0)


# Trained cartridges.


def test_identity_tokens_alone_give_nobody_the_cartridge(home: Home) -> None:
    with serving(home) as server:
        salt = claimed(server, home.made["trained"].manifest.digest)
        assert server.ask(prompt(home, "trained"), salt) == 3
        digest = home.made["trained"].manifest.digest
        tenants, strangers = ("", "a client's own", digest), (NOBODY, tag_salt(digest[:-1] + "0"))
        for other in (*tenants, *strangers, salt[:-1], tag_salt(home.made["doc"].manifest.digest)):
            assert server.ask(prompt(home, "trained"), other) == 0, other
        for other in strangers:
            assert server.ask(prompt(home, "doc"), other) == 0, "kept apart, it gets not even a document"
        for other in tenants:
            assert server.ask(prompt(home, "doc"), other) == 4
        for own in tenants:
            assert server.ask(prompt(home, "trained"), tag_salt(digest, own)) == 3, "each tenant's own copy"


def test_no_client_can_spell_the_salt_of_a_tag_or_of_another_client() -> None:
    digest = "ab" * 32
    chain = ".".join([digest] * 16)
    for params in (None, {}, {"cartridge": {"must_inject": 3}}, {"lmcache.skip_save": True}):
        assert key_salt(params) == ""
        assert key_salt(params, "a tenant's") == "a tenant's", "as without us: LMCache's quotas are by salt"
    own = "t", "u", "a/b", "a@b", "a\\b", "a\0b", "x" * 128, "x" * 129, "\ud800"
    own += tag_salt(digest), tag_salt(digest, "t"), NOBODY, check_salt(), key_salt({}, "a/b"), "cartridge-"
    tags = {TAG: digest}, {TAG: chain}, {TAG: check_salt()}
    others = {"lmcache.tag.mine": "x"}, {TAG: digest, "lmcache.tag.mine": "x"}, {"lmcache.tag.x": check_salt()}
    salts = [key_salt(params, salt) for params in ({}, *tags, *others) for salt in ("", *own)]
    assert len(set(salts)) == len(salts), "nobody has another's"
    for salt in salts:
        ObjectKey(b"h", "m", 1, 0, salt)
        assert not salt.startswith("cartridge-check-")
    assert key_salt({TAG: digest}) == tag_salt(digest) == tag_part(key_salt({TAG: digest}, "t"))
    assert {tag_part(key_salt({}, salt)) for salt in own} == {None}
    assert not {tag_part(key_salt(other, "t")) for other in others} & {tag_salt(tag[TAG]) for tag in tags}
    granted = {TAG: digest, "cartridge": {"must_inject": 3, "salt": "t"}}
    assert key_salt(granted, "vLLM's") == tag_salt(digest, "t"), (
        "vLLM's own salt has a secret that a new server has not"
    )


def test_what_follows_a_cartridge_is_each_tenants_own_where_all_have_its_salt() -> None:
    digest, chunk = "ab" * 32, 8
    hasher, rng = TokenHasher(chunk), random.Random(4)
    prompt = [rng.randrange(1 << 18) for _ in range(5 * chunk + 3)]

    def names(start: int, own: str | None, ids: list[int]) -> list[bytes]:
        """As of a tenant, or of a client without a salt, which shifts nothing."""
        shifts = () if own is None else own_shifts(key_salt({TAG: digest}, own), chunk)
        return hasher.compute_chunk_hashes(shifted(ids, start, shifts))

    assert shared_salt({TAG: digest, "lmcache.skip_save": True}) == tag_salt(digest)
    assert {shared_salt(params) for params in (None, {}, {TAG: digest, "lmcache.tag.mine": "x"})} == {None}
    for chunks in range(6):
        start = chunks * chunk
        seen: set[bytes] = set()
        for own in (None, "t", "u", "t ", "T"):
            found = names(start, own, prompt)
            assert found == names(start, own, prompt)
            assert found[:chunks] == names(0, None, prompt)[:chunks], "all find the cartridge"
            assert seen.isdisjoint(found[chunks:]), own
            seen |= {*found[chunks:]}
        for place in range(start, 5 * chunk):
            other = [*prompt[:place], prompt[place] + 1, *prompt[place + 1 :]]
            assert names(start, "t", other)[place // chunk] not in seen, "prompts of one tenant stay different"
    moved = shifted(prompt, 8, own_shifts("s", 8))
    assert all(0 <= number < 1 << 31 for number in moved), "LMCache hashes numbers of 32 bits"
    assert shifted(prompt[:10], 8, own_shifts("s", 8)) == moved[:10], "what is generated later changes no id before it"


def test_a_lora_adapter_has_keys_of_its_own_under_which_nothing_of_ours_is(home: Home) -> None:
    tag = {TAG: home.made["doc"].manifest.digest}
    plain = [key_salt(params, salt) for params in ({}, tag) for salt in ("", "t")]
    adapters = [LoRARequest(*each) for each in (("a", 1, "/a"), ("b", 1, "/a"), ("a", 2, "/a"), ("a", 1, "/b"))]
    salts = [adapter_salt(salt, adapter) for salt in plain for adapter in adapters]
    assert len({*plain, *salts}) == len(plain) + len(salts)
    assert salts == [adapter_salt(salt, adapter) for salt in plain for adapter in adapters]
    replaced = LoRARequest("a", 1, "/a", load_inplace=True)
    assert adapter_salt("", replaced) != adapter_salt("", replaced), "its weights may be others each time"
    for given in (None, *adapters):
        granted = tag | {GRANT: {"must_inject": 0, "adapter": adapter_name(given)}}
        others = [other for other in (None, *adapters) if other is not given]
        assert not is_apart(granted, given), (
            "cartridges are of the adapter that computes: what follows them goes by their digests"
        )
        assert all(is_apart(granted, other) for other in others)
        assert len({adapter_salt("", other) for other in others}) == len(others)
        assert [is_apart(params, given) for params in (None, {}, tag)] == [given is not None] * 3
    with serving(home) as server:
        assert claimed(server, tag[TAG]) == plain[2]
        assert [server.ask(prompt(home, "doc"), salt) for salt in plain] == [4] * 4
        assert {server.ask(prompt(home, "doc"), salt) for salt in salts} == {0}


def test_an_engine_that_recomputes_what_it_loses_is_served_no_trained_cartridge(home: Home) -> None:
    with serving(home) as server:
        tag = home.made["trained"].manifest.digest
        workers = ControlClient([server.confirm(allow_trained=False)])
        assert "kv_load_failure_policy" in asked(workers, tag)["refused"]
        workers.close()
        assert server.ask(prompt(home, "trained"), tag_salt(tag)) == 0


def test_a_chain_is_served_once_it_was_claimed(home: Home) -> None:
    with serving(home) as server:
        tag = ".".join(home.made[name].manifest.digest for name in ("other", "trained"))
        ids = home.ids("other") + home.ids("trained") + make_ids(CHUNK, 3)
        assert server.ask(ids, tag_salt(tag)) == 0
        assert claimed(server, tag) == tag_salt(tag)
        (keys,), hits = server.prefetch(ids, tag_salt(tag))
        assert hits == 6
        found = server.bytes(keys[:6])
        for chunk in range(3):
            assert torch.equal(found[chunk], packed(home.made["other"], chunk))
        assert not torch.equal(found[3], packed(home.made["trained"], 0)), "keys of the second are rotated"


# Failing closed.


def test_nothing_is_served_before_an_engine_has_confirmed_itself(home: Home) -> None:
    with serving(home) as server:
        assert server.ask(prompt(home, "doc")) == 0
        server.confirm()
        assert server.ask(prompt(home, "doc"), model="/models/small") == 0
        assert server.ask(prompt(home, "doc"), model=key_name("/models/small", "other facts")) == 0
        assert server.ask(prompt(home, "doc")) == 4


def test_objects_of_any_other_geometry_are_not_filled(home: Home) -> None:
    shapes = (3, CHUNK, 128), (2, 3, CHUNK, 128), (3, 2 * CHUNK, 256), (4, CHUNK, 256), (3, 256, CHUNK)
    with serving(home) as server:
        server.confirm()
        for wrong in (
            *({"shape": shape} for shape in shapes), {"dtype": torch.float16}, {"dtype": torch.float32}, {"group": 1}
        ):  # fmt: skip
            assert server.ask(prompt(home, "doc"), **wrong) == 0, wrong
        assert server.ask(prompt(home, "doc"), shape=(3, CHUNK, 256)) == 4
        assert server.ask(prompt(home, "other"), shape=(1, 3, CHUNK, 256)) == 3, "the other way to name one plane"


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"layout": "heads"}, "layout heads"),
        ({"layout": "neon/128"}, "layout neon/128"),
        ({"heads": 1}, "has 1 KV heads, not 2"),
    ],
)
def test_a_report_that_cannot_be_served_is_refused_with_the_reason(home: Home, wrong: dict, reason: str) -> None:
    with serving(home) as server:
        with pytest.raises(UnsupportedEngine, match=reason):
            server.confirm(**wrong)
        assert server.ask(prompt(home, "doc")) == 0


@pytest.mark.parametrize("change", [{"layout": "amx/32"}, {"layout": "vec/64"}, {"chunk_tokens": 32}])
def test_a_second_engine_of_the_same_name_with_other_bytes_is_refused(home: Home, change: dict[str, Any]) -> None:
    with serving(home) as server:
        first = server.confirm()
        assert server.confirm() == first
        with pytest.raises(UnsupportedEngine, match="restart LMCache's server"):
            server.confirm(**change)


def test_an_engine_of_another_name_gets_the_memory_of_one_that_is_gone_and_never_that_of_another(home: Home) -> None:
    new = key_name("/models/small", "other weights")

    def keepers() -> int:
        return sum(thread.name == "cartridge-keeper" for thread in threading.enumerate())

    before = keepers()
    with serving(home) as server:
        server.confirm()
        assert server.ask(prompt(home, "doc")) == 4
        with pytest.raises(UnsupportedEngine, match=f'serves {MODEL}: .*"engines": 2'):
            server.confirm(model_name=new)
        assert server.ask(prompt(home, "other")) == 3, "it is served as before"
        server.confirm()
        for connection in server.engines:
            connection.close()
        server.confirm()  # the same engine, started again
        assert server.cpu()["resident"] == 7, "its store is still warm"
        server.engines[-1].close()

        def takes_over() -> bool:
            with suppress(UnsupportedEngine):
                return bool(server.confirm(model_name=new))
            return False

        until(takes_over)
        (engine,) = server.adapter.report_status()["engines"]
        assert (engine["model"], keepers()) == (new, before + 1)
        assert server.ask(prompt(home, "doc"), model=new) == 4


def test_engines_that_share_an_lmcache_server_share_the_memory_too(home: Home) -> None:
    new = key_name("/models/small", "other weights")
    with serving(home, engines=2) as server:
        for name in (MODEL, new):
            server.confirm(model_name=name)
            assert server.ask(prompt(home, "doc"), model=name) == 4
        with pytest.raises(UnsupportedEngine, match='"engines": 3'):
            server.confirm(model_name="third")
        engines = server.adapter.report_status()["engines"]
        assert sum(engine["tiers"]["cpu"]["budget_bytes"] for engine in engines) <= 4 << 20


def test_engines_that_differ_in_anything_have_other_keys() -> None:
    fingerprint = make_fingerprint()
    names = [
        key_name("m", fingerprint, 32, True),
        key_name("m", fingerprint, 64, True),
        key_name("m", fingerprint, 32, False),
        key_name("m", msgspec.structs.replace(fingerprint, weights_digest="e2" * 32), 32, True),
        key_name("n", fingerprint, 32, True),
    ]
    assert len(set(names)) == 5
    assert key_name("m", fingerprint, 32, True) == names[0]
    ObjectKey(b"h", key_name("user@host:/m", 1), 1)
    model = key_name("/a/long/path/" * 20 + "m" * 99, 1)
    for salt in (tag_salt("a", "tenant"), key_salt({}, "x" * 96), key_salt({}, "x" * 128)):
        name = _object_key_to_filename(ObjectKey(b"h" * 32, model, ObjectKey.ComputeKVRank(8, 7, 8, 7), 0, salt))
        assert len(f"{name}.tmp") <= 255, "LMCache's fs adapter cannot write it"


def test_a_cartridge_of_another_model_is_not_served(home: Home) -> None:
    with serving(home) as server:
        workers = ControlClient(
            [server.confirm(fingerprint=msgspec.structs.replace(FINGERPRINT, config_digest="f" * 64))]
        )
        assert server.ask(prompt(home, "doc")) == 0
        assert asked(workers, home.made["doc"].manifest.digest)["mismatch"] is True
        workers.close()


@pytest.mark.parametrize("algorithm", ["sha256_cbor", "builtin"])
def test_an_engine_whose_server_names_chunks_by_another_hash_is_refused(home: Home, algorithm: str) -> None:
    with serving(home) as server:
        check = server.check(algorithm=algorithm)
        with pytest.raises(UnsupportedEngine, match="by another algorithm than blake3"):
            confirm(str(server.socket), server.report(), check)
        assert server.ask(prompt(home, "doc")) == 0, "nobody has confirmed anything"
        with pytest.raises(UnsupportedEngine, match="another LMCache server"):
            confirm(str(server.socket), server.report(), check)


def test_a_check_waits_for_no_other_lookup(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(home) as server:
        server.confirm()
        go_on = threading.Event()
        monkeypatch.setattr(CartridgeStore, "lookup", lambda *_: go_on.wait(60) and 0)
        keys = server.keys(prompt(home, "doc"), ANYBODY)
        for _ in range(l2._LOOKUP_THREADS):
            server.adapter.submit_lookup_and_lock_task(keys, {0: DESC})
        salt = check_salt()
        server.adapter.submit_lookup_and_lock_task(server.keys(check_ids(CHUNK), salt), {0: DESC})
        confirm(str(server.socket), server.report(), salt).connection.close()
        go_on.set()


def test_garbage_at_the_socket_hurts_nobody(home: Home) -> None:
    with serving(home) as server:
        for data in (b"", b"\x05", b"\x04\0\0\0oops", b"\xff\xff\xff\xff", b"\x01\0\0\0\x80"):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(str(server.socket))
                stranger.sendall(data)
        server.confirm()
        assert server.ask(prompt(home, "doc")) == 4


# Failures.


@pytest.mark.parametrize("method", ["lookup", "lend", "release"])
def test_an_error_in_the_store_is_a_miss_and_no_more(home: Home, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("broken on purpose")

    with serving(home) as server:
        server.confirm()
        with monkeypatch.context() as patch:
            patch.setattr(CartridgeStore, method, broken)
            assert server.ask(prompt(home, "doc")) == (4 if method == "release" else 0)
        assert server.ask(prompt(home, "other")) == 3


def test_a_chunk_lost_between_lookup_and_load_ends_the_prefix(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(home) as server:
        server.confirm()
        lost, lend = int.from_bytes(server.hasher.compute_chunk_hashes(home.ids("doc"))[2], "big"), CartridgeStore.lend
        monkeypatch.setattr(CartridgeStore, "lend", lambda self, h, tag: None if h == lost else lend(self, h, tag))
        assert server.ask(prompt(home, "doc")) == 2


def test_a_lookup_that_never_ends_is_answered_with_a_miss(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(l2, "_LOOKUP_GRACE_S", 1.0)
    with serving(home, lookup_timeout_s=0.1) as server:
        server.confirm()
        go_on, lookup = threading.Event(), CartridgeStore.lookup
        monkeypatch.setattr(CartridgeStore, "lookup", lambda *args: go_on.wait(60) and lookup(*args))
        assert server.ask(prompt(home, "doc")) == 0
        go_on.set()
        monkeypatch.undo()
        until(lambda: server.cpu()["resident"] == 4)
        assert server.ask(prompt(home, "doc")) == 4
        until(lambda: server.cpu()["leased"] == 0)  # what came late does not stay leased


def test_nothing_is_written_into_a_buffer_after_its_load_was_answered(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(l2, "_LOAD_DEADLINE_S", 1.0)
    with serving(home) as server:
        server.confirm()
        go_on, writes, lend, fill = threading.Event(), [], CartridgeStore.lend, l2._fill
        late = int.from_bytes(server.hasher.compute_chunk_hashes(home.ids("doc"))[1], "big")
        monkeypatch.setattr(
            CartridgeStore, "lend", lambda self, h, tag: (h != late or go_on.wait(60)) and lend(self, h, tag)
        )
        monkeypatch.setattr(l2, "_fill", lambda *args: (writes.append(1), fill(*args)))
        assert server.ask(prompt(home, "doc")) == 1, "what was written in time counts"
        assert len(writes) == 1
        go_on.set()
        time.sleep(0.3)
        assert len(writes) == 1


def test_memory_that_cannot_hold_a_cartridge_costs_a_miss_and_is_given_back(home: Home) -> None:
    with serving(home, l1_bytes=2 * packed(home.made["doc"], 0).numel()) as server:
        server.confirm()
        assert server.ask(prompt(home, "doc")) == 0, "LMCache reserves all of a prefix or nothing"
        assert server.ask(home.ids("doc")[:CHUNK]) == 1
        assert server.cpu()["leased"] == 0


def test_a_claim_on_what_lmcache_has_no_room_for_is_refused_with_the_reason(home: Home) -> None:
    chunk_bytes = packed(home.made["doc"], 0).numel()
    with serving(home, l1_bytes=3 * chunk_bytes) as server:
        workers = ControlClient([server.confirm()])
        for name, fits in (("doc", False), ("trained", True)):
            state = asked(workers, home.made[name].manifest.digest)
            assert (state["refused"] is None) is fits
            assert fits or "--l1-size-gb" in state["refused"]
        workers.close()


# LMCache's own copies.


@contextmanager
def lmcaches_http(server: Server, port: int) -> Iterator[None]:
    """Run LMCache's own HTTP API over its storage, as its server does."""
    engine = SimpleNamespace(storage_manager=server.manager)
    app = FastAPI()
    app.include_router(cache_api.router)
    app.state.context = MPHTTPContext(engine, ObjectService(engine), None)
    http = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning"))
    thread = threading.Thread(target=http.run)
    thread.start()
    try:
        until(lambda: http.started)
        yield
    finally:
        http.should_exit = True
        thread.join(60)


@pytest.fixture
def fills(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that has one more for each chunk that LMCache is handed."""
    fills, fill = [], l2._fill
    monkeypatch.setattr(l2, "_fill", lambda *args: (fills.append(1), fill(*args)))
    return fills


@pytest.mark.parametrize("name", ["doc", "trained"])
def test_evicting_drops_lmcaches_copies_of_the_cartridge_and_no_others(home: Home, name: str, fills: list[int]) -> None:
    port = free_port()
    with serving(home, lmcache_http=f"http://127.0.0.1:{port}") as server, lmcaches_http(server, port):
        server.confirm()
        salt = claimed(server, home.made[name].manifest.digest) if name == "trained" else ANYBODY
        assert (server.ask(prompt(home, name), salt), server.ask(prompt(home, "other"))) == (WHOLE[name], 3)
        del fills[:]
        assert (server.ask(prompt(home, name), salt), server.ask(prompt(home, "other"))) == (WHOLE[name], 3)
        assert fills == [], "the control: LMCache keeps what it loads"
        workers = ControlClient([server.confirm()])
        assert workers.call("evict", home.made[name].manifest.digest) == [WHOLE[name]]
        assert server.ask(prompt(home, "other")) == 3
        assert fills == []
        (keys,), hits = server.prefetch(prompt(home, name), salt)
        assert (hits, len(fills)) == (WHOLE[name], WHOLE[name]), "loaded anew"
        workers.call("evict", home.made[name].manifest.digest)  # while the request reads them
        for chunk, found in enumerate(server.bytes(keys[:hits])):
            assert torch.equal(found, packed(home.made[name], chunk))
        workers.close()


@pytest.mark.parametrize("http", [None, "http://127.0.0.1:1"])
def test_copies_that_cannot_be_dropped_stay_and_the_log_says_so(
    home: Home, http: str | None, fills: list[int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("lmcache_cartridge"), "propagate", True)
    with serving(home, lmcache_http=http) as server, caplog.at_level(logging.INFO):
        workers = ControlClient([server.confirm()])
        assert server.ask(prompt(home, "doc")) == 4
        assert workers.call("evict", home.made["doc"].manifest.digest) == [4]
        assert "LMCache's server keeps its copies of 4 chunks" in caplog.text
        assert server.ask(prompt(home, "doc")) == 4
        assert len(fills) == 4
        workers.close()


def test_what_lmcache_kept_of_an_old_version_is_never_found_under_the_new_one(home: Home) -> None:
    with serving(home, reload_s=0) as server:
        server.confirm()
        old = home.made["trained"]
        salt = claimed(server, old.manifest.digest)
        (kept,), hits = server.prefetch(home.ids("trained"), salt)
        assert hits == 3
        made = make_artifact(
            home.path / "new", cartridge_id="trained", version=2, fingerprint=FINGERPRINT, kind="trained", seed=8,
            positions=3 * CHUNK,
        )  # fmt: skip
        home.registry.register(home.path / "new")
        home.registry.remove("trained@1")
        workers = ControlClient([server.confirm()])
        workers.call("refresh")
        workers.close()
        ids = load_token_ids(made.manifest, home.path / "new").tolist()
        (keys,), hits = server.prefetch(ids, claimed(server, made.manifest.digest))
        assert hits == 3
        assert not set(keys) & set(kept)
        for chunk, found in enumerate(server.bytes(keys)):
            assert torch.equal(found, packed(made, chunk))
        assert server.ask(ids, salt) == 0, "the new one's ids under the old one's salt"
        assert server.ask(home.ids("trained"), tag_salt(made.manifest.digest)) == 0


# The contract by itself.


def test_a_result_is_handed_out_once_and_its_bitmap_fits_its_keys(home: Home) -> None:
    with serving(home) as server:
        server.confirm()
        adapter = server.adapter
        fds = {adapter.get_store_event_fd(), adapter.get_lookup_and_lock_event_fd(), adapter.get_load_event_fd()}
        assert len(fds) == 3
        for count in (0, 1, 5):
            keys = server.keys(make_ids(count * CHUNK, 1), ANYBODY)
            task = adapter.submit_lookup_and_lock_task(keys, {0: DESC})
            assert _result(adapter.query_lookup_and_lock_result, task).size() == count
            assert adapter.query_lookup_and_lock_result(task) is None
        assert adapter.query_lookup_and_lock_result(10**6) is None
        assert adapter.query_load_result(10**6) is None


def _result(query: Any, task: int) -> Any:
    results = []
    until(lambda: results.append(query(task)) or results[-1] is not None)
    return results[-1]


@pytest.mark.parametrize("ack", [True, False])
def test_stores_are_answered_at_once_and_nothing_is_kept(home: Home, ack: bool) -> None:
    with serving(home, store_ack=ack) as server:
        server.confirm()
        keys = server.keys(make_ids(3 * CHUNK, 44), ANYBODY)
        task = server.adapter.submit_store_task(keys, [])
        server_took = server.adapter.pop_completed_store_tasks()
        assert server_took.get(task) is None or server_took[task].is_successful() is ack
        assert server.adapter.pop_completed_store_tasks() == {}
        assert server.ask(make_ids(3 * CHUNK, 44)) == 0


def test_closing_waits_for_what_is_being_written(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    started, done = threading.Event(), threading.Event()
    fill = l2._fill

    def slow(*args: Any) -> None:
        started.set()
        time.sleep(0.5)
        done.set()
        fill(*args)

    monkeypatch.setattr(l2, "_fill", slow)
    with serving(home) as server:
        server.confirm()
        spec_keys = server.keys(prompt(home, "doc"), ANYBODY)
        server.manager.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(spec_keys, 0, DESC)]))
        assert started.wait(60)
        adapter = server.adapter
    assert done.is_set(), "LMCache's memory was freed while it was written"
    assert not [t for t in threading.enumerate() if t.name.startswith("cartridge-l2")]
    adapter.submit_unlock(spec_keys)
    assert adapter.query_lookup_and_lock_result(1) is None


@pytest.mark.parametrize("params", [{"control": None}, {"store_ack": "yes"}, {"cpu_bites": 3}, {"engines": 0}])
def test_wrong_parameters_end_the_start_with_their_name(home: Home, params: dict[str, Any]) -> None:
    own = {"home": str(home.path), "control": str(home.path / "s" / "c")} | params
    with pytest.raises(SettingsError, match=next(iter(params))):
        l2.CartridgeL2Adapter({k: v for k, v in own.items() if v is not None}, l1_memory_desc=object())


def test_one_socket_belongs_to_one_adapter_and_a_dead_ones_is_taken_over(home: Home) -> None:
    with serving(home) as server:
        params = {"home": str(home.path), "control": str(server.socket)}
        with pytest.raises(UnsupportedEngine, match="another adapter listens"):
            l2.CartridgeL2Adapter(params)
    server.socket.touch()
    with serving(home) as server:
        server.confirm()


def test_a_socket_where_others_may_write_is_refused(home: Home, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(UnsupportedEngine, match="other users"):
        l2.CartridgeL2Adapter({"home": str(home.path), "control": str(tmp_path / "open" / "c")})


def test_the_status_is_plain_values(home: Home) -> None:
    with serving(home) as server:
        server.confirm()
        status = server.adapter.report_status()
        assert status["is_healthy"] is True
        assert json.loads(json.dumps(status))["engines"][0]["layout"] == LAYOUT
        assert server.manager.report_status()["is_healthy"] is True
