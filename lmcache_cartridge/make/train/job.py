"""Job: one training from document and questions to a registered cartridge; an interrupted one goes on."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import torch
from blake3 import blake3
from tqdm import tqdm

from ...artifact import files
from ...artifact.manifest import Manifest, Training
from ...errors import CanaryFailed, CartridgeError, CartridgeExists
from ...library.registry import Registry
from ...settings import Settings
from .. import plot, questions
from ..compact.distill import gentle_rate
from ..compact.job import make
from ..compact.wanted import Wanted, check_positions
from ..document import read_document
from ..model import CausalModel
from ..payload import as_served
from ..progress import Bar, Bars
from ..questions import Question, model_writer, server_writer
from ..server import WRITER_KEY, Server
from ..write import write_trained
from . import lesson, retention
from .initial import initial_kv, positions_of, prefilled
from .retention import ACCEPT, Retention
from .sweep import Try, find_rate
from .trainer import CHECKPOINT, Recipe, Result, Trainer

RUN = "run.json"
QUESTIONS, HELD_OUT = "questions.jsonl", "held_out.jsonl"
MOST_HELD_OUT = 256
COMPACT = "compact"
"""The start that is a compaction for the questions to train on."""
REFINE = 30
"""Gradient steps for each layer of it: seconds. Without them 280 steps of training end at 99.6%, not 100.0 (16x, two sheets)."""
_CANARIES = 6
"""Held-out questions that a server may be made to try its engine with."""

_NO_BAR = partial(tqdm, disable=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What to train, as a person says it."""

    model: str
    document: Path
    id: str
    positions: int | None = None
    compress: float | None = None
    """The document's tokens over p, where `positions` is not given."""
    chunk_tokens: int = 256
    init: str = "sci"
    questions: Path | None = None
    template: Path | None = None
    self_study: int | None = None
    """Questions to be written by the model, or by that at `writer_url`."""
    writer_url: str | None = None
    writer_model: str | None = None
    held_out: Path | None = None
    form: str | None = None
    """`chat` or `text`; None is `chat` where the model has a template."""
    answer_tokens: int = 128
    top_k: int = 32
    precision: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    """Of the engine, for longrope."""
    payload: str = "plain"
    """One of `manifest.ENCODINGS`."""
    device: str = "cpu"
    lora: Path | None = None
    """Directory of a LoRA adapter, for whose requests the cartridge is."""
    recipe: Recipe = Recipe()


class Job:
    """Carries out one task. What it needs to go on lies in `training/<id>/<version>` of the home directory."""

    def __init__(self, task: Task, settings: Settings, registry: Registry, *, say: Callable[[str], None], bar: Bar):
        """`say` is told a line at a time what is done; `bar` shows progress."""
        self.task, self.settings, self.registry, self.say, self.bar = task, settings, registry, say, bar
        directory, self.version = settings.home / "training" / task.id, registry.next_version(task.id)
        if not (directory / str(self.version) / CHECKPOINT).exists():  # else an interrupted run goes on
            self.version = registry.next_version(task.id, settings.cartridges_dir)
        self.directory = directory / str(self.version)
        self.root = settings.cartridges_dir / task.id / str(self.version)

    def run(self, *, restart: bool = False, accept: float = ACCEPT, promote: bool = True) -> Manifest:
        """Train, write, register; return the manifest. Raises `CartridgeError`, and a second run then goes on.

        A cartridge that keeps less than `accept` of what the document adds is not registered: `CanaryFailed`, and a
        second run that accepts it registers it. With `restart` what an earlier run has left is removed first; without
        `promote` the id goes on to mean what it means.
        """
        if restart:
            shutil.rmtree(self.directory, ignore_errors=True)
        if self.root.exists() and not (self.directory / CHECKPOINT).exists():
            raise CartridgeExists(
                f"{self.root} exists, though it is not registered; register it, or "
                f"`lmcache-cartridge remove {self.task.id}@{self.version} --delete-files`"
            )
        model, recipe = self._model()
        document = read_document(model, self.task.document)
        ids = document.ids
        positions = self._positions(len(ids))
        kv = self._initial(model, ids, positions, recipe.seed)
        self._claim(document.blake3, model)
        form = self.task.form or ("chat" if model.tokenizer.chat_template else "text")
        to_train, held_out = self._questions(model, document.text, form)
        self.say(f"{len(to_train)} questions to train on, {len(held_out)} held out")
        document_kv = None
        if kv is None:
            with Bars(self.bar) as progress:
                document_kv = prefilled(model, ids, progress)
                wanted = Wanted(positions, to_train, form, refine=REFINE)
                kv = make(model, document_kv, ids, wanted, say=self.say, progress=progress).kv
            if recipe.rate is None:
                recipe = replace(recipe, rate=gentle_rate(kv))
                self.say(f"rate {recipe.rate:g}, low, since a compaction is near to where it should be")
        with Bars(self.bar) as progress:
            lessons = lesson.prepare(
                model, ids, [*to_train, *held_out], form=form, top_k=self.task.top_k,
                answer_tokens=self.task.answer_tokens, teach=recipe.objective == "distill",
                directory=self.settings.home / "training" / "lessons", kv=document_kv, progress=progress,
            )  # fmt: skip
        trainer = Trainer(
            model, kv, lessons, range(len(to_train), len(to_train) + len(held_out)), recipe,
            lambda kv: as_served(kv, model.fingerprint, self.task.payload, self.task.chunk_tokens),
        )  # fmt: skip
        tries = self._find_rate(trainer) if recipe.rate is None else []
        result = self._train(trainer)
        result = result._replace(
            seconds=result.seconds + sum(t.seconds for t in tries if t.rate != trainer.recipe.rate)
        )
        kept = self._gate(
            retention.measure(model, kv, lessons, trainer.held_out, result.score.answered), trainer, result, accept
        )
        if not self.root.exists():  # else a run that ended before it could register it wrote it
            recipe = trainer.recipe
            training = Training(
                recipe.objective, self.task.init, recipe.seed, len(to_train), len(held_out), result.steps, result.step,
                result.loss if result.steps else None, result.score.loss, result.score.answered.exact,
                round(result.seconds, 1), recipe.rate, kept,
            )  # fmt: skip
            provenance = model.provenance(
                "train", document=document.path.name, document_blake3=document.blake3, training=training
            )
            with Bars(self.bar) as progress:
                write_trained(
                    model, result.kv, self.root, provenance, cartridge_id=self.task.id, version=self.version,
                    chunk_tokens=self.task.chunk_tokens, document_ids=ids, encoding=self.task.payload,
                    questions=[model.question_ids(q.text, form) for q in held_out[:_CANARIES]], progress=progress,
                )  # fmt: skip
        manifest = self.registry.register(self.root, promote=promote)
        (self.directory / CHECKPOINT).unlink(missing_ok=True)
        return manifest

    def _model(self) -> tuple[CausalModel, Recipe]:
        task = self.task
        model = CausalModel(
            task.model, dtype=task.dtype, device=task.device, lora=task.lora, max_model_len=task.max_model_len
        )
        model.need_values("train")
        precision = self.task.precision or ("float32" if model.device.type == "cpu" else "bfloat16")
        if precision == "float32":
            model.model.float()
        return model, replace(self.task.recipe, autocast=precision == "bfloat16")

    def _initial(self, model: CausalModel, ids: list[int], positions: int, seed: int) -> torch.Tensor | None:
        """Return where training starts; None for a compaction, which needs the questions and is checked only."""
        if self.task.init != COMPACT:
            return initial_kv(self.task.init, model, ids, positions, seed)
        check_positions(positions, len(ids))
        return None

    def _positions(self, tokens: int) -> int:
        task = self.task
        positions = positions_of(tokens, task.chunk_tokens, compress=task.compress, positions=task.positions)
        asked = f"{task.positions} positions"
        if task.positions is None and task.compress is not None:
            asked = f"{tokens / task.compress:.1f} ({task.compress:g}x)"
        self.say(
            f"p = {positions} positions for a document of {tokens} tokens, {tokens / positions:.1f}x; asked for {asked}, "
            f"rounded to whole chunks of {task.chunk_tokens}, which is what an engine serves"
        )
        return positions

    def _claim(self, document: str, model: CausalModel) -> None:
        """Take the run's directory; raise `CartridgeError` if an interrupted run of another task has it."""
        task = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self.task).items()}
        for name in ("questions", "template", "held_out"):
            path = getattr(self.task, name)
            task[name] = path and blake3(path.read_bytes()).hexdigest()
        fingerprint = blake3(msgspec.json.encode(model.fingerprint)).hexdigest()
        claim = json.loads(json.dumps(task | {"document": document, "model": fingerprint}))
        path = self.directory / RUN
        if path.exists() and (self.directory / HELD_OUT).exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            if other := sorted(name for name in claim.keys() | found.keys() if claim.get(name) != found.get(name)):
                raise CartridgeError(
                    f"an interrupted training of {self.task.id}@{self.version} differs in {', '.join(other)}; "
                    f"go on with its options, or give --restart. It lies in {self.directory}"
                )
            self.say(f"going on with the training in {self.directory}")
        else:
            self.directory.mkdir(parents=True, exist_ok=True)
            files.replace(path, [json.dumps(claim, indent=2).encode()])

    def _questions(self, model: CausalModel, text: str, form: str) -> tuple[list[Question], list[Question]]:
        """Return the questions to train on and those held out: as drawn before, if this run was interrupted."""
        kept, apart = self.directory / QUESTIONS, self.directory / HELD_OUT
        if not apart.exists():
            found = self._gather(model, text, form)
            held_out = questions.read(self.task.held_out) if self.task.held_out else _hold_out(found)
            texts = {question.text for question in held_out}
            questions.save([question for question in found if question.text not in texts], kept)
            questions.save(held_out, apart)
        return questions.read(kept), questions.read(apart)

    def _gather(self, model: CausalModel, text: str, form: str) -> list[Question]:
        task, found = self.task, []
        if task.questions:
            found += questions.read(task.questions)
        if task.template:
            found += questions.from_template(task.template, text)
        if task.self_study:
            with ExitStack() as stack:
                write = model_writer(model, form)
                if task.writer_url:
                    write = server_writer(
                        stack.enter_context(Server(task.writer_url, task.writer_model, key=WRITER_KEY))
                    )
                progress = stack.enter_context(Bars(self.bar))
                found += questions.self_study(write, text, task.self_study, task.recipe.seed, progress)
        return questions.distinct(found)

    def _find_rate(self, trainer: Trainer) -> list[Try]:
        with self.bar(unit=" steps", desc="find the rate") as bar:

            def progress(rate: float) -> Callable[[int, float], None]:
                def step(step: int, loss: float) -> None:
                    bar.set_postfix(
                        rate=rate, loss=f"{loss:.4f}", held_out=f"{trainer.held_out_loss:.4f}", refresh=False
                    )
                    bar.update(1)

                return step

            tries = find_rate(trainer, self.directory, progress)
        found = ", ".join(f"{t.rate:g}: {t.loss:.4f}" for t in sorted(tries))
        self.say(
            f"rate {trainer.recipe.rate:g}, found in {sum(t.seconds for t in tries):.0f} s by held-out losses after a few "
            f"steps ({found})"
        )
        return tries

    def _train(self, trainer: Trainer) -> Result:
        try:
            with self.bar(total=trainer.recipe.steps, unit=" steps", desc="train") as bar:

                def progress(step: int, loss: float) -> None:
                    bar.set_postfix(loss=f"{loss:.4f}", held_out=f"{trainer.held_out_loss:.4f}", refresh=False)
                    bar.total = trainer.recipe.end(trainer.fall)
                    bar.update(step - bar.n)

                result = trainer.run(self.directory, progress)
        finally:
            plot.losses(trainer.rows, self.directory / "loss.png", self.task.id)
        why = "held-out questions got no better" if result.why == "held-out" else "all --steps are done"
        self.say(f"ended after {result.steps} steps: {why}; the best were the first {result.step}")
        return result

    def _gate(self, found: Retention, trainer: Trainer, result: Result, accept: float) -> float | None:
        """Return the share that the cartridge keeps; raise `CanaryFailed` where that is less than `accept`."""
        held_out, kept = len(trainer.held_out), found.kept
        figures = ", ".join(
            f"{getattr(found, way).exact:.1%} after {after}"
            for way, after in (("cartridge", "it"), ("document", "the document"), ("nothing", "neither"))
        )
        if kept is None:
            verdict = f"the document adds next to nothing to the answers of the {held_out} held-out questions"
        else:
            verdict = f"it keeps {max(0.0, kept):.0%} of what the document adds to the answers of {held_out} held-out questions"
        verdict += f" (exact: {figures})"
        if (kept or 0.0) >= ACCEPT:
            self.say(verdict)
        elif accept <= (kept or 0.0) or accept == 0:
            self.say(f"registered as --accept {accept:g} says, though {verdict}; {ACCEPT:.0%} is the rule")
        else:
            steps = ", more --steps" if result.why == "steps" else ""
            raise CanaryFailed(
                f"{self.task.id}@{self.version} is not registered: {verdict}, and must keep {accept:.0%}. Train anew with "
                f"--restart and more --positions, more questions or more wordings of them{steps}; or register it as it is: "
                f"the same command with --accept {max(0.0, math.floor(100 * (kept or 0.0)) / 100):g}. It lies in {self.directory}"
            )
        return None if kept is None else round(kept, 4)


def train(
    task: Task,
    settings: Settings,
    *,
    restart: bool = False,
    accept: float = ACCEPT,
    promote: bool = True,
    say: Callable[[str], None] = lambda line: None,
    bar: Bar = _NO_BAR,
) -> Manifest:
    """Train what `task` says, register it in the registry of `settings`, and return its manifest, as `Job.run` does.

    How it went is in the manifest's `provenance.training`. Blocks for as long as training takes: minutes to hours. `say` is told what is done a line at a time, `bar` makes
    progress bars, as tqdm does; without them it is silent.
    """
    job = Job(task, settings, Registry(settings.registry_path), say=say, bar=bar)
    return job.run(restart=restart, accept=accept, promote=promote)


def _hold_out(found: Sequence[Question]) -> list[Question]:
    """Draw a tenth of the questions, and at least one; the same ones for the same questions."""
    if len(found) < 2:
        raise CartridgeError(f"{len(found)} questions are too few to train on one and hold out another")
    return random.Random(0).sample(list(found), min(MOST_HELD_OUT, max(1, len(found) // 10)))
