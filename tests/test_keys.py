"""Chunk hashes lead to prepared chunks: the longest leading run, a trained cartridge only under its tag."""

from __future__ import annotations

import msgspec
import pytest
import torch
from invariants import check_index
from making import make_artifact, make_ids, sha256_hasher

from lmcache_cartridge.artifact.manifest import Manifest
from lmcache_cartridge.library.index import ChunkKey, KeyIndex

CHUNK = 16


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
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


def test_a_trained_cartridge_is_found_under_its_tag_until_it_and_its_chains_are_forgotten(template: Manifest) -> None:
    index, ids = _index(), make_ids(32, 0)
    _add(index, _manifest(template, "a", 32, "trained"), ids)
    index.add_chain("a.b", ids, [ChunkKey("a", 0), ChunkKey("a.b", 1)])
    index.add_chain("ab.c", ids, [ChunkKey("ab", 0), ChunkKey("ab.c", 1)])
    index.hide("a")
    assert index.chunks("a") == index.leading(_hashes(ids), "a") == [ChunkKey("a", 0), ChunkKey("a", 1)]
    index.forget("a")
    assert (index.has("a"), index.has("a.b"), index.has("ab.c")) == (False, False, True)


@pytest.mark.parametrize(("positions", "chunks"), [(13, 1), (96, 1), (256, 1), (300, 2)])
def test_the_tail_of_a_trained_cartridge_is_a_chunk_that_no_prompt_finds(
    template: Manifest, positions: int, chunks: int
) -> None:
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
def test_lmcache_hashes_a_prompt_to_a_leading_run_of_exactly_the_whole_chunks(
    template: Manifest, positions: int, chunk: int
) -> None:
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.token_database import ChunkedTokenDatabase

    config = LMCacheEngineConfig.from_defaults(chunk_size=chunk, pre_caching_hash_algorithm="sha256_cbor")
    metadata = LMCacheMetadata("model", 1, 1, 0, 0, torch.bfloat16, (3, 2, chunk, 2, 64), chunk_size=chunk)
    database = ChunkedTokenDatabase(config, metadata)

    def chain(ids: list[int]) -> list[int]:
        return [h for _, _, h in database.process_tokens(tokens=ids, make_key=False)]

    document, question = make_ids(positions, 0), make_ids(3 * chunk, 1)
    index = KeyIndex(chain, chunk)
    assert _add(index, _manifest(template, "a", positions), document) == positions // chunk
    keys = [key for _, _, key in database.process_tokens(tokens=document + question)]
    run = index.leading([key.chunk_hash for key in keys], None)
    assert run == [ChunkKey("a", i) for i in range(positions // chunk)]
    assert len(keys) > len(run)
    assert index.leading(chain([document[0] + 1, *document[1:], *question]), None) == []


def test_what_was_registered_last_leads_in_whatever_order_they_are_read(template: Manifest) -> None:
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
