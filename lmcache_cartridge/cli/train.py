"""Commands that train a cartridge and ask it: `train` and `evaluate`."""

from __future__ import annotations

import argparse
import math
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CartridgeError
from .options import (
    NAME,
    Verb,
    add_accept,
    add_device,
    add_length,
    add_lora,
    add_made,
    add_server_model,
    check_accept,
    check_files,
    check_made,
    check_numbers,
    load_model,
    registry_of,
    settings_of,
)
from .show import bar, bars, fields, say, show, size, table, working

if TYPE_CHECKING:
    from ..library.registry import RegistryEntry
    from ..make.ask import Asker

INITIALS = ("compact", "sci", "first-k", "vocab", "random")


def add(verb: Verb) -> None:
    """Add the commands to the command line."""
    _add_train(verb)
    _add_evaluate(verb)


def _add_train(verb: Verb) -> None:
    train = verb(
        "train", _train, "Train a cartridge much shorter than its document, and register it. Interrupted, it goes on.",
        "train --model ./llama --document handbook.txt --id handbook --compress 4x --questions questions.jsonl",
    )  # fmt: skip
    option = train.add_argument
    add_made(train)
    option("--document", required=True, type=Path, help="UTF-8 text file")
    add_length(train, "--compress", required=True)
    option("--init", choices=INITIALS, default="compact",
           help="where training starts: the document compacted for the questions; KV of 64-token chunks sampled over it; KV "
           "of its first p tokens; KV of random vocabulary tokens; random N(0, 0.02) (default compact). The first position "
           "is the document's own and stays")  # fmt: skip

    asked = train.add_argument_group("what to train on; several may be given")
    asked.add_argument(
        "--questions", type=Path, metavar="FILE",
        help='JSON lines {"question": ..., "answer": ...}; without an answer the model itself answers',
    )  # fmt: skip
    asked.add_argument(
        "--self-study", type=int, metavar="N", help="let a model write N questions on random parts of the document"
    )
    asked.add_argument(
        "--writer-url",
        metavar="URL",
        help="OpenAI-compatible server that writes them, not the model; its key is that in $WRITER_API_KEY",
    )
    asked.add_argument("--writer-model", metavar="NAME", help="its model (default: the first it serves)")
    asked.add_argument("--held-out", type=Path, metavar="FILE",
                       help="questions to measure it by at the end, never to train or to choose by (default: a tenth of the "
                       "others; another tenth chooses when to stop and what to keep)")  # fmt: skip
    asked.add_argument("--ask-as", choices=("chat", "text"),
                       help="a question is a user message, or text as it is (default: chat, if the model has a template)")  # fmt: skip
    asked.add_argument(
        "--answer-tokens", type=int, default=128, help="longest answer that the model gives itself (default 128)"
    )

    how = train.add_argument_group("how to train")
    how.add_argument("--objective", choices=("distill", "next-token"), default="distill",
                     help="match the predictions of the model with the document in context, or the answers alone")  # fmt: skip
    how.add_argument("--top-k", type=int, default=32, help="likeliest tokens to match; 0: all (default 32)")
    how.add_argument("--steps", type=int, default=4000,
                     help="at most; it ends before when the validation questions get no better (default 4000)")  # fmt: skip
    how.add_argument("--batch", type=int, default=32, help="questions in a forward pass (default 32)")
    how.add_argument("--accumulate", type=int, default=1, help="forward passes a step (default 1)")
    how.add_argument("--rate", type=float,
                     help="peak learning rate of AdamW (default: 0.015 of the deviation of the document's keys from a "
                     "compaction, 0.09 from another start)")  # fmt: skip
    how.add_argument("--schedule", choices=("plateau", "cosine", "constant"), default="plateau",
                     help="the rate after the warm-up; plateau: constant until patience ends, or half of --steps are done, "
                     "then down to 0 in as many steps again (default plateau)")  # fmt: skip
    how.add_argument("--warmup", type=int, default=10, help="steps to the peak (default 10)")
    how.add_argument("--jitter", type=int, default=32,
                     help="positions that half of the questions stand further back in training, at random; wordings not "
                     "trained on do better so (default 32)")  # fmt: skip
    how.add_argument("--check-every", type=int, default=25,
                     help="steps between checkpoints and looks at the validation questions (default 25)")  # fmt: skip
    how.add_argument("--patience", type=int, default=8,
                     help="looks without progress before the rate falls, or training ends where the schedule is another; "
                     "0: never (default 8)")  # fmt: skip
    how.add_argument("--precision", choices=("float32", "bfloat16"),
                     help="of the computation (default bfloat16 on a GPU, float32 elsewhere); the cartridge is float32 "
                     "until it is stored")  # fmt: skip
    how.add_argument("--seed", type=int, default=0)
    how.add_argument("--restart", action="store_true", help="forget an interrupted training of this id")
    then = train.add_argument_group("what becomes of it")
    add_accept(then, "the answers of the questions it is measured by")


def _add_evaluate(verb: Verb) -> None:
    evaluate = verb(
        "evaluate", _evaluate, "Ask questions without a prefix, after the document, and after a cartridge; compare.",
        "evaluate handbook --questions questions.jsonl --url http://localhost:8000",
    )  # fmt: skip
    option = evaluate.add_argument
    option("name", help=NAME)
    option("--questions", required=True, type=Path, help='JSON lines {"question": ..., "answer": ...}')
    where = evaluate.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--url", metavar="URL", help="server started by `lmcache-cartridge serve`; its key is that in $VLLM_API_KEY"
    )
    where.add_argument("--model", help="directory or cached Hub id; asked here with transformers")
    add_lora(evaluate, "with --model: ")
    add_server_model(evaluate)
    option("--document", type=Path, help="text of the document (default: the ids that the cartridge carries)")
    option("--ask-as", choices=("chat", "text"), help="as for train (default: chat, if the model has a template)")
    option("--answer-tokens", type=int, default=64, help="longest answer (default 64)")
    option("--limit", type=int, help="ask only so many questions, drawn evenly")
    option(
        "--judge-url",
        metavar="URL",
        help="OpenAI-compatible server that also scores each answer from 0 to 5; its key is that in $JUDGE_API_KEY",
    )
    option("--judge-model", metavar="NAME", help="its model (default: the first it serves)")
    option("--output", type=Path, metavar="DIR", help="write evaluation.json, with every answer, and evaluation.png")
    add_device(evaluate, "with --model: ")


def _train(arguments: argparse.Namespace) -> None:
    check_made(arguments, arguments.document, arguments.questions, arguments.held_out)
    check_numbers(
        arguments,
        at_least_one=("positions", "self_study", "answer_tokens", "steps", "batch", "accumulate", "check_every"),
        at_least_zero=("top_k", "warmup", "patience", "jitter"),
    )  # fmt: skip
    if arguments.rate is not None and not 0 < arguments.rate < math.inf:
        raise CartridgeError(f"--rate {arguments.rate:g} must be above 0")
    check_accept(arguments)
    if not (arguments.questions or arguments.self_study):
        raise CartridgeError("nothing to train on: give --questions or --self-study")
    if arguments.writer_url and not arguments.self_study:
        raise CartridgeError("--writer-url writes questions for --self-study; say how many")
    if missing := [name for name in ("torch", "transformers", "peft") if find_spec(name) is None]:
        raise CartridgeError(f"training needs {', '.join(missing)}; install lmcache-cartridge[train]")
    with working("load torch", arguments.format):
        from msgspec import to_builtins

        from ..make.gate import ACCEPT
        from ..make.train.job import Task, train
        from ..make.train.trainer import Recipe

    values = vars(arguments) | {"chunk_tokens": arguments.chunk_size, "form": arguments.ask_as}
    recipe = Recipe(**{name: values[name] for name in Recipe.__slots__ if name in values})
    task = Task(**{name: values[name] for name in Task.__slots__ if name in values}, recipe=recipe)
    settings, accept = settings_of(arguments), ACCEPT if arguments.accept is None else arguments.accept
    manifest = train(
        task, settings, restart=arguments.restart, accept=accept, promote=arguments.promote,
        say=partial(say, form=arguments.format), bar=partial(bar, arguments.format),
    )  # fmt: skip
    training = manifest.provenance.training
    assert training is not None and manifest.document is not None, "train wrote them"
    result = {
        "name": manifest.name,
        "promoted": manifest.name in registry_of(arguments).current([manifest.id]),
        "positions": manifest.positions,
        "compression": round(manifest.document.count / manifest.positions, 2),
        "bytes": manifest.payload_bytes,
        "digest": manifest.digest,
        **to_builtins(training),
        "ended": "all --steps are done"
        if training.steps == task.recipe.steps
        else "validation questions got no better",
        "losses": str(settings.home / "training" / manifest.id / str(manifest.version) / "loss.jsonl"),
    }
    show(result, fields(result | {"bytes": size(result["bytes"])}), arguments.format)


def _evaluate(arguments: argparse.Namespace) -> None:
    check_numbers(arguments, at_least_one=("answer_tokens", "limit"))
    check_files(arguments.questions, arguments.document)
    location = registry_of(arguments, read_only=True).find(arguments.name)
    from ..make import evaluate, questions
    from ..make.server import JUDGE_KEY, Server

    asked = evaluate.pick(questions.read(arguments.questions), arguments.limit)
    with ExitStack() as stack:
        judge = None
        if arguments.judge_url:
            judge = stack.enter_context(Server(arguments.judge_url, arguments.judge_model, key=JUDGE_KEY))
        asker = _asker(arguments, location, stack)
        progress = stack.enter_context(bars(arguments.format))
        answers = evaluate.ask_all(asker, asked, arguments.answer_tokens, judge=judge, progress=progress)
    report = evaluate.report(location.name, answers, judge.model if judge else None)
    if arguments.output:
        evaluate.write(report, answers, arguments.output)
    show(report, table(evaluate.rows(report)), arguments.format)


def _asker(arguments: argparse.Namespace, location: RegistryEntry, stack: ExitStack) -> Asker:
    """Return what asks the questions: a server, or the model here with the cartridge's KV, checked."""
    from ..artifact import reading
    from ..make.ask import ModelAsker, ServerAsker
    from ..make.questions import text_of
    from ..make.server import Server

    root = location.local_root()
    manifest = reading.load_manifest(root, location.digest)
    document: str | list[int]
    if arguments.document:
        document = text_of(arguments.document)
    elif manifest.kind == "trained" and manifest.document is None:
        raise CartridgeError(f"{manifest.name} carries no text of its document; give --document")
    else:
        ids = reading.load_document_ids(manifest, root)
        document = (reading.load_token_ids(manifest, root) if ids is None else ids).tolist()
    if arguments.url:
        server = stack.enter_context(Server(arguments.url, arguments.server_model))
        return ServerAsker(server, location.name, document, arguments.ask_as)
    if manifest.payload is None:
        raise CartridgeError(f"{manifest.name} has no KV; evaluate it on a server")
    from ..make.payload import read_checked

    model = load_model(arguments, manifest.fingerprint)
    with bars(arguments.format) as progress:
        kv = read_checked(manifest, root, model, progress)
    if isinstance(document, str):
        document = model.encode(document, special=True)
    return ModelAsker(model, document, kv, arguments.ask_as)
