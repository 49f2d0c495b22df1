"""Trained: one training of many, by a model that is loaded once."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from tqdm import tqdm

from ..settings import Settings
from .compact.job import silence
from .model import CausalModel
from .train.job import RUN, Job, Task
from .train.trainer import Recipe


class Trained(Job):
    """Carries out one task, without a word."""

    def __init__(self, model: CausalModel, task: Task, settings: Settings, registry: Any) -> None:
        """`registry` registers what is made, or publishes it."""
        super().__init__(task, settings, registry, say=silence, bar=partial(tqdm, disable=True))
        self._loaded = model

    def _model(self) -> tuple[CausalModel, Recipe]:
        model = self._loaded
        model.need_values("train")
        exact = (self.task.precision or model.device.type) in ("float32", "cpu")
        if exact:
            model.model.float()
        return model, replace(self.task.recipe, autocast=not exact)

    def is_of(self, version: int) -> bool:
        """Return whether a version of this id was trained with these options, its document and model apart, if its run was here."""
        path = self.directory.with_name(str(version)) / RUN
        told = json.loads(json.dumps(asdict(self.task), default=str))
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else told
        return found | {name: told[name] for name in ("document", "model")} == told
