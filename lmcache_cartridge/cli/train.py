"""Commands that train a cartridge and ask it: `train` and `evaluate`."""

from __future__ import annotations

import math
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..errors import CartridgeError
from .making import ONE, many
from .options import (
    Accept,
    AskAs,
    ChunkSize,
    Corpus,
    Device,
    Dtype,
    HeldOut,
    Id,
    Lora,
    Model,
    Name,
    NoPromote,
    OneDocument,
    Payload,
    Publish,
    Ray,
    ServerModel,
    Url,
    assignment,
    check,
    command,
    file,
    length,
    load_model,
    option,
    registry_of,
    settings_of,
    stored,
    tell,
)
from .show import bar, bars, say, show, table

if TYPE_CHECKING:
    from ..make.ask import Asker

RECIPE: dict[str, int | float | tuple[str, ...]] = {
    "objective": ("distill", "next-token"), "top_k": 0, "batch": 1, "accumulate": 1, "rate": 0.0, "warmup": 0, "jitter": 0,
    "schedule": ("plateau", "cosine", "constant"), "check_every": 1, "patience": 0, "precision": ("float32", "bfloat16"),
    "seed": 0, "answer_tokens": 1, "ask_as": ("chat", "text"), "max_model_len": 1,
    "init": ("compact", "sci", "first-k", "vocab", "random"),
}  # fmt: skip
"""What `--set` takes: what each may be, or the least number it may be."""
ANSWER_TOKENS = 64
"""Longest answer that `evaluate` asks for."""


@command("train --model ./llama --document handbook.txt --id handbook --compress 4x --questions questions.jsonl")
def train(
    corpus: Corpus = [],  # noqa: B006  Typer copies it
    *,
    id: Id = None,
    model: Model,
    document: OneDocument = None,
    compress: Annotated[
        str, option("p as a fraction of the document's tokens, rounded to whole chunks: 4x; or p itself", "--compress", "--positions", metavar="4x")
    ],
    questions: Annotated[
        Path | None, file('JSON lines {"question": ..., "answer": ...}; without an answer the model itself answers')
    ] = None,
    self_study: Annotated[
        int | None, option("let a model write so many questions on random parts of the document", min=1)
    ] = None,
    writer_url: Annotated[
        str | None,
        option("OpenAI-compatible server that writes them, not the model; its key is that in $WRITER_API_KEY, and its model that in $WRITER_MODEL, or the first it serves"),
    ] = None,
    held_out: HeldOut = None,
    steps: Annotated[
        int, option("at most; it ends before when the validation questions get no better", min=1)
    ] = 4000,
    set: Annotated[
        list[str],
        option(f"another setting of the training, as jitter=0; may be given often: {', '.join(RECIPE)}. init is where it starts: compact, the document compacted for the questions; sci, KV of 64-token chunks sampled over it; first-k, KV of its first p tokens; vocab, KV of random vocabulary tokens; random, N(0, 0.02)", metavar="NAME=VALUE"),
    ] = [],  # noqa: B006  Typer copies it
    accept: Accept = None,
    restart: Annotated[bool, option("forget an interrupted training of this id", "--restart")] = False,
    lora: Lora = None,
    chunk_size: ChunkSize = 256,
    dtype: Dtype = "auto",
    payload: Payload = "plain",
    device: Device = "auto",
    no_promote: NoPromote = False,
    publish: Publish = None,
    ray: Ray = None,
) -> int | None:  # fmt: skip
    """Train cartridges much shorter than their documents. Registers them; interrupted, it goes on."""
    if corpus:
        check(locals(), "--questions, --held-out need one document, not many; of many --self-study has them written",
              "--id, --document, --no-promote need one document, not many",
              "train of many documents needs --self-study; say how many questions on each")  # fmt: skip
    else:
        check(locals(), ONE, "train needs --id", "train needs --document", "train needs --questions or --self-study")
    check(locals(), "--writer-url needs --self-study; say how many")
    values = locals() | _recipe(set)
    values["compress"], values["positions"] = length(compress)
    from msgspec import to_builtins

    from ..make.gate import ACCEPT
    from ..make.train.job import Task
    from ..make.train.job import train as run
    from ..make.train.trainer import Recipe

    values |= {"chunk_tokens": chunk_size, "form": values.get("ask_as"), "writer_model": os.environ.get("WRITER_MODEL")}
    recipe = Recipe(**{name: values[name] for name in Recipe.__slots__ if name in values})
    task = {name: values[name] for name in Task.__slots__ if name in values} | {"recipe": recipe}
    if corpus:
        options = {name: task[name] for name in ("dtype", "device", "lora", "max_model_len") if name in task}
        said = {"accept": accept, "restart": restart, "compact": length(compress), "options": options, "train": task}
        return many(corpus, values | said)
    settings = settings_of()
    manifest = run(
        Task(**task), settings, restart=restart, accept=ACCEPT if accept is None else accept, promote=not no_promote,
        say=say, bar=bar,
    )  # fmt: skip
    losses = settings.home / "training" / manifest.id / str(manifest.version) / "loss.jsonl"
    tell(registry_of(), manifest, **to_builtins(manifest.provenance.training), losses=str(losses))
    return None


def _recipe(words: list[str]) -> dict[str, Any]:
    """Return what `--set` says. Raises `CartridgeError` for what is no setting, and for a value that it cannot have."""
    found = dict(map(assignment, words))
    for name, value in found.items():
        allowed = RECIPE.get(name)
        if allowed is None:
            raise CartridgeError(f"--set {name}: there is no such setting of a training; there are {', '.join(RECIPE)}")
        if isinstance(allowed, tuple):
            good, least = value in allowed, f"one of {', '.join(allowed)}"
        elif isinstance(allowed, float):
            good, least = type(value) in (int, float) and allowed < value < math.inf, f"a number above {allowed:g}"
        else:
            good, least = type(value) is int and value >= allowed, f"a whole number of at least {allowed}"
        if not good:
            raise CartridgeError(f"--set {name}={value} must be {least}")
    return found


@command("evaluate handbook --questions questions.jsonl --url http://localhost:8000")
def evaluate(
    name: Name,
    questions: Annotated[Path, file('JSON lines {"question": ..., "answer": ...}')],
    url: Url = None,
    model: Annotated[str | None, option("directory or cached Hub id; asked here with transformers")] = None,
    lora: Lora = None,
    server_model: ServerModel = None,
    document: Annotated[Path | None, file("text of the document (default: the ids that the cartridge carries)")] = None,
    ask_as: AskAs = None,
    judge_url: Annotated[
        str | None,
        option(
            "OpenAI-compatible server that also scores each answer from 0 to 5; its key is that in $JUDGE_API_KEY, and its model that in $JUDGE_MODEL, or the first it serves"
        ),
    ] = None,
    output: Annotated[Path | None, option("write evaluation.json, with every answer", metavar="DIR")] = None,
    device: Device = "auto",
) -> None:
    """Count right answers after a cartridge. Beside those without a prefix, and after the document."""
    check(locals(), "evaluate takes one of --url, --model; say who is asked")
    manifest, root = stored(name)
    from ..artifact import reading
    from ..make import evaluate
    from ..make.ask import ModelAsker, ServerAsker
    from ..make.questions import read, text_of
    from ..make.server import JUDGE_KEY, Server

    asked = read(questions)
    about: str | list[int]
    if document is not None:
        about = text_of(document)
    elif manifest.kind == "trained" and manifest.document is None:
        raise CartridgeError(f"{manifest.name} carries no text of its document; give --document")
    else:
        ids = reading.load_document_ids(manifest, root)
        about = (reading.load_token_ids(manifest, root) if ids is None else ids).tolist()
    with ExitStack() as stack:
        judge = None
        if judge_url is not None:
            judge = stack.enter_context(Server(judge_url, os.environ.get("JUDGE_MODEL"), key=JUDGE_KEY))
        progress = stack.enter_context(bars())
        asker: Asker
        if url is not None:
            asker = ServerAsker(stack.enter_context(Server(url, server_model)), manifest.name, about, ask_as)
        elif manifest.payload is None:
            raise CartridgeError(f"{manifest.name} has no KV; evaluate it on a server")
        else:
            from ..make.payload import read_checked
            from ..make.train.initial import prefilled

            loaded = load_model(str(model), manifest.fingerprint, lora=lora, device=device)
            kv = read_checked(manifest, root, loaded, progress)
            if isinstance(about, str):
                about = loaded.encode(about, special=True)
            asker = ModelAsker(loaded, prefilled(loaded, about, progress), kv, ask_as)
        answers = evaluate.ask_all(asker, asked, ANSWER_TOKENS, judge=judge, progress=progress)
    report = evaluate.report(manifest.name, answers, judge.model if judge else None)
    if output:
        evaluate.write(report, answers, output)
    show(report, table(evaluate.rows(report)))
