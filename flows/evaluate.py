"""Evaluate any model on a benchmark, with or without a reference model to compare it with."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from prefect import flow

from flows.config import BenchmarkConfig
from flows.presets import data_root
from grom.config import CollectConfig, Config, ModelConfig
from tasks.benchmark import BenchmarkRef, load_benchmark
from tasks.exam import Exams, examine
from tasks.exam_log import log_exams
from tasks.load import load_model
from tasks.place import Place
from tasks.register import tracked_run
from tasks.tracking import Tracking

Quantisation = Literal["nf4", "fp4", "int8", "int4"]


class EvalConfig(Config):
    """One evaluation, whole."""

    model: ModelConfig
    """The model to evaluate."""
    benchmark: BenchmarkConfig
    """What it is measured on."""
    reference: ModelConfig | None = None
    """A model trained without what had to be forgotten; forget quality, privacy leakage and the
    distance to it need one."""
    quantisation: Quantisation | None = None
    """Load the model in nf4, fp4, int8 or int4."""
    quantise_head: bool = False
    """Quantise the LM head as well."""
    collect: CollectConfig = CollectConfig()
    tracking: Tracking = Tracking()
    work: str = "grom-work"
    store: str | None = None
    """Root of the artifacts.  Not given: `<work>/store`."""


class Evaluated(Config):
    """What an evaluation gives."""

    run_id: str
    place: Place
    exams: Exams


def find_benchmark(cfg: BenchmarkConfig) -> BenchmarkRef:
    """The benchmark's rows, from where the configuration or the shared data has them."""
    return load_benchmark(cfg.name, cfg.data or data_root(cfg.name), cfg.limit, cfg.splits)


@flow(name="evaluate")
def evaluate(cfg: EvalConfig) -> Evaluated:
    """One model on one benchmark, top to bottom."""
    place = Place(work=cfg.work, store=cfg.store or str(Path(cfg.work) / "store"))
    settings = cfg.model_dump(mode="json")
    with tracked_run(f"eval-{cfg.benchmark.name}", cfg.tracking, place, settings) as run:
        benchmark = find_benchmark(cfg.benchmark)
        model = load_model(cfg.model, place, cfg.tracking, editable=False)
        asked = [
            examine(
                "model", model, benchmark, cfg.collect, place, cfg.quantisation, cfg.quantise_head
            )
        ]
        reference = None
        if cfg.reference is not None:
            compared = load_model(cfg.reference, place, cfg.tracking, editable=False)
            reference = examine("reference", compared, benchmark, cfg.collect, place)
            asked.append(reference)
        exams = Exams(benchmark=benchmark, exams=tuple(asked), reference=reference)
        log_exams(run, exams, place)
    return Evaluated(run_id=run.run_id, place=place, exams=exams)
