"""A document as the first messages of a chat, in the tokens that the model's own template makes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ..artifact.chat import MAX_MESSAGES, Chat, Message
from ..errors import ArtifactError
from ..serve.chat import begun
from .document import Document, check_fits, read_text
from .model import CausalModel

_Messages = Annotated[list[Message], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
_decode_messages = msgspec.json.Decoder(_Messages).decode


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
        return _decode_messages(text)
    except ValueError as error:
        raise ArtifactError(f"{path} is no JSON list of messages with role and content, both text: {error}") from None


def render(model: CausalModel, messages: Sequence[Message], arguments: Mapping[str, Any]) -> tuple[list[int], Chat]:
    """Return the ids that the template makes of messages, and how servers go on with them, as `serve.chat.begun` does.

    Raises `ArtifactError` where the ids are not the first of every longer conversation, or depend on the day.
    """

    async def tokenized(messages: Any, chat_template_kwargs: Any, add_generation_prompt: bool) -> list[int]:
        return _ids(model, messages, chat_template_kwargs, add_generation_prompt=add_generation_prompt)

    plain = msgspec.to_builtins(list(messages))
    ids, chat = asyncio.run(begun(tokenized, plain, dict(arguments)))
    another = {"strftime_now": lambda form: "another day"} | dict(arguments)
    if _behind(model, chat, "Hi", another) is None:
        raise ArtifactError(
            f"the chat template of {model.name} writes today's date before the document, so no other day's requests "
            """begin so; give the date to --chat-arguments, such as '{"date_string": "26 Jul 2024"}'"""
        )
    return ids, chat


def question_ids(model: CausalModel, text: str, chat: Chat | None) -> list[int]:
    """Return the ids of a question as it follows a cartridge: as it is, or as a user's message of its chat."""
    if chat is None:
        return model.encode(text, special=False)
    ids = _behind(model, chat, text.strip(), chat.arguments)
    if ids is None:
        raise ArtifactError(f"the chat template of {model.name} is not the one that the cartridge was made with")
    return ids


def _behind(model: CausalModel, chat: Chat, text: str, arguments: Mapping[str, Any]) -> list[int] | None:
    messages = msgspec.to_builtins([*chat.messages, Message("user", text)])
    return chat.behind(_ids(model, messages, arguments, add_generation_prompt=True))


def _ids(model: CausalModel, messages: Any, arguments: Mapping[str, Any], *, add_generation_prompt: bool) -> list[int]:
    import jinja2

    if not model.tokenizer.chat_template:
        raise ArtifactError(f"{model.name} has no chat template; give it with --chat-template, as to vLLM")
    try:
        return model.tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=False, add_generation_prompt=add_generation_prompt, **arguments
        )
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise ArtifactError(f"the chat template of {model.name} does not take these messages: {error}") from None
