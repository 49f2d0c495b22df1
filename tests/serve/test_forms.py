"""Cartridges, router and settings in `kv_connector_extra_config` are those settings, exactly, or the server does not start."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from making import make_artifact, make_fingerprint

from lmcache_cartridge.engine.forms import EXTRA, SKIP_SAVING, configure, from_forms, saves_nowhere
from lmcache_cartridge.engine.lmcache_file import VARIABLE
from lmcache_cartridge.errors import SettingsError
from lmcache_cartridge.serve.launch import Launch, plan
from lmcache_cartridge.serve.request import Refusal, Router
from lmcache_cartridge.serve.resolve import Resolver
from lmcache_cartridge.settings import from_environment, from_mapping

REMOTE = "s3://bucket/team/b"
SHAPE = make_fingerprint(pairing="half")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two artefacts and a file, in no registry."""
    root = tmp_path_factory.mktemp("artefacts")
    for seed, name in enumerate("ab"):
        make_artifact(root / name, positions=32, cartridge_id=f"made-{name}", seed=seed, fingerprint=SHAPE)
    (root / "x.pt").write_bytes(b"?")
    (root / "empty").mkdir()
    return root


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A process that nobody has configured."""
    for name in [name for name in os.environ if name.startswith("LMCACHE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("LMCACHE_CARTRIDGE_HOME", str(tmp_path / "home"))
    for name in (VARIABLE, SKIP_SAVING):
        monkeypatch.setenv(name, "x")  # so that what is set below is taken back
        monkeypatch.delenv(name)
    return tmp_path / "home"


def names(place: Path, extra: dict[str, Any], fields: dict[str, Any]) -> list[str] | int:
    """Return what a request with these fields gets: the artefacts' own names, or the status of its refusal."""
    settings = from_mapping({"home": place / "nobody"} | from_forms(extra))
    try:
        chain = Router(settings).choose(fields, None, "m")
        return [manifest.name for manifest in Resolver(settings).resolve(chain).manifests] if chain else []
    except Refusal as refusal:
        return refusal.status


A, B = ["made-a@1"], ["made-b@1"]
EXPLICIT: list[tuple[dict[str, Any], Any]] = [({"cartridges": ["first"]}, A), ({"cartridge_id": "first"}, [])]
ROUTERS: list[tuple[Any, list[tuple[dict[str, Any], Any]]]] = [
    ({"type": "label", "field": "cartridge_id"}, [({"cartridge_id": "second"}, B), ({"cartridges": ["second", "first"]}, B + A), ({}, [])]),
    ({"type": "explicit"}, EXPLICIT),
    (None, EXPLICIT),
    ({"type": "static", "cartridge_id": "second"}, [({}, B)]),
    ({"type": "composite", "field": "which", "composites": {"both": ["second", "first"]}},
     [({"which": "both"}, B + A), ({"which": "first"}, A)]),
]  # fmt: skip


@pytest.mark.parametrize(("router", "asked"), ROUTERS)
def test_names_are_had_by_the_field_and_as_the_router_says(place, router, asked):
    named = {"first": str(place / "a"), "second": str(place / "b")}
    for pairs in (named, [{"cartridge_id": name, "path": path} for name, path in named.items()]):
        extra = {"cartridges": pairs} | ({"router": router} if router else {})
        assert [names(place, extra, fields) for fields, _ in asked] == [expected for _, expected in asked]


def test_one_path_or_name_is_everybodys_cartridge(place):
    extra = {"cartridge_path": str(place / "a")}
    assert names(place, extra, {}) == A
    assert names(place, {"cartridges": {"first": str(place / "a")}, "router": {"type": "static"}}, {}) == A
    assert names(place, extra, {"cartridges": [str(place / "b")]}) == 404


def test_remote_paths_are_the_only_ones_of_their_bucket(place):
    values = from_forms({"cartridges": {"here": str(place / "a"), "there": REMOTE}, "cartridge.buckets": ["other"]})
    assert (values["roots"], values["buckets"]) == ([str(place / "a")], ["other", "bucket/team/b"])


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"cartridge_path": "/{a}", "cartridges": {"a": "/{a}"}}, "leave cartridges and router out"),
    ({"cartridge_path": "/{a}", "router": {"type": "label"}}, "leave cartridges and router out"),
    *(({"cartridge_path": path}, why) for path, why in (
        ("relative", "/relative: No such file"), (5, "cartridge_path: .* valid string"), ("/{empty}", "neither a cartridge"),
    )),
    *(({"cartridges": named}, why) for named, why in (
        ({}, "cartridges: "), ({"a": "/nowhere"}, "/nowhere: No such file"), ([{"name": "a"}], "cartridge_id"),
        ([{"cartridge_id": "a", "path": "/{a}"}, {"cartridge_id": "a", "path": "/{b}"}], "named twice"),
    )),
    *(({"cartridges": {"a": "/{a}", "b": "/{b}"}, "router": router}, why) for router, why in (
        ({"type": "magic"}, "router.type: .*'explicit', 'label'"), ({"type": "explicit", "field": "x"}, "router.field goes with no router"),
        ({"type": "static"}, "which one"), ({"type": "composite", "composites": {"a": ["b"]}}, "already"),
    )),
    ({"cartridges": {"a": "/{a}"}, "cartridge.composites": {"b": ["c"]}}, "give one of them"),
    ({"cartridges": {"a": "/{a}"}, "cartridge.roots": "/srv"}, "must be a list"),
]  # fmt: skip


def _at(value: Any, place: Path) -> Any:
    text = json.dumps(value)
    for name in ("a", "b", "empty", "x.pt"):
        text = text.replace(f"/{{{name}}}", str(place / name))
    return json.loads(text)


@pytest.mark.parametrize(("extra", "problem"), WRONG, ids=lambda value: json.dumps(value)[:40])
def test_what_is_wrong_is_refused_by_name(place, extra, problem):
    with pytest.raises(SettingsError, match=problem) as caught:
        from_forms(_at(extra, place))
    assert str(caught.value).startswith(EXTRA)


def test_every_process_writes_the_same_yaml_and_reads_its_settings_there(place, home):
    extra = {"cartridge_path": str(place / "a"), "cartridge.cpu_bytes": "2GiB", "cartridge.request_api": "on"}
    settings = configure({EXTRA: extra})
    assert settings == from_environment()
    assert (settings.cpu_bytes, settings.router) == (2 << 30, "static")
    [written] = (home / "run").iterdir()
    assert (os.environ[VARIABLE], os.environ[SKIP_SAVING]) == (str(written), "1")
    assert configure(json.dumps({EXTRA: extra})) == settings, "in a child that inherits the variable"
    assert [*(home / "run").iterdir()] == [written]


def test_a_transfer_configuration_without_forms_changes_nothing(home):
    for transfer in (None, "no json", {}, {EXTRA: None}, {EXTRA: {"lmcache.x": 1, "cartridge.control": "/s"}}):
        assert configure(transfer) is None
    assert (VARIABLE in os.environ, home.exists()) == (False, False)


def test_forms_beside_a_yaml_or_in_a_home_that_cannot_be_written_are_refused(place, home, monkeypatch):
    forms = {EXTRA: {"cartridge_path": str(place / "a")}}
    with monkeypatch.context() as patched:
        patched.setenv(VARIABLE, "/etc/lmcache.yaml")
        with pytest.raises(SettingsError, match="names a YAML too"):
            configure(forms)
    assert not home.exists()
    home.write_text("a file")
    with pytest.raises(SettingsError, match=r"\$LMCACHE_CARTRIDGE_HOME"):
        configure(forms)


@pytest.mark.parametrize(
    ("more", "environment", "idle"),
    [({}, {"LMCACHE_CARTRIDGE_HOME": "/x"}, True), ({"lmcache.local_cpu": True}, {}, False), ({}, {"LMCACHE_REMOTE_URL": "x"}, False)],
)  # fmt: skip
def test_kv_both_saves_only_where_something_names_a_place(more, environment, idle):
    assert saves_nowhere({"lmcache.chunk_size": 128} | more, environment) is idle


# `serve` takes the same.


def planned(home: Path, extra: dict[str, Any], *, mode: str = "in-process", **settings: Any) -> Launch:
    """Plan as `serve` does, where saving is asked for and nothing names a place for it."""
    given = ["--kv-transfer-config", json.dumps({"kv_role": "kv_both", EXTRA: extra})]
    return plan("m", from_mapping({"home": home} | settings), mode=mode, vllm_args=[*given, "-pp", "2"])


@pytest.mark.parametrize("mode", ["in-process", "multiprocess"])
def test_serve_puts_the_forms_into_what_it_writes(place, home, mode):
    extra = {"cartridges": {"x": str(place / "a")}, "router": {"type": "label", "field": "cartridge_id"}, "other": 1}
    made = planned(home, extra, mode=mode, roots=["/srv"])
    written = yaml.safe_load(made.yaml)["extra_config"]
    assert written["storage_plugin.cartridge.roots"] == ["/srv", str(place / "a")]
    left = made.engine["kv_transfer_config"]
    assert (left["kv_role"], left[EXTRA]["other"]) == ("kv_both", 1)
    assert not {"cartridges", "router"} & left[EXTRA].keys(), "no connector finds them a second time"
    assert (made.environment.get(SKIP_SAVING) == "1") is (mode == "in-process"), "nothing names a place to save in"


def test_serve_refuses_what_is_given_twice(place, home):
    with pytest.raises(SettingsError, match="router is given as a setting"):
        planned(home, {"cartridge_path": str(place / "a")}, router="label")
