"""The stages one by one, without a Prefect server, and what a refusal must look like."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from flows.config import UnlearnConfig
from grom.config import DataConfig, ModelConfig
from grom.errors import GromError
from tasks.apply import apply
from tasks.calibrate import calibrate
from tasks.collect import collect_forget, collect_retain
from tasks.count import count
from tasks.evaluate import evaluate
from tasks.load import load_data, load_model
from tasks.place import (
    CalibrationRef,
    CheckpointRef,
    CollectRef,
    CountRef,
    DataRef,
    EditRef,
    ModelRef,
    Place,
    ScoreRef,
    SitesRef,
)
from tasks.select import select
from tasks.solve import solve
from tasks.sweep import sweep_sequential
from tests.tiny import CANARY, residue, save_model, tiny_config, write_rows


class Stages:
    """One run, a stage at a time and only as far as it is asked for."""

    def __init__(self, config: UnlearnConfig) -> None:
        self.config, self.work = config, Path(config.work)

    def but(self, **changes: Any) -> Stages:
        """The same run with other settings; nothing is carried over but the store."""
        return Stages(self.config.model_copy(update=changes))

    @property
    def place(self) -> Place:
        return Place(work=str(self.work), store=str(self.work / "store"))

    @cached_property
    def model(self) -> ModelRef:
        return load_model.fn(self.config.model, self.place)

    @cached_property
    def reference(self) -> ModelRef | None:
        reference = self.config.reference
        return load_model.fn(reference, self.place) if reference else None

    @cached_property
    def forget(self) -> DataRef:
        return load_data.fn(self.config.forget, self.place, "forget")

    @cached_property
    def retain(self) -> DataRef:
        return load_data.fn(self.config.retain, self.place, "retain", self.config.hold_out)

    @cached_property
    def counted(self) -> CountRef:
        special = self.config.target.suppress_special
        return count.fn(
            self.model, self.forget, self.retain, None, self.config.collect, special, self.place
        )

    @cached_property
    def sites(self) -> SitesRef:
        return select.fn(
            self.model, self.forget, self.retain, self.counted, self.config.select,
            self.config.collect, self.config.target, self.place, self.reference,
        )  # fmt: skip

    @cached_property
    def kept(self) -> CollectRef:
        return collect_retain.fn(
            self.model, self.retain, self.sites, self.counted, self.config.collect, self.place
        )

    @cached_property
    def moved(self) -> CollectRef:
        return collect_forget.fn(
            self.model, self.forget, self.sites, self.config.target,
            self.config.collect, self.place, self.reference,
        )  # fmt: skip

    @cached_property
    def frozen_edit(self) -> EditRef:
        return solve.fn(
            self.model, (self.kept,), self.moved, self.sites, self.config.ridge,
            self.config.target, self.place,
        )  # fmt: skip

    @cached_property
    def calibrated(self) -> CalibrationRef:
        return calibrate.fn(
            self.model, self.frozen_edit, self.forget, self.retain, self.sites, self.counted,
            self.config.strength, self.config.collect, self.place, self.reference,
        )  # fmt: skip

    @cached_property
    def edit(self) -> EditRef:
        if self.config.collect.order == "frozen":
            return self.frozen_edit
        return sweep_sequential.fn(
            self.model, (self.retain,), self.forget, self.moved, self.calibrated, self.sites,
            self.counted, self.config.ridge, self.config.target, self.config.collect, self.place,
            self.reference,
        )  # fmt: skip

    @cached_property
    def edited(self) -> CheckpointRef:
        return apply.fn(self.model, self.edit, self.calibrated, self.place)

    def score(self, *, edited: bool) -> ScoreRef:
        """Scores of the forget and the held-out retain examples."""
        folder, key = self.model.folder, self.model.fingerprint
        if edited:
            folder = str(self.place.fetch(self.edited.artifact))
            key = self.edited.fingerprint
        return evaluate.fn(
            "edited" if edited else "unedited", folder, key,
            {"forget": (self.forget, "all"), "held out": (self.retain, "held out")},
            self.config.evaluate, self.config.collect, self.place,
        )  # fmt: skip


def stages(folder: Path, family: str = "llama", **how: Any) -> Stages:
    """A tiny run on a random model of a family."""
    return Stages(tiny_config(folder, family, **how))


def refused(run: Stages, stage: str, kind: type[GromError]) -> str:
    """The message of a stage that must fail, once those before it have succeeded."""
    with pytest.raises(kind) as caught:
        getattr(run, stage)
    assert residue(run.work) == []
    name = {"edited": "apply", "frozen_edit": "solve"}.get(stage, stage)
    assert list((run.work / "store").glob(f"{name}/*")) == []
    assert CANARY not in str(caught.value)
    return str(caught.value)


def with_rows(run: Stages, role: str, rows: list[Any], **settings: Any) -> Stages:
    """The same run with other rows."""
    path = write_rows(run.work.parent / f"other-{role}.jsonl", rows)
    return run.but(**{role: DataConfig(uri=str(path), **settings)})


def with_model(run: Stages, model: PreTrainedModel, **how: Any) -> Stages:
    """The same run on another model."""
    folder = save_model(run.work.parent / "other-model", model, **how)
    return run.but(model=ModelConfig(source=str(folder)))
