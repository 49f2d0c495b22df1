"""A document in a chat, on a real server: the prompt is the template's of the whole conversation. The matrix counts answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from serving import SERVER_ARGS
from templates import WARD
from wards import MODEL, Asker, Ward, content, patients, register, write_ward

from lmcache_cartridge.artifact import reading
from lmcache_cartridge.cli.main import main
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.serve.launch import plan
from lmcache_cartridge.serve.processes import ServerProcess
from lmcache_cartridge.settings import from_mapping

CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


class Served(NamedTuple):
    asker: Asker
    model: CausalModel
    ward: Ward
    positions: int

    def post(self, path: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
        """Return what a route answers."""
        reply = self.asker.http.post(path, json={"model": MODEL} | body)
        assert reply.status_code == status, reply.text
        return reply.json()

    def whole(self, messages: list[dict[str, str]]) -> list[int]:
        """Return transformers' tokens of the document and messages."""
        system = {"role": "system", "content": self.ward.document.text}
        return self.model.tokenizer.apply_chat_template(
            [system, *messages], tokenize=True, add_generation_prompt=True, return_dict=False
        )


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    settings = from_mapping({"home": home, "cpu_bytes": 256 << 20})
    template, document = home / "template.jinja", home / "ward.txt"
    model = CausalModel(MODEL)
    ward = write_ward(model, patients(0, 4), "chat")
    template.write_text(WARD)
    document.write_text(ward.document.text)
    model.tokenizer.chat_template = WARD
    options = ["--home", str(home), "--model", MODEL, "--document", str(document)]
    assert main(["build", "--id", "chat", "--chat", "system", "--chat-template", str(template), *options]) == 0
    register(model, settings, write_ward(model, patients(1, 4), "plain").ids, name="plain")
    entry = Registry(settings.registry_path).find("chat")
    positions = reading.load_manifest(Path(entry.location)).positions
    launch = plan(
        MODEL, settings, chunk_tokens=256, on_load_failure="fail",
        vllm_args=[*SERVER_ARGS, "--enable-scale-out", "--chat-template", str(template), "--enable-auto-tool-choice",
                   "--tool-call-parser", "pythonic"],
    )  # fmt: skip
    with ServerProcess(launch, home / "server.log") as server, Asker(server.url) as asker:
        yield Served(asker, model, ward, positions)


def _turns(served: Served, count: int) -> list[dict[str, str]]:
    """Return a conversation of so many questions, all but the last answered."""
    facts, turns = served.ward.facts, []
    for fact in facts[: count - 1]:
        turns += [{"role": "user", "content": content(fact)}, {"role": "assistant", "content": fact.value}]
    return [*turns, {"role": "user", "content": content(facts[count - 1])}]


def test_what_is_shown_is_the_templates_tokens_of_the_whole_conversation(served):
    messages = _turns(served, 2)
    whole, named = served.whole(messages), {"cartridges": ["chat"]}
    assert served.post(f"{CHAT}/render", {"messages": messages} | named)["token_ids"] == whole
    head = whole[: served.positions]
    alone = served.post("/tokenize", {"messages": messages})["tokens"]
    assert [*head, *alone[1:]] != whole, "the negative control: the template's own system prompt stands in the middle"
    [text] = served.post("/v1/completions/render", {"prompt": "Q:", "add_special_tokens": False} | named)
    assert text["token_ids"][:-1] == head, "text goes on as it is"


def test_other_routes_of_messages_go_on_behind_it_too(served):
    messages, named = _turns(served, 1), {"cartridges": ["chat"]}
    tokens = len(served.whole(messages))
    reply = served.post("/v1/messages", {"messages": messages, "max_tokens": 1} | named)
    assert reply["usage"]["input_tokens"] + reply["usage"]["cache_read_input_tokens"] == tokens
    asked = {"input": messages[0]["content"], "max_output_tokens": 1, "temperature": 0}
    assert served.post("/v1/responses", asked | named)["usage"]["input_tokens"] == tokens


@pytest.mark.parametrize(
    "body",
    [{"tools": [TOOL], "tool_choice": "none"}, {"truncate_prompt_tokens": 8}, {"cartridges": ["chat", "plain"]}],
    ids=["tools before the document", "a cut prompt", "a chain that goes on with another"],
)  # fmt: skip
def test_a_conversation_that_does_not_begin_so_is_refused_with_the_reason(served, body):
    asked = {"messages": _turns(served, 1), "max_tokens": 1, "cartridges": ["chat"]} | body
    error = served.post(CHAT, asked, 422)["error"]["message"]
    assert ("must be the last" if "cartridges" in body else "does not begin this conversation") in error
    served.post(CHAT, asked | {"cartridges": ["plain"]})


def test_in_a_chain_it_is_the_last(served):
    messages = _turns(served, 1)
    behind = len(served.whole(messages)) - served.positions
    plain = served.post(CHAT, {"messages": messages, "max_tokens": 1, "cartridges": ["plain"]})["usage"][
        "prompt_tokens"
    ]
    both = served.post(CHAT, {"messages": messages, "max_tokens": 1, "cartridges": ["plain", "chat"]})
    alone = len(served.post("/tokenize", {"messages": messages})["tokens"]) - 1
    assert both["usage"]["prompt_tokens"] == plain - alone + served.positions + behind
