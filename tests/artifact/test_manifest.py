"""A manifest is read whole and consistent, or refused with `ManifestError`."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from making import make_artifact, make_fingerprint, make_rope

from lmcache_cartridge.artifact.manifest import (  # fmt: skip
    MAX_MANIFEST_BYTES,
    Manifest,
    check_id,
    content_digest,
    decode,
)
from lmcache_cartridge.errors import ManifestError


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    shape = make_fingerprint(rope=msgspec.structs.replace(make_rope(), pairing="half"))
    root = tmp_path_factory.mktemp("artefact") / "doc"
    return make_artifact(root, positions=40, chunk_tokens=16, fingerprint=shape).manifest


def _edited(manifest: Manifest, **changes: Any) -> bytes:
    """Return the manifest's JSON with fields replaced; `__` goes one level down, a number is an index."""
    document = json.loads(manifest.encode())
    for path, value in changes.items():
        *parents, last = [int(name) if name.isdecimal() else name for name in path.split("__")]
        target = document
        for name in parents:
            target = target[name]
        target[last] = value
    return json.dumps(document).encode()


def test_what_an_older_release_wrote_of_its_training_and_compaction_is_read(manifest):
    about = {
        "training": {
            "objective": "distill", "init": "sci", "seed": 0, "questions": 90, "steps": 400, "best_step": 375, "loss": 0.5,
            "seconds": 12.0, "held_out": 10, "kept": 0.9,
        },
        "compaction": {"queries": "repeat", "query_tokens": 9, "examples": 1, "seconds": 1.0, "method": "attention matching"},
    }  # fmt: skip
    found = decode(_edited(manifest, provenance={"tool": "t", "created": "2026", **about}), "here").provenance
    assert found.training.measured is found.compaction.measured is None


def _rotating(manifest: Manifest, *layers: tuple[int, ...] | None) -> Manifest:
    """Return the manifest of a model of kinds of layers that have a rotation each."""
    (one,) = manifest.fingerprint.rope
    rope = tuple(msgspec.structs.replace(one, layers=each) for each in layers)
    made = msgspec.structs.replace(manifest, fingerprint=msgspec.structs.replace(manifest.fingerprint, rope=rope))
    return msgspec.structs.replace(made, digest=content_digest(made))


@pytest.mark.parametrize("layers", [((0, 2), (1,)), (None,), ()])
def test_rotations_are_each_of_other_layers_or_one_of_layers_that_nobody_knows(manifest, layers):
    made = _rotating(manifest, *layers)
    assert decode(made.encode(), "here") == made
    assert made.digest != manifest.digest


@pytest.mark.parametrize(
    "layers",
    [((0, 1), (1, 2)), ((0,), None), ((0, 3),), ((1, 0),)],
)
def test_layers_that_rotate_are_some_of_the_models_in_order(manifest, layers):
    with pytest.raises(ManifestError, match="layers"):
        decode(_rotating(manifest, *layers).encode(), "here")


@pytest.mark.parametrize(
    "where", ["", "fingerprint__", "fingerprint__rope__0__", "tokens__", "payload__", "provenance__"]
)
def test_an_unknown_field_is_refused_at_every_level(manifest, where):
    with pytest.raises(ManifestError, match="surprise"):
        decode(_edited(manifest, **{f"{where}surprise": 1}), "here")


AT_ONCE = """
import pathlib, sys, threading
from lmcache_cartridge.artifact.manifest import decode
data, begin = pathlib.Path(sys.argv[1]).read_bytes(), threading.Barrier(8)
sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=lambda: (begin.wait(), decode(data, "here"))) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


def test_the_first_manifests_of_a_process_may_be_read_by_many_threads_at_once(manifest, tmp_path):
    """Red within a few processes where msgspec learns what a manifest has while one is decoded: it crashes."""
    (tmp_path / "manifest.json").write_bytes(manifest.encode())
    for _ in range(12):
        subprocess.run([sys.executable, "-c", AT_ONCE, tmp_path / "manifest.json"], check=True, timeout=60)


@pytest.mark.parametrize("version", ["2.0", "30.0", "x"])
def test_an_unknown_major_format_is_refused_whatever_else_it_has_with_the_one_this_release_reads(version):
    with pytest.raises(ManifestError, match=r"/mnt/x: .*this release reads 3\.0: an older one is made anew"):
        decode(json.dumps({"format": version, "everything": "else"}).encode(), "/mnt/x")


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "trained"},
        {"positions": 41, "tokens__count": 41, "tokens__inline": [7] * 41, "payload__size_bytes": 4096 + 41 * 1536},
        {"fingerprint__architecture": "Other"},
        {"fingerprint__weights_digest": None},
        {"fingerprint__rope__0__attention_factor": 1.0000001},
        {"payload__chunk_tokens": 17},
        {"payload__checksums__2__1": "00" * 16},
        {"tokens__blake3": "00" * 32},
        {"digest": "00" * 32},
    ],
    ids=lambda changes: "+".join(changes),
)
def test_editing_a_field_that_decides_an_answer_breaks_the_digest(manifest, changes):
    with pytest.raises(ManifestError, match="digest is not the digest"):
        decode(_edited(manifest, **changes), "here")


@pytest.mark.parametrize(
    "changes", [{"id": "_A.b-c_9" * 16}, {"version": 7}, {"provenance__tool": "other"}, {"format": "3.9"}]
)
def test_id_version_provenance_and_minor_format_are_not_part_of_the_digest(manifest, changes):
    renamed = decode(_edited(manifest, **changes), "here")
    assert renamed != manifest
    assert renamed.digest == manifest.digest


def test_the_token_ids_of_a_trained_cartridge_are_part_of_its_digest(manifest):
    """What was drawn from other ordinary ids is another cartridge: engines know one list of ids for each digest."""
    trained = msgspec.structs.replace(manifest, kind="trained")
    others = msgspec.structs.replace(trained, tokens=msgspec.structs.replace(trained.tokens, blake3="00" * 32))
    assert len({content_digest(each) for each in (trained, others, manifest)}) == 3


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"fingerprint__dtype": "float8"}, "fingerprint.dtype"),
        ({"payload__checksums__1": ["00" * 16]}, "checksums do not cover 3 chunks of 2 heads"),
        ({"payload__checksums__1__0": "00"}, "length"),
        ({"payload__size_bytes": 4096}, "its geometry needs"),
        ({"payload__encoding": "int8"}, "its geometry needs"),
        ({"payload__encoding": "fp4"}, r"that this release knows: .* at `\$\.payload\.encoding`"),
        ({"tokens__inline": [1, 2]}, "must be inline, all of them, or in their file"),
        ({"tokens__inline": None, "tokens__file": "document_ids.npy"}, "must be inline, all of them, or in their file"),
        ({"tokens__inline__0": 1000}, "outside the model's vocabulary"),
        ({"tokens__inline__0": -1}, "tokens.inline"),
        ({"tokens__count": 41}, "41 token ids for p = 40"),
        ({"tokens__count": (1 << 31) - 1}, "<= 16777215"),
        ({"kind": "tokens"}, "a payload does not go with kind tokens"),
        ({"tokens__inline": None, "tokens__file": "../token_ids.npy"}, "not a cartridge manifest"),
        ({"payload__file": "/etc/passwd"}, "not a cartridge manifest"),
        ({"kind": "other"}, "not a cartridge manifest"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(manifest, changes, problem):
    with pytest.raises(ManifestError, match=problem):
        decode(_edited(manifest, **changes), "here")


@pytest.mark.parametrize(
    "data",
    [
        b"", b"null", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"format":[]}', b" " * (MAX_MANIFEST_BYTES + 1),
    ],
    ids=lambda data: repr(data[:12]),
)  # fmt: skip
def test_what_is_no_manifest_at_all_is_refused(data):
    with pytest.raises(ManifestError):
        decode(data, "here")


@pytest.mark.parametrize(
    "cartridge_id",
    ["", "..", "../x", ".hidden", "-rf", "a/b", "a b", "a\n", "a\x00", "a@1", "a" * 129],
)
def test_an_id_that_could_escape_is_refused(manifest, cartridge_id):
    with pytest.raises(ManifestError, match="cannot be a cartridge id"):
        check_id(cartridge_id)
    with pytest.raises(ManifestError, match=r"at `\$\.id`"):
        decode(_edited(manifest, id=cartridge_id), "here")
