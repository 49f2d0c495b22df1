"""CausalModel: a Hugging Face causal language model that authors run to make and check KV."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, DynamicCache
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging

from .. import __version__
from ..artifact.hf_config import (
    by_type,
    config_fields,
    of_config,
    quantisation_of,
    reach,
    rope_kinds,
    rope_parameters,
    takes_long_factors,
)
from ..artifact.manifest import Provenance
from ..artifact.model import Fingerprint, Pairing, Rope, rotating_layers, rotation_of
from ..artifact.weights import adapter_digest, weights_digest
from ..errors import UnsupportedModel
from ..memory.layout import DTYPES
from ..memory.rope import default_frequencies, rotate
from .checkpoint import ARGUMENTS, SEEING, auto_class, locate_model, outline, read_config, read_tokenizer
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

    By the best quarter of the tokens of `[T, ...]`: a router may send others to other experts for a rounding, most of
    them in the last layers of a model in bfloat16, while keys that rotate otherwise do so for every token.
    """
    error = [
        float(((x - found).float().flatten(1).norm(dim=1) / found.float().flatten(1).norm(dim=1)).quantile(0.25))
        for x in (first, second)
    ]
    if min(error) <= _SAME and 3 * min(error) <= max(error):
        return error[0] < error[1]
    return None


class CausalModel:
    """A model and its tokenizer, loaded from a local directory or the Hub cache; never from the network."""

    def __init__(
        self, name: str, *, dtype: str = "auto", device: str = "cpu", lora: Path | None = None,
        max_model_len: int | None = None, weights: bool = True,
    ) -> None:  # fmt: skip
        """Load the model. `dtype` is a key of `DTYPES`, or `auto` for the one it was saved in; `device` is one of torch's,
        or `auto` for the first GPU where there is one.

        `max_model_len` is the engine's, by which longrope is settled: see `artifact.hf_config.takes_long_factors`.
        With `lora`, a directory, it computes with that PEFT LoRA adapter in all it does. Raises `UnsupportedModel` when
        there is no such model or adapter here, or its KV cannot be a cartridge.

        Without `weights` it takes no memory and computes nothing: `prefill`, `logits` and the like are not to be had. How keys
        rotate is then known of the types in `hf_config.HALF`; a cartridge of any other stands first in a chain.
        """
        digest = None if lora is None else adapter_digest(lora)
        directory, self.name = locate_model(name)
        logging.disable_progress_bar()
        own = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(own if device == "auto" else device)
        options = self._checked_options(directory)  # before the weights are read, which may take minutes
        wanted = dtype if dtype == "auto" else DTYPES[dtype]
        self.model: Any = self._load(directory, wanted, options) if weights else outline(directory, wanted)
        self.max_model_len = max_model_len
        self._settle_rope()
        self.lora = lora
        self.tokenizer: Any = read_tokenizer(directory)
        self.fingerprint = msgspec.structs.replace(self._fingerprint(directory), lora=digest)
        self._order: list[int] | None = None
        """Which of a rotary key's elements transformers has where engines have the first, second, ...; None for the same."""
        rope = self.fingerprint.rope
        self.reorders = bool(rope) and rope[0].pairing is not None
        """Whether engines have the elements of a key in another order than transformers."""
        if weights:
            torch.nn.Module.to(self.model, self.device)  # PreTrainedModel's is typed for nothing but itself
            self.model.eval().requires_grad_(False)
            if lora is not None:
                add_adapter(self.model, lora)
            self._copies = self._copies_of_heads()
        if rope and weights:
            self.fingerprint = msgspec.structs.replace(self.fingerprint, rope=self._found(rope))
        else:
            self.fingerprint = by_type(self.fingerprint, self.model.config.model_type)

    def _found(self, rope: Rope) -> Rope:
        """Return how this model's keys rotate with what can be found out by trying only."""
        pairing, layers = self.rotation(rope)
        (first, *others), known = rope, rotating_layers(rope)
        if first.pairing is not None and first.pairing != pairing:  # of_config knows which it is in engines
            if pairing is None:
                raise UnsupportedModel("its keys do not rotate as its config says")
            pairs = torch.arange(first.rotary_dim)
            apart = pairs.view(2, -1).T if pairing == "half" else pairs.view(-1, 2).T
            self._order, pairing = apart.flatten().tolist(), first.pairing
        if None not in (known, layers) and known != layers:
            pairing, layers = None, None  # the config says otherwise, which is what an engine goes by
        replaced = {"pairing": pairing} if others else {"pairing": pairing, "layers": layers}
        return tuple(msgspec.structs.replace(each, **replaced) for each in rope)  # of which kind, the config says

    def need_values(self, verb: str) -> None:
        """Raise `UnsupportedModel` where a cache is not the keys and values of transformers, which `verb` is made for."""
        if self.fingerprint.planes != 2 or self.reorders:
            what = "latent vectors" if self.fingerprint.planes != 2 else "keys in another order in engines"
            raise UnsupportedModel(
                f"{verb}: {self.fingerprint.architecture} caches {what}, of which cartridges are made by a plain `build` alone"
            )

    @property
    def _text(self) -> Any:
        """What reads text of a model that also reads images, whose eyes have frequencies of their own; else the model."""
        return self.model.get_decoder() if hasattr(self.model.config, "vision_config") else self.model

    @staticmethod
    def _load(directory: Path, dtype: Any, options: dict[str, str]) -> Any:
        """Raises `UnsupportedModel` for a quantised model that transformers cannot compute here, or where weights are missing."""
        config = read_config(directory)
        quantised = quantisation_of(config.to_dict().get("quantization_config"))
        try:
            model, found = auto_class(config).from_pretrained(
                directory, config=config, dtype=dtype, output_loading_info=True, **ARGUMENTS, **options
            )
        except (ImportError, RuntimeError, ValueError) as error:
            if quantised is None:
                raise
            raise UnsupportedModel(
                f"{directory.name} is quantised ({quantised}), and transformers cannot compute it here "
                f"({str(error).strip().partition(chr(10))[0][:200]}); `build --url URL` has a server that runs it "
                "compute the KV"
            ) from error
        if missing := sorted(found["missing_keys"]):  # transformers warns, and draws them at random
            raise UnsupportedModel(
                f"{directory.name} lacks {len(missing)} of its model's weights, {missing[0]} for one"
            )
        return model

    @staticmethod
    def _checked_options(directory: Path) -> dict[str, str]:
        """Return what transformers must be told to load a model.

        Raises `UnsupportedModel` for one that its config alone tells to be none for cartridges.
        """
        whole = read_config(directory)
        config = whole.get_text_config()
        of_config(config_fields(config), dtype="float32")
        if whole.model_type not in SEEING and type(whole) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise UnsupportedModel(
                f"{whole.model_type} is none of the models that read images or sound beside text whose answers to text were "
                f"compared with an engine's; those are {', '.join(SEEING)}"
            )
        # PyTorch's attention, the default, leaves soft caps out without a word (transformers 5.19): 1.9 nats on a loud model.
        return {"attn_implementation": "eager"} if getattr(config, "attn_logit_softcapping", None) else {}

    def _fingerprint(self, directory: Path) -> Fingerprint:
        config = self.model.config
        fields = config_fields(config.get_text_config()) | {"architectures": config.architectures}
        return of_config(
            fields,
            dtype=str(self.model.dtype).removeprefix("torch."),
            frequencies={kind: self._frequencies(fields, kind) for kind in rope_kinds(fields)},
            weights=weights_digest(directory),
            max_model_len=self.max_model_len,
        )

    def _frequencies(self, config: dict[str, Any], kind: str | None) -> tuple[list[float], float]:
        """Return the frequencies of layers of a kind, and their attention factor, as the model keeps them."""
        prefix = f"{kind}_" if kind else ""
        for module in self._text.modules():
            if isinstance(inv_freq := getattr(module, f"{prefix}inv_freq", None), torch.Tensor):
                return inv_freq.tolist(), float(getattr(module, f"{prefix}attention_scaling", 1.0))
        if kind is None and rope_parameters(config)["rope_type"] == "default":  # GPT-J keeps a table of sines
            return default_frequencies(config), 1.0
        raise UnsupportedModel(f"{config['architectures'][0]} keeps its RoPE frequencies in a place that is not known")

    def _settle_rope(self) -> None:
        """Let longrope rotate every prompt by the factors that the engine takes, whatever the prompt's length."""
        config = self.model.config.get_text_config()
        is_long = takes_long_factors(config_fields(config), self.max_model_len)
        for module in self.model.modules() if is_long is not None else ():
            if getattr(module, "rope_type", None) == "longrope":
                tokens = self.max_model_len if is_long else None
                inverse, module.attention_scaling = ROPE_INIT_FUNCTIONS["longrope"](config, self.device, seq_len=tokens)
                module.inv_freq, module.rope_type = inverse, "default"  # this type's are never computed again

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
        expected = {(copies * shape.kv_heads, shape.head_size)}
        if shape.latent is not None:
            expected = {(1, shape.latent), (1, shape.head_size - shape.latent)}
        if len(cache.layers) != shape.layers or found != expected:
            raise UnsupportedModel(
                f"{shape.architecture} caches {len(cache.layers)} layers of {sorted(map(tuple, found))} heads and elements, "
                f"its config says {shape.layers} of {(shape.kv_heads, shape.head_size)}"
            )
        return copies

    @torch.inference_mode()
    def rotation(self, rope: Rope) -> tuple[Pairing | None, tuple[int, ...] | None]:
        """Return which dimensions of keys rotate together and in which layers, found by trying.

        Attention knows relative positions only, so a prompt that is moved as a whole has the same hidden states, and
        in every layer either the same keys or rotated ones: by its kind's frequencies where kinds have their own. None
        and unset where a layer's keys are neither.
        """
        offset = max(1, min(1000, (self.context_tokens or 2000) - len(_IDS)))
        here, there = self._keys(0), self._keys(offset)
        several = len(rope) > 1
        tried = [several and rotation_of(rope, layer) or rope[0] for layer in range(len(here))]
        for pairing in ("half", "interleaved"):
            ways = [msgspec.structs.replace(each, pairing=pairing) for each in tried]
            moved = [rotate(keys, way, offset) for keys, way in zip(here, ways, strict=True)]
            rotates = [_is_first(*layer) for layer in zip(moved, here, there, strict=True)]
            if not any(rotates) and None not in rotates:
                return None, ()
            if None not in rotates:
                return pairing, tuple(layer for layer, does in enumerate(rotates) if does)
        return None, None

    def _keys(self, start: int) -> torch.Tensor:
        """Return the keys `[L, T, H * D]` of a few tokens at `start` and the positions after it."""
        ids = torch.tensor([_IDS], device=self.device)
        cache: Any = DynamicCache()
        at = start + torch.arange(len(_IDS), device=self.device)[None]
        self.model(input_ids=ids, position_ids=at, past_key_values=cache, use_cache=True, logits_to_keep=1)
        name = "keys" if self.fingerprint.planes == 2 else "values"  # a rotary key stands beside its latent vector
        return torch.stack([getattr(layer, name)[0].transpose(0, 1) for layer in cache.layers]).cpu()

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
        """Yield the canonical KV `[planes, L, T, H, D]` of each slice of up to `slice_tokens` tokens, in order."""
        cache = DynamicCache()
        for start in range(0, len(ids), slice_tokens):
            part = torch.tensor([ids[start : start + slice_tokens]], device=self.device)
            self.model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1)
            yield self.canonical(cache, part.shape[1])

    def canonical(self, cache: Any, last: int = 0) -> torch.Tensor:
        """Return what a transformers cache of one sequence has, at its `last` positions or at all, as canonical KV."""
        found = [torch.stack([getattr(layer, name)[0, :: self._copies, -last:] for layer in cache.layers])
                 for name in ("keys", "values")]  # fmt: skip
        return self.planes(*(each.transpose(1, 2) for each in found)).cpu()

    def planes(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return what transformers caches, `[L, T, H, D]` each, as canonical KV `[planes, L, T, H, D]`, as engines have it."""
        if self.fingerprint.planes == 2:
            return torch.stack([keys if self._order is None else keys[..., self._order], values])
        return torch.cat([keys, values if self._order is None else values[..., self._order]], dim=-1)[None]

    def _cached(self, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what transformers caches of canonical KV: keys and values, or latent vectors and rotary keys."""
        order = ... if self._order is None else torch.tensor(self._order, device=kv.device).argsort()
        if self.fingerprint.latent is not None:
            latent, keys = kv[0].tensor_split([self.fingerprint.latent], dim=-1)
            return latent, keys[..., order]
        keys, values = kv.repeat_interleave(self._copies, dim=3)
        return keys[..., order], values

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
        keys, values = (each.transpose(1, 2) for each in self._cached(kv.to(self.device)))
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
    def sight(self) -> int | None:
        """How many positions every layer sees, its own with them; None where all layers see everything."""
        config = self.model.config.get_text_config()
        kinds = getattr(config, "layer_types", None) or ("sliding_attention",)
        sizes = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
        return min((size for kind in kinds if (size := getattr(config, sizes.get(kind, ""), None))), default=None)

    @property
    def has_alibi(self) -> bool:
        """Whether attention weighs positions by their distance (ALiBi)."""
        config = self.model.config.get_text_config()
        return config.model_type in ("bloom", "mpt") or bool(getattr(config, "alibi", False))

    @property
    def context_tokens(self) -> int | None:
        """Positions the model was made for; None where its config does not say. Of longrope those its factors are for."""
        config, rope = self.model.config.get_text_config(), self.fingerprint.rope
        if rope and rope[0].parameters.get("factors") == "short":
            return int(config.rope_parameters["original_max_position_embeddings"])
        given = getattr(config, "max_position_embeddings", None)
        most = reach(self.fingerprint.architecture)
        return given if most is None else min(given or most, most)

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
