"""The configuration of a service that honours deletion batches as they arrive."""

from __future__ import annotations

from pathlib import Path
from typing import Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import Field, field_validator, model_validator

from flows.config import JobConfig, read_settings
from grom.errors import ConfigError


class ServiceConfig(JobConfig):
    """A job whose forget set is what the inbox of its store holds, again and again.

    Deployments carry it as their parameter, so it is shown in the UI: no secret belongs here.
    """

    store: str
    """Root of inbox, ledger and artifacts: folder, `s3://bucket/prefix` or another fsspec address
    whose store creates if absent and compares before it swaps."""
    approval: Literal["auto", "required"] = "auto"
    """auto: what passes the gate is promoted.  required: and then a person approves it."""
    approval_hours: float = Field(default=72, gt=0)
    """How long a run waits for a person; then its batches fail and can be retried."""
    max_batches: int = Field(default=50, ge=1)
    """Batches that one run takes together."""
    lease_s: float = Field(default=600, ge=1)
    """After this time without a sign of life a run's batches are free for another."""
    erase_after_days: float = Field(default=0, ge=0)
    """Raw requests of a done batch are erased after this time; 0: by the run itself."""
    failed_after_days: float | None = Field(default=None, ge=0)
    """Raw requests of a failed batch are erased after this time; null: kept for `grom retry`."""
    keep_versions: int = Field(default=3, ge=1)
    """Newest versions of the model whose files stay whatever their age."""
    keep_days: float = Field(default=30, ge=0)
    """Files of other versions without an alias are purged after this time."""
    sweep_seconds: float | None = Field(default=60, ge=5)
    """How often the inbox is looked at and a run started if a batch waits; null: only by `cron`."""
    cron: str | None = None
    """When a run starts that takes whatever waits: `0 3 * * 0`, Sundays at three."""
    timezone: str = "UTC"
    """Of `cron`, by its IANA name."""
    prefect_pool: str = "grom"
    """Prefect work pool that the runs go to."""

    @field_validator("timezone")
    @classmethod
    def _known(cls, timezone: str) -> str:
        try:
            ZoneInfo(timezone)
        except (ZoneInfoNotFoundError, ValueError):
            raise ValueError("no such time zone; write it like Europe/Berlin") from None
        return timezone

    @model_validator(mode="after")
    def _adds_up(self) -> ServiceConfig:
        if self.collect.order == "sequential":
            raise ValueError(
                "`keys: sequential` does not add up over batches; a service needs `frozen`"
            )
        return self


def read_service(path: Path) -> ServiceConfig:
    """Read a service's YAML configuration.

    Raises:
        ConfigError: not there, not YAML, or a setting is wrong; names the setting.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; infra/service.yaml is one to start from")
    return read_settings(
        ServiceConfig, path, "`grom schema --service` prints all settings of a service."
    )
