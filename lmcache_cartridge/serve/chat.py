"""Chat: a request's messages, rendered as what comes behind those of a cartridge."""

from __future__ import annotations

from contextlib import suppress
from os.path import commonprefix
from typing import Any

import msgspec

from ..artifact.chat import Chat, Message
from ..engine.host_api import Around
from ..errors import ArtifactError
from .request import Refusal

STAND_IN = 200
"""Characters of a message that stand for it on servers. It is the end, so that a token that begins in the message and
ends behind it is the same."""
_GO_ON: Any = (
    *([{"role": "user", "content": text}] for text in ("Hi", "\n7 days?", "\n\n\nWhy?", " What?")),
    [
        {"role": "user", "content": "What?"},
        {"role": "assistant", "content": "This."},
        {"role": "user", "content": "Why?"},
    ],
)
"""How conversations may go on: other first characters, and more than one turn."""
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

    Where it closes a message only when the next has come, the ids end in the middle of it. Raises `ArtifactError` where they
    are not the first ids of every conversation that goes on, and `KeyError` or `TypeError` for what are no messages.
    """
    # Each shorter than its message: so it is seen where a template puts a message behind the ids.
    short = [each | {"content": each["content"][-min(STAND_IN, len(each["content"]) // 2) :]} for each in messages]

    async def ids_of(*turns: Any, add_generation_prompt: bool = True) -> list[int]:
        return await tokenized(
            messages=list(turns), chat_template_kwargs=arguments, add_generation_prompt=add_generation_prompt
        )

    whole, shown = [[await ids_of(*first, *more) for more in _GO_ON] for first in (messages, short)]
    found = [list(commonprefix(whole)[:-1])]
    with suppress(ArtifactError):  # a template may want a user's message
        found.insert(0, await ids_of(*messages, add_generation_prompt=False))
    for ids in found:
        left = len(whole[0]) - len(ids)
        chat = Chat(
            tuple(Message(**each) for each in short), tuple(shown[0][: max(0, len(shown[0]) - left)]), arguments
        )
        if chat.prefix and all([*ids, *(chat.behind(a) or [])] == b for a, b in zip(shown, whole, strict=True)):
            return ids, chat
    raise ArtifactError(
        "the chat template does not begin every conversation with these messages: they stand elsewhere or are changed when "
        "others follow; try another role, or end them with an assistant's"
    )


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
