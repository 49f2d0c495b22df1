"""LoRA on real servers: each adapter, and the base model, has KV of its own, of cartridges as of what LMCache saves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from typing import Any

import pytest
from adapters import write_adapter
from posting import ROUTE
from recall.ward import ask
from serving import difference, serving
from templates import WARD
from test_l2_saving import NOISE, Served, _build, _questions
from test_marks import MARK, Counted, chat
from waiting import until
from wards import MODEL, Answer, Ward, content, patients, register, write_ward

from lmcache_cartridge.cli.main import main
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.serve.processes import SMALL
from lmcache_cartridge.settings import from_mapping

MODELS = {MODEL: "base", "one": "one", "two": "two"}
"""What requests ask for, and the cartridge of the sheet that is made with it."""
TEXT = 1024
"""Tokens of the sheet, in whole chunks."""


@pytest.fixture(scope="module", params=["multiprocess", "in-process"])
def served(request, tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    settings, model = from_mapping({"home": home, "contexts": True}), CausalModel(MODEL)
    ward = write_ward(model, patients(0, 6), "doc", positions=TEXT, facts=48)
    _build(model, settings, "base", ward)  # first, since the newest of documents that begin alike leads
    for seed, name in enumerate(("one", "two")):
        adapted = CausalModel(MODEL, lora=write_adapter(home / name, seed))
        _build(adapted, settings, name, ward)
        register(adapted, settings, ward.ids[:256], name=f"short-{name}", kind="trained")
    shutil.copytree(home / "one", home / "changing")
    (template := home / "template.jinja").write_text(WARD)
    modules = [f"{name}={home / name}" for name in ("one", "two")]
    options = ["--chat-template", str(template), "--enable-lora", "--max-loras", "3", "--max-lora-rank", "8",
               "--lora-modules", *modules]  # fmt: skip
    environment = SMALL | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    given = {"environment": environment, "mode": request.param, "l1_bytes": 128 << 20}
    with serving(settings, home / "server.log", MODEL, *options, **given) as asker:
        served = Served(asker, model, settings, {"doc": ward})
        # The engine is tried with each, and from then on plain prompts are answered from the base model's.
        for asked, name in MODELS.items():
            served.ask([5], name, model=asked)
        yield served


def _computed(served: Served, ids: list[int], model: str) -> Answer:
    """Return the reply of a model to a prompt of which it computes everything."""
    return served.asker.computed(ids, model=model)


def _ward(served: Served) -> Ward:
    return served.wards["doc"]


def test_a_model_is_answered_from_its_own_cartridge_and_refused_any_other(served):
    """The matrix of three models and their cartridges; with another one's KV the logprobs would differ by more than 1."""
    questions = [question for question, _ in _questions(_ward(served), 3)]
    computed = {model: [_computed(served, _ward(served).ids + q, model) for q in questions] for model in MODELS}
    for one, other in (("one", "two"), ("one", MODEL), ("two", MODEL)):
        assert max(map(difference, computed[one], computed[other])) > 4 * NOISE, "the control: another's KV is seen"
    for model in MODELS:
        for asked, name in MODELS.items():
            if asked == model:
                replies = [served.ask(q, name, model=model) for q in questions]
                assert {reply.cached_tokens for reply in replies} == {TEXT}
                assert max(map(difference, replies, computed[model])) < NOISE
            else:
                assert "made with" in _refused(served, model, [name])


def test_a_context_is_of_the_model_that_it_is_made_by_and_refused_to_others(served):
    ids, names = _ward(served).ids[:768], dict(zip(MODELS, ("of-base", "of-one", "of-two"), strict=True))
    for model, name in names.items():
        body = {"token_ids": ids, "id": name, "model": model}
        assert served.asker.http.post(ROUTE, json=body).status_code in (200, 202)
        until(lambda name=name: served.asker.state(name)["state"] != "making")
    for model, name in names.items():
        for question, _ in _questions(_ward(served), 3):
            reply = served.ask(question, name, model=model)
            assert reply.cached_tokens == len(ids)
            assert difference(reply, _computed(served, ids + question, model)) < NOISE
        for other in MODELS.keys() - {model}:
            assert "made with" in _refused(served, other, [name])
    strange = served.asker.http.post(ROUTE, json={"token_ids": ids, "model": "three"})
    assert strange.status_code == 404 and "'three'" in strange.text, "the base model would compute it"
    for name in names.values():
        assert served.asker.http.delete(f"{ROUTE}/{name}").status_code == 200


def test_what_is_marked_is_read_for_the_model_that_it_was_marked_for(served):
    ward, texts = _ward(served), []

    def asked(model: str, mark: dict[str, Any]) -> list[Counted]:
        """Return what is said behind the sheet."""
        found = []
        for fact in ward.facts[:4]:
            said = [{"type": "text", "text": ward.document.text} | mark, {"type": "text", "text": content(fact)}]
            found.append(chat(served.asker, [{"role": "user", "content": said}], tokens=24, model=model))
        return found

    def contexts() -> set[str]:
        return {each["id"] for each in served.asker.http.get(ROUTE).json()["data"]}

    names = contexts()
    for number, model in enumerate(MODELS, 1):
        plain, _ = asked(model, {}), asked(model, MARK)
        until(lambda number=number: len(contexts() - names) == number)
        read = asked(model, MARK)
        texts.append([each.text for each in plain])
        assert [each.text for each in read] == texts[-1]
        assert all(each.used for each in read) and not any(each.used for each in plain)
    assert texts[0] != texts[1] != texts[2] != texts[0], "the control: the adapters answer otherwise"
    for name in contexts() - names:
        assert served.asker.http.delete(f"{ROUTE}/{name}").status_code == 200


def test_a_chain_is_of_one_adapter(served):
    (question, _), *_ = _questions(_ward(served), 1)
    text = _ward(served).ids
    computed = _computed(served, text + text[:256] + question, "one")
    body = {"cartridges": ["one", "short-one"], "model": "one"}
    reply = served.ask(question, **body)
    assert reply.cached_tokens == TEXT + 256
    assert difference(reply, computed) < 2 * NOISE, "keys are rotated in bfloat16"
    assert "no chain" in _refused(served, "one", ["one", "short-two"])


def test_a_server_is_validated_and_evaluated_by_the_adapters_name(served, tmp_path, capsys):
    questions, facts = tmp_path / "q.jsonl", _ward(served).facts[:4]
    questions.write_text("".join(f"{json.dumps({'question': ask(f, 0), 'answer': f.value})}\n" for f in facts))
    options = ["--url", served.asker.url, "--home", str(served.settings.home), "--format", "json"]
    assert main(["validate", "one", "--server-model", "one", *options]) == 0, capsys.readouterr()
    assert main(["validate", "one", *options]) == 1
    capsys.readouterr()
    assert (
        main(["evaluate", "one", "--server-model", "one", "--questions", str(questions), "--ask-as", "text", *options])
        == 0
    )
    ways = json.loads(capsys.readouterr().out)["ways"]
    assert ways["cartridge"] == ways["document"] != ways["no prefix"]


def test_plain_prompts_never_get_anothers_kv(served):
    """They begin with the sheet, of which there are cartridges of every model, and are saved."""
    question, answer = _questions(_ward(served), 1)[0]
    ids = _ward(served).ids + question
    computed = {model: _computed(served, ids, model) for model in MODELS}
    assert served.saved(TEXT, ids, salt="tenant", model=MODEL).text.strip() == answer, "the base model's cartridge"
    for model in ("one", "two"):
        first = served.ask(ids, salt="tenant", model=model)
        assert first.cached_tokens == 0, "it got the base model's KV, or the other adapter's"
        assert difference(first, computed[model]) < NOISE
    for model in (*MODELS, *MODELS):
        assert difference(served.saved(TEXT, ids, salt="tenant", model=model), computed[model]) < NOISE


def test_what_follows_a_cartridge_is_its_tenants_and_its_adapters(served):
    """All tenants of an adapter have the same copy of its cartridge; what is behind it each has for itself."""
    (question, _), *_ = _questions(_ward(served), 1)
    ids = _ward(served).ids[2:259] + question
    computed = {model: _computed(served, _ward(served).ids + ids, model) for model in MODELS}
    assert max(difference(computed[MODEL], computed[name]) for name in ("one", "two")) > 4 * NOISE, "the control"
    for salt in ("here", "there"):
        for model, name in MODELS.items():
            first = served.ask(ids, name, salt, model=model)
            assert first.cached_tokens == TEXT, "another tenant's, or another adapter's"
            saved = served.saved(TEXT + 256, ids, name, salt, model=model)
            assert max(difference(reply, computed[model]) for reply in (first, saved)) < NOISE


def test_another_adapter_in_the_place_of_one_gets_no_cartridge_of_the_old_and_nothing_that_it_computed(served):
    (question, _), *_ = _questions(_ward(served), 1)
    ids, directory = _ward(served).ids + question, served.settings.home / "changing"

    def load(**options: Any) -> None:
        body = {"lora_name": "changing", "lora_path": str(directory)} | options
        assert served.asker.http.post("/v1/load_lora_adapter", json=body).status_code == 200

    def again(ask: Callable[..., Answer] = served.ask_now) -> list[Answer]:
        """Ask with and without cartridges."""
        return [ask(ids, salt="tenant", model="changing", **fields) for fields in ({}, {"cartridges": False})]

    load()
    assert served.ask(question, "one", model="changing").cached_tokens == TEXT, "the same weights by another name"
    computed = _computed(served, ids, "two")
    served.saved(TEXT, ids, salt="tenant", model="changing"), again()
    assert min(reply.cached_tokens for reply in again()) >= TEXT, "the control: all is found again"
    shutil.copytree(served.settings.home / "two", directory, dirs_exist_ok=True)
    for name in ("one", "two"):
        assert "changed after it was loaded" in _refused(served, "changing", [name])
    load(load_inplace=True)
    for reply in again() + again(served.ask):
        assert difference(reply, computed) < NOISE, "vLLM or LMCache had what the adapter before it computed"
    assert "other weights" in _refused(served, "changing", ["one"])
    reply = served.ask(question, "two", model="changing")
    assert reply.cached_tokens == TEXT
    assert difference(reply, computed) < NOISE


def _refused(served: Served, model: str, cartridges: list[str]) -> str:
    """Return why a request is refused, by a status and not within a stream, before any claim is made."""
    body = {"model": model, "prompt": [5, 6], "max_tokens": 1, "cartridges": cartridges, "stream": True}
    response = served.asker.http.post("/v1/completions", json=body)
    assert response.status_code == 422, response.text
    return response.json()["error"]["message"]
