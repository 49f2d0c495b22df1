"""Job: one training from document and questions to a registered cartridge; an interrupted one goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import torch
from blake3 import blake3
from tqdm import tqdm

from ...artifact import files
from ...artifact.manifest import Manifest, Measured, Training
from ...errors import CartridgeError, CartridgeExists
from ...library.registry import Registry
from ...settings import Settings
from .. import gate, plot, questions
from ..compact.job import make
from ..compact.wanted import Wanted
from ..document import read_document
from ..gate import ACCEPT
from ..model import CausalModel
from ..payload import as_served, rounded
from ..progress import Bar, Bars, Progress
from ..questions import Question, Split, model_writer, server_writer, split
from ..server import WRITER_KEY, Server
from ..write import write_trained
from . import lesson
from .initial import COMPACT, check_positions, initial_kv, positions_of, prefilled, usual_rate
from .trainer import CHECKPOINT, Recipe, Result, Trainer

RUN = "run.json"
FILES = "questions.jsonl", "validation.jsonl", "test.jsonl"
"""What is trained on, what chooses, and what measures."""
_CANARIES = 6
"""Questions that a server may be made to try its engine with."""

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
    init: str = COMPACT
    questions: Path | None = None
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
    """That of `manifest.Payload`."""
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

        One that keeps less than `accept` of what the document adds to the answers of questions that neither training nor a
        choice has seen is not registered: `CanaryFailed`, and a second run that accepts it registers it. With `restart` what an earlier run has left is removed first; without
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
        ids, task = document.ids, self.task
        positions = self._positions(len(ids))
        self._claim(document.blake3, model)
        form = task.form or ("chat" if model.tokenizer.chat_template else "text")
        parts = self._questions(model, document.text, form)
        self.say(
            f"{len(parts.fit)} questions to train on, {len(parts.validation)} to choose by, {len(parts.test)} to measure by"
        )
        with Bars(self.bar) as progress:
            whole = prefilled(model, ids, progress)
            lessons = lesson.prepare(
                model, ids, [*parts.fit, *parts.validation], whole, form=form, top_k=task.top_k,
                answer_tokens=task.answer_tokens, teach=recipe.objective == "distill",
                directory=self.settings.home / "training" / "lessons", progress=progress,
            )  # fmt: skip
            kv = self._start(model, ids, whole, positions, parts, form, progress)
        if recipe.rate is None:
            recipe = replace(recipe, rate=usual_rate(task.init, whole))
            self.say(f"rate {recipe.rate:g}, by the size of the document's keys")
        trainer = Trainer(model, kv, lessons, range(len(parts.fit), len(lessons.examples)), recipe)
        result = self._train(trainer)
        with Bars(self.bar) as progress:
            served = as_served(
                rounded(result.kv, model.fingerprint), model.fingerprint, task.payload, task.chunk_tokens
            )
            measured = gate.measure(model, whole, served, parts.test, form, task.answer_tokens, progress=progress)
        self._judge(measured, result, accept)
        if not self.root.exists():  # else a run that ended before it could register it wrote it
            training = Training(
                recipe.objective, task.init, recipe.seed, len(parts.fit), result.steps, result.step,
                result.loss if result.steps else None, round(result.seconds, 1), recipe.rate, len(parts.validation),
                measured,
            )  # fmt: skip
            provenance = model.provenance(
                "train", document=document.path.name, document_blake3=document.blake3, training=training
            )
            with Bars(self.bar) as progress:
                write_trained(
                    model, result.kv, self.root, provenance, cartridge_id=task.id, version=self.version,
                    chunk_tokens=task.chunk_tokens, document_ids=ids, encoding=task.payload,
                    questions=[model.question_ids(q.text, form) for q in parts.validation[:_CANARIES]],
                    progress=progress,
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

    def _start(
        self, model: CausalModel, ids: list[int], kv: torch.Tensor, positions: int, parts: Split, form: str,
        progress: Progress,
    ) -> torch.Tensor:  # fmt: skip
        """Return where training starts: the document's KV compacted for the questions, or as `INITIALS` says."""
        if self.task.init != COMPACT:
            return initial_kv(self.task.init, model, ids, positions, self.task.recipe.seed)
        wanted = Wanted(positions, parts.fit, form=form)
        return make(model, kv, ids, wanted, parts.validation, say=self.say, progress=progress).kv

    def _positions(self, tokens: int) -> int:
        task = self.task
        positions = positions_of(tokens, task.chunk_tokens, compress=task.compress, positions=task.positions)
        check_positions(positions, tokens)
        rounded = f", rounded to whole chunks of {task.chunk_tokens}" if task.positions is None else ""
        self.say(f"p = {positions} positions for a document of {tokens} tokens, {tokens / positions:.1f}x{rounded}")
        return positions

    def _claim(self, document: str, model: CausalModel) -> None:
        """Take the run's directory; raise `CartridgeError` if an interrupted run of another task has it."""
        task = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self.task).items()}
        for name in ("questions", "held_out"):
            path = getattr(self.task, name)
            task[name] = path and blake3(path.read_bytes()).hexdigest()
        fingerprint = blake3(msgspec.json.encode(model.fingerprint)).hexdigest()
        claim = json.loads(json.dumps(task | {"document": document, "model": fingerprint}))
        path = self.directory / RUN
        if path.exists() and (self.directory / FILES[-1]).exists():
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

    def _questions(self, model: CausalModel, text: str, form: str) -> Split:
        """Return the questions by their use: as drawn before, if this run was interrupted."""
        paths = [self.directory / name for name in FILES]
        if not paths[-1].exists():
            test = questions.read(self.task.held_out) if self.task.held_out else ()
            for part, path in zip(split(self._gather(model, text, form), test), paths, strict=True):
                questions.save(part, path)
        return Split(*map(questions.read, paths))

    def _gather(self, model: CausalModel, text: str, form: str) -> list[Question]:
        task, found = self.task, []
        if task.questions:
            found += questions.read(task.questions)
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

    def _train(self, trainer: Trainer) -> Result:
        try:
            with self.bar(total=trainer.recipe.steps, unit=" steps", desc="train") as bar:

                def progress(step: int, loss: float) -> None:
                    bar.set_postfix(loss=f"{loss:.4f}", validation=f"{trainer.validation_loss:.4f}", refresh=False)
                    bar.total = trainer.recipe.end(trainer.fall)
                    bar.update(step - bar.n)

                result = trainer.run(self.directory, progress)
        finally:
            plot.losses(trainer.rows, self.directory / "loss.png", self.task.id)
        why = "validation questions got no better" if result.why == "validation" else "all --steps are done"
        self.say(f"ended after {result.steps} steps: {why}; the best were the first {result.step}")
        return result

    def _judge(self, measured: Measured, result: Result, accept: float) -> None:
        """Say what it keeps; raise `CanaryFailed` where that is less than `accept`."""
        steps = ", more --steps" if result.why == "steps" else ""
        gate.check(
            measured, accept,
            f"Train anew with --restart and more --positions, more questions or more wordings of them{steps}. It lies in "
            f"{self.directory}",
        )  # fmt: skip
        below = (measured.kept or 0.0) < ACCEPT
        self.say(
            f"registered as --accept {accept:g} says: {gate.verdict(measured)}" if below else gate.verdict(measured)
        )


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
