"""One key for one selection of cartridges, however it is named; and the callback by which a router hashes it."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from starlette.datastructures import Headers

from lmcache_cartridge.fleet import affinity
from lmcache_cartridge.fleet.affinity import Naming, affinity_key, model_ids, session_headers
from lmcache_cartridge.serve import misnamed
from lmcache_cartridge.serve.request import MAX_CHAIN, Refusal, Router, read_header
from lmcache_cartridge.settings import Settings

CONFIGS = Path(__file__).parents[2] / "configs"
MODELS = ("m", "org/model", "qwen", "qwen:7b", "/models/llama")
SETTINGS = {
    "composites": {"both": ["a", "b@3"], "one": ["a"]},
    "static": {"model:m": "by-model", "*": "for-all@2"},
    "label_field": "bot",
}
IDS = st.from_regex(r"\A[A-Za-z0-9_][A-Za-z0-9._-]{0,11}\Z") | st.sampled_from(["a", "b", "both", "s3://b/k", "/r/c"])
VERSIONS = st.sampled_from(["", "@1", "@2", "@17"])


def test_an_alias_several_headers_a_label_a_connectors_field_and_a_session_have_the_key_of_what_they_name():
    assert affinity_key({"model": "bot"}, naming=Naming(models=MODELS, model_aliases={"bot": ["a@2", "b"]})) == "a,b"
    assert affinity_key({"bot": "both"}, naming=Naming(router="label", label_field="bot")) == "both"
    assert affinity_key({"kv_transfer_params": {"cartridge_id": ["a@1", {"id": "b"}]}}) == "a,b"
    assert affinity_key({}, ["a@1", "b"]) == affinity_key(None, "a ,\t, b@7,") == "a,b"
    assert session_headers("a@2", "b") == {"x-session-id": "a,b", "X-Cartridges": "a@2, b"}


_ODD: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(["a", "both", "a@1", "nope", "sk-1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["id", "source", "x"]), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip
_REFERENCES = st.lists(IDS | st.builds(lambda one, v: {"id": one + v}, IDS, VERSIONS), max_size=MAX_CHAIN + 1)
_BODIES = st.fixed_dictionaries(
    {},
    optional={
        "model": st.sampled_from(MODELS)
        | st.builds("{}:{}{}{}".format, st.sampled_from(MODELS), IDS, VERSIONS, st.sampled_from(["", ",b@2"])),
        "cartridges": _REFERENCES | _ODD,
        "kv_transfer_params": st.dictionaries(st.sampled_from(["cartridge_id", "x"]), IDS | _REFERENCES | _ODD) | _ODD,
        "bot": st.sampled_from(["both", "one", "nope"]) | _ODD,
    },
)
_HEADERS = st.lists(st.text(st.sampled_from("ab@1, \tz:/"), max_size=12) | IDS, max_size=2)


@given(_BODIES, _HEADERS, st.sampled_from(["explicit", "label", "composite", "static"]))
@examples(max_examples=150, deadline=None, derandomize=True, database=None)
def test_the_key_is_of_the_cartridges_that_a_server_would_take(body, header, router):
    settings = Settings(home=Path("/nowhere"), router=router, **SETTINGS)
    named = {name: getattr(settings, name) for name in ("router", "label_field", "static", "composites")}
    key = affinity_key(body, header, naming=Naming(**named, models=MODELS))
    server = Router(settings)
    server.models = MODELS
    try:
        taken = server.choose(body, body.get("kv_transfer_params"), body.get("model"), read_header(header))
    except Refusal:
        return  # no server answers it; a key was had without an error
    assert key == ",".join(re.sub("@[0-9]+$", "", reference.id) for reference in taken)


@pytest.mark.parametrize(
    "model, ids",
    [("m", []), ("m:a@2, b", ["a@2", "b"]), ("qwen:7b:a", ["a"]), ("s3://bucket/model", []),
     ("org/m:a,s3://b/k", ["a", "s3://b/k"]), ("m:", []), (":a", []), (5, [])],
)  # fmt: skip
def test_a_model_name_is_taken_apart_without_knowing_the_models(model, ids):
    assert model_ids(model) == ids


def test_the_file_stands_alone(tmp_path):
    """As in a router's pod: no package of ours, nor of anybody's."""
    (tmp_path / "affinity.py").write_text(Path(affinity.__file__).read_text())
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import affinity; "
        "print(affinity.affinity_key({'cartridges': ['a@1', {'id': 'b'}]})); "
        "assert not [m for m in sys.modules.values() if 'site-packages' in (getattr(m, '__file__', None) or '')]"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("a,b\n", "")


# The production stack's router.


def _session(module: dict[str, Any], body: Any, **headers: str) -> Any:
    """Return the dict as that router reads it after `pre_request` (routing by header or field `--session-key`)."""
    request = SimpleNamespace(headers=Headers(headers))
    assert module["callbacks"].pre_request(request, json.dumps(body).encode(), body) is None
    return body


def test_the_production_stack_gets_one_session_key_for_all_ways_of_naming_and_none_without(monkeypatch):
    naming = {"models": ["m", "qwen:7b"], "composites": {"both": ["a", "b"]}}
    monkeypatch.setenv("CARTRIDGE_NAMING", json.dumps(naming))
    module = runpy.run_path(str(CONFIGS / "production-stack" / "cartridge_affinity.py"))
    assert _session(module, {"model": "m", "cartridges": ["both"]})["affinity_key"] == "a,b"
    assert _session(module, {"model": "m"}, **{"X-Cartridges": "a@7, b"})["affinity_key"] == "a,b"
    engines_list_the_base = {"model": "qwen:7b", "cartridges": ["a@2", "b"], "affinity_key": "a,b"}
    assert _session(module, {"model": "qwen:7b:a@2,b"}) == engines_list_the_base
    assert misnamed.find({module["KEY"]: "a"}, ("cartridges",)) is None, "servers would refuse it as a misspelt field"
    for body in ({"model": "qwen:7b"}, [1]):
        assert _session(module, body.copy()) == body
