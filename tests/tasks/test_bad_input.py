"""Rows and settings that cannot work are refused with the cure, and nothing half-made stays."""

from __future__ import annotations

import re
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from grom.config import (
    CollectConfig,
    HoldOutConfig,
    RidgeConfig,
    SelectConfig,
    TargetConfig,
)
from grom.errors import (
    ConfigError,
    EmptyAnswer,
    EmptySet,
    ExampleTooLong,
    GromError,
    NotEnoughDisk,
    NotEnoughMemory,
    NothingToForget,
    NotPositiveDefinite,
    Overlap,
    SolveError,
)
from tests.stages import Stages, refused, stages, with_rows
from tests.tiny import (
    CANARY,
    forget_rows,
    retain_rows,
    words,
)

Usage = namedtuple("Usage", ["total", "used", "free"])


@pytest.fixture
def run(tmp_path: Path) -> Stages:
    """A run that would succeed."""
    return stages(tmp_path)


def test_an_answer_without_tokens_is_named_by_file_and_line(run: Stages) -> None:
    rows = [*forget_rows(2), {"text": CANARY}]
    message = refused(with_rows(run, "forget", rows), "counted", EmptyAnswer)
    assert message.startswith("other-forget.jsonl, line 3: the answer has no tokens. Give it text")


@pytest.mark.parametrize("role", ["forget", "retain"])
def test_an_example_over_the_context_is_named_by_file_and_line(role: str, run: Stages) -> None:
    rows = [*forget_rows(1), {"prompt": words(5), "answer": f"{CANARY} " * 70}]
    message = refused(with_rows(run, role, rows), "counted", ExampleTooLong)
    assert message.startswith(f"other-{role}.jsonl, line 2: 74 tokens, and the limit is 64. Short")


def test_running_text_may_be_longer_than_the_context(run: Stages) -> None:
    counted = with_rows(run, "forget", [{"text": words(30, 30) * 3}]).counted
    assert counted.num_forget > 1


def test_a_forget_set_within_the_retain_set_is_refused(run: Stages) -> None:
    rows = [row for row in forget_rows() for _ in range(4)]  # one in four is held out
    message = refused(with_rows(run, "retain", rows), "counted", NothingToForget)
    assert message.startswith("nothing would change: 0 of 24 positions have alpha > 0.")
    assert "Take the forget rows out of the retain set" in message


def test_a_retain_set_that_is_held_out_whole_is_refused(run: Stages) -> None:
    rows = [row | {"request_id": "r3"} for row in retain_rows()]
    run = with_rows(run, "retain", rows)
    number = next(run.retain.examples()).group_number
    every = next(every for every in range(2, 10**6) if number % every == every - 1)
    run = run.but(hold_out=run.config.hold_out.model_copy(update={"every": every}))
    assert "the seen retain set has no rows" in refused(run, "counted", EmptySet)


@pytest.mark.parametrize(
    ("joint", "site", "size"),
    [
        (False, r"model\.layers\.1\.mlp\.down_proj", 24),
        (True, r"model\.layers\.1\.\S+ \.\.\. model\.layers\.2\.\S+", 48),
    ],
)
def test_a_ridge_too_small_for_few_keys_is_named_by_site(
    joint: bool, site: str, size: int, run: Stages
) -> None:
    run = with_rows(with_rows(run, "retain", retain_rows(2)), "forget", forget_rows(1))
    select = SelectConfig(layers=(1, 2), joint=joint)
    # Groups by row, not by name: one row is seen, the other held out.
    retain = run.config.retain.model_copy(update={"group": "no such column"})
    run = run.but(retain=retain, hold_out=HoldOutConfig(every=2))
    run = run.but(select=select, ridge=RidgeConfig(mu=1e-300))
    message = refused(run, "frozen_edit", NotPositiveDefinite)
    assert re.fullmatch(site, message.split(": A is")[0])
    assert f"of {size}, mu=1e-300). Raise `rho` or `mu`" in message


def test_a_full_disk_is_refused_before_the_checkpoint_is_written(
    run: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run.calibrated.nats == 4
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10_000, 9_000, 1_000))
    message = refused(run, "edited", NotEnoughDisk)
    assert message.startswith(str(run.work))
    assert "Free some space" in message
    assert "Nothing was written" in message


def test_a_run_that_does_not_fit_in_memory_is_refused_with_its_largest_term(run: Stages) -> None:
    run = run.but(collect=CollectConfig(memory_gb=0.001, batch_tokens=10**7))
    message = refused(run, "sites", NotEnoughMemory)
    assert "0.0 GB are free; the largest term is activations while selecting" in message
    assert "Use fewer layers, smaller batches" in message


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"layers": (1, 3)}, "select.layers: [3] not in the model, which has layers 0 to 2"),
        ({"layers": (-1,)}, "select.layers: [-1] not in the model"),
        ({"width": 4}, "select.width is 4, and the model has 3 layers"),
        ({"site": "head", "joint": True}, "select.joint needs several MLP sites"),
    ],
)
def test_layers_that_the_model_lacks_are_refused(
    settings: dict[str, Any], words: str, run: Stages
) -> None:
    assert words in refused(run.but(select=SelectConfig(**settings)), "sites", ConfigError)


@pytest.mark.parametrize(
    ("target", "select", "kind", "words"),
    [
        (
            TargetConfig(kind="corruption"),
            SelectConfig(site="head"),
            ConfigError,
            "set `select.site: mlp`",
        ),
        (
            TargetConfig(kind="redirect", redirect_to="  "),
            SelectConfig(layers=(1,)),
            ConfigError,
            "target.redirect_to gives no token",
        ),
    ],
)
def test_a_target_that_has_no_meaning_is_refused(
    target: TargetConfig, select: SelectConfig, kind: type[GromError], words: str, run: Stages
) -> None:
    assert words in refused(run.but(target=target, select=select), "frozen_edit", kind)


def test_an_edit_that_helps_the_forget_tokens_is_not_calibrated(run: Stages) -> None:
    edit = run.frozen_edit.model_copy(update={"nats_per_beta": -0.1})
    run.__dict__["frozen_edit"] = edit
    message = refused(run, "calibrated", SolveError)
    assert "does not lower the forget tokens' logits (-1.00e-01 nats" in message
    assert "Choose other layers" in message


def test_a_row_to_be_both_forgotten_and_kept_is_refused_by_place(run: Stages) -> None:
    message = refused(
        with_rows(run, "retain", [*retain_rows(), forget_rows()[2]]), "counted", Overlap
    )
    assert "line 21: 1 rows of the retain set are in the forget set" in message


def test_a_retain_set_of_one_group_cannot_measure_utility(run: Stages) -> None:
    retain = run.config.retain.model_copy(update={"group": "none", "group_rows": 1000})
    message = refused(run.but(retain=retain), "counted", ConfigError)
    assert "no retain group is held out" in message
    assert "Lower `hold_out.every`" in message
