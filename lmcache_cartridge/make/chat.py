"""A document as the first messages of a chat, in the tokens that the model's own template makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..artifact.chat import MAX_MESSAGES, Chat, Message
from ..errors import ArtifactError
from ..serve.chat import STAND_IN
from .document import Document, check_fits, read_text
from .model import CausalModel

_CUT = 2
"""Tokens at the document's end that may be left to the request: the last may be one with what the template puts there."""
_PROBES = (
    [Message("user", "Hi")],
    [Message("user", "\n7 days?")],
    [Message("user", "What?"), Message("assistant", "This."), Message("user", "And then?")],
)
"""What requests may go on with: other first characters, and more than one turn."""
_decode_messages = msgspec.json.Decoder(list[Message]).decode


def read_chat(
    model: CausalModel, path: Path, role: str | None, arguments: Mapping[str, Any], raw: bytes | None = None
) -> Document:
    """Return the text of a file, or of `raw`, as one message of that role, or without a role the messages of a JSON file.

    Raises `ArtifactError` for what is no such file, and where the template's tokens for the messages are not the first of
    every longer conversation.
    """
    digest, text = read_text(path, raw)
    messages = [Message(role, text)] if role is not None else _read_messages(path, text)
    ids, chat = render(model, messages, arguments)
    check_fits(model, path, ids)
    return Document(path, text, ids, digest, chat)


def _read_messages(path: Path, text: str) -> list[Message]:
    try:
        found = _decode_messages(text)
    except ValueError as error:
        raise ArtifactError(f"{path} is no JSON list of messages with role and content, both text: {error}") from None
    if not 0 < len(found) <= MAX_MESSAGES:
        raise ArtifactError(f"{path} has {len(found)} messages; a cartridge is made of 1 to {MAX_MESSAGES}")
    return found


def render(model: CausalModel, messages: Sequence[Message], arguments: Mapping[str, Any]) -> tuple[list[int], Chat]:
    """Return the ids that the template makes of messages, and how servers go on with them.

    Where it closes a message only when the next has come, the ids end in the middle of it. Raises `ArtifactError` where
    the ids are not the first of every longer conversation, or depend on the day.
    """
    given = dict(arguments)
    whole = [_ids(model, [*messages, *probe], given) for probe in _PROBES]
    common = next((n for n, ids in enumerate(zip(*whole, strict=False)) if len(set(ids)) > 1), min(map(len, whole)))
    prefix = whole[0][:common]
    try:
        alone = _ids(model, messages, given, add_generation_prompt=False)
    except ArtifactError:
        alone = []  # a template may want a user's message
    end = _tokens_with(model, [*messages, *_PROBES[0]], given)
    is_closed = len(alone) >= end and prefix[: len(alone)] == alone
    # A document's last token may be another one before a request that begins with a newline.
    prefix = alone if is_closed else prefix[: end - 1]
    if len(prefix) < end - _CUT:
        raise ArtifactError(
            f"the chat template of {model.name} does not begin every conversation with the document: it stands elsewhere "
            "or is changed when others follow; try another role, or --messages with an assistant's message at the end"
        )
    another = _ids(model, [*messages, *_PROBES[0]], {"strftime_now": lambda form: "another day"} | given)
    if another[: len(prefix)] != prefix:
        raise ArtifactError(
            f"the chat template of {model.name} writes today's date before the document, so no other day's requests "
            """begin so; give the date to --chat-arguments, such as '{"date_string": "26 Jul 2024"}'"""
        )
    short = [Message(each.role, each.content[-STAND_IN:]) for each in messages]
    stand_ins = [_ids(model, [*short, *probe], given) for probe in _PROBES]
    chat = Chat(tuple(short), tuple(stand_ins[0][: len(stand_ins[0]) - len(whole[0]) + len(prefix)]), given)
    for ids, found in zip(whole, stand_ins, strict=True):
        if not chat.prefix or chat.behind(found) != ids[len(prefix) :]:
            raise ArtifactError(
                f"what the chat template of {model.name} puts behind the document depends on the document's text"
            )
    return prefix, chat


def question_ids(model: CausalModel, text: str, chat: Chat | None) -> list[int]:
    """Return the ids of a question as it follows a cartridge: as it is, or as a user's message of its chat."""
    if chat is None:
        return model.encode(text, special=False)
    ids = chat.behind(_ids(model, [*chat.messages, Message("user", text.strip())], chat.arguments))
    if ids is None:
        raise ArtifactError(f"the chat template of {model.name} is not the one that the cartridge was made with")
    return ids


def _ids(
    model: CausalModel, messages: Sequence[Message], arguments: Mapping[str, Any], *, add_generation_prompt: bool = True
) -> list[int]:
    return _apply(
        model, messages, arguments, tokenize=True, return_dict=False, add_generation_prompt=add_generation_prompt
    )


def _tokens_with(model: CausalModel, messages: Sequence[Message], arguments: Mapping[str, Any]) -> int:
    """Return how many tokens a conversation has up to the end of the last message but one; more than any if it is not there."""
    text = _apply(model, messages, arguments, tokenize=False, add_generation_prompt=True)
    last = messages[-2].content.strip()
    at = text.rfind(last)
    return len(model.encode(text[: at + len(last)], special=False)) if at >= 0 else len(text) + _CUT + 1


def _apply(model: CausalModel, messages: Sequence[Message], arguments: Mapping[str, Any], **how: Any) -> Any:
    import jinja2

    if not model.tokenizer.chat_template:
        raise ArtifactError(f"{model.name} has no chat template; give it with --chat-template, as to vLLM")
    try:
        return model.tokenizer.apply_chat_template(msgspec.to_builtins(list(messages)), **how, **arguments)
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise ArtifactError(f"the chat template of {model.name} does not take these messages: {error}") from None
