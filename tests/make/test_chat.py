"""A document in a chat: its tokens and what goes behind them are what the model's template makes of the conversation."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from blocks import quietly
from commands import Cli
from making import VOCABULARY, make_artifact
from templates import CHATML, COUNTING, DATED, HEADERS, INSIDE, LAST, PAIRS, SPECIAL, WARD
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lmcache_cartridge.artifact import reading
from lmcache_cartridge.artifact.chat import Chat, Message
from lmcache_cartridge.artifact.manifest import decode
from lmcache_cartridge.cli.recall import MODEL_DIR, SHEETS_DIR
from lmcache_cartridge.errors import ArtifactError, ManifestError
from lmcache_cartridge.make.chat import question_ids, read_chat, render
from lmcache_cartridge.make.document import read_ids
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.serve.request import Refusal

with quietly():
    from lmcache_cartridge.serve.offline import ids_behind

SHEET = (SHEETS_DIR / "ward-a.txt").read_text()
ENDS = ("", "\n", "\n\n", "  ", "…", " 7", "<br>")
CONVERSATIONS = (
    ["Hi"], ["\n\n7 days?\n"], [" What is it?"], ["é"], ["…and?"], ["s"], ["What?", "This.", "And then?"],
    ["What?", "\nThis.\n", "\nWhy?", "So.", "Thanks"],
)  # fmt: skip
TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "inside": INSIDE, "pairs": PAIRS}


@pytest.fixture(scope="module")
def tokenizer():
    """A byte-level BPE of merges across words' ends, spaces and newlines, as the pre-tokenizer of GPT-2 lets them be."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator([SHEET + "\n\nYou are a helpful assistant.\n\n\n  \n" * 9], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


def _model(tokenizer: Any, template: str | None) -> Any:
    """Return what of a model rendering needs."""
    tokenizer.chat_template = template
    model = SimpleNamespace(name="m", tokenizer=tokenizer, context_tokens=8192)
    model.encode = lambda text, special: CausalModel.encode(model, text, special=special)
    return model


def _turns(*contents: str, system: str | None = None) -> list[Message]:
    """Return a conversation, with a system message or without."""
    turns = [Message("assistant" if n % 2 else "user", content) for n, content in enumerate(contents)]
    return turns if system is None else [Message("system", system), *turns]


def _rendered(tokenizer: Any, messages: Any, **options: Any) -> list[int]:
    given = {"tokenize": True, "add_generation_prompt": True, "return_dict": False} | options
    return tokenizer.apply_chat_template(msgspec.to_builtins(list(messages)), **given)


def _assert_goes_on(tokenizer: Any, ids: list[int], chat: Chat, first: list[Message]) -> None:
    """Assert that ids and what goes behind them are the template's tokens of conversations that begin with some messages."""
    for contents in CONVERSATIONS:
        behind = chat.behind(_rendered(tokenizer, [*chat.messages, *_turns(*contents)]))
        assert [*ids, *(behind or [])] == _rendered(tokenizer, [*first, *_turns(*contents)]), contents


@pytest.mark.parametrize(
    "template, role, reason",
    [
        (LAST, "system", "does not begin every conversation"), (INSIDE, "user", "roles must alternate"),
        (DATED, "system", "today's date"), (COUNTING, "system", "does not begin every conversation"),
        (None, "system", "no chat template"), ("{{ messages[0].oops.x }}", "system", "does not take"),
    ],
)  # fmt: skip
def test_a_template_whose_tokens_are_no_beginning_is_refused_with_the_reason(tokenizer, template, role, reason):
    with pytest.raises(ArtifactError, match=reason):
        render(_model(tokenizer, template), [Message(role, SHEET)], {})


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("turns", [(), ("Well?", "Yes.")])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_cartridge_and_what_goes_behind_it_are_the_templates_tokens_of_the_whole_conversation(
    tokenizer, name, turns, end
):
    first = _turns(*turns, system=SHEET.strip() + end)
    ids, chat = render(_model(tokenizer, TEMPLATES[name]), first, {})
    assert len(chat.prefix) < len(ids) / 4
    _assert_goes_on(tokenizer, ids, chat, first)


def test_a_date_that_is_given_goes_with_every_request(tokenizer):
    model, date = _model(tokenizer, DATED), {"date_string": "26 Jul 2024"}
    ids, chat = render(model, _turns(system=SHEET), date)
    assert chat.arguments == date
    assert [*ids, *question_ids(model, "Hi", chat)] == _rendered(tokenizer, _turns("Hi", system=SHEET), **date)
    assert chat.behind(_rendered(tokenizer, [*chat.messages, *_turns("Hi")])) is None, "today's"


def test_a_second_bos_before_the_templates_own_is_left_out_and_no_other():
    chat, whole = Chat((Message("user", "x"),), (1, 5)), [1, 5, 7]
    assert chat.behind([1, *whole], 1) == chat.behind(whole, 1) == chat.behind(whole) == [7]
    for given in (([1, *whole],), ([5, 7], 1), ([5, *whole], 1)):
        assert chat.behind(*given) is None, given
    assert Chat(chat.messages, (1, 1)).behind([1, 1, 7], 1) == [7], "the template's own are two"


def test_offline_messages_go_on_behind_it_and_text_and_ids_as_they_are(tokenizer):
    model = _model(tokenizer, CHATML.replace("{% if messages[0]", "{{ bos_token }}{% if messages[0]", 1))
    ids, chat = render(model, _turns(system=SHEET), {})
    whole, asked = _rendered(tokenizer, _turns("Hi", system=SHEET)), msgspec.to_builtins(_turns("Hi"))
    assert [*ids, *ids_behind(chat, tokenizer, asked)] == whole
    assert ids_behind(None, tokenizer, asked) == _rendered(tokenizer, asked)[1:] != whole[len(ids) :]
    text = tokenizer.encode("Hi", add_special_tokens=False)
    assert ids_behind(chat, tokenizer, "Hi") == ids_behind(chat, tokenizer, [tokenizer.bos_token_id, *text]) == text
    tokenizer.chat_template = HEADERS
    with pytest.raises(Refusal, match="does not begin this conversation"):
        ids_behind(chat, tokenizer, asked)


# Files.


@pytest.mark.parametrize(
    "text, reason",
    [
        ("[]", "length >= 1"), ("[1, 640]", "640 is outside the model's vocabulary of 640"), ("[1, -1]", "token id -1 is outside"),
        ("a b", "malformed"), (f"[{'5,' * 8999}5]", "9000 tokens"),
    ],
)  # fmt: skip
def test_a_file_that_holds_no_ids_of_the_model_is_refused(model, tmp_path, text, reason):
    (tmp_path / "ids").write_text(text)
    with pytest.raises(ArtifactError, match=reason):
        read_ids(model, tmp_path / "ids")


@pytest.mark.parametrize("text", ["[]", "x", '[{"role": "user", "content": [1]}]'])
def test_messages_that_are_not_text_are_refused(tokenizer, tmp_path, text):
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(ArtifactError, match=r"messages"):
        read_chat(_model(tokenizer, HEADERS), tmp_path / "m.json", None, {})


# The command.


def _build(cli: Cli, *options: object) -> None:
    document = [] if "--messages" in options else ["--document", SHEETS_DIR / "ward-a.txt"]
    cli.json("build", "--model", MODEL_DIR, "--id", "a", *document, *options)


def test_what_is_built_as_the_system_message_stays_so_in_int8_and_is_not_compacted(tmp_path, cli):
    """What it is answered by the matrix counts."""
    (tmp_path / "t.jinja").write_text(WARD)
    _build(cli, "--chat", "system", "--chat-template", tmp_path / "t.jinja")
    cli.json("build", "--from", "a", "--payload", "int8", "--id", "b")
    of_a = cli.refused("build", "--from", "a", "--id", "c", "--model", MODEL_DIR, "--compact", "4x")
    assert "is of a chat" in of_a
    (plain, _), (smaller, _) = map(cli.artefact, "ab")
    assert plain.chat == smaller.chat is not None
    assert plain.provenance.canary.top1_equal and plain.canary is not None


def test_messages_and_ids_are_built_too(model, tmp_path, cli):
    messages = _turns("blood of Tehor?", "A+", system=SHEET[:1500])
    (tmp_path / "m.json").write_bytes(msgspec.json.encode(messages))
    _build(cli, "--messages", tmp_path / "m.json")
    ids = _rendered(model.tokenizer, messages, add_generation_prompt=False)
    (tmp_path / "ids.json").write_text(json.dumps(ids))
    _build(cli, "--token-ids", tmp_path / "ids.json")
    (chat, _), (plain, _) = made = [cli.artefact(name) for name in ("a@1", "a@2")]
    assert [reading.load_token_ids(*each).tolist() for each in made] == [ids, ids]
    assert len(chat.chat.messages) == 3 and plain.chat is None
    assert chat.digest != plain.digest, "requests go on with them otherwise"


@pytest.mark.parametrize(
    "chat", [Chat((), (1,)), Chat((Message("user", "x"),), ()), Chat((Message("user", "x"),), (VOCABULARY,))]
)
def test_a_manifest_whose_chat_cannot_be_gone_on_with_is_refused(tmp_path, chat):
    manifest = make_artifact(tmp_path / "a", positions=3).manifest
    with pytest.raises(ManifestError, match=r"at `\$\.chat|outside the model's vocabulary"):
        decode(msgspec.structs.replace(manifest, chat=chat).encode(), "here")
