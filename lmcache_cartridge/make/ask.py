"""Asking a model questions three ways: without a prefix, after the document, and after the cartridge.

Here with transformers, or on a running server.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from ..errors import SourceError
from .progress import Progress
from .server import Server

if TYPE_CHECKING:
    import torch

    from .model import CausalModel

Way = Literal["no prefix", "document", "cartridge"]
WAYS: tuple[Way, ...] = ("no prefix", "document", "cartridge")
_AT_ONCE = 8
"""Requests to a server."""


class ModelAsker:
    """Asks a model loaded here."""

    def __init__(self, model: CausalModel, document: torch.Tensor, cartridge: torch.Tensor, form: str | None) -> None:
        """`document` and `cartridge` are canonical KV. `form` is `chat`, `text`, or None for `chat` if the model has a template."""
        self._model, dtype = model, model.model.dtype
        self._form = form or ("chat" if model.tokenizer.chat_template else "text")
        self._kv = {"no prefix": None, "document": document.to(dtype), "cartridge": cartridge.to(dtype)}

    def ask(self, way: Way, questions: Sequence[str], tokens: int, progress: Progress) -> list[str]:
        """Return the answers, `tokens` long at most, without surrounding spaces. Blocks until all are there.

        `progress` counts those of this way.
        """
        start = self._model.encode("", special=True) if way == "no prefix" else []
        prompts = [[*start, *self._model.question_ids(question, self._form)] for question in questions]
        answers = self._model.answers_after(self._kv[way], prompts, tokens, partial(progress, way))
        return [self._model.tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in answers]


class ServerAsker:
    """Asks a server that serves cartridges, by token ids, so that the ways differ in nothing but the prefix."""

    def __init__(self, server: Server, cartridge: str, document: str | list[int], form: str | None) -> None:
        """`cartridge` is its name there. `document` is its text, or its ids. Raises `SourceError` if it does not answer."""
        self._server, self._cartridge = server, cartridge
        self._form = form or self._find_form()
        empty = server.tokenize(prompt="", add_special_tokens=True)
        self._start = empty[:1]
        self._document = document
        if isinstance(document, str):
            ids = server.tokenize(prompt=document, add_special_tokens=True)
            self._document = ids[:-1] if len(empty) > 1 and ids[-1:] == empty[-1:] else ids  # an end token

    def ask(self, way: Way, questions: Sequence[str], tokens: int, progress: Progress) -> list[str]:
        """As `ModelAsker.ask`. Raises `SourceError` at the first request that the server refuses."""
        answers = []
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for answer in pool.map(lambda question: self._ask(way, question, tokens), questions):
                answers.append(answer)
                progress(way, len(answers), len(questions))
        return answers

    def _ask(self, way: Way, question: str, tokens: int) -> str:
        own = self._question(question)
        body: dict[str, Any] = {"model": self._server.model, "max_tokens": tokens, "temperature": 0}
        if way == "cartridge":
            body |= {"prompt": own, "cartridges": [self._cartridge]}
        else:
            prefix = self._document if way == "document" else self._start
            body |= {"prompt": [*prefix, *own], "cartridges": False}
        return self._server.post("/v1/completions", body, lambda reply: reply["choices"][0]["text"].strip())

    def _question(self, question: str) -> list[int]:
        if self._form == "text":
            return self._server.tokenize(prompt=question, add_special_tokens=False)
        messages = [{"role": "user", "content": question}]
        ids = self._server.tokenize(messages=messages, add_generation_prompt=True, add_special_tokens=False)
        return ids[1:] if ids[:1] == self._start and self._start else ids

    def _find_form(self) -> str:
        try:
            self._server.tokenize(messages=[{"role": "user", "content": "x"}])
        except SourceError:  # vLLM answers 400 for a model without a chat template
            return "text"
        return "chat"


Asker = ModelAsker | ServerAsker
"""Answers questions greedily."""
