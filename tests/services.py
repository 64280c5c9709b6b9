"""A tiny service: a random model, retain rows, batches of deletion requests for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flows.service import ServiceConfig
from grom.config import (
    DataConfig,
    EvaluateConfig,
    GateConfig,
    HoldOutConfig,
    ModelConfig,
    SelectConfig,
    StrengthConfig,
)
from tasks.bucket import Bucket
from tasks.codecs import load_edit
from tasks.submit import submit
from tests.faulty import QUICK
from tests.tiny import checkpoint, retain_rows, words, write_rows

EASY_GATE = GateConfig(
    max_forget_probability=1,
    min_held_out_share=0,
    max_recovery=1,
    max_repetition=None,
    max_empty_rate=None,
    max_degenerate_rate=None,
)
"""A random model has nothing to lose."""


def service(folder: Path, **changes: Any) -> ServiceConfig:
    """The service, everything below `folder`."""
    settings: dict[str, Any] = {
        "name": "tiny",
        "model": ModelConfig(source=str(checkpoint(folder / "model"))),
        "retain": DataConfig(uri=str(write_rows(folder / "retain.jsonl", retain_rows()))),
        "hold_out": HoldOutConfig(every=4),
        "select": SelectConfig(layers=(1, 2)),
        "strength": StrengthConfig(nats=4),
        "evaluate": EvaluateConfig(quantisations=(), health_examples=2, health_tokens=8),
        "gate": EASY_GATE,
        "work": str(folder / "work"),
        "store": str(folder / "store"),
        "lease_s": 30,
    }
    return ServiceConfig(**(settings | changes))


def requests(first: int, count: int = 2) -> list[dict[str, str]]:
    """Rows of requests `first` and on; no retain answer has their words."""
    return [
        {
            "request_id": f"person-{number}@example.org",
            "prompt": words(5 + number, 2),
            "answer": words(40 + 2 * number, 3),
        }
        for number in range(first, first + count)
    ]


def put(cfg: ServiceConfig, batch: str, rows: list[dict[str, str]], folder: Path) -> None:
    """Submit a batch."""
    path = write_rows(folder / f"{batch}.jsonl", rows)
    submit([path], bucket_of(cfg), batch)
    path.unlink()


def bucket_of(cfg: ServiceConfig) -> Bucket:
    """The service's store."""
    return Bucket(cfg.store, patience=QUICK)


def outcome(cfg: ServiceConfig, batch: str, state: str = "done") -> dict[str, Any]:
    """How a batch ended."""
    found = bucket_of(cfg).read(f"{state}/{batch}.json")
    assert found is not None, f"{batch} is not {state}"
    parsed: dict[str, Any] = json.loads(found.data)
    return parsed


def dense_edit(folder: Path) -> dict[str, Any]:
    """P of each site of an applied checkpoint, dense."""
    return {
        site.name: update.dense() for site, update in load_edit(folder / "edit").updates.items()
    }
