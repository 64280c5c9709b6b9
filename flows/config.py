"""The configuration of one unlearning run: the method's settings, and where everything is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Self, TypeVar

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from grom.config import (
    AuditConfig,
    CollectConfig,
    Config,
    DataConfig,
    EvaluateConfig,
    GateConfig,
    HoldOutConfig,
    ModelConfig,
    RidgeConfig,
    SelectConfig,
    StrengthConfig,
    TargetConfig,
)
from grom.errors import ConfigError
from tasks.tracking import Tracking

Settings = TypeVar("Settings", bound=Config)


class BenchmarkConfig(Config):
    """A benchmark that the models of a run are measured on."""

    name: str
    """`grom benchmarks` lists them."""
    data: str | None = None
    """Folder, fsspec address, or `hub`.  Not given: the benchmark's folder under `GROM_SHARED` or
    ../shared/data if it is there, the hub otherwise."""
    splits: dict[str, str] = Field(default_factory=dict)
    """Addresses of single splits that lie elsewhere."""
    limit: int | None = Field(default=None, ge=1)
    """Rows per split that are asked about, spread evenly; not given: all."""


class JobConfig(Config):
    """What every unlearning job needs, whatever says what is to be forgotten."""

    name: str = "unlearn"
    """Short name: letters, digits and hyphens.  Names the run and the registered model."""
    model: ModelConfig
    """The model that must forget."""
    reference: ModelConfig | None = None
    """A model that never saw the forget set, for instance the checkpoint before fine-tuning: it is
    asked what to say instead, and its level of forgetting is the one to reach."""
    retrained: ModelConfig | None = None
    """A model trained without the forget set: if given, the level to reach is its level."""
    retain: DataConfig
    """What must be kept."""
    background: DataConfig | None = None
    """Further examples of the retain kind about other subjects, which the model need not know:
    their keys show the solver where knowledge that no retain row names may lie.  Variety of
    subjects counts, some dozens of rows are enough.  Never measured."""
    hold_out: HoldOutConfig = HoldOutConfig()
    """Retain groups whose keys the solver never sees, for the honest measure of utility."""
    also: dict[str, DataConfig] = Field(default_factory=dict)
    """Further sets that are only measured, by name."""
    target: TargetConfig = TargetConfig()
    ridge: RidgeConfig = RidgeConfig()
    select: SelectConfig = SelectConfig()
    collect: CollectConfig = CollectConfig()
    strength: StrengthConfig = StrengthConfig()
    audit: AuditConfig | None = AuditConfig()
    """How much each request changed the model; null: not measured."""
    evaluate: EvaluateConfig = EvaluateConfig()
    benchmark: BenchmarkConfig | None = None
    """Also measure the unedited, the edited and the retrained model on a benchmark."""
    gate: GateConfig = GateConfig()
    tracking: Tracking = Tracking()
    work: str = "grom-work"
    """Folder for scratch files and the embedded MLflow and Prefect."""
    store: str | None = None
    """Root of the artifacts: folder or fsspec address.  Not given: `<work>/store`."""

    @field_validator("also")
    @classmethod
    def _distinct_names(cls, also: dict[str, DataConfig]) -> dict[str, DataConfig]:
        for name in also:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9 -]*", name):
                raise ValueError(f"{name!r}: letters, digits, blanks and hyphens only")
            if name in ("forget", "retain"):
                raise ValueError(f"{name!r} is the name of a set that is measured anyway")
        return also

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        if self.collect.order == "sequential" and self.select.site == "head":
            raise ValueError("`keys: sequential` goes by layers; with `site: head` use `frozen`")
        if self.ridge.cache_retain and self.collect.order == "sequential":
            raise ValueError("`cache_retain` keeps what `keys: frozen` collects; use `frozen`")
        if self.ridge.cache_retain and not self.collect.keep_request_keys:
            raise ValueError("`cache_retain` solves from keys: set `collect.keep_request_keys`")
        if self.target.kind == "corruption" and self.strength.nats is not None:
            raise ValueError("`corruption` lowers no logit, so give `strength.beta`, not `nats`")
        return self

    @field_validator("name")
    @classmethod
    def _plain_name(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
            raise ValueError("letters, digits, hyphens and underscores only")
        return name


class UnlearnConfig(JobConfig):
    """One unlearning run, whole."""

    forget: DataConfig
    """What must be forgotten."""


class RepeatedKey(yaml.constructor.ConstructorError):
    """Two equal keys in one mapping."""


class StrictLoader(yaml.SafeLoader):
    """YAML's safe subset, without its habit of letting the last of two equal keys win: a second
    `forget:` would silently take the place of the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping whose keys differ."""
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                what = f"the key {key.value!r} occurs twice"
                raise RepeatedKey(None, None, what, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_config(path: Path) -> UnlearnConfig:
    """Read a YAML configuration.

    Raises:
        ConfigError: not there, not YAML, or a setting is wrong; names the setting.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file, and no preset of that name; see `grom presets`")
    return read_settings(UnlearnConfig, path, "`grom schema` prints all settings.")


def read_settings(kind: type[Settings], path: Path, cure: str) -> Settings:
    """Read settings of a kind from a YAML file that is there.

    Raises:
        ConfigError: not YAML, or a setting is wrong; names the setting.
    """
    try:
        values: Any = yaml.load(path.read_text(encoding="utf-8"), Loader=StrictLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        what = "not valid YAML; check indentation and quotes"
        if isinstance(error, RepeatedKey):
            what = f"{error.problem}; keep one of them"
        raise ConfigError(f"{path}{line}: {what}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected settings by name, like `model:` and `forget:`")
    return checked(kind, values, str(path), cure)


def checked(kind: type[Settings], values: object, where: str, cure: str = "") -> Settings:
    """Settings of a kind.

    Raises:
        ConfigError: one is wrong; names it, without its value.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        lines = [
            f"  {'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}"
            for problem in error.errors()
        ]
        raise ConfigError("\n".join([f"{where}:", *lines, *([cure] if cure else [])])) from error
