"""What a request may ask for: every malformed shape is refused by name, and what it gets is bound to its content."""

from __future__ import annotations

import json
import os
from typing import Any

import msgspec
import pytest
from homes import Home
from making import make_artifact, make_fingerprint
from waiting import Clock

from lmcache_cartridge.artifact.manifest import Manifest
from lmcache_cartridge.engine.contract import ADAPTER, TAG, TENANT
from lmcache_cartridge.library.manifest_cache import ManifestCache
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.serve.request import (
    MAX_CHAIN,
    Reference,
    Refusal,
    Router,
    read_references,
    shorten,
    without_paths,
)
from lmcache_cartridge.serve.resolve import Resolver, Selection
from lmcache_cartridge.settings import from_mapping

SHAPE = make_fingerprint(pairing="half")


def put(home: Home, name: str, positions: int = 16, **given: Any) -> Manifest:
    """Make and register a cartridge; each has ids and KV of its own."""
    options = {"positions": positions, "fingerprint": SHAPE, "seed": len(home.made)} | given
    return home.make(name, **options).manifest


def resolver_of(home: Home, **changed: Any) -> Resolver:
    return Resolver(from_mapping({"home": home.path, "roots": [str(home.path / "allowed")]} | changed))


@pytest.fixture
def asked(home):
    """Two prefill cartridges, two trained ones of which one has its document, and one of tokens only."""
    put(home, "a", 32)
    put(home, "b", 20)
    put(home, "trained", kind="trained")
    put(home, "whole", kind="trained", document_ids=[7, 8, 9])
    put(home, "text", kind="tokens")
    home.registry.label("current", "a")
    return home


def resolve(where: Home | Resolver, *ids: str, **changed: Any) -> Selection:
    resolver = where if isinstance(where, Resolver) else resolver_of(where, **changed)
    return resolver.resolve([Reference(id=name) for name in ids])


def refused(call: Any, *args: Any, **named: Any) -> tuple[int, str]:
    """Return the status and the words with which something is refused."""
    with pytest.raises(Refusal) as caught:
        call(*args, **named)
    json.dumps(str(caught.value), ensure_ascii=False).encode()  # as a response will carry it
    return caught.value.status, str(caught.value)


# What `cartridges` may look like.


WRONG = {
    "cartridges:": ["a", [], ["a"] * (MAX_CHAIN + 1)],
    "cartridges.0.id:": [["x" * (1 << 20)], ["\ud800"]],
    "cartridges.1.id:": [["a", ""]],
    "cartridges.0.source:": [[{"id": "a", "source": "http"}]],
    "cartridges.0.force_redownload:": [[{"id": "a", "force_redownload": 1}]],
}
STALLING = [
    (TAG, None), (TENANT, "another"), (ADAPTER, "another"), ("lmcache.tag.tenant", ["a"]), ("lmcache.tag.tenant", "a@b%c"),
    ("lmcache.tag.a%b", "c"), ("lmcache.tag.\ud800", "c"), ("lmcache.skip_save", []), ("lmcache.anything", "x"),
    ("x" * (1 << 20), 1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "params", "place"),
    [({"cartridges": wrong}, None, place) for place, values in WRONG.items() for wrong in values]
    + [({}, {key: value}, "kv_transfer_params.") for key, value in STALLING]
    + [({}, "a", "kv_transfer_params must be an object"), ({"cartridges": ["a"]}, {"cartridge_id": "a"}, "")],
)
def test_what_is_malformed_stalls_the_engine_or_names_anothers_kv_is_refused_by_its_place(fields, params, place):
    status, said = refused(read_references, fields, params)
    assert (status, said[: len(place)]) == (400, place)
    assert len(said) < 300


# What names stand for.


OUTSIDE = {
    "another directory": "{home}/cartridges/a/1", "dots": "{root}/../cartridges/a/1", "dots to the root's sibling": "{root}x",
    "a link out of the root": "{root}/out", "a link to itself": "{root}/loop", "nothing there": "{root}/nope",
    "a NUL": "{root}/l\0", "a long name": "{root}/" + "x" * 500, "a relative path": "l", "a file": "/etc/passwd",
    "the root of all": "/", "no roots": "{root}/l",
}  # fmt: skip


@pytest.mark.parametrize("case", OUTSIDE)
def test_whatever_is_not_under_a_root_is_not_found_be_it_there_or_not(asked, case):
    make_artifact((allowed := asked.path / "allowed") / "l", positions=16)
    (allowed / "out").symlink_to(asked.root("a"))
    (allowed / "loop").symlink_to(allowed / "loop")
    path = OUTSIDE[case].format(root=allowed, home=asked.path)
    resolver = resolver_of(asked, roots=[] if case == "no roots" else [str(allowed)])
    status, said = refused(resolver.resolve, [Reference(id=path, source="local")])
    assert (status, said.split(" under ")[0]) == (404, f"no cartridge is at {shorten(path)!r}")


@pytest.mark.parametrize("damage", ["manifest", "gone", "ids", "exchanged"])
def test_a_damaged_or_exchanged_artefact_is_not_usable_and_its_path_not_told(asked, damage):
    root = asked.root("a")
    file = root / "manifest.json"
    text, resolver = file.read_text(), resolver_of(asked)
    assert resolve(resolver, "a")
    match damage:
        case "manifest":
            file.write_text("{")
        case "gone":
            file.unlink()
        case "ids":
            file.write_text(text.replace('"count": 32', '"count": 31'))
        case "exchanged":
            root.rename(root.with_name("old"))
            make_artifact(root, positions=32, cartridge_id="a", seed=99)
    status, said = refused(resolve, asked, "a")
    assert (status, str(asked.path) in said) == (422, False)


def test_an_id_means_an_older_version_while_the_newest_cannot_be_had(asked):
    _, newest = (put(asked, "trained", kind="trained", version=n, seed=9 + n, promote=n == 3) for n in (2, 3))
    asked.registry.label("newest", "trained")
    root = asked.root("trained", 3)
    asked.quarantine.put(newest.digest, f"{root}/payload.safetensors: chunk 1 is /secret home/x y/z", str(root))
    assert resolve(asked, "trained").names == "trained@1", "@2 was never promoted"
    told = "cartridge trained@3 is quarantined: trained@3/payload.safetensors: chunk 1 is z"
    for name in ("trained@3", "newest"):
        assert refused(resolve, asked, name) == (422, told)


def test_an_id_means_an_older_version_for_a_moment_after_the_engine_refused_the_newest(asked):
    oldest, newest = asked.made["trained"].digest, put(asked, "trained", kind="trained", version=2).digest
    resolver = Resolver(from_mapping({"home": asked.path}), clock := Clock())
    resolver.pass_over(newest)
    assert [resolve(resolver, name).names for name in ("trained", "trained@2")] == ["trained@1", "trained@2"]
    resolver.pass_over(oldest)
    assert resolve(resolver, "trained").names == "trained@2", "none is left, so the newest says why"
    clock.move(60)
    resolver.pass_over(oldest)
    assert resolve(resolver, "trained").names == "trained@2", "the engine is asked again"


def test_a_damaged_copy_of_what_lies_on_s3_is_made_again(home, s3_credentials, bucket, tmp_path, monkeypatch):
    monkeypatch.setattr("lmcache_cartridge.serve.resolve._REPLACED_S", 0.0)
    resolver, location = resolver_of(home, s3_endpoint_url=s3_credentials.endpoint), f"s3://{bucket}/h"
    make_artifact(tmp_path / "h", positions=80, cartridge_id="h", seed=3)
    for path in (tmp_path / "h").iterdir():
        s3_credentials.client.upload_file(str(path), bucket, f"h/{path.name}")
    copy = ManifestCache(from_mapping({"home": home.path}).manifests_dir, resolver.sources).fetch(location)
    home.registry.register(copy, location)
    before = resolve(resolver, "h")
    for _ in range(2):
        os.truncate(copy / "token_ids.npy", 100)
        assert resolve(resolver, "h").token_ids == before.token_ids


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("/srv/my docs/a b/payload.safetensors: chunk 3", "payload.safetensors: chunk 3"),
        ("at '/a/b c/d', not (/d/e f/g)", "at 'd', not (g)"),
        ("rope frequencies: 1/2 of heads, not 3/4", "rope frequencies: 1/2 of heads, not 3/4"),
        ("/srv/k: v/h/copy/payload.safetensors is short", "copy of h@1/payload.safetensors is short"),
    ],
)
def test_a_reason_has_no_directories(reason, shown):
    assert without_paths(reason, {"/srv/k: v/h": "h@1", "/srv/k: v/h/copy": "copy of h@1"}) == shown


def test_what_was_found_is_served_on_while_the_registry_cannot_be_read(asked):
    resolver, path = resolver_of(asked), asked.path / "registry.sqlite"
    before, kept = resolve(resolver, "a"), path.read_bytes()
    path.write_bytes(b"no database at all" * 999)
    assert resolve(resolver, "a") == before
    with pytest.raises(Refusal) as caught:
        resolve(resolver, "b")
    assert (caught.value.status, caught.value.retry_after_s) == (503, 5)
    path.write_bytes(kept)
    assert resolve(resolver, "b").names == "b@1"
    Registry(path).remove("b")
    assert refused(resolve, resolver, "b")[0] == 404
    path.write_bytes(b"no database at all" * 999)
    assert refused(resolve, resolver, "b")[0] == 503, "it was removed since"


# Cartridges of tokens only, alone and in chains: KV in front of the first of them is injected, all behind is computed.


def test_a_trained_one_behind_tokens_is_computed_from_its_document_where_that_is_allowed(asked):
    status, said = refused(resolve, asked, "text", "whole")
    assert (status, "whole@1 is trained" in said, "on_miss=document" in said) == (422, True, True)
    allowed = {"on_miss": "document"}
    selection = resolve(asked, "text", "whole", "a", **allowed)
    told = resolve(asked, "text").token_ids + (7, 8, 9) + resolve(asked, "a").token_ids
    assert selection.token_ids == told, "no identity token is computed"
    assert (selection.tag, selection.must_inject) == (None, 0)
    status, said = refused(resolve, asked, "a", "text", "trained", **allowed)
    assert (status, "trained@1 has no text" in said) == (422, True)


def test_what_is_computed_behind_tokens_is_of_their_model(asked):
    put(asked, "other", fingerprint=make_fingerprint(layers=5))
    assert refused(resolve, asked, "text", "other")[0] == 409


# What a selection is bound to.


def test_documents_stand_where_every_part_has_one_and_the_last_trained_one_ends_what_must_not_be_computed(asked):
    a, b, text = (resolve(asked, name).token_ids for name in ("a", "b", "text"))
    mixed = resolve(asked, "a", "whole", "b")
    assert (mixed.document_ids, mixed.must_inject) == (a + (7, 8, 9) + b, 48)
    assert resolve(asked, "a", "trained").document_ids is None
    replaced = resolve(asked, "a", "text")
    assert (replaced.document_ids, replaced.tag, replaced.positions) == (a + text, asked.made["a"].digest, 32), (
        "of what is injected alone"
    )


def test_a_chain_of_llama4_ends_where_its_attention_depends_on_the_engine(asked):
    shape = make_fingerprint(layers=1, kv_heads=1, head_size=2, pairing="half")
    shape = msgspec.structs.replace(shape, architecture="Llama4ForCausalLM")
    for name, positions in (("long", 8000), ("short", 192), ("more", 193)):
        put(asked, name, positions, fingerprint=shape)
    assert resolve(asked, "long", "short").names == "long@1, short@1"
    told = "the chain has 8193 positions; this model's KV cannot be moved beyond 8192"
    assert refused(resolve, asked, "long", "more") == (422, told)


@pytest.mark.parametrize("rope", [(), (msgspec.structs.replace(SHAPE.rope[0], layers=None),)])
def test_a_cartridge_whose_keys_cannot_be_moved_stands_first_or_is_refused(asked, rope):
    put(asked, "still", fingerprint=msgspec.structs.replace(SHAPE, rope=rope))
    assert resolve(asked, "still", "a").names == "still@1, a@1"
    assert refused(resolve, asked, "a", "still")[0] == 422


def test_the_salt_differs_for_every_chain_order_content_and_client_salt(asked):
    chains = ["a"], ["b"], ["a", "b"], ["b", "a"], ["a", "a"], ["trained"], ["text"]
    salts = {resolve(asked, *chain).salt(client) for chain in chains for client in (None, "x", "x\0", "\0x")}
    assert len(salts) == len(chains) * 4
    assert resolve(asked, "a").salt("x") == resolve(asked, "current").salt("x"), "the same content may share blocks"
    assert resolve(asked, "a").salt("x", b"secret") not in salts, "who knows the digest must not know the salt"


# Routers.


@pytest.mark.parametrize(
    ("values", "fields", "status"),
    [
        ({"composites": {"many": ["a"] * 16}}, {"cartridges": ["many", "b"]}, 400),
        ({"router": "composite"}, {"cartridge_label": "a"}, 404),
        *(({"router": "label"}, {"cartridge_label": label}, 400) for label in ("", "x" * 129, 5, "\ud800", "a\nb")),
    ],
)
def test_a_chain_too_long_by_composites_and_a_label_that_is_none_are_refused(values, fields, status):
    assert refused(Router(from_mapping(values)).choose, fields, None, None)[0] == status


def test_a_document_that_is_longer_than_the_context_is_not_read(asked):
    put(asked, "long", kind="trained", document_ids=list(range(100)))
    for longest, document in ((101, tuple(range(100))), (100, None)):
        resolver = resolver_of(asked)
        resolver.context = longest
        assert resolve(resolver, "long").document_ids == document
        (asked.root("long") / "document_ids.npy").unlink(missing_ok=True)
