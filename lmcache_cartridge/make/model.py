"""CausalModel: a Hugging Face causal language model that authors run to make and check KV."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import logging

from .. import __version__
from ..artifact import fingerprint
from ..artifact.fingerprint import Fingerprint, Rope
from ..artifact.lora import adapter_digest
from ..artifact.manifest import Provenance
from ..errors import UnsupportedModel
from ..memory.layout import DTYPES
from ..memory.rope import default_frequencies, rotate
from .lora import add_adapter

ROWS_BYTES = 512 << 20
"""Memory that sequences sharing one prefix may take for their copies of it."""
_SAME = 0.1
"""Relative error below which keys are the same but for rounding. In bfloat16 it grows with the layers; of keys that were
not rotated it is about 1."""
_IDS = range(1, 9)
"""Tokens to try a model with."""
_MARK = re.compile(r"<[^<>]+>|\[[A-Z_]+\]")
"""Texts that templates, tools and images use as marks even where a tokenizer does not list them as special."""


def _is_first(first: torch.Tensor, second: torch.Tensor, found: torch.Tensor) -> bool | None:
    """Return whether `found` is `first`, False where it is `second`; None if it is neither or they are too alike.

    By the median token of `[T, ...]`, which a router that sends some tokens to other experts does not move.
    """
    error = [
        float(((x - found).float().flatten(1).norm(dim=1) / found.float().flatten(1).norm(dim=1)).median())
        for x in (first, second)
    ]
    if min(error) <= _SAME and 3 * min(error) <= max(error):
        return error[0] < error[1]
    return None


class CausalModel:
    """A model and its tokenizer, loaded from a local directory or the Hub cache; never from the network."""

    def __init__(self, name: str, *, dtype: str = "auto", device: str = "cpu", lora: Path | None = None) -> None:
        """Load the model. `dtype` is a key of `DTYPES`, or `auto` for the one it was saved in.

        With `lora`, a directory, it computes with that PEFT LoRA adapter in all it does. Raises `UnsupportedModel` when
        there is no such model or adapter here, or its KV cannot be a cartridge.
        """
        digest = None if lora is None else adapter_digest(lora)
        directory = fingerprint.model_directory(name)
        if directory is None:
            raise UnsupportedModel(
                f"{name} is neither a directory nor a model in the local Hub cache; download it first"
            )
        logging.disable_progress_bar()
        self.name = directory.name if Path(name).is_dir() else name
        self.device = torch.device(device)
        self._check_config(directory)  # before the weights are read, which may take minutes
        wanted = dtype if dtype == "auto" else DTYPES[dtype]
        self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=wanted, local_files_only=True)
        torch.nn.Module.to(self.model, self.device)  # PreTrainedModel's is typed for nothing but itself
        self.model.eval().requires_grad_(False)
        self.lora = lora
        if lora is not None:
            add_adapter(self.model, lora)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        self.fingerprint = msgspec.structs.replace(self._fingerprint(directory), lora=digest)
        self._copies = self._copies_of_heads()
        if (rope := self.fingerprint.rope) is not None:
            pairing, layers = self.rotation(rope)
            if msgspec.UNSET not in (rope.layers, layers) and rope.layers != layers:
                layers = msgspec.UNSET  # the config says otherwise, which is what an engine goes by
            rope = msgspec.structs.replace(rope, pairing=pairing, layers=layers)
            self.fingerprint = msgspec.structs.replace(self.fingerprint, rope=rope)

    @staticmethod
    def _check_config(directory: Path) -> None:
        """Raise `UnsupportedModel` for a model that its config alone tells to be none for cartridges."""
        config = AutoConfig.from_pretrained(directory, local_files_only=True).get_text_config()
        fingerprint.of_config(fingerprint.config_fields(config), dtype="float32", inv_freq=None)

    def _fingerprint(self, directory: Path) -> Fingerprint:
        config = self.model.config
        fields = fingerprint.config_fields(config.get_text_config()) | {"architectures": config.architectures}
        inv_freq, factor = None, 1.0
        if rotary := [m for m in self.model.modules() if isinstance(getattr(m, "inv_freq", None), torch.Tensor)]:
            inv_freq, factor = rotary[0].inv_freq.tolist(), getattr(rotary[0], "attention_scaling", 1.0)
        elif fingerprint.rope_parameters(fields).get("rope_type") == "default":  # GPT-J keeps a table of sines
            inv_freq = default_frequencies(fields)
        return fingerprint.of_config(
            fields,
            dtype=str(self.model.dtype).removeprefix("torch."),
            inv_freq=inv_freq,
            attention_factor=factor,
            weights=fingerprint.weights_digest(directory),
        )

    @torch.inference_mode()
    def _copies_of_heads(self) -> int:
        """Return how often transformers caches each KV head: once, but for Falcon's newer models.

        Raises `UnsupportedModel` where the cache is not what the fingerprint says engines have.
        """
        shape = self.fingerprint
        cache: Any = DynamicCache()
        self.model(input_ids=torch.tensor([_IDS], device=self.device), past_key_values=cache, logits_to_keep=1)
        found = {plane.shape[1::2] for layer in cache.layers for plane in (layer.keys, layer.values)}
        copies = cache.layers[0].keys.shape[1] // shape.kv_heads
        if len(cache.layers) != shape.layers or found != {(copies * shape.kv_heads, shape.head_size)}:
            raise UnsupportedModel(
                f"{shape.architecture} caches {len(cache.layers)} layers of {sorted(map(tuple, found))} heads and elements, "
                f"its config says {shape.layers} of {(shape.kv_heads, shape.head_size)}"
            )
        return copies

    @torch.inference_mode()
    def rotation(self, rope: Rope) -> tuple[Literal["half", "interleaved"] | None, tuple[int, ...] | msgspec.UnsetType]:
        """Return which dimensions of keys rotate together and in which layers, found by trying.

        Attention knows relative positions only, so a prompt that is moved as a whole has the same hidden states, and
        in every layer either the same keys or rotated ones. None and unset where a layer's keys are neither.
        """
        offset = max(1, min(1000, (self.context_tokens or 2000) - len(_IDS)))
        here, there = self._keys(0), self._keys(offset)
        for pairing in ("half", "interleaved"):
            moved = rotate(here, msgspec.structs.replace(rope, pairing=pairing), offset)
            rotates = [_is_first(*layer) for layer in zip(moved, here, there, strict=True)]
            if not any(rotates) and None not in rotates:
                return None, ()
            if None not in rotates:
                return pairing, tuple(layer for layer, does in enumerate(rotates) if does)
        return None, msgspec.UNSET

    def _keys(self, start: int) -> torch.Tensor:
        """Return the keys `[L, T, H * D]` of a few tokens at `start` and the positions after it."""
        ids = torch.tensor([_IDS], device=self.device)
        cache: Any = DynamicCache()
        at = start + torch.arange(len(_IDS), device=self.device)[None]
        self.model(input_ids=ids, position_ids=at, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return torch.stack([layer.keys[0].transpose(0, 1) for layer in cache.layers]).cpu()

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Return token ids; with `special` as a prompt begins (BOS where the tokenizer adds one), never with EOS."""
        ids = self.tokenizer(text, add_special_tokens=special).input_ids
        if special and len(ids) > 1 and ids[-1] == self.tokenizer.eos_token_id:
            ids = ids[:-1]
        return ids

    def ordinary_ids(self) -> np.ndarray:
        """Return the ids that identity tokens are drawn from: words that mean nothing to a server.

        No special, added or mark-like token, and no id that the tokenizer does not use.
        """
        taken = {*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder}
        size = min(len(self.tokenizer), self.fingerprint.vocab_size)
        texts = self.tokenizer.convert_ids_to_tokens(list(range(size)))
        return np.array([i for i, text in enumerate(texts) if text and i not in taken and not _MARK.fullmatch(text)])

    @torch.inference_mode()
    def prefill(self, ids: list[int], slice_tokens: int) -> Iterator[torch.Tensor]:
        """Yield the canonical KV `[2, L, T, H, D]` of each slice of up to `slice_tokens` tokens, in order."""
        cache = DynamicCache()
        for start in range(0, len(ids), slice_tokens):
            part = torch.tensor([ids[start : start + slice_tokens]], device=self.device)
            self.model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1)
            count = part.shape[1]
            planes = [torch.stack([getattr(layer, name)[0, :: self._copies, -count:] for layer in cache.layers])
                      for name in ("keys", "values")]  # fmt: skip
            yield torch.stack(planes).transpose(2, 3).cpu()

    @torch.inference_mode()
    def logits(self, ids: list[int], last: int) -> torch.Tensor:
        """Return float32 logits `[last, vocabulary]` at the last positions of a plain forward pass over `ids`."""
        out = self.model(input_ids=torch.tensor([ids], device=self.device), use_cache=False, logits_to_keep=last)
        return out.logits[0].float().cpu()

    @torch.inference_mode()
    def logits_after(self, kv: torch.Tensor, ids: list[int]) -> torch.Tensor:
        """Return float32 logits `[len(ids), vocabulary]` of `ids` after canonical KV `[2, L, T, H, D]`."""
        rows = torch.tensor([ids], device=self.device)
        return self.model(input_ids=rows, past_key_values=self.cache(kv, 1), use_cache=True).logits[0].float().cpu()

    def cache(self, kv: torch.Tensor, rows: int) -> DynamicCache:
        """Return canonical KV `[2, L, T, H, D]` as `past_key_values` of `rows` sequences, without copying it for each."""
        cache = DynamicCache()
        keys, values = kv.transpose(2, 3).to(self.device).repeat_interleave(self._copies, dim=2)
        for layer in range(keys.shape[0]):
            shape = (rows, -1, -1, -1)
            cache.update(keys[layer : layer + 1].expand(shape), values[layer : layer + 1].expand(shape), layer)
        return cache

    def passes(self, rows: Sequence[Sequence[int]], kv: torch.Tensor | None) -> Iterator[list[int]]:
        """Yield indices of rows that go through one forward pass after `kv`: of one length, so that none is padded.

        Each layer makes a copy of the KV for each.
        """
        size = 64 if kv is None else max(1, min(64, ROWS_BYTES // (kv.nbytes + 1)))
        order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
        for _, same in groupby(order, lambda index: len(rows[index])):
            alike = list(same)
            yield from (alike[start : start + size] for start in range(0, len(alike), size))

    @torch.no_grad()
    def answers_after(
        self,
        kv: torch.Tensor | None,
        prompts: Sequence[list[int]],
        tokens: int,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[list[int]]:
        """Return the greedy continuation of each prompt after canonical KV, or after nothing; the end token left out.

        `progress` counts prompts.
        """
        found: list[list[int]] = [[] for _ in prompts]
        done = 0
        for part in self.passes(prompts, kv):
            for index, answer in zip(part, self._continue(kv, [prompts[i] for i in part], tokens), strict=True):
                found[index] = answer
            done += len(part)
            progress(done, len(prompts))
        return found

    def _continue(self, kv: torch.Tensor | None, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
        cache = DynamicCache() if kv is None else self.cache(kv, len(prompts))
        ids = torch.tensor(prompts, device=self.device)
        new: list[torch.Tensor] = []
        ended = torch.zeros(len(prompts), dtype=torch.bool, device=self.device)
        ends = torch.tensor(self.end_ids, device=self.device)
        while len(new) < tokens and not ended.all():
            logits = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            ids = logits.argmax(-1)
            ended |= torch.isin(ids[:, 0], ends)
            new.append(ids)
        rows = torch.cat(new, 1).tolist() if new else [[] for _ in prompts]
        cut = [next((i for i, token in enumerate(row) if token in self.end_ids), len(row)) for row in rows]
        return [row[:end] for row, end in zip(rows, cut, strict=True)]

    @property
    def context_tokens(self) -> int | None:
        """Positions the model was made for; None where its config does not say."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    @property
    def end_ids(self) -> list[int]:
        """Ids that end an answer, the one to train on first; empty where the model has none."""
        ends = getattr(self.model.generation_config, "eos_token_id", None)
        ends = [ends] if isinstance(ends, int) else list(ends or [])
        return list(dict.fromkeys(i for i in [*ends, self.tokenizer.eos_token_id] if i is not None))

    def question_ids(self, question: str, form: str) -> list[int]:
        """Return the ids of a question as it follows a document: a user message if `form` is `chat`, else as it is."""
        if form == "text":
            return self.encode(question, special=False)
        message = [{"role": "user", "content": question}]
        ids = self.tokenizer.apply_chat_template(message, tokenize=True, add_generation_prompt=True, return_dict=False)
        start = next((i for i, token in enumerate(ids) if token != self.tokenizer.bos_token_id), len(ids))
        return ids[start:]

    def provenance(self, verb: str, **facts: Any) -> Provenance:
        """Return where a cartridge comes from that `lmcache-cartridge verb` makes now; `facts` are other fields of it."""
        created = datetime.now(UTC).isoformat(timespec="seconds")
        tool = f"lmcache-cartridge {__version__} {verb}"
        lora = None if self.lora is None else self.lora.resolve().name
        return Provenance(tool=tool, created=created, model=self.name, lora=lora, **facts)
