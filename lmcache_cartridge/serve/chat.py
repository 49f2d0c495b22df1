"""Chat: a request's messages, rendered as what comes behind those of a cartridge."""

from __future__ import annotations

from typing import Any

import msgspec

from ..artifact.chat import Chat, Message
from ..engine.host_api import Around
from ..errors import ArtifactError
from .request import Refusal

STAND_IN = 200
"""Characters of a message that stand for it on servers. It is the end, so that a token that begins in the message and
ends behind it is the same."""
BEHIND = "behind"
"""Key of an engine's input whose ids are what comes behind a cartridge's messages, as they are."""
_OTHERWISE = (
    "the chat template does not begin this conversation with the cartridge's messages; tools, template arguments and "
    "truncation that change the beginning do not go with a cartridge of a chat, nor does another template or tokenizer than "
    "it was built with"
)
_NOT_RENDERED = (
    "this model's messages are rendered without a chat template; a cartridge of a chat does not go with that"
)


async def begun(tokenized: Any, messages: Any, arguments: Any) -> tuple[list[int], Chat]:
    """Return the ids that a chat template makes of messages, by what vLLM's `/tokenize` does, and how servers go on with them.

    Raises `ArtifactError` where those are not the first ids of a conversation that goes on, and `KeyError` or `TypeError` for
    what are no messages.
    """
    short = [each | {"content": each["content"][-STAND_IN:]} for each in messages]
    asked = {"role": "user", "content": "Hi"}
    ids, whole, prefix, shown = [
        await tokenized(messages=found, chat_template_kwargs=arguments, add_generation_prompt=False)
        for found in (messages, [*messages, asked], short, [*short, asked])
    ]
    chat = Chat(tuple(Message(**each) for each in short), tuple(prefix), arguments)
    if [*ids, *(chat.behind(shown) or [])] != whole:
        raise ArtifactError(
            "the chat template does not begin a conversation that goes on with these messages as they are; try another role, or "
            "end them with an assistant's"
        )
    return ids, chat


def behind(chat: Chat, ids: list[int], bos: int | None) -> list[int]:
    """Return what a rendered conversation has behind a cartridge's messages. Raises `Refusal` if it begins otherwise."""
    own = chat.behind(ids, bos)
    if own is None:
        raise Refusal(422, _OTHERWISE)
    return own


class ChatRenderer(Around):
    """vLLM's renderer, which renders messages behind a cartridge's and returns what comes behind those.

    One for each request. vLLM's own methods run on it, so that they come by for each list of messages.
    """

    def __init__(self, inner: Any, chat: Chat) -> None:
        super().__init__(inner)
        self._chat, self.rendered = chat, False
        """Whether messages were rendered, whose tokens are then what goes behind the cartridge's."""

    async def render_chat(self, request: Any, **kwargs: Any) -> Any:
        """Render a chat request. Raises `Refusal`, as all do here."""
        return self._checked(await type(self.inner).render_chat(self, request, **kwargs))

    async def render_responses(self, request: Any, **kwargs: Any) -> Any:
        """Render a Responses request."""
        return self._checked(await type(self.inner).render_responses(self, request, **kwargs))

    def _checked(self, result: Any) -> Any:
        if not self.rendered and not hasattr(result, "error"):
            raise Refusal(422, _NOT_RENDERED)
        return result

    async def preprocess_chat(
        self, request: Any, messages: list[Any], *, default_template_kwargs: dict[str, Any] | None, **kwargs: Any
    ) -> Any:
        """Render messages; the engine's inputs have only what comes behind the cartridge's."""
        conversation, inputs = await self.inner.preprocess_chat(
            request, [*msgspec.to_builtins(list(self._chat.messages)), *messages],
            default_template_kwargs={**(default_template_kwargs or {}), **self._chat.arguments}, **kwargs,
        )  # fmt: skip
        bos = getattr(self.inner.renderer.tokenizer, "bos_token_id", None)
        for each in inputs:
            if each.get("type") == "token":
                each["prompt_token_ids"] = behind(self._chat, each["prompt_token_ids"], bos)
                each[BEHIND] = True
        self.rendered = True
        return conversation[len(self._chat.messages) :], inputs
