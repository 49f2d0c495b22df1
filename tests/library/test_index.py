"""Chunk hashes lead to prepared chunks: the longest leading run, a trained cartridge only under its tag."""

from __future__ import annotations

from types import SimpleNamespace

import hypothesis.strategies as st
import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from invariants import check_index
from making import make_artifact, make_ids, sha256_hasher

from lmcache_cartridge.artifact.manifest import Manifest
from lmcache_cartridge.library import index as index_module
from lmcache_cartridge.library.index import ChunkKey, KeyIndex

CHUNK = 16


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    return make_artifact(tmp_path_factory.mktemp("artefact") / "doc", positions=40, layers=1).manifest


def _manifest(template: Manifest, digest: str, positions: int, kind: str = "prefill") -> Manifest:
    """Return as much of a manifest as the index reads."""
    return msgspec.structs.replace(template, digest=digest, positions=positions, kind=kind, id=f"id-{digest}")


def _index() -> KeyIndex:
    return KeyIndex(sha256_hasher(CHUNK), CHUNK)


def _add(index: KeyIndex, manifest: Manifest, ids: list[int]) -> int:
    """Make a cartridge findable as the catalog does, and return how many chunks it has."""
    index.add(manifest.digest, index.hash(manifest, ids), open_to_all=manifest.kind == "prefill")
    return len(index.chunks(manifest.digest))


def _hashes(ids: list[int], chunk: int = CHUNK) -> list[int]:
    return list(sha256_hasher(chunk)(ids))


@pytest.mark.parametrize(("positions", "chunks"), [(13, 1), (96, 1), (256, 1), (300, 2)])
def test_the_tail_of_a_trained_cartridge_is_a_chunk_that_no_prompt_finds(template, positions, chunks):
    index, ids = KeyIndex(sha256_hasher(256), 256), make_ids(positions, 0)
    _add(index, _manifest(template, "t", positions, "trained"), ids)
    assert index.chunks("t") == [ChunkKey("t", i) for i in range(chunks)]
    whole = positions // 256
    for more in (make_ids(600, 1), [0] * 600):
        assert index.leading(_hashes([*ids, *more], 256), "t") == [ChunkKey("t", i) for i in range(whole)]
    assert list(index.candidates(index.last("t"), "t")) == [ChunkKey("t", chunks - 1)]


# vLLM and LMCache warn while they are imported; what they compute is what is tested.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("positions", "chunk"), [(600, 256), (512, 256), (100, 16), (15, 16)])
def test_lmcache_hashes_a_prompt_to_a_leading_run_of_exactly_the_whole_chunks(template, positions, chunk):
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata

    from lmcache_cartridge.engine.host import module
    from lmcache_cartridge.engine.host_inprocess import hasher

    config = LMCacheEngineConfig.from_defaults(chunk_size=chunk, pre_caching_hash_algorithm="sha256_cbor")
    metadata = LMCacheMetadata("model", 1, 1, 0, 0, torch.bfloat16, (3, 2, chunk, 2, 64), chunk_size=chunk)
    database = module("lmcache.v1.token_database").ChunkedTokenDatabase(config, metadata)

    chain = hasher(SimpleNamespace(token_database=database, config=config))
    document, question = make_ids(positions, 0), make_ids(3 * chunk, 1)
    index = KeyIndex(chain, chunk)
    assert _add(index, _manifest(template, "a", positions), document) == positions // chunk
    keys = [key for _, _, key in database.process_tokens(tokens=document + question)]
    run = index.leading([key.chunk_hash for key in keys], None)
    assert run == [ChunkKey("a", i) for i in range(positions // chunk)]
    assert len(keys) > len(run)
    assert index.leading(chain([document[0] + 1, *document[1:], *question]), None) == []


def test_what_was_registered_last_leads_in_whatever_order_they_are_read(template):
    index = _index()
    ids = make_ids(2 * CHUNK, 5)
    hashes = index.hash(_manifest(template, "a", len(ids)), ids)

    def leader() -> str:
        return index.leading(_hashes(ids), None)[0].digest

    for digest, rank, leading in (("b", "2", "b"), ("a", "1", "b"), ("d", "4", "d"), ("c", "3", "d")):
        index.add(digest, hashes, open_to_all=True, rank=rank)
        assert leader() == leading
    for forgotten, leading in (("d", "c"), ("c", "b"), ("b", "a")):
        index.forget(forgotten)
        assert leader() == leading
    check_index(index)


# However cartridges came into it, the index answers as a dict of everything would.

SHORT = 2
documents = st.lists(st.integers(0, 2), max_size=8)
"""Token ids; so few that many begin alike."""


def _hasher(width: int):
    def chain(ids: list[int]) -> list[int]:
        whole = [tuple(ids[:end]) for end in range(SHORT, len(ids) + 1, SHORT)]
        low = [int.from_bytes(bytes([1 + max(i, 0) for i in prefix]).rjust(8, b"\0"), "big") for prefix in whole]
        if width == 8:
            return low
        # The last 64 bits of every hash of a length alike: what tells them apart is above.
        return [(h << 128) | len(prefix) for h, prefix in zip(low, whole, strict=True)]

    return chain


class _Index(RuleBasedStateMachine):
    width = 8

    def __init__(self) -> None:
        super().__init__()
        self.hasher = _hasher(self.width)
        self.index = KeyIndex(lambda ids: self.hasher([min(i, 250) for i in ids]), SHORT)
        self.open: dict[str, list[int]] = {}
        self.closed: dict[str, list[int]] = {}
        self.hidden: set[str] = set()
        self.gone: set[str] = set()

    def _packed(self, ids: list[int]) -> bytes:
        return b"".join(h.to_bytes(self.width, "big") for h in self.hasher(ids))

    # The digest stands for the document, as in an artefact.

    @rule(ids=documents)
    def add(self, ids: list[int]) -> None:
        digest = f"d{ids}"
        self.index.add(digest, self._packed(ids), open_to_all=True)
        self.closed.pop(digest, None)
        self.open[digest] = ids
        self.hidden.discard(digest)

    @rule(ids=documents)
    def add_closed(self, ids: list[int]) -> None:
        digest = f"d{ids}"
        self.index.add(digest, self._packed(ids), open_to_all=False)
        if self.open.get(digest, ids) != ids:  # after `put_right`
            del self.open[digest]
            self.hidden.discard(digest)
        if digest not in self.open:
            self.closed[digest] = ids

    @rule(ids=documents)
    def put_right(self, ids: list[int]) -> None:
        """Other hashes under a digest that is known: they take the place of those before."""
        for digest in list(self.open)[:1]:
            self.index.add(digest, self._packed(ids), open_to_all=True)
            self.open[digest] = ids
            self.hidden.discard(digest)

    @rule(data=st.data())
    def hide(self, data: st.DataObject) -> None:
        if self.open:
            digest = data.draw(st.sampled_from(sorted(self.open)))
            self.index.hide(digest)
            self.hidden.add(digest)

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        if known := sorted(self.open | self.closed):
            digest = data.draw(st.sampled_from(known))
            self.index.forget(digest)
            for table in (self.open, self.closed):
                table.pop(digest, None)
            self.gone.add(digest)
            self.hidden.discard(digest)

    @rule(ids=documents, data=st.data(), start=st.integers(0, 2))
    def ask(self, ids: list[int], data: st.DataObject, start: int) -> None:
        without = data.draw(st.sets(st.sampled_from(sorted(self.open)), max_size=3)) if self.open else set()
        hashes = self.hasher(ids)[start:]
        expected = []
        for chunk_hash in hashes:
            keys_of = self._holders(chunk_hash)
            usable = {key for key in keys_of if key.digest not in without | self.hidden}
            if not usable:
                break
            expected.append(usable)
        run = self.index.leading(hashes, None, lambda digest: digest not in without)
        assert len(run) == len(expected)
        assert all(key in usable for key, usable in zip(run, expected, strict=True))
        for chunk_hash in hashes:
            found = list(self.index.candidates(chunk_hash, None))
            assert set(found) == self._holders(chunk_hash)
            assert len(found) == len(set(found))

    @invariant()
    def every_tag_has_its_own_chunks(self) -> None:
        for digest, ids in (self.open | self.closed).items():
            own = self.hasher(ids)
            assert self.index.chunks(digest) == [ChunkKey(digest, i) for i in range(len(own))]
            assert self.index.leading(own, digest) == self.index.chunks(digest)
            assert self.index.has(digest)

    @invariant()
    def nothing_is_kept_of_what_is_gone(self) -> None:
        check_index(self.index)
        for digest in self.gone - (self.open | self.closed).keys():
            assert not self.index.has(digest)
            assert self.index.chunks(digest) == []

    def _holders(self, chunk_hash: int) -> set[ChunkKey]:
        return {
            ChunkKey(digest, chunk)
            for digest, ids in self.open.items()
            for chunk, own in enumerate(self.hasher(ids))
            if own == chunk_hash
        }


@pytest.mark.parametrize("width", [8, 32])
@pytest.mark.parametrize("bound", [1, 5, 1 << 18])
def test_the_index_answers_as_a_dict_of_everything(width, bound, monkeypatch):
    monkeypatch.setattr(index_module, "MAX_CACHED_CHUNKS", bound)
    machine = type("_Index", (_Index,), {"width": width})
    run_state_machine_as_test(machine, settings=settings(max_examples=60, stateful_step_count=30, deadline=None))


@given(st.integers())
@settings(deadline=None)
def test_a_hash_that_is_none_of_this_engine_is_a_miss(chunk_hash):
    index = KeyIndex(_hasher(8), SHORT)
    index.add("a", bytes(7) + b"\1", open_to_all=True)
    assert len(index.leading([chunk_hash], None)) == (chunk_hash == 1)
    assert list(index.candidates(chunk_hash, None)) == ([ChunkKey("a", 0)] if chunk_hash == 1 else [])
