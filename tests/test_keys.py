"""Chunk hashes lead to prepared chunks: the longest leading run, a trained cartridge only under its tag."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from making import make_artifact, make_ids, sha256_hasher

from lmcache_cartridge.artifact.manifest import Manifest
from lmcache_cartridge.errors import ChunkSizeMismatch
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


def test_every_whole_chunk_of_a_document_is_found_under_any_question(template: Manifest) -> None:
    index, ids = _index(), make_ids(40, 0)
    assert _add(index, _manifest(template, "a", 40), ids) == 2
    prompt = ids + make_ids(50, 1)
    assert index.leading(_hashes(prompt), None) == [ChunkKey("a", 0), ChunkKey("a", 1)]


def test_the_tail_of_a_document_is_not_indexed(template: Manifest) -> None:
    index, ids = _index(), make_ids(40, 0)
    _add(index, _manifest(template, "a", 40), ids)
    padded = ids + [0] * 8
    assert len(_hashes(padded)) == 3
    assert len(index.leading(_hashes(padded), None)) == 2


def test_a_document_shorter_than_a_chunk_has_nothing_to_find(template: Manifest) -> None:
    index, ids = _index(), make_ids(15, 0)
    assert _add(index, _manifest(template, "a", 15), ids) == 0
    assert index.leading(_hashes(ids + [1] * 30), None) == []


def test_a_run_ends_at_the_first_hash_that_is_not_known(template: Manifest) -> None:
    index, ids = _index(), make_ids(64, 0)
    _add(index, _manifest(template, "a", 64), ids)
    hashes = _hashes(ids)
    assert index.leading([*hashes[:2], 12345, hashes[3]], None) == [ChunkKey("a", 0), ChunkKey("a", 1)]
    assert index.leading([12345, *hashes], None) == []
    assert index.leading([], None) == []


def test_a_chunk_in_another_place_of_a_prompt_is_not_found(template: Manifest) -> None:
    index, ids = _index(), make_ids(32, 0)
    _add(index, _manifest(template, "a", 32), ids)
    assert index.leading(_hashes([5] * CHUNK + ids), None) == []
    assert index.leading(_hashes(ids[CHUNK:]), None) == []


def test_documents_that_begin_alike_are_each_served_whole(template: Manifest) -> None:
    index, shared = _index(), make_ids(32, 0)
    documents = {name: shared + make_ids(32, seed) for seed, name in enumerate("abc", start=1)}
    for name, ids in documents.items():
        _add(index, _manifest(template, name, 64), ids)
    for name, ids in documents.items():
        run = index.leading(_hashes(ids), None)
        assert [key.chunk for key in run] == [0, 1, 2, 3]
        assert [key.digest for key in run] == ["c", "c", name, name]


@pytest.mark.parametrize("without", ["a", "b", "c", "ab", "bc", "ac"])
def test_documents_that_begin_alike_stand_in_for_those_that_cannot_serve(template: Manifest, without: str) -> None:
    index, shared = _index(), make_ids(32, 0)
    documents = {name: shared + make_ids(32, seed) for seed, name in enumerate("abc", start=1)}
    for name, ids in documents.items():
        _add(index, _manifest(template, name, 64), ids)
    for name, ids in documents.items():
        run = index.leading(_hashes(ids), None, set(without))
        assert [key.chunk for key in run] == ([0, 1] if name in without else [0, 1, 2, 3])
        assert not {key.digest for key in run} & set(without)


def test_nothing_is_found_when_every_document_is_left_out(template: Manifest) -> None:
    index, ids = _index(), make_ids(32, 0)
    for name in "ab":
        _add(index, _manifest(template, name, 32), ids)
    assert index.leading(_hashes(ids), None, {"a", "b"}) == []


def test_a_hidden_document_leads_no_prompt_but_its_chunks_can_be_had_until_it_is_forgotten(template: Manifest) -> None:
    index, ids = _index(), make_ids(32, 0)
    hashes = _hashes(ids)
    _add(index, _manifest(template, "old", 32), ids)
    _add(index, _manifest(template, "new", 32), ids)
    index.hide("new")
    assert index.leading(hashes, None) == [ChunkKey("old", 0), ChunkKey("old", 1)]
    assert list(index.candidates(hashes[0], None)) == [ChunkKey("new", 0), ChunkKey("old", 0)]
    index.hide("old")
    assert index.leading(hashes, None) == []
    index.forget("new")
    assert index.leading(hashes, None) == []
    assert list(index.candidates(hashes[0], None)) == [ChunkKey("old", 0)]
    _add(index, _manifest(template, "old", 32), ids)
    assert index.leading(hashes, None) == [ChunkKey("old", 0), ChunkKey("old", 1)]
    assert list(index.candidates(hashes[0], None)) == [ChunkKey("old", 0)], "it stands in for itself"
    index.forget("old")
    assert list(index.candidates(hashes[0], None)) == []


def test_a_trained_cartridge_is_found_under_its_tag_until_it_and_its_chains_are_forgotten(template: Manifest) -> None:
    index, ids = _index(), make_ids(32, 0)
    _add(index, _manifest(template, "a", 32, "trained"), ids)
    index.add_chain("a.b", ids, [ChunkKey("a", 0), ChunkKey("a.b", 1)])
    index.add_chain("ab.c", ids, [ChunkKey("ab", 0), ChunkKey("ab.c", 1)])
    index.hide("a")
    assert index.chunks("a") == index.leading(_hashes(ids), "a") == [ChunkKey("a", 0), ChunkKey("a", 1)]
    index.forget("a")
    assert (index.has("a"), index.has("a.b"), index.has("ab.c")) == (False, False, True)


def test_looking_up_changes_nothing(template: Manifest) -> None:
    index, ids = _index(), make_ids(32, 0)
    for name in "ab":
        _add(index, _manifest(template, name, 32), ids)
    before = index.leading(_hashes(ids), None)
    index.leading(_hashes(ids), None, {"b"})
    index.leading(_hashes(ids), "tag", {"b"})
    assert index.leading(_hashes(ids), None) == before


def test_a_trained_cartridge_is_found_under_its_tag_and_not_without(template: Manifest) -> None:
    index, ids = _index(), make_ids(32, 0)
    assert _add(index, _manifest(template, "t", 32, "trained"), ids) == 2
    hashes = _hashes(ids + make_ids(20, 9))
    assert index.leading(hashes, "t") == [ChunkKey("t", 0), ChunkKey("t", 1)]
    assert index.leading(hashes, None) == []
    assert index.leading(hashes, "other") == []
    assert index.leading(hashes, "") == []
    assert index.leading(hashes, "t", {"t"}) == []


def test_a_document_is_found_without_a_tag_and_under_its_own_but_no_other(template: Manifest) -> None:
    index, ids = _index(), make_ids(32, 0)
    _add(index, _manifest(template, "p", 32), ids)
    assert len(index.leading(_hashes(ids), None)) == 2
    assert index.leading(_hashes(ids), "p") == [ChunkKey("p", 0), ChunkKey("p", 1)]
    assert index.leading(_hashes(ids), "") == index.leading(_hashes(ids), "q") == []


def test_a_trained_cartridge_and_a_document_of_the_same_ids_do_not_mix(template: Manifest) -> None:
    index, ids = _index(), make_ids(32, 0)
    _add(index, _manifest(template, "p", 32), ids)
    _add(index, _manifest(template, "t", 32, "trained"), ids)
    assert {key.digest for key in index.leading(_hashes(ids), None)} == {"p"}
    assert {key.digest for key in index.leading(_hashes(ids), "t")} == {"t"}
    assert index.leading(_hashes(ids), None, {"p"}) == []


@pytest.mark.parametrize(
    ("positions", "fits"), [(40, ""), (96, ": 16, 32$"), (128, ": 16, 32, 64, 128$"), (255, "divisor of p$")]
)
def test_a_trained_cartridge_with_a_tail_is_refused_with_the_sizes_that_fit(
    template: Manifest, positions: int, fits: str
) -> None:
    index = KeyIndex(sha256_hasher(256), 256)
    with pytest.raises(ChunkSizeMismatch, match=f"p = {positions}, no multiple of the engine's chunk_size 256.*{fits}"):
        _add(index, _manifest(template, "t", positions, "trained"), make_ids(positions, 0))
    assert index.leading(_hashes(make_ids(positions, 0), 256), "t") == []


@pytest.mark.parametrize("positions", [256, 512])
def test_a_trained_cartridge_without_a_tail_is_accepted(template: Manifest, positions: int) -> None:
    index = KeyIndex(sha256_hasher(256), 256)
    assert _add(index, _manifest(template, "t", positions, "trained"), make_ids(positions, 0)) == positions // 256


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


@pytest.mark.filterwarnings("ignore")
def test_lmcache_hashes_the_same_prompt_alike_in_another_instance(tmp_path: Path) -> None:
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.token_database import ChunkedTokenDatabase

    config = LMCacheEngineConfig.from_defaults(chunk_size=16, pre_caching_hash_algorithm="sha256_cbor")
    chains = [
        list(ChunkedTokenDatabase(config).process_tokens(tokens=make_ids(64, 0), make_key=False)) for _ in range(2)
    ]
    assert chains[0] == chains[1]
    assert len({chunk_hash for _, _, chunk_hash in chains[0]}) == 4
