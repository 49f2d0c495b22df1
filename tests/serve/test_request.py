"""What a request may ask for: every malformed shape is refused by name, and what it gets is bound to its content."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from making import make_artifact, make_fingerprint, make_rope
from waiting import Clock

from lmcache_cartridge.artifact import reading
from lmcache_cartridge.artifact.manifest import Compaction, Manifest, Provenance, Tokens, Training
from lmcache_cartridge.artifact.writing import ArtifactWriter
from lmcache_cartridge.engine.contract import ADAPTER, GRANT, TAG, TENANT
from lmcache_cartridge.library.manifest_cache import ManifestCache
from lmcache_cartridge.library.quarantine import Quarantine
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.serve.request import (
    MAX_CHAIN,
    Reference,
    Refusal,
    Router,
    read_model,
    read_references,
    without_paths,
)
from lmcache_cartridge.serve.resolve import NeedsReading, Resolver, Selection
from lmcache_cartridge.settings import Settings, from_mapping
from lmcache_cartridge.sources.s3 import S3Source
from lmcache_cartridge.sources.sources import Sources

SHAPE = make_fingerprint(rope=msgspec.structs.replace(make_rope(), pairing="half"))


class Home(NamedTuple):
    settings: Settings
    manifests: dict[str, Manifest]

    def resolve(self, *ids: str) -> Selection:
        return Resolver(self.settings).resolve([Reference(id=i) for i in ids])


@pytest.fixture
def home(tmp_path):
    """Two prefill cartridges, two trained ones of which one has its document, one of tokens only, one not registered."""
    root = tmp_path / "secret-home"
    settings = from_mapping({"home": root, "roots": [str(tmp_path / "allowed")]})
    (tmp_path / "allowed").mkdir()
    registry = Registry(settings.registry_path)
    made = {
        "a": make_artifact(root / "c/a", positions=32, cartridge_id="a", seed=1, fingerprint=SHAPE).manifest,
        "b": make_artifact(root / "c/b", positions=20, cartridge_id="b", seed=2, fingerprint=SHAPE).manifest,
        "trained": make_artifact(
            root / "c/t", positions=16, cartridge_id="trained", kind="trained", seed=3, fingerprint=SHAPE
        ).manifest,
        "whole": _without_kv_or_with_document(root / "c/w", "whole", "trained", [7, 8, 9]),
        "text": _without_kv_or_with_document(root / "c/x", "text", "tokens", None),
    }
    for path in sorted((root / "c").iterdir()):
        registry.register(path)
    registry.label("current", "a")
    made["local"] = make_artifact(
        tmp_path / "allowed/l", positions=16, cartridge_id="local", seed=6, fingerprint=SHAPE
    ).manifest
    return Home(settings, made)


def _without_kv_or_with_document(root: Path, name: str, kind: str, document: list[int] | None) -> Manifest:
    writer = ArtifactWriter(
        root, cartridge_id=name, version=1, kind=kind, fingerprint=SHAPE, token_ids=np.arange(16),
        document_ids=None if document is None else np.array(document), chunk_tokens=16,
    )  # fmt: skip
    with writer:
        if kind != "tokens":
            writer.write(bytes(16 * SHAPE.token_bytes))
        return writer.commit(Provenance(tool="tests", created="2026-01-01T00:00:00Z"))


def _refusal(call: Any, *args: Any, **kwargs: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        call(*args, **kwargs)
    json.dumps({"error": str(caught.value)}, ensure_ascii=False).encode()  # as a response will carry it
    return caught.value


# What `cartridges` may look like.


@pytest.mark.parametrize(
    ("fields", "params", "expected"),
    [
        ({}, None, []),
        ({"cartridges": None}, {}, []),
        ({"cartridges": ["a", {"id": "b@2"}]}, None, ["a", "b@2"]),
        ({}, {"cartridge_id": "a"}, ["a"]),
        ({}, {"cartridge_id": ["a", "b"]}, ["a", "b"]),
        ({"other": 1}, {"lmcache.tag.tenant": "x", "lmcache.skip_save": True}, []),
    ],
)
def test_cartridges_are_named_by_the_field_or_by_the_parameter(fields, params, expected):
    assert [reference.id for reference in read_references(fields, params)] == expected


@pytest.mark.parametrize(
    ("name", "where"), [("a", "registry"), ("a@1", "registry"), ("/a", "local"), ("s3://b/k", "s3")]
)
def test_the_source_follows_from_the_form_of_the_id_unless_it_is_given(name, where):
    assert Reference(id=name).where() == where
    assert Reference(id=name, source="local").where() == "local"


WRONG = {
    "cartridges:": ["a", 5, True, {"id": "a"}, [], ["a"] * (MAX_CHAIN + 1)],
    "cartridges.0:": [[5], [None], [["a"]]],
    "cartridges.0.id:": [[{}], [{"id": 5}], ["x" * (1 << 20)], ["\ud800"]],
    "cartridges.1.id:": [["a", ""]],
    "cartridges.0.source:": [[{"id": "a", "source": "http"}], [{"id": "a", "source": 1}]],
    "cartridges.0.force_redownload:": [[{"id": "a", "force_redownload": 1}]],
    "cartridges.0.path:": [[{"id": "a", "path": "/etc"}]],
}
STALLING = [
    (TAG, "00" * 32), (TAG, None), (GRANT, {"must_inject": 0}), (TENANT, "another"), (ADAPTER, "another"),
    ("lmcache.tag.tenant", ["a"]), ("lmcache.tag.tenant", 5), ("lmcache.tag.tenant", "a@b%c"), ("lmcache.tag.a%b", "c"),
    ("lmcache.tag.\ud800", "c"), ("lmcache.skip_save", []), ("lmcache.anything", "x"), ("disagg_spec", {}),
    ("ret_first_tok", True), ("do_remote_prefill", True), ("prompt_token_ids", [1]), ("x" * (1 << 20), 1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "params", "place"),
    [({"cartridges": wrong}, None, place) for place, values in WRONG.items() for wrong in values]
    + [({}, {key: value}, "kv_transfer_params.") for key, value in STALLING]
    + [({}, params, "kv_transfer_params must be an object") for params in ([], "a")]
    + [({"cartridges": ["a"]}, {"cartridge_id": "a"}, "")],
)
def test_what_is_malformed_stalls_the_engine_or_names_anothers_kv_is_refused_by_its_place(fields, params, place):
    refusal = _refusal(read_references, fields, params)
    assert refusal.status == 400
    assert str(refusal).startswith(place)
    assert len(str(refusal)) < 300


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@examples(max_examples=500, deadline=None)
@given(cartridges=_json, params=st.none() | st.dictionaries(st.sampled_from(["cartridge_id", TAG]) | st.text(), _json))
def test_any_json_at_all_is_read_or_refused(cartridges, params):
    try:
        assert all(
            isinstance(reference, Reference) for reference in read_references({"cartridges": cartridges}, params)
        )
    except Refusal as refusal:
        assert refusal.status == 400


# What names stand for.


def test_registered_names_versions_and_labels_are_found(home):
    assert home.resolve("a").manifests == home.resolve("a@1").manifests == home.resolve("current").manifests
    assert home.resolve("a", "b", "trained").names == "a@1, b@1, trained@1"
    assert home.resolve("a", "b").used(40) == "a@1;positions=32;injected=32, b@1;positions=20;injected=8"


@pytest.mark.parametrize(
    "name",
    [
        "nope",
        "a@2",
        "a@",
        "@1",
        "../a",
        "a\0",
        "A",
        " a",
        "'; --",
        "." * 1024,
        "s3://bucket/key",
        "s3://",
        "s3://b/../o",
    ],
)
def test_an_unknown_name_or_bucket_is_not_found_and_shown_as_it_was_sent(home, name):
    refusal = _refusal(home.resolve, name)
    assert refusal.status == 404
    assert repr(name)[1:20] in str(refusal)
    assert "secret" not in str(refusal)
    assert len(str(refusal)) < 200


def test_an_artefact_under_a_configured_root_is_found_by_its_path(home):
    path = home.settings.roots[0] / "l"
    assert home.resolve(str(path)).manifests == (home.manifests["local"],)
    (home.settings.roots[0] / "link").symlink_to(path)
    assert home.resolve(str(home.settings.roots[0] / "link")).places == ((str(path), str(path)),)


OUTSIDE = {
    "another directory": "{home}/c/a", "dots": "{root}/../secret-home/c/a", "dots to the root's sibling": "{root}x",
    "a link out of the root": "{root}/out", "a link to itself": "{root}/loop", "nothing there": "{root}/nope",
    "a NUL": "{root}/l\0", "a long name": "{root}/" + "x" * 500, "a relative path": "l", "a file": "/etc/passwd",
    "the root of all": "/", "no roots": "{rootless}{root}/l",
}  # fmt: skip


@pytest.mark.parametrize("path", OUTSIDE.values(), ids=OUTSIDE)
def test_whatever_is_not_under_a_root_is_not_found_be_it_there_or_not(home, path):
    root = home.settings.roots[0]
    (root / "out").symlink_to(home.settings.home / "c" / "a")
    (root / "loop").symlink_to(root / "loop")
    settings = home.settings if "{rootless}" not in path else home.settings.model_copy(update={"roots": ()})
    path = path.format(root=root, home=home.settings.home, rootless="")
    refusal = _refusal(Resolver(settings).resolve, [Reference(id=path, source="local")])
    assert refusal.status == 404
    assert str(refusal).startswith("no cartridge is at ")
    assert str(home.settings.home) not in str(refusal).replace(repr(path), "")


def test_a_directory_under_a_root_that_is_no_cartridge_is_not_usable_and_no_path_but_the_clients_is_told(
    home,
):
    path = home.settings.roots[0] / "empty"
    path.mkdir()
    (home.settings.roots[0] / "alias").symlink_to(path)
    refusal = _refusal(home.resolve, str(home.settings.roots[0] / "alias"))
    assert refusal.status == 422
    assert str(path) not in str(refusal)


@pytest.mark.parametrize("damage", ["manifest", "gone", "ids", "exchanged"])
def test_a_damaged_or_exchanged_artefact_is_not_usable_and_its_path_not_told(home, damage):
    root = home.settings.home / "c" / "a"
    assert home.resolve("a")
    text = (root / "manifest.json").read_text()
    match damage:
        case "manifest":
            (root / "manifest.json").write_text("{")
        case "gone":
            (root / "manifest.json").unlink()
        case "ids":
            (root / "manifest.json").write_text(text.replace('"count": 32', '"count": 31'))
        case "exchanged":
            root.rename(root.with_name("old"))
            make_artifact(root, positions=32, cartridge_id="a", seed=99)
    refusal = _refusal(home.resolve, "a")
    assert refusal.status == 422
    assert "secret" not in str(refusal)


@pytest.mark.parametrize("damage", [lambda payload: os.truncate(payload, 9), Path.unlink], ids=["truncated", "gone"])
def test_whose_payload_is_damaged_is_found_by_its_tokens_and_left_to_the_workers(home, damage):
    sound = home.resolve("a")
    damage(home.settings.home / "c" / "a" / "payload.safetensors")
    assert Resolver(home.settings).resolve([Reference(id="a")]) == sound


def test_a_new_version_is_found_at_once(home):
    before = home.resolve("a")
    root = home.settings.home / "c" / "a2"
    make_artifact(root, positions=32, cartridge_id="a", version=2, seed=50)
    Registry(home.settings.registry_path).register(root)
    after = home.resolve("a")
    assert after.names == "a@2"
    assert after.tag != before.tag
    assert home.resolve("a@1")[:5] == before[:5]


TRAINING = Training("distill", "sci", 0, 9, 5, 5, 0.1, 1.0)
COMPACTION = Compaction("repeat", 9, 1, 1.0)


@pytest.mark.parametrize(
    ("about", "tokens", "company"),
    [
        ({}, 64, 0), ({"training": TRAINING}, 64, 0),
        ({"compaction": COMPACTION}, 66, None), ({"compaction": COMPACTION}, 128, 0), ({"compaction": COMPACTION}, 0, 0),
        ({"compaction": msgspec.structs.replace(COMPACTION, refine=9)}, 64, None),
    ],
)  # fmt: skip
def test_what_a_cartridge_of_16_positions_was_made_for(home, about, tokens, company):
    """`tokens` is the length of its document, 0 where that is not known."""
    made = home.manifests["trained"]
    provenance = msgspec.structs.replace(made.provenance, **about)
    document = Tokens(tokens, "") if tokens else None
    assert msgspec.structs.replace(made, provenance=provenance, document=document).company == company
    assert home.manifests["a"].company is None, "a prefill's KV is a document's"


def test_a_chain_says_which_of_its_cartridges_were_made_for_less_company(home):
    path, made = Path(home.settings.home) / "c/t" / reading.MANIFEST, home.manifests["trained"]
    provenance = msgspec.structs.replace(made.provenance, training=TRAINING)
    path.write_bytes(msgspec.structs.replace(made, provenance=provenance).encode())
    assert home.resolve("trained").notice == home.resolve("a", "b").notice == ""
    refusing = Resolver(from_mapping(home.settings.model_dump() | {"on_made_alone": "error"}))
    assert refusing.resolve([Reference(id="trained")]).names == "trained@1"
    for others in (1, 2):
        names = ["a", "trained", "b"][: others + 1]
        notice = f"made for fewer than {others} others: trained@1 (0)"
        assert home.resolve(*names).notice == notice
        chain = [Reference(id=name) for name in names]
        refusal = _refusal(refusing.resolve, chain)
        assert (refusal.status, notice in str(refusal)) == (400, True)


def test_a_quarantined_trained_cartridge_is_not_usable_unless_its_document_can_take_its_place(home):
    quarantine = Quarantine(home.settings.quarantine_dir)
    for name in ("trained", "whole", "a"):
        quarantine.put(home.manifests[name].digest, "/secret/path has a wrong checksum")
    refusal = _refusal(home.resolve, "trained")
    assert refusal.status == 422
    assert "secret" not in str(refusal)
    assert home.resolve("whole").document_ids == (7, 8, 9)
    assert home.resolve("a").must_inject == 0, "its document is computed"


@pytest.mark.parametrize("fault", ["gone", "quarantined", "passed over"])
def test_an_id_means_an_older_version_while_the_newest_cannot_be_had(home, fault):
    clock = Clock()
    registry, resolver = Registry(home.settings.registry_path), Resolver(home.settings, clock)
    newest = {
        version: make_artifact(
            home.settings.home / f"c/t{version}", positions=16, cartridge_id="trained", version=version, kind="trained",
            seed=40 + version,
        ).manifest
        for version in (2, 3)
    }  # fmt: skip
    for version in newest:
        registry.register(home.settings.home / f"c/t{version}", promote=version == 3)
    registry.label("newest", "trained")
    broken, quarantine = home.settings.home / "c/t3", Quarantine(home.settings.quarantine_dir)
    match fault:
        case "gone":
            broken.rename(broken.with_name("elsewhere"))
        case "quarantined":
            quarantine.put(newest[3].digest, f"{broken}/payload.safetensors: chunk 1 is /secret home/x y/z")
        case "passed over":
            resolver.pass_over(newest[3].digest)
    found = resolver.resolve([Reference(id="trained")])
    assert found.names == "trained@1", "@2 was never promoted"
    if fault == "passed over":
        assert resolver.resolve([Reference(id="trained@3")]).names == "trained@3"
        resolver.pass_over(found.manifests[0].digest)
        assert resolver.resolve([Reference(id="trained")]).names == "trained@3", "none is left, so the newest says why"
        clock.now += 60
        resolver.pass_over(found.manifests[0].digest)
        assert resolver.resolve([Reference(id="trained")]).names == "trained@3", "the engine is asked again"
        return
    for name in ("trained@3", "newest"):
        refusal = _refusal(resolver.resolve, [Reference(id=name)])
        assert refusal.status == 422
        assert not {"secret", "home", "/"} & set(str(refusal).replace("lmcache-cartridge", "").split())
    quarantine.put(home.manifests["trained"].digest, "bad")
    message = str(_refusal(resolver.resolve, [Reference(id="trained")]))
    assert "bad" not in message, "the newest says why"
    if fault == "quarantined":
        assert message == "cartridge trained@3 is quarantined: trained@3/payload.safetensors: chunk 1 is z"


@pytest.mark.parametrize("by", ["this machine", "another"])
def test_what_is_pushed_over_a_served_prefix_and_registered_is_served(
    by, s3_credentials, bucket, tmp_path, monkeypatch
):
    """Whoever registers it has read it: here its copy is found, elsewhere this machine has none yet."""
    monkeypatch.setattr("lmcache_cartridge.serve.resolve._REPLACED_S", 0.0)
    location = f"s3://{bucket}/h"
    settings = from_mapping(
        {"home": tmp_path / "home", "s3_endpoint_url": s3_credentials.endpoint, "buckets": [bucket]}
    )
    sources, registry, resolver = Sources(S3Source(**settings.s3)), Registry(settings.registry_path), Resolver(settings)
    copies = ManifestCache(settings.manifests_dir if by == "this machine" else tmp_path / "elsewhere", sources)
    for version in (1, 2):
        root = tmp_path / str(version)
        made = make_artifact(root, positions=32, cartridge_id="h", version=version, seed=version)
        for file in root.iterdir():
            s3_credentials.client.put_object(Bucket=bucket, Key=f"h/{file.name}", Body=file.read_bytes())
        registry.register(copies.fetch(location, force=True), location)
        with pytest.raises(NeedsReading) if by == "another" else nullcontext():
            resolver.resolve([Reference(id="h")], {})
        assert resolver.resolve([Reference(id="h")]).tag == made.manifest.digest
        assert resolver.resolve([Reference(id="h")], {}).names == f"h@{version}"
    assert _refusal(resolver.resolve, [Reference(id="h@1")]).status == 422
    sources.close()


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("/srv/my docs/a b/payload.safetensors: chunk 3", "payload.safetensors: chunk 3"),
        ("cannot open '/srv/my docs/x' now", "cannot open 'x' now"),
        ("at /a/b/c, not (/d/e f/g)", "at c, not (g)"),
        ("rope frequencies: 1/2 of heads, not 3/4", "rope frequencies: 1/2 of heads, not 3/4"),
        ("/srv/k: v/h/copy/payload.safetensors is short", "copy of h@1/payload.safetensors is short"),
    ],
)
def test_a_reason_has_no_directories(reason, shown):
    assert without_paths(reason, {"/srv/k: v/h": "h@1", "/srv/k: v/h/copy": "copy of h@1"}) == shown


@pytest.mark.parametrize("damage", ["corrupt", "no text"])
def test_what_was_found_is_served_on_while_the_registry_cannot_be_read(home, damage):
    resolver = Resolver(home.settings)
    before, path = resolver.resolve([Reference(id="a")]), home.settings.registry_path
    kept = path.read_bytes()
    if damage == "corrupt":
        path.write_bytes(b"no database at all" * 999)
    else:
        db = sqlite3.connect(path)
        db.execute("UPDATE cartridges SET location = CAST(x'ff41' AS TEXT)")
        db.commit()
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        db.close()
    assert resolver.resolve([Reference(id="a")]) == before
    refusal = _refusal(resolver.resolve, [Reference(id="b")])
    assert (refusal.status, refusal.retry_after_s) == (503, 5)
    path.write_bytes(kept)
    assert resolver.resolve([Reference(id="b")]).names == "b@1"
    Registry(path).remove("b")
    assert _refusal(resolver.resolve, [Reference(id="b")]).status == 404
    path.write_bytes(b"no database at all" * 999)
    assert _refusal(resolver.resolve, [Reference(id="b")]).status == 503, "it was removed since"


# Cartridges of tokens only, alone and in chains: KV in front of the first of them is injected, all behind is computed.

IDS = tuple(range(16))
"""Of `text`."""


@pytest.mark.parametrize(
    ("chain", "injected", "told"),
    [
        (["text"], [], "text@1;positions=16;injected=0;served=tokens"),
        (["text", "a"], [],
         "text@1;positions=16;injected=0;served=tokens, a@1;positions=32;injected=0;served=document"),
        (["trained", "text"], ["trained"],
         "trained@1;positions=16;injected=16, text@1;positions=16;injected=0;served=tokens"),
        (["b", "a", "text", "b"], ["b", "a"],
         "b@1;positions=20;injected=20, a@1;positions=32;injected=32, text@1;positions=16;injected=0;served=tokens, "
         "b@1;positions=20;injected=0;served=document"),
    ],
)  # fmt: skip
def test_what_stands_in_front_of_tokens_is_injected_and_what_stands_behind_is_computed(home, chain, injected, told):
    selection = home.resolve(*chain)
    assert selection.token_ids == sum((home.resolve(name).token_ids for name in chain), ())
    digests = [home.manifests[name].digest for name in injected]
    assert selection.tag == (".".join(digests) or None)
    assert set(selection.located) == set(digests), "workers are told of nothing else"
    assert selection.positions == sum(home.manifests[name].positions for name in injected)
    assert selection.must_inject == (selection.positions if "trained" in injected else 0)
    assert selection.used(1000) == told


def test_a_trained_one_behind_tokens_is_computed_from_its_document_where_that_is_allowed(home):
    refusal = _refusal(home.resolve, "text", "whole")
    assert (refusal.status, "whole@1 is trained: it stands behind text@1" in str(refusal)) == (422, True)
    assert "on_miss=document" in str(refusal)
    resolver = Resolver(from_mapping(home.settings.model_dump() | {"on_miss": "document"}))
    selection = resolver.resolve([Reference(id=name) for name in ("text", "whole", "a")])
    assert selection.token_ids == IDS + (7, 8, 9) + home.resolve("a").token_ids, "no identity token is computed"
    assert (selection.tag, selection.must_inject) == (None, 0)
    for chain in (["text", "trained"], ["a", "text", "trained"]):
        refusal = _refusal(resolver.resolve, [Reference(id=name) for name in chain])
        assert (refusal.status, "trained@1 has no text" in str(refusal)) == (422, True)
    assert home.resolve("whole", "text").must_inject == 16, "in front of them it is injected"


def test_what_is_computed_behind_tokens_is_of_their_model(home):
    root = home.settings.home / "c/other"
    make_artifact(root, positions=16, cartridge_id="other", seed=9, layers=5)
    Registry(home.settings.registry_path).register(root)
    assert _refusal(home.resolve, "text", "other").status == 409
    assert home.resolve("other", "text").tag is not None, "the engine says so of what is injected"


# What a selection is bound to.


def test_documents_stand_where_every_part_has_one_and_the_last_trained_one_ends_what_must_not_be_computed(
    home,
):
    a, b, text = (home.resolve(name).token_ids for name in ("a", "b", "text"))
    mixed = home.resolve("a", "whole", "b")
    assert (mixed.document_ids, mixed.must_inject) == (a + (7, 8, 9) + b, 48)
    assert home.resolve("a", "trained").document_ids is None
    replaced = home.resolve("a", "text")
    told = "a@1;positions=32;injected=0;served=document, text@1;positions=16;injected=0;served=tokens"
    assert (replaced.document_ids, replaced.replaced) == (a + text, told)


def test_a_chain_of_llama4_ends_where_its_attention_depends_on_the_engine(home):
    rope = make_rope(rotary_dim=2)
    shape = make_fingerprint(layers=1, kv_heads=1, head_size=2, rope=msgspec.structs.replace(rope, pairing="half"))
    shape = msgspec.structs.replace(shape, architecture="Llama4ForCausalLM")
    for name, positions in (("long", 8000), ("short", 192), ("more", 193)):
        root = home.settings.home / "c" / name
        make_artifact(root, positions=positions, cartridge_id=name, fingerprint=shape)
        Registry(home.settings.registry_path).register(root)
    assert home.resolve("long", "short").names == "long@1, short@1"
    refusal = _refusal(home.resolve, "long", "more")
    assert refusal.status == 422
    assert str(refusal) == "the chain has 8193 positions; this model's KV cannot be moved beyond 8192"


@pytest.mark.parametrize(
    ("rope", "reason"),
    [
        ((), "has no rotary embedding"),
        ((make_rope(),), "not known which layers"),
        ((msgspec.structs.replace(make_rope(), layers=(0, 1, 2)),), "not known which dimensions"),
        ((msgspec.structs.replace(make_rope(), layers=()),), "has no rotary embedding"),
    ],
)
def test_a_cartridge_whose_keys_cannot_be_moved_stands_first_or_is_refused(home, rope, reason):
    shape = msgspec.structs.replace(SHAPE, rope=rope)
    root = home.settings.home / "c/still"
    make_artifact(root, positions=16, cartridge_id="still", kind="trained", seed=9, fingerprint=shape)
    Registry(home.settings.registry_path).register(root)
    assert home.resolve("still", "a").names == "still@1, a@1"
    refusal = _refusal(home.resolve, "a", "still")
    assert refusal.status == 422
    assert str(refusal).startswith("still@1 cannot stand behind another cartridge: ")
    assert reason in str(refusal)


def test_the_salt_differs_for_every_chain_order_content_and_client_salt(home):
    chains = [["a"], ["b"], ["a", "b"], ["b", "a"], ["a", "a"], ["trained"], ["whole"], ["text"]]
    salts = {home.resolve(*chain).salt(client) for chain in chains for client in (None, "x", "y", "x\0", "\0x")}
    assert len(salts) == len(chains) * 5
    assert all(len(salt) == 64 for salt in salts)
    assert home.resolve("a").salt("x") == home.resolve("current").salt("x"), "the same content may share blocks"
    assert home.resolve("a").salt("x", b"secret") not in salts, "who knows the digest must not know the salt"


# Routers.


CHAINS = {"both": ["a", "b"], "one": ["c"]}


LABEL, STATIC = {"router": "label", "label_field": "tenant"}, {"router": "static", "composites": CHAINS}
KEYED = {f"key:{hashlib.sha256(b'sk-1').hexdigest()}": "for-key", "model:m": "for-model", "*": "both"}


@pytest.mark.parametrize(
    ("values", "fields", "model", "key", "chosen"),
    [
        ({"router": "explicit"}, {"cartridge_label": "x"}, None, None, []),
        ({"composites": CHAINS}, {"cartridges": ["x", "both", "one"]}, None, None, ["x", "a", "b", "c"]),
        ({"composites": {"/p": ["a"]}}, {"cartridges": ["/p"]}, None, None, ["/p"]),  # a path is no composite
        (LABEL, {"tenant": "ward/a"}, None, None, ["ward/a"]),
        (LABEL, {"cartridge_label": "x"}, None, None, []),
        (LABEL, {"tenant": "x", "cartridges": ["named"]}, None, None, ["named"]),  # what the request names comes first
        ({"router": "composite", "composites": CHAINS}, {"cartridge_label": "both"}, None, None, ["a", "b"]),
        (STATIC | {"static": KEYED}, {}, "m", "sk-1", ["for-key"]),
        (STATIC | {"static": KEYED}, {}, "m", "sk-2", ["for-model"]),
        (STATIC | {"static": KEYED}, {}, "n", None, ["a", "b"]),
        (STATIC | {"static": KEYED}, {"cartridges": ["named"]}, "m", "sk-1", ["named"]),
        (STATIC | {"static": {"model:m": "x"}}, {}, "n", None, []),
    ],
)
def test_each_router_chooses_by_its_own_and_what_the_request_names_comes_first(values, fields, model, key, chosen):
    assert [one.id for one in Router(from_mapping(values)).choose(fields, None, model, key)] == chosen


@pytest.mark.parametrize(
    ("values", "fields", "status"),
    [
        ({"composites": {"many": ["a"] * 16}}, {"cartridges": ["many", "b"]}, 400),
        ({"router": "composite", "composites": CHAINS}, {"cartridge_label": "a"}, 404),
    ],
)
def test_a_chain_too_long_by_composites_and_a_label_that_is_none_are_refused(values, fields, status):
    assert _refusal(Router(from_mapping(values)).choose, fields, None, None, None).status == status


@pytest.mark.parametrize("label", ["", "x" * 129, 5, ["a"], "\ud800", "a\nb"])
@pytest.mark.parametrize("router", ["label", "composite"])
def test_a_malformed_label_is_refused_by_its_fields_name(router, label):
    refusal = _refusal(Router(from_mapping({"router": router})).choose, {"cartridge_label": label}, None, None, None)
    assert refusal.status == 400
    assert "cartridge_label" in str(refusal)


# Cartridges in `model`.


@pytest.mark.parametrize(
    ("model", "ids"),
    [("m", ()), ("m:7b", ()), ("m:a", ("a",)), ("m:7b:a", ("a",)), ("m:a@2, b", ("a@2", "b")), ("bot", ("x", "y")),
     ("m:s3://b/k", ("s3://b/k",)), ("other:a", ()), ("mm:a", ()), (None, ()), (5, ()), ("m:bot", ("bot",))],
)  # fmt: skip
def test_a_model_name_may_name_cartridges(model, ids):
    assert read_model(model, ("m", "m:7b"), {"bot": ["x", "y"], "m": ["never"]}) == ids


@pytest.mark.parametrize("model", ["m:", "m:,", "m:a,", "m: ", "m:a b", "m:\n", "m:\ud800", "m:" + ",".join("a" * 17)])
def test_a_model_name_that_names_cartridges_wrong_is_refused(model):
    assert _refusal(read_model, model, ("m",), {}).status == 400


@pytest.mark.parametrize(
    ("fields", "model", "header"),
    [({"cartridges": ["b"]}, "m:a", ()), ({}, "m:a", ("b",)), ({}, "m:a", ("a@1",)), ({"cartridges": ["a", "b"]}, "m:a", ()),
     ({"cartridges": ["a"]}, "m:a", ("b",)), ({"cartridges": ["b"]}, "m:a", ("a",)), ({"cartridges": ["a"]}, "m", ("b",))],
)  # fmt: skip
def test_ways_of_naming_that_contradict_each_other_are_refused(fields, model, header):
    router = Router(from_mapping({}))
    router.models = ("m",)
    assert _refusal(router.choose, fields, None, model, None, header).status == 400
    same = router.choose({"cartridges": ["a"]}, None, "m:a", None, ("a",))
    assert [reference.id for reference in same] == ["a"]


@pytest.mark.parametrize("where", ["local", "registry", "s3"])
@pytest.mark.parametrize("fault", ["another model", "too long"])
def test_ids_that_the_engine_cannot_use_are_not_read(home, s3_credentials, bucket, tmp_path, where, fault):
    shape = msgspec.structs.replace(SHAPE, layers=4) if fault == "another model" else SHAPE
    root = tmp_path / "allowed/huge"
    make_artifact(root, positions=128, cartridge_id="huge", fingerprint=shape)
    changed = {"buckets": [bucket], "s3_endpoint_url": s3_credentials.endpoint}
    settings = from_mapping(home.settings.model_dump() | changed)
    if where == "registry":
        Registry(settings.registry_path).register(root)
    (root / "token_ids.npy").unlink()
    for file in root.iterdir() if where == "s3" else ():
        s3_credentials.client.put_object(Bucket=bucket, Key=f"huge/{file.name}", Body=file.read_bytes())
    resolver = Resolver(settings)
    names = {"local": str(root), "registry": "huge", "s3": f"s3://{bucket}/huge"}
    assert _refusal(resolver.resolve, [Reference(id=names[where])]).status in (404, 422), "the ids are looked for"
    resolver.model, resolver.context = SHAPE, 128
    refusal = _refusal(resolver.resolve, [Reference(id=names[where])])
    if fault == "too long":
        assert (refusal.status, str(refusal)) == (
            400,
            "huge@1 has 128 positions, which leave nothing of the context of 128",
        )
    else:
        assert refusal.status == 409
        assert "cannot be used with the model served here: made for another model" in str(refusal)


def test_a_document_that_is_longer_than_the_context_is_not_read(home, tmp_path):
    root = tmp_path / "allowed/long"
    _without_kv_or_with_document(root, "long", "trained", list(range(100)))
    for longest, read in ((101, True), (100, False)):
        resolver = Resolver(home.settings)
        resolver.model, resolver.context = SHAPE, longest
        found = resolver.resolve([Reference(id=str(root))]).document_ids
        assert found == (tuple(range(100)) if read else None)
        (root / "document_ids.npy").unlink(missing_ok=True)
