"""Contexts that one server makes and publishes: every server that follows the library answers by them, to whoever made them alone.

The library is on S3, and in a directory where a server is killed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import posting
import pytest
from posting import CHUNK, KEYS, ROUTE, Served, serving
from recall.ward import ask, encode
from test_marks import message, turns
from waiting import until
from wards import Ward

from lmcache_cartridge.artifact.reading import load_manifest, verify
from lmcache_cartridge.cli.main import main
from lmcache_cartridge.errors import UnsupportedEngine

wards = posting.wards


BUCKET, LIBRARY = "contexts", "s3://contexts/library"


def _serving(home: Path, library: object, wards: dict[str, Ward], mode: str = "in-process", **settings: Any) -> Any:
    home.mkdir(exist_ok=True)
    return serving(home, wards, mode, library=str(library), disk_dir=home / "cache", **settings)


@pytest.fixture(scope="module")
def bucket(moto_server):
    """What returns the ids of all artefacts in the library on S3, also of half stored ones."""

    def ids() -> set[str]:
        there = moto_server.client.list_objects_v2(Bucket=BUCKET, Prefix="library/cartridges/").get("Contents", ())
        return {each["Key"].split("/")[2] for each in there}

    with pytest.MonkeyPatch.context() as here:
        for name, value in moto_server.environment.items():
            here.setenv(name, value)
        moto_server.client.create_bucket(Bucket=BUCKET)
        yield ids


@pytest.fixture(scope="module")
def pair(tmp_path_factory, bucket, moto_server, wards):
    """Two servers that share nothing but the library: one in each mode."""
    home = tmp_path_factory.mktemp("pair")
    where = {"s3_endpoint_url": moto_server.endpoint, "s3_region": "us-east-1", "buckets": (BUCKET,)}
    with ExitStack() as stack:
        one, two = (
            stack.enter_context(_serving(home / mode, LIBRARY, wards, mode, **where))
            for mode in ("in-process", "multiprocess")
        )
        yield one, two


def _gone(bucket: Callable[[], set[str]], name: str, *servers: Served) -> None:
    for server in servers:
        until(lambda server=server: server.get(name).status_code == 404)
        assert server.naming(name) == 404
        assert name not in server.named()
    until(lambda: name not in bucket())


def test_what_one_server_made_every_server_answers_by(pair, bucket):
    one, two = pair
    ward = one.wards["first"]
    made = one.made(document=ward.document.text, labels=["sheet"])
    assert bucket() == {made["id"]} and not one.places(), "it is kept once"
    until(lambda: two.get(made["id"]).status_code == 200)
    for served, count in ((one, 4), (two, 8)):
        served.right(made["id"], ward, count)
        served.right("sheet", ward, 2)
        assert made["id"] in served.named()
    there, names = two.get(made["id"]).json(), ("id", "digest", "tokens", "bytes")
    assert [there[name] for name in names] == [made[name] for name in names]
    assert there["expires_at"] == pytest.approx(made["expires_at"], abs=0.01)
    until(lambda: two.get(made["id"]).json()["uses"] == 10)
    again = two.post(document=ward.document.text)
    assert again.status_code == 200 and again.json()["id"] == made["id"], "the same text is made once"
    until(lambda: one.get(made["id"]).json()["expires_at"] == pytest.approx(again.json()["expires_at"], abs=0.01))


def test_a_server_makes_cartridges_for_others_though_it_publishes_what_it_makes(pair, bucket, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", KEYS[0])
    document, before = tmp_path / "sheet.txt", bucket()
    document.write_text(pair[0].wards["second"].document.text)
    for served in pair:
        url, name = str(served.asker.http.base_url), f"of-{served.mode}"
        words = ["build", "--url", url, "--home", str(tmp_path), "--id", name, "--document", str(document)]
        assert main(words) == 0
        root = tmp_path / "cartridges" / name / "1"
        assert list(verify(root)) and load_manifest(root).positions == len(served.wards["second"].ids)
    until(lambda: bucket() == before)


def test_a_chat_that_one_server_keeps_goes_on_at_the_other(pair, bucket):
    """Whether it was posted or marked."""
    for one, two, ward in ((*pair, pair[0].wards["second"]), (*pair[::-1], pair[0].wards["third"])):
        body = {"messages": [{"role": "system", "content": ward.document.text}]}
        made, salt = one.made(**body), {"cache_salt": f"marked at {one.mode}"}
        until(lambda two=two, made=made: two.get(made["id"]).status_code == 200)
        two.chats_right(made["id"], ward)
        one.chats_right(made["id"], ward, 2)
        assert two.post(**body).json()["id"] == made["id"]
        assert two.delete(made["id"]) == 200
        _gone(bucket, made["id"], two, one)
        whole, others = len(ward.ids) // CHUNK * CHUNK, two.named()
        assert message(one.asker, turns(ward.document.text, ward.facts[0]), **salt).created == whole
        until(lambda two=two, salt=salt, others=others: two.named(**salt) - others)
        for fact in ward.facts[1:4]:
            found = message(two.asker, turns(ward.document.text, fact), **salt)
            assert (found.text.strip(), found.created) == (fact.value, 0) and found.used and found.read >= whole, found
        for name in two.named(**salt) - others:
            assert two.delete(name, **salt) == 200


def test_for_others_there_is_none_of_the_name_on_any_server(pair):
    one, two = pair
    ward = one.wards["second"]
    made = one.made(document=ward.document.text, cache_salt="mine", labels=["of-mine"])
    until(lambda: two.get(made["id"], cache_salt="mine").status_code == 200)
    for served in pair:
        served.right(made["id"], ward, 4, cache_salt="mine")
        for asker in (served.asker, served.other):
            place = f"{LIBRARY}/cartridges/{made['id']}/1/{made['digest'][:16]}"
            assert served.naming(place, asker) == 404
            for name in (made["id"], "of-mine", f"{made['id']}@1"):
                assert served.naming(name, asker) == 404
                assert served.get(name, asker).status_code == 404
            assert served.patch(made["id"], asker, ttl=1).status_code == 404
            assert served.delete(made["id"], asker) == 404
            assert asker.http.get(f"{ROUTE}/{made['id']}/files/manifest.json").status_code == 404
            assert made["id"] not in served.named(asker)
        fact = ward.facts[0]
        for _ in range(2):
            found = served.other.complete([*ward.ids, *encode(ask(fact, 0))], cache_salt=os.urandom(8).hex())
            assert (found.text.strip(), found.cached_tokens, found.used) == (fact.value, 0, None)
    forged = one.post(token_ids=ward.ids[:CHUNK], labels=["ctx.x"])
    assert forged.status_code == 400 and "may begin with ctx." in forged.text
    assert two.delete(made["id"], cache_salt="mine") == 200


def test_a_text_is_posted_at_any_server_just_after_another_has_kept_or_removed_it(pair):
    one, two = pair
    made, body = one.made(token_ids=one.wards["fourth"].ids[:CHUNK]), {"token_ids": one.wards["fourth"].ids[:CHUNK]}
    until(lambda: two.get(made["id"]).status_code == 200)
    for ttl in range(1000, 1003):
        for served in pair:
            assert served.patch(made["id"], ttl=ttl).status_code == 200
            again = served.post(**body)
            assert (again.status_code, again.json().get("id")) == (200, made["id"]), again.text
    assert one.delete(made["id"]) == 200
    again = two.made(**body)
    assert again["id"] != made["id"] and two.delete(again["id"]) == 200


def test_what_is_deleted_or_has_expired_is_gone_from_every_server_and_from_the_library(pair, bucket):
    one, two = pair
    text = one.wards["third"].document.text
    made = one.made(document=text, id="ctx-third", labels=["third"])
    until(lambda: two.get("third").status_code == 200)
    two.right("third", one.wards["third"], 4)
    assert two.patch("ctx-third", labels=[], ttl=600).status_code == 200
    until(lambda: one.get("ctx-third").json()["expires_at"] < made["expires_at"] - 1000)
    until(lambda: one.get("third").status_code == 404)
    assert two.delete("ctx-third") == 200
    _gone(bucket, "ctx-third", two, one)
    again = two.made(document=text)
    until(lambda: one.get(again["id"]).status_code == 200)
    one.right(again["id"], one.wards["third"], 4)
    assert two.patch(again["id"], ttl=0.5).status_code == 200
    _gone(bucket, again["id"], one, two)
    reply = two.post(token_ids=[7] * CHUNK, id="third")
    assert reply.status_code == 400 and "begins with ctx-" in reply.text
    # Both have the id made at once: the first keeps it.
    kept = one.made(document=text, id="ctx-both")
    reply = two.post(token_ids=[7] * CHUNK, id="ctx-both")
    until(lambda: two.get("ctx-both").json().get("digest") == kept["digest"])
    assert reply.status_code in (202, 409), reply.text
    one.right("ctx-both", one.wards["third"], 4)
    assert two.post(token_ids=[7] * CHUNK, id="ctx-both").status_code == 409
    until(lambda: not one.places() and not two.places())


def test_a_server_that_is_killed_while_it_publishes_leaves_nothing_half_made(tmp_path, wards):
    library = tmp_path / "library"

    def places() -> set[str]:
        return {path.parts[-3] for path in library.glob("cartridges/*/*/*")}

    with _serving(tmp_path / "other", library, wards, roots=(str(library),)) as other:
        with _serving(tmp_path / "killed", library, wards) as served, ThreadPoolExecutor(1) as pool:
            kept = served.made(document=wards["first"].document.text)
            text = wards["second"].document.text
            pool.submit(served.post, document=text, id="ctx-half")
            until(lambda: "ctx-half" in places())
            served.kill()
        killed_s = time.time()
        until(lambda: (other.get().json()["library"]["seen"] or 0) > killed_s and kept["id"] in other.named())
        other.right(kept["id"], wards["first"])
        is_made = other.get("ctx-half").status_code == 200  # it may have been killed after that was listed
        if is_made:
            other.right("ctx-half", wards["second"])
        with _serving(tmp_path / "killed", library, wards) as served:
            served.right(kept["id"], wards["first"])
            until(lambda: places() == served.named())
            assert served.named() == {kept["id"], *["ctx-half"] * is_made}
            if not is_made:
                served.made(document=text, id="ctx-half")
            served.right("ctx-half", wards["second"])
            (place,) = map(str, library.glob(f"cartridges/{kept['id']}/1/*"))
            assert other.naming(place) == 404
            assert served.delete(kept["id"]) == 200
            until(lambda: other.get(kept["id"]).status_code == 404)
            assert places() == {"ctx-half"} and not list(library.glob(f"cartridges/{kept['id']}*"))


def test_a_server_that_may_not_publish_does_not_start(tmp_path, wards):
    with pytest.raises(UnsupportedEngine, match="/proc/library"), _serving(tmp_path, Path("/proc/library"), wards):
        pass
