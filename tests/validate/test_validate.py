"""`validate` passes where a server is right; each check fails where it is not, with a line that says what.

The server here is a stub, with no engine: an answer is a hash of the tokens before it. Real ones are asked in
`test_canary_served.py`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import tempfile
import xml.etree.ElementTree
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import routers
from making import make_artifact
from routers import Reply, Request

from lmcache_cartridge.artifact.manifest import Manifest
from lmcache_cartridge.cli.main import main
from lmcache_cartridge.cli.recall import MODEL_DIR
from lmcache_cartridge.errors import CartridgeNotFound, UnsupportedEngine
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make.server import Reply as Answered
from lmcache_cartridge.make.server import Server
from lmcache_cartridge.make.trial.maker import Held, Maker, parts
from lmcache_cartridge.make.trial.own import OwnServer, reason
from lmcache_cartridge.settings import from_mapping
from lmcache_cartridge.validate import suite, test_answers, test_changes, test_known, test_others
from lmcache_cartridge.validate.compare import Noise, compare_logprobs
from lmcache_cartridge.validate.context import Context, existing
from lmcache_cartridge.validate.suite import FAIL, NOT_CHECKED, PASS, Row

VOCABULARY, LONGEST = 60, 2000
Answer = dict[str, Any]


class Stub(routers.Stub):
    """It does what a server with cartridges does, or what `fault` says."""

    def __init__(self, home: Path) -> None:
        super().__init__("validate", lambda request: self.post(request, json.loads(request.body)))
        self.home, self.registry = home, Registry(from_mapping({"home": home}).registry_path)
        self.ids: dict[str, list[int]] = {}
        """By `id@version`."""
        self.meant: dict[str, str] = {}
        """What each name meant when it was first asked for."""
        self.fault, self.count = "", itertools.count(1)
        for name in "abc":
            self.registry.register(self.make(name, [ord(name) + n % 7 for n in range(40 + ord(name) % 5)])[1])

    def make(self, name: str, ids: list[int], version: int = 1, **how: Any) -> tuple[Manifest, Path]:
        """Write a cartridge, not registered."""
        root = self.home / f"{name}-{version}"
        shutil.rmtree(root, ignore_errors=True)
        made = make_artifact(
            root, positions=len(ids), cartridge_id=name, version=version, token_ids=ids, **how
        ).manifest
        self.ids[made.name] = ids
        return made, root

    def get(self, path: str) -> Reply:
        if path == "/v1/models":
            return Reply(body={"data": [{"id": "m", "max_model_len": LONGEST}]})
        if path == "/v1/cartridges":
            row = {"current": True, "kind": "prefill", "state": "cold"}
            return Reply(body={"data": [row | each._asdict() for each in self.registry.all()]})
        if path.startswith("/v1/cartridges/"):
            return Reply(body={"state": "resident" if self.fault == "notes nothing" else "quarantined"})
        return Reply(500 if self.fault == "unwell" else 200)

    def means(self, name: str) -> str | None:
        if self.fault == "follows nothing" and name in self.meant:
            return self.meant[name]
        with suppress(CartridgeNotFound):
            self.meant[name] = self.registry.find(name).name
            return self.meant[name]
        return self.meant.get(name) if self.fault == "keeps what was removed" else None

    def post(self, request: Request, body: Answer) -> Reply:
        path, header, fault = request.path, request.headers.get("x-cartridges"), self.fault
        names = [self.means(name) for name in ([header] if header else body.get("cartridges") or [])]
        if None in names:
            return self._refuse(404, "no cartridge is called so")
        if fault == "errors sometimes" and names and next(self.count) % 5 == 0:
            return self._refuse(500, "EngineCore encountered an issue")
        used = list(names)
        if fault == "swaps":
            used = [{"a@1": "b@1", "b@1": "a@1"}.get(name, name) for name in names]
        if fault == "swaps now and then" and names and next(self.count) % 40 == 0:
            used = ["c@1" if names != ["c@1"] else "a@1"]
        if any("missing" in name or "corrupt" in name for name in names):
            if fault != "serves what is broken":
                return self._refuse(500 if fault == "breaks" else 422, "cannot be served")
            used = ["a@1"]
        own = self._own(body)
        ids = [*(i for name in used for i in self.ids[name]), *own]
        if path == "/v1/cartridges/tokens":
            return Reply(body={"token_ids": ids})
        if path == "/tokenize":
            return Reply(body={"tokens": own})
        return self._complete(path, body, ids, names)

    def _own(self, body: Answer) -> list[int]:
        if "messages" in body:
            return [5, *(ord(c) % 50 for c in body["messages"][0]["content"]), 6]
        prompt = body.get("prompt", [])
        return [ord(c) % 50 for c in prompt] if isinstance(prompt, str) else prompt

    def _complete(self, path: str, body: Answer, ids: list[int], names: list[str]) -> Reply:
        tokens, rows = [], []
        for _ in range(body["max_tokens"]):
            seed = int.from_bytes(hashlib.sha256(repr([*ids, *tokens]).encode()).digest()[:8], "big")
            logits = np.random.default_rng(seed).normal(size=VOCABULARY) * 2
            logprobs = logits - np.log(np.exp(logits).sum())
            if self.fault.startswith("off by") and names:
                logprobs -= {"off by one": 1, "off by a third": 0.3}[self.fault]
            best = np.argsort(-logprobs)[:20]
            tokens.append(int(best[0]))
            rows.append({f"token_id:{i}": float(logprobs[i]) for i in best})
        logged: Any = {"tokens": [f"token_id:{t}" for t in tokens], "top_logprobs": rows}
        if path.endswith("chat/completions"):
            tops = [[{"token": k, "logprob": v} for k, v in row.items()] for row in rows]
            logged = {
                "content": [{"token": t, "top_logprobs": top} for t, top in zip(logged["tokens"], tops, strict=True)]
            }
        sizes = {name: len(self.ids[name]) for name in names}
        cached = sum(sizes[name] for name in names)
        reply = {"choices": [{"logprobs": logged}], "usage": {"prompt_tokens_details": {"cached_tokens": cached}}}
        part = "{0};positions={1};injected=" + ("0" if self.fault == "computes it" else "{1}")
        if "cache_salt" not in body and self.fault != "computes it":  # then vLLM has most of it already
            part = "{0};positions={1};injected=0;cached={1}"
        header = ", ".join(part.format(name, sizes[name]) for name in names)
        return Reply(200, {"X-Cartridges": header} if names and self.fault != "no header" else {}, reply)

    def _refuse(self, status: int, message: str) -> Reply:
        return Reply(status, body={"error": {"message": message}})


CHECKS = {
    mark.args: check
    for module in (test_answers, test_changes, test_known, test_others)
    for check in vars(module).values()
    for mark in getattr(check, "pytestmark", ())
    if check.__module__ == module.__name__
}
"""By tier and what it is about."""


@pytest.fixture
def stub(tmp_path):
    with Stub(tmp_path) as server:
        yield server


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A stub for many tests, right while it was measured."""
    with Stub(tmp_path_factory.mktemp("stub")) as server, Server(server.url) as client:
        found = Context(client, existing(client, []))
        found.measure()
        yield server, found


@pytest.fixture
def context(measured):
    return measured[1]


@pytest.fixture
def fault(measured):
    """Have the stub do something wrong until the test ends."""
    server = measured[0]
    server.count = itertools.count(1)
    yield partial(setattr, server, "fault")
    server.fault = ""


def made(context: Context, wanted: str) -> tuple[str, str]:
    """Make the check of a tier, or of what it is about; return what came of it."""
    [check] = [check for names, check in CHECKS.items() if wanted in names]
    told: list[str] = []
    try:
        check(context, told.append)
    except (pytest.fail.Exception, pytest.skip.Exception) as ended:
        return NOT_CHECKED if isinstance(ended, pytest.skip.Exception) else FAIL, str(ended)
    return PASS, "; ".join(told)


def test_what_cannot_be_tried_is_said_and_is_no_pass(context):
    for tier, what in CHECKS:
        if tier in ("6", "7", "7b", "9", "10", "11", "12"):
            result, found = made(context, what)
            assert result == NOT_CHECKED and "--model" in found


@pytest.mark.parametrize(
    "wrong, tiers, told",
    [
        ("swaps", "3cross", "answers as b@1 does"),
        ("swaps now and then", "8", "contamination: 5 of 200"),
        ("no header", "0 0.5 1 1b 2 3 3cross 8", "has no header X-Cartridges"),
        ("errors sometimes", "2 4 8", "was answered 500: "),
        ("off by one", "0 0.5 1 1b 2 3 4", "logprobs differ by 1 on average"),
        ("off by one", "8", "200 of 200 answers are not those of their dense prompts"),
        ("computes it", "0", "0 positions were injected, not any: the server computed the rest"),
        ("", "5", "an empty prompt was answered 200, not 400"),
        ("unwell", "4", "not healthy after fifty requests in a row"),
    ],
)
def test_a_wrong_server_fails_with_a_line_that_says_how(context, fault, wrong, tiers, told):
    fault(wrong)
    for tier in tiers.split():
        result, found = made(context, tier)
        assert (result, told in found) == (FAIL, True), (tier, found)


def test_a_model_whose_answers_do_not_depend_on_the_document_is_not_checked(stub, monkeypatch):
    complete = stub._complete
    monkeypatch.setattr(stub, "_complete", lambda path, body, ids, names: complete(path, body, [1], names))
    with Server(stub.url) as client:
        deaf = Context(client, existing(client, []))
        deaf.measure()
        other = SimpleNamespace(start=str, stop=str, client=lambda: Server(stub.url))
        deaf.own = SimpleNamespace(stop=str, variant=lambda **_: other)
        for what in ("0", "saving on"):
            result, found = made(deaf, what)
            assert result == NOT_CHECKED and "cannot tell" in found


class Life:
    """Stands for a maker: what it makes the stub has, with files to be damaged."""

    run, chunk = "life", 32

    def __init__(self, stub: Stub) -> None:
        self.stub, self.registry = stub, stub.registry

    def prefill(self, cartridge_id: str, positions: int, *, version: int = 1, add: bool = True) -> Held:
        ids = [version, *range(2, positions + 1)]
        manifest, root = self.stub.make(cartridge_id, ids, version)
        if add:
            self.add(root)
        return Held(manifest.name, tuple(ids), tuple(parts(ids)), (), manifest=manifest, root=root)

    def add(self, root: Path) -> None:
        self.registry.register(root)

    def kv(self, given: Held) -> None:
        """Have none: nothing rounds here."""


@pytest.mark.parametrize(
    "wrong, what, told",
    [
        ("", "corrupt bytes", "3 x 422; quarantined; others answer on"),
        ("", "missing bytes", "3 x 422; others answer on"),
        ("serves what is broken", "corrupt bytes", "from the corrupt cartridge life-corrupt@1 came an answer"),
        ("breaks", "missing bytes", "life-missing@1 was answered 500: "),
        ("notes nothing", "corrupt bytes", "is corrupt, and /v1/cartridges says it is 'resident'"),
        ("unwell", "missing bytes", "the server is not healthy after a missing cartridge"),
        ("", "7", "10 changes followed"),
        ("follows nothing", "7", "life-life should mean life-life@2 by now; it was answered 200"),
        ("keeps what was removed", "7", "life-label was removed, and a request for it is answered 200"),
    ],
)
def test_changes_are_followed_and_a_broken_cartridge_hurts_only_itself(measured, fault, monkeypatch, wrong, what, told):
    server, context = measured
    fault(wrong)
    monkeypatch.setattr(test_changes, "SEEN_S", 0.2)
    monkeypatch.setattr(context, "maker", Life(server))
    monkeypatch.setattr(context, "bound", lambda *_: 0.15)
    result, found = made(context, what)
    for row in server.registry.all():
        if row.id.startswith("life"):
            server.registry.remove(row.name)  # with a label it could not be
    assert (result, told in found) == (FAIL if wrong else PASS, True), found


def test_what_was_not_checked_is_never_passed():
    for results, status, allowed in (
        ({"-1": PASS, "0": PASS}, 0, 0), ({"-1": PASS, "0": PASS, "1b": NOT_CHECKED}, 1, 0),
        ({"-1": PASS, "1b": NOT_CHECKED}, 2, 2), ({"-1": PASS}, 2, 2), ({"1b": NOT_CHECKED}, 2, 2), ({"-1": PASS, "0": FAIL}, 1, 1),
    ):  # fmt: skip
        rows = [Row(tier, "", result, "", 0.0) for tier, result in results.items()]
        assert (suite.status(rows), suite.status(rows, allow_unchecked=True)) == (status, allowed), results


@pytest.fixture
def told(stub, capsys, monkeypatch):
    """Run `validate` on the stub; return the exit status, and what it writes for programs."""

    def run(*words: str, options: str = "") -> tuple[int, dict[str, Any]]:
        monkeypatch.setenv("PYTEST_ADDOPTS", options)
        status = main(["validate", "--url", stub.url, *words, "--format", "json"])
        return status, json.loads(capsys.readouterr().out)

    return run


def test_a_server_whose_equal_prompts_are_answered_otherwise_fails_though_all_else_is_lost_in_its_noise(
    stub, told, monkeypatch
):
    """A prefix cache that answers from another document would raise every bound so far that no question tells."""
    complete, seen = stub._complete, set()

    def forgetful(path: str, body: Answer, ids: list[int], names: list[str]) -> Any:
        key = (body.get("cache_salt"), *ids)
        wrong = [9] if key in seen else []
        seen.add(key)
        return complete(path, body, [*wrong, *ids], names)

    monkeypatch.setattr(stub, "_complete", forgetful)
    for options in ("", "-k 'not noise'"):
        status, found = told("--tier", "0,3cross", "--allow-unchecked", options=options)
        assert status == 1 and found["passed"] is False and found["noise"]["cached"] > 1
        assert [row["tier"] for row in found["rows"] if row["result"] == FAIL] == ["noise"]


def test_the_command_makes_the_checks_by_pytest_and_ends_with_what_they_found(
    stub, told, tmp_path, capsys, monkeypatch
):
    usual = ["0", "0.5", "1", "1b", "2", "3", "3cross"]
    status, found = told("--tier", ",".join([*usual, "4", "8"]))
    assert (status, {row["result"] for row in found["rows"]}) == (0, {PASS})
    assert [row["tier"] for row in found["rows"]] == ["noise", *usual, "4", "8"]
    assert suite.default(model=True, own=True) == ["-1", *usual, "5", "7", "10", "11", "7b"]
    asked = ["--tier", "0,3cross,10", "--cartridges", "a,b@1"]
    report = tmp_path / "report.xml"
    status, found = told(*asked, options=f"--junitxml={report}")
    results = {row["tier"]: row["result"] for row in found["rows"]}
    assert results == {"noise": PASS, "0": PASS, "3cross": PASS, "10": NOT_CHECKED}
    assert (status, found["passed"]) == (1, False), "a tier that was asked for was not checked"
    counts = xml.etree.ElementTree.parse(report).getroot()[0].attrib
    assert (counts["tests"], counts["skipped"], counts["failures"]) == ("4", "1", "0")
    assert told(*asked, "--allow-unchecked", options="-k ten")[0] == 0
    stub.fault = "no header"
    status, found = told(*asked, options="-x")
    assert (status, [row["result"] for row in found["rows"]]) == (1, [PASS, FAIL])
    stub.fault = ""
    assert main(["validate", "--url", stub.url, "--tier", "10"]) == 1, "nothing was checked"
    assert "1 passed, 0 failed, 1 not checked" in capsys.readouterr().out


def test_a_cartridge_that_is_known_to_be_int8_may_be_further_from_its_document(stub, told, tmp_path):
    """It was failed though every answer was right: 0.245 off, of which 0.15 are allowed."""
    stub.registry.register(stub.make("small", [*range(32)], encoding="int8")[1])
    stub.fault = "off by a third"
    asked = ["--cartridges", "small", "--tier", "0,0.5"]
    assert told(*asked, "--home", str(tmp_path / "another"))[0] == 1
    assert told(*asked, "--home", str(tmp_path))[0] == 0


@pytest.mark.parametrize("words, options, said", [
    ("--url {} --cartridges missing", "", "missing: no prefill cartridge"), ("--url {}", "--nope", "pytest ended"),
    ("", "", "validate needs --url or --model"), ("--url {} --tier 99", "", "there is no tier 99; there are -1, 0, 0.5"),
])  # fmt: skip
def test_where_nothing_could_be_asked_it_is_an_error(stub, capsys, monkeypatch, words, options, said):
    monkeypatch.setenv("PYTEST_ADDOPTS", options)
    assert main(["validate", *words.format(stub.url).split()]) == 1
    assert said in capsys.readouterr().err


def test_every_tier_has_a_check():
    assert {tier for tier, _ in CHECKS} == {"noise", *suite.TIERS}
    assert suite.read_tiers("all") == suite.TIERS and suite.read_tiers("3 cross, -1,1B") == ["-1", "1b", "3cross"]


def test_what_cannot_be_taken_back_is_named(tmp_path, caplog):
    registry = Registry(tmp_path / "registry.sqlite")
    maker = Maker(None, from_mapping({"home": tmp_path}), 32)
    for name in ("a", "b"):
        make_artifact(tmp_path / name, positions=32, cartridge_id=name)
        maker.add(tmp_path / name)
    registry.label("kept", "a@1")
    maker.clear()
    assert [row.name for row in registry.all()] == ["a@1"]
    assert "a@1 stays registered" in caplog.text
    assert "b@1" not in caplog.text


def _reply(*rows: dict[int, float]) -> Answered:
    return Answered(200, "", tuple(max(row, key=lambda token: row[token]) for row in rows), rows)


def test_answers_are_compared_up_to_the_first_token_that_differs():
    same = _reply({1: -0.5, 2: -1.5}, {3: -0.1, 4: -3.0})
    nearly = compare_logprobs(same, _reply({1: -0.6, 2: -1.4}, {3: -0.1, 4: -3.0}))
    assert nearly.mean == pytest.approx(0.05)
    flipped = compare_logprobs(same, _reply({1: -1.5, 2: -0.5}, {9: 0.0, 8: -9.0}))
    assert (flipped.positions, flipped.margin) == (1, pytest.approx(1.0))
    assert not flipped.within(0.2) and not compare_logprobs(same, _reply({1: -0.5, 2: -1.5})).within(100.0)


def test_the_bound_is_four_times_the_largest_noise_and_wider_where_rounding_is_not_known():
    assert (Noise().bound(0.0), Noise().bound(0.0, "float32"), Noise().bound(None)) == (0.05, 0.01, 0.15)
    assert Noise().bound(None, encoding="int8") == 0.5
    assert Noise(neighbours=0.1).bound(0.02) == Noise().bound(0.1) == pytest.approx(0.4)


def test_why_a_server_did_not_start_is_found_in_its_log(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "(x) ERROR lmcache_cartridge.errors.UnsupportedEngine: no\nRuntimeError: see above\nINFO: finished\n"
    )
    assert reason("it ended", log) == "UnsupportedEngine: no"


def test_the_log_of_a_server_that_did_not_start_is_kept(tmp_path, capsys, monkeypatch):
    """vLLM's last words are that the cause stands above, and the directory with the log was gone by then."""

    def start(own: OwnServer) -> float:
        own.log.write_text("the cause")
        raise UnsupportedEngine("the server did not start; see root cause above")

    monkeypatch.setattr(OwnServer, "start", start)
    monkeypatch.setattr(Maker, "three", lambda maker: [])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main(["validate", "--model", str(MODEL_DIR)]) == 1
    assert "the servers' logs are in" in capsys.readouterr().err
    [log] = tmp_path.rglob("*.log")
    assert log.read_text() == "the cause"


def test_a_server_of_ours_is_started_otherwise_with_what_it_was_given(tmp_path):
    own = OwnServer("m", tmp_path, vllm_args=["--seed", "2"])
    launch = own.variant(mode="multiprocess", vllm_args=["-tp", "2"]).launch()
    assert launch.lmcache and launch.command[-4:] == ["--seed", "2", "-tp", "2"]
    assert '"kv_role": "kv_consumer"' in " ".join(launch.command), "it still saves nothing"
