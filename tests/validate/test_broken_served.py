"""`validate --url` on a real server that is broken: it fails, and says what is wrong; on the same server unbroken it passes."""

from __future__ import annotations

import io
import json
import random
import re
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch
from families import FAMILIES, make_model
from making import make_artifact
from serving import SERVER_ARGS

from lmcache_cartridge.cli.main import main
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.serve.launch import plan
from lmcache_cartridge.serve.processes import SMALL, ServerProcess
from lmcache_cartridge.settings import from_mapping

CHUNK, POSITIONS = 64, 192
OPTIONS = ["--dtype", "float32", "--max-model-len", "1024", "--block-size", "32"]


class Served(NamedTuple):
    url: str
    home: Path
    faults: Path

    def validate(self, cartridges: str, tiers: str = "0,3cross") -> tuple[list[dict[str, Any]], str]:
        """Return the rows of `validate` on cartridges that the server has, and what was said of an error."""
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as said:
            status = main(["validate", "--url", self.url, "--home", str(self.home), "--tier", tiers,
                           "--cartridges", cartridges, "--format", "json"])  # fmt: skip
        rows = json.loads(out.getvalue())["rows"] if out.getvalue() else []
        assert status == (0 if rows and all(row["result"] == "pass" for row in rows) else 1)
        return rows, said.getvalue()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server whose own canaries are off, with documents `a`, `b` and `c`; `foreign` has the KV of another model."""
    home = tmp_path_factory.mktemp("home")
    path = make_model(home / "model", FAMILIES["llama"]())
    own, other = CausalModel(str(path)), CausalModel(str(make_model(home / "other", FAMILIES["llama"](), seed=1)))
    settings = from_mapping({"home": home, "cpu_bytes": 64 << 20, "canary": False, "admin": True})
    for name in ("a", "b", "c", "foreign"):
        ids = random.Random(name).choices(range(10, 640), k=POSITIONS)
        kv = torch.cat(list((other if name == "foreign" else own).prefill(ids, POSITIONS)), dim=2)
        root = settings.cartridges_dir / name
        make_artifact(root, positions=POSITIONS, cartridge_id=name, fingerprint=own.fingerprint, token_ids=ids, kv=kv,
                      chunk_tokens=CHUNK)  # fmt: skip
        Registry(settings.registry_path).register(root)
    launch = plan(str(path), settings, chunk_tokens=CHUNK, vllm_args=[*SERVER_ARGS, *OPTIONS])
    launch = launch._replace(yaml=launch.yaml.replace("lmcache_cartridge.engine.backend", "faulty_engine"))
    faults = home / "faults.json"
    environment = SMALL | {"LMCACHE_FAULTY_FILE": str(faults)}
    with ServerProcess(launch, home / "log", environment=environment) as server:
        yield Served(server.url, home, faults)


@pytest.fixture
def broken(served, request):
    """Break the server for one test. What it has in memory is loaded again, before and after."""

    def switch(faults: dict[str, str]) -> None:
        served.faults.write_text(json.dumps(faults))
        for name in "abc":
            httpx.post(f"{served.url}/v1/cartridges/{name}/evict").raise_for_status()

    switch(request.param)
    yield
    switch({})


def test_the_sound_server_passes(served):
    rows, _ = served.validate("a,b,c", "0,2,3cross,4,5")
    assert [row["tier"] for row in rows if row["result"] == "pass"] == ["noise", "0", "2", "3cross", "4", "5"], rows


@pytest.mark.parametrize(
    "broken",
    [
        {"kv": "keys one position late"},
        {"kv": "a layer of zeros"},
        {"kv": "values of another head"},
        {"loads": "nothing"},
    ],
    indirect=True,
)
def test_a_server_that_has_other_kv_than_it_was_given_fails(served, broken):
    _, ten, cross = served.validate("a,b,c")[0]
    for row in (ten, cross):
        assert row["result"] == "FAIL"
        found = re.search(r"the answer with [abc]@1 is not that of its dense prompt: logprobs differ by (\S+) on average, "
                          r"of which (\S+) may be noise", row["found"])  # fmt: skip
        assert float(found[1]) > 3 * float(found[2]), row["found"]


def test_a_cartridge_of_another_model_fails(served):
    _, ten, _ = served.validate("foreign,a,b")[0]
    assert ten["result"] == "FAIL"
    assert "the answer with foreign@1 is not that of its dense prompt: logprobs differ by" in ten["found"]


@pytest.mark.parametrize("broken", [{"salts": "ignored"}], indirect=True)
def test_a_prefix_cache_that_all_tenants_share_fails(served, broken):
    rows, said = served.validate("a,b,c")
    assert rows == []
    assert re.search(r"took \d+ tokens of a dense prompt from a cache, so nothing can be compared", said), said
