"""The adapter in LMCache's own StorageManager: exactly a cartridge's KV in LMCache's buffers, or an honest miss, in time."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import homes
import msgspec
import pytest
import torch
from blocks import objects, quietly
from hypothesis import given, settings
from hypothesis import strategies as st
from making import Made, make_fingerprint, make_ids
from waiting import until

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
    from lmcache.v1.multiprocess.token_hasher import TokenHasher
    from vllm.lora.request import LoRARequest

    from lmcache_cartridge.engine import l2

from lmcache_cartridge.artifact.reading import load_token_ids
from lmcache_cartridge.engine.client import ControlClient, Held
from lmcache_cartridge.engine.contract import GRANT, TAG
from lmcache_cartridge.engine.report import Report, check_ids, confirm, key_name
from lmcache_cartridge.engine.salts import (
    adapter_name,
    adapter_salt,
    check_salt,
    is_apart,
    is_check,
    key_salt,
    own_shifts,
    shared_salt,
    shifted,
    tag_part,
    tag_salt,
)
from lmcache_cartridge.errors import CartridgeError, SettingsError, UnsupportedEngine
from lmcache_cartridge.memory import tiles
from lmcache_cartridge.memory.layout import ChunkShape
from lmcache_cartridge.memory.store import CartridgeStore

CHUNK = 64
BLOCK = 32
LAYOUT = tiles.layout("vec", BLOCK)
MODEL = key_name("/models/small", "facts")
KV_RANK = ObjectKey.ComputeKVRank(1, 0, 1, 0)
NOBODY = key_salt({"lmcache.tag.x": "y"})
CARTRIDGES = {
    "doc": {"positions": 4 * CHUNK + 9, "chunk_tokens": CHUNK},
    "other": {"positions": 3 * CHUNK, "chunk_tokens": 256, "seed": 5},
    "trained": {"positions": 3 * CHUNK, "kind": "trained", "seed": 7},
}
FINGERPRINT = make_fingerprint(pairing="half")


def _of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> MemoryLayoutDesc:
    return MemoryLayoutDesc([*map(torch.Size, shapes)], [dtype] * len(shapes))


DESC = _of((3, CHUNK, 256))
"""Of the objects that LMCache makes for a chunk."""


class Home(homes.Home):
    """One with the cartridges."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        for name, form in CARTRIDGES.items():
            self.make(name, fingerprint=FINGERPRINT, **form)

    def prompt(self, name: str) -> list[int]:
        """Return the ids of a cartridge's whole chunks and a question of two chunks."""
        ids = load_token_ids(self.made[name].manifest, self.root(name)).tolist()
        return ids[: len(ids) // CHUNK * CHUNK] + make_ids(2 * CHUNK, 99)

    def digest(self, name: str) -> str:
        return self.made[name].manifest.digest


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path / "home")


class Server:
    """LMCache's storage with the adapter as its one L2, as LMCache's server builds it from its command line."""

    def __init__(self, home: Home, l1_bytes: int, **params: Any) -> None:
        self.home, self.socket = home, home.path.parent / "s" / "control"
        given = {"home": str(home.path), "control": str(self.socket), "cpu_bytes": 4 << 20, "lookup_timeout_s": 5,
                 "plain_prompts": "all"}  # fmt: skip
        adapter = PluginL2AdapterConfig(l2.__name__, "CartridgeL2Adapter", given | params)
        l1 = L1ManagerConfig(L1MemoryManagerConfig(l1_bytes, False))
        config = StorageManagerConfig(l1, EvictionConfig("LRU"), L2AdaptersConfig([adapter]), prefetch_policy="retain")
        with quietly():
            self.manager = StorageManager(config)
        self.hasher = TokenHasher(CHUNK)
        self.engines: list[Held] = []
        """What those who have confirmed keep, who are there as long as it is."""
        self.controls: list[str] = []
        """Paths of their control sockets."""

    @property
    def adapter(self) -> l2.CartridgeL2Adapter:
        return self.manager.l2_adapters()[0][1]

    def cpu(self) -> dict[str, int]:
        """Return the counters of the last engine's cpu tier."""
        return cpu_tier(self.controls[-1])

    def report(self, **changes: Any) -> Report:
        """Return what a fitting engine of one rank would report."""
        fitting = {
            "model_name": MODEL, "fingerprint": FINGERPRINT, "chunk_tokens": CHUNK, "layout": LAYOUT, "allow_trained": True,
        }  # fmt: skip
        return Report(**fitting | changes)

    def confirm(self, **changes: Any) -> str:
        report = self.report(**changes)
        control, told = confirm(str(self.socket), report, self.check(desc=_desc(report.layout)))
        self.engines.append(told)
        self.controls.append(control)
        return control

    def check(self, algorithm: str = "blake3", desc: MemoryLayoutDesc = DESC) -> str:
        """Look a check up as LMCache's server would that names chunks by an algorithm; return its salt."""
        salt = check_salt()
        with quietly():
            (chunk_hash,) = TokenHasher(CHUNK, algorithm).compute_chunk_hashes(check_ids(CHUNK))
        assert self.look_up([ObjectKey(chunk_hash, MODEL, KV_RANK, 0, salt)], desc) == 0
        return salt

    def keys(self, prompt: list[int] | str, salt: str = "", model: str = MODEL, group: int = 0) -> list[ObjectKey]:
        """Return LMCache's keys of a prompt's chunks, or of the prompt of a cartridge's name."""
        ids = self.home.prompt(prompt) if isinstance(prompt, str) else prompt
        return [ObjectKey(h, model, KV_RANK, group, salt) for h in self.hasher.compute_chunk_hashes(ids)]

    def ask(self, prompt: list[int] | str, salt: str = "", desc: MemoryLayoutDesc = DESC, **named: Any) -> int:
        """Return how many leading chunks of a prompt LMCache finds and brings into its memory."""
        keys = self.keys(prompt, salt, **named)
        if hits := self.look_up(keys, desc):
            self.manager.finish_read_prefetched(keys[:hits])
        return hits

    def look_up(self, keys: list[ObjectKey], desc: MemoryLayoutDesc) -> int:
        """Return how many leading keys LMCache finds and holds locked."""
        results, grouped = list[Any](), GroupedObjectKeys(keys, keys[0].object_group_id, desc)
        handle = self.manager.submit_prefetch_task(PrefetchTaskSpec([grouped]))
        until(lambda: results.append(self.manager.query_prefetch_status(handle)) or results[-1] is not None)
        return min((row.count_leading_ones() for row in results[-1].hit_cells), default=0)


def cpu_tier(control: str) -> dict[str, int]:
    """Return the counters of the cpu tier of a rank's store."""
    return ControlClient([control]).call("status")[0]["tiers"]["cpu"]


def _desc(layout: str) -> MemoryLayoutDesc:
    """Return of what LMCache's server makes its objects for an engine of such layers."""
    width, dtype = (64, torch.int64) if layout.endswith("/blocks") else (256, torch.bfloat16)
    return _of((3, CHUNK, width), dtype=dtype)


@contextmanager
def serving(home: Home, *, l1_bytes: int = 8 << 20, **params: Any) -> Iterator[Server]:
    server = Server(home, l1_bytes, **params)
    try:
        yield server
    finally:
        server.manager.close()
        for engine in server.engines:
            engine.release()


@pytest.fixture
def server(home):
    """One with an engine that has confirmed itself."""
    with serving(home) as server:
        server.confirm()
        yield server


def packed(made: Made, layout: str = LAYOUT) -> list[torch.Tensor]:
    """Return the bytes that LMCache must get for each whole chunk."""
    kv = made.kv[:, :, : made.kv.shape[2] // CHUNK * CHUNK]
    return [chunk.raw_data for chunk in objects(kv, ChunkShape(2, 3, CHUNK, 64, "bfloat16"), layout)[0]]


def asked(workers: ControlClient, tag: str, wait_s: float = 0.0) -> dict[str, Any]:
    """Return how far a claim is, which ends."""
    claim = Held(workers)
    return claim.begin("claim", tag, {}, wait_s, False).result()[0]


# What is served.


@pytest.mark.parametrize("layout", [LAYOUT, f"{LAYOUT}/blocks", "fused"])
def test_lmcache_gets_a_documents_whole_chunks_bit_by_bit(home, layout):
    with serving(home) as server:
        server.confirm(layout=layout)
        for name in ("doc", "other"):
            keys = server.keys(name)
            hits, expected = server.look_up(keys, _desc(layout)), packed(home.made[name], layout)
            with server.manager.read_prefetched_results(keys[:hits]) as objects:
                found = [each.raw_tensor.view(torch.uint8)[: each.get_size()] for each in objects]
                assert len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    "desc",
    [
        DESC,  # all layers together
        _of((2, CHUNK // 2, 256), (1, CHUNK, 256)),  # a window of half a chunk
    ],
)
def test_an_engine_whose_server_has_no_room_for_all_of_a_chunk_is_refused_at_its_start(home, desc):
    with serving(home) as server, pytest.raises(UnsupportedEngine, match="sliding window"):
        confirm(str(server.socket), server.report(groups=((0, 2), (1,))), server.check(desc=desc))


# Trained cartridges, tenants, adapters.


def test_identity_tokens_alone_give_nobody_the_cartridge(server, home):
    digest, control = home.digest("trained"), server.confirm()
    assert asked(ControlClient([control]), digest, 20)["ready"]
    tenants, strangers = ("", "a client's own", digest), (NOBODY, tag_salt(digest[:-1] + "0"))
    for other in (*tenants, *strangers, tag_salt(digest)[:-1], tag_salt(home.digest("doc"))):
        assert server.ask("trained", other) == 0, other
    assert [server.ask("doc", other) for other in strangers] == [0, 0], "not even a document"
    for own in tenants:
        assert (server.ask("doc", own), server.ask("trained", tag_salt(digest, own))) == (4, 3)


_DIGEST = "ab" * 32
_ADAPTERS = [LoRARequest(*each) for each in (("a", 1, "/a"), ("b", 1, "/a"), ("a", 2, "/a"), ("a", 1, "/b"))]
_TAGS = [
    {},
    {TAG: _DIGEST},
    {TAG: f"{_DIGEST}.{_DIGEST}"},
    {"lmcache.tag.mine": "x"},
    {"lmcache.tag.mine": "x", TAG: _DIGEST},
]
_SALTS = [
    "",
    "x" * 129,
    "cartridge-",
    check_salt(),
    tag_salt(_DIGEST),
    tag_salt(_DIGEST, "t"),
    key_salt({}, "a/b"),
    NOBODY,
]
_WHOSE = st.tuples(
    st.sampled_from(_TAGS),
    st.sampled_from(_SALTS) | st.text(st.sampled_from("ta/@\\\0\ud800")),
    st.sampled_from([None, *_ADAPTERS]),
)


def _salt(params: dict[str, str], own: str, adapter: LoRARequest | None) -> str:
    salt = key_salt(params, own)
    return salt if adapter is None else adapter_salt(salt, adapter)


@given(_WHOSE, _WHOSE)
def test_no_client_can_spell_the_salt_of_a_tag_of_another_client_or_of_an_adapter(one, other):
    assert (_salt(*one) == _salt(*other)) == ([*one[:2], adapter_name(one[2])] == [*other[:2], adapter_name(other[2])])
    ObjectKey(b"h", "m", 1, 0, _salt(*one))
    assert not is_check(_salt(*one))
    part = tag_part(key_salt(*one[:2]))
    if "lmcache.tag.mine" in one[0]:
        assert part not in (None, tag_salt(_DIGEST)), "no cartridge is found under it"
    else:
        assert part == (tag_salt(one[0][TAG]) if one[0] else None)


def test_whose_kv_is_whose():
    assert key_salt({"lmcache.skip_save": True}, "a tenant's") == "a tenant's", "LMCache's quotas are by salt"
    replaced = LoRARequest("a", 1, "/a", load_inplace=True)
    assert adapter_salt("", replaced) != adapter_salt("", replaced), "its weights may be others each time"
    granted = {TAG: _DIGEST, GRANT: {"must_inject": 3, "salt": "t", "adapter": adapter_name(_ADAPTERS[0])}}
    assert key_salt(granted, "vLLM's") == tag_salt(_DIGEST, "t"), "vLLM's own has a secret that a new server has not"
    assert [is_apart(granted, other) for other in (None, *_ADAPTERS[:2])] == [True, False, True]
    assert [*map(shared_salt, (key_salt(granted), "mine", NOBODY))] == [tag_salt(_DIGEST), None, None]


_DOCUMENT = make_ids(5 * 8 + 3, 4)


@settings(deadline=None)
@given(st.integers(0, 5), st.integers(0, 39), st.sampled_from([None, "t", "u", "t ", "T"]))
def test_what_follows_a_cartridge_is_each_tenants_own_where_all_have_its_salt(chunks, place, own):
    """By keys of chunks of 8 tokens, of which the cartridge has the first `chunks`."""
    hasher, tag = TokenHasher(8), {TAG: _DIGEST}

    def names(own: str | None, ids: list[int] = _DOCUMENT) -> list[bytes]:
        moved = shifted(ids, chunks * 8, () if own is None else own_shifts(key_salt(tag, own), 8))
        assert all(0 <= number < 1 << 31 for number in moved), "LMCache hashes numbers of 32 bits"
        return hasher.compute_chunk_hashes(moved)

    found, other = names(own), [*_DOCUMENT[:place], _DOCUMENT[place] + 1, *_DOCUMENT[place + 1 :]]
    assert [a == b for a, b in zip(names(own, other), found, strict=True)] == [chunk < place // 8 for chunk in range(5)]
    assert found[:chunks] == names(None)[:chunks], "all find the cartridge"
    strangers = {name for each in (None, "t", "u", "t ", "T") if each != own for name in names(each)[chunks:]}
    assert not {*found[chunks:]} & strangers


@pytest.mark.parametrize(
    ("report", "chunks", "name", "refused"),
    [
        ({"allow_trained": False}, 64, "trained", "kv_load_failure_policy"), ({}, 3, "doc", "--l1-size-gb"), ({}, 3, "trained", None),
        ({"fingerprint": msgspec.structs.replace(FINGERPRINT, config_digest="f" * 64)}, 64, "doc", "another model"),
    ],
)  # fmt: skip
def test_a_claim_that_cannot_be_kept_is_refused_with_the_reason(home, report, chunks, name, refused):
    """An engine that recomputes what it loses, an LMCache with room for three chunks, another model."""
    with serving(home, l1_bytes=chunks * packed(home.made["doc"])[0].numel()) as server:
        state = asked(ControlClient([server.confirm(**report)]), home.digest(name))
        assert state["mismatch"] is ("fingerprint" in report)
        assert refused in state["refused"] if refused else state["refused"] is None
        if chunks == 64:
            assert server.ask(name, tag_salt(home.digest(name))) == server.ask(name) == 0
        else:
            assert server.ask("doc") == 0, "LMCache reserves all of a prefix or nothing"
            assert server.ask(home.prompt("doc")[:CHUNK]) == 1
        assert server.cpu()["leased"] == 0


# Failing closed.


def test_nothing_is_served_but_to_an_engine_that_confirmed_itself_and_by_its_geometry(home):
    wrong = [{"desc": _of(shape)} for shape in ((3, CHUNK, 128), (4, CHUNK, 256), (3, 256, CHUNK))]
    wrong += (
        {"desc": _of((3, CHUNK, 256), dtype=torch.float16)},
        {"group": 1},
        {"model": key_name("/models/small", "other")},
    )
    with serving(home) as server:
        assert server.ask("doc") == 0
        server.confirm()
        assert [server.ask("doc", **given) for given in wrong] == [0] * len(wrong)
        assert server.ask("doc") == 4
        assert server.ask("other", desc=_of((1, 3, CHUNK, 256))) == 3, "the other way to name one plane"


@pytest.mark.parametrize(
    ("wrong", "alone"),
    [({"layout": "heads"}, "layout heads"), ({"layout": "vec/64"}, None)],
)
def test_a_report_that_cannot_be_served_is_refused_alone_or_beside_one_of_the_same_name(home, wrong, alone):
    with serving(home) as server:
        if alone:
            with pytest.raises(UnsupportedEngine, match=alone):
                server.confirm(**wrong)
            assert server.ask("doc") == 0
        assert server.confirm() == server.confirm()
        with pytest.raises(UnsupportedEngine, match="restart LMCache's server"):
            server.confirm(**wrong)


def test_an_engine_of_another_name_gets_the_memory_of_one_that_is_gone_and_never_that_of_another(server, home):
    new = key_name("/models/small", "other weights")
    assert server.ask("doc") == 4
    with pytest.raises(UnsupportedEngine, match=f'serves {MODEL}: .*"engines": 2'):
        server.confirm(model_name=new)
    assert server.ask("other") == 3, "it is served as before"
    server.confirm()
    for engine in server.engines:
        engine.release()
    server.confirm()  # the same engine, started again
    assert server.cpu()["resident"] == 7, "its store is still warm"
    server.engines[-1].release()

    def takes_over() -> bool:
        with suppress(UnsupportedEngine):
            return bool(server.confirm(model_name=new))
        return False

    until(takes_over)
    with pytest.raises(CartridgeError):
        cpu_tier(server.controls[0])
    assert server.ask("doc", model=new) == 4


def test_engines_that_share_an_lmcache_server_share_the_memory_too(home):
    with serving(home, engines=2) as server:
        for name in (MODEL, key_name("/models/small", "other weights")):
            server.confirm(model_name=name)
            assert server.ask("doc", model=name) == 4
        assert sum(cpu_tier(path)["budget_bytes"] for path in server.controls) <= 4 << 20


def test_engines_that_differ_in_anything_have_other_keys_that_are_no_longer_than_a_file_name():
    facts = ("m", FINGERPRINT, 32), ("m", FINGERPRINT, 64), ("m", None, 32), ("n", FINGERPRINT, 32)
    assert len({key_name(*each) for each in facts}) == 4
    key = ObjectKey(b"h" * 32, key_name("user@host:/m" + "m" * 99, 1), KV_RANK, 0, tag_salt("a", "tenant"))
    assert len(_object_key_to_filename(key) + ".tmp") <= 255


def test_an_engine_whose_server_names_chunks_by_another_hash_is_refused(home):
    with serving(home) as server:
        check = server.check(algorithm="sha256_cbor")
        for reason in ("by another algorithm than blake3", "another LMCache server"):
            with pytest.raises(UnsupportedEngine, match=reason):
                confirm(str(server.socket), server.report(), check)
            assert server.ask("doc") == 0, "nobody has confirmed anything"


# Failures.


@pytest.mark.parametrize(("method", "hits"), [("lookup", 0), ("lend", 0), ("release", 4)])
def test_an_error_in_the_store_is_a_miss(server, method, hits, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(CartridgeStore, method, lambda *_, **__: 1 / 0)
        assert server.ask("doc") == hits
    assert server.ask("other") == 3


def test_a_lookup_that_never_ends_is_answered_with_a_miss(home, monkeypatch):
    monkeypatch.setattr(l2, "_LOOKUP_GRACE_S", 1.0)
    with serving(home, lookup_timeout_s=0.1) as server:
        server.confirm()
        go_on, lookup = threading.Event(), CartridgeStore.lookup
        monkeypatch.setattr(CartridgeStore, "lookup", lambda *args: go_on.wait(60) and lookup(*args))
        assert server.ask("doc") == 0
        go_on.set()
        monkeypatch.undo()
        until(lambda: server.cpu()["resident"] == 4)
        assert server.ask("doc") == 4
        until(lambda: server.cpu()["leased"] == 0)  # what came late does not stay leased


def test_nothing_is_written_into_a_buffer_after_its_load_was_answered(home, monkeypatch, fills):
    monkeypatch.setattr(l2, "_LOAD_DEADLINE_S", 1.0)
    with serving(home) as server:
        server.confirm()
        go_on, lend = threading.Event(), CartridgeStore.lend
        monkeypatch.setattr(CartridgeStore, "lend", lambda *asked: (fills and go_on.wait(60), lend(*asked))[1])
        assert server.ask("doc") == 1, "what was written in time counts"
        assert len(fills) == 1
        go_on.set()
        time.sleep(0.3)
        assert len(fills) == 1


# LMCache's own copies.


@pytest.fixture
def fills(monkeypatch):
    """A list that has one more for each chunk that LMCache is handed."""
    fills, fill = [], l2._fill
    monkeypatch.setattr(l2, "_fill", lambda *args: (fills.append(1), fill(*args)))
    return fills


@pytest.mark.parametrize("http", [None, "http://127.0.0.1:1"])
def test_what_is_evicted_though_lmcaches_copies_cannot_be_dropped_is_answered_from_them(home, http, fills):
    with serving(home, lmcache_http=http) as server:
        control = server.confirm()
        assert server.ask("doc") == 4
        assert ControlClient([control]).call("evict", home.digest("doc")) == [4]
        assert (server.ask("doc"), len(fills)) == (4, 4)


def test_a_start_with_wrong_parameters_or_a_socket_that_is_not_its_own_is_refused(home, tmp_path):
    own, strange = {"home": str(home.path), "control": str(home.path / "s" / "c")}, tmp_path / "open"
    strange.mkdir()
    strange.chmod(0o777)
    with serving(home) as server:
        for params, error, reason in (
            ({"cpu_bites": 3}, SettingsError, "cpu_bites"), ({"control": ""}, SettingsError, "control"),
            ({"control": str(strange / "c")}, UnsupportedEngine, "other users"),
            ({"control": str(server.socket)}, UnsupportedEngine, "another adapter listens"),
        ):  # fmt: skip
            with pytest.raises(error, match=reason):
                l2.CartridgeL2Adapter(own | params)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(server.socket))
    with serving(home) as server:
        server.confirm()  # a dead one's is taken over
