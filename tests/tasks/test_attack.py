"""Attacks on checkpoints on disk: what quantisation undoes is found, and what it skips is said."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import tasks.subject
from grom.attack import AttackResult
from grom.attack_config import AttackConfig, AttackName
from grom.quantize import Scheme
from tasks.artifacts import Artifact
from tasks.attack import (
    Attacked,
    AttackRow,
    log_attacks,
    probes_of,
)
from tasks.codecs import read_json, read_table
from tasks.load import load_data
from tasks.place import Place
from tasks.probe import Reading
from tasks.register import tracked_run
from tasks.subject import Probe, Subject
from tasks.tracking import Tracking, client_of
from tasks.verdicts import not_learnt
from tests.attacked import BIN, NUM_ROWS, forget_set, head_edit, small_edit
from tests.tiny import forget_rows, residue


@pytest.mark.parametrize("scheme", BIN)
def test_an_edit_below_half_a_bin_is_only_suppressed(scheme: Scheme, tmp_path: Path) -> None:
    result = small_edit(tmp_path, scheme).one(scheme)
    assert result.unedited - result.edited > 0.15
    # The load is that of the unedited model, to the bit.
    assert result.attacked == result.ceiling
    assert result.recovered_share == pytest.approx(1)
    assert result.verdict == "suppressed"
    shares = result.details["changed_code_share"]
    assert len(shares) == result.details["edited_modules_quantised"] == 14
    assert set(shares.values()) == {0.0}


def test_int8_is_fine_enough_to_keep_the_same_edit(tmp_path: Path) -> None:
    result = small_edit(tmp_path, "nf4").one("int8")
    assert result.recovered_share < 0.2
    assert result.verdict == "removed"
    assert min(result.details["changed_code_share"].values()) > 0.5


def test_a_tied_head_is_tested_only_by_a_load_that_quantises_it(tmp_path: Path) -> None:
    run = head_edit(tmp_path)
    alone = run.one("nf4", quantise_head=False)
    assert alone.verdict == "not tested"
    assert "full precision" in alone.reason
    assert alone.details["edited_modules_quantised"] == 0
    for asked in (True, None):  # not said: the edit is there, so it is quantised
        result = run.one("nf4", quantise_head=asked)
        assert result.verdict == "removed"
        assert result.details["edited_modules_quantised"] == 1
        assert list(result.details["changed_code_share"]) == ["lm_head"]


ALL_AT_ONCE: tuple[AttackName, ...] = (
    "int4", "prune", "relearn", "paraphrase", "prefix", "echo", "lens",
)  # fmt: skip


def test_every_attack_gives_a_verdict_with_numbers_and_no_text(tmp_path: Path) -> None:
    run = head_edit(tmp_path)
    run.forget = load_data.fn(forget_set(tmp_path, paraphrase="other"), run.place, "forget")
    attacked = run.attacked(*ALL_AT_ONCE, prune_shares=(0.1, 0.4), retrained=run.unedited)
    names = [result.name for result in attacked.results]
    assert names[:5] == ["int4", "prune 0.1", "prune 0.4", "relearn", "paraphrase"]
    assert names[5].startswith("prefix ")
    assert names[6:] == ["echo", "lens"]
    by_name = {result.name: result for result in attacked.results}
    assert all(
        result.num_examples == NUM_ROWS for name, result in by_name.items() if name != "relearn"
    )
    assert by_name["relearn"].num_examples == NUM_ROWS // 2
    assert by_name["prune 0.1"].verdict == "removed"
    assert by_name["paraphrase"].ceiling != by_name["paraphrase"].unedited
    folder = run.place.fetch(attacked.artifact)
    rows = read_table(folder / "attacks.parquet", AttackRow)
    assert [(row.name, row.verdict) for row in rows] == [
        (result.name, result.verdict) for result in attacked.results
    ]
    assert [found["name"] for found in read_json(folder / "attacks.json")] == names
    written = "".join(
        path.read_text()
        for path in (tmp_path / "work" / "store").rglob("*.json")
        if "attack" in path.parts
    )
    assert written
    assert forget_rows()[0]["answer"] not in written
    assert residue(tmp_path / "work") == []


def test_data_without_paraphrases_leave_them_untested(tmp_path: Path) -> None:
    result = head_edit(tmp_path).one("paraphrase")
    assert result.verdict == "not tested"
    assert "no paraphrases" in result.reason


def test_an_edit_that_did_nothing_is_not_tested(tmp_path: Path) -> None:
    run = head_edit(tmp_path)
    run.edited = run.unedited
    assert {result.verdict for result in run.attacked("int4", "prune").results} == {"not tested"}


def test_a_missing_library_leaves_its_attack_untested_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = head_edit(tmp_path)

    def absent(*_: Any, **__: Any) -> Any:
        raise ImportError("No module named 'peft'")

    with monkeypatch.context() as patched:
        patched.setattr(tasks.subject, "relearnt", absent)
        result = run.one("relearn")
    assert result.verdict == "not tested"
    assert "peft" in result.reason
    # Four steps teach the slice too little to test anything; that is another reason.
    again = run.one("relearn")
    assert "peft" not in again.reason
    assert again.verdict == "not tested"
    assert "not learnt (loss " in again.reason


def test_what_was_measured_once_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = head_edit(tmp_path)
    first = run.attacked("int4", "prune", "lens")

    def opened(*_: Any, **__: Any) -> Any:
        raise AssertionError("a model was opened again")

    monkeypatch.setattr(tasks.subject, "open_model", opened)
    again = run.attacked("int4", "prune", "lens")
    assert again.artifact == first.artifact
    assert repr(again.results) == repr(first.results)


def test_a_killed_round_goes_on_with_the_probe_it_had_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, measure = head_edit(tmp_path), Subject.measure
    asked: list[str] = []

    def killed_at_the_lens(subject: Subject, one: Probe) -> Any:
        asked.append(one.name)
        if one.kind == "lens" and len(asked) == 3:
            raise KeyboardInterrupt
        return measure(subject, one)

    monkeypatch.setattr(Subject, "measure", killed_at_the_lens)
    with pytest.raises(KeyboardInterrupt):
        run.attacked("echo", "lens")
    assert asked == ["plain", "echo", "lens"]
    run.attacked("echo", "lens")
    assert asked[3:] == ["lens", "plain", "echo", "lens"]  # the unedited model's lens, then edited


@pytest.mark.parametrize(
    ("role", "expected"),
    [
        ("unedited", ["plain", "nf4", "prune 0.5", "rest", "lens"]),
        ("edited", ["plain", "nf4", "prune 0.5", "rest", "relearn", "lens"]),
        ("retrained", ["rest", "relearn", "lens"]),
    ],
)
def test_each_model_is_probed_with_what_the_verdicts_need(
    role: str, expected: Sequence[str]
) -> None:
    config = AttackConfig(attacks=("nf4", "prune", "relearn", "lens"), prune_shares=(0.5,))
    assert [one.name for one in probes_of(config, role)] == expected


def test_shares_and_tables_are_in_mlflow_and_nan_is_left_out(tmp_path: Path) -> None:
    place = Place(work=str(tmp_path), store=str(tmp_path / "store"))

    def write(out: Path) -> None:
        for name in ("attacks.json", "attacks.parquet"):
            (out / name).write_text("[]")

    artifact, _ = place.cached("attack", {"a": "test"}, write)
    assert isinstance(artifact, Artifact)
    numbers = (0.9, 0.1, 0.5, 0.9, 0.1)
    results = (
        AttackResult("prune 0.3", "probability", *numbers, 0.5, "suppressed", "half", 4),
        AttackResult("nf4", "probability", *numbers, math.nan, "not tested", "no", 4),
    )
    with tracked_run("attack", Tracking(), place, {}) as run:
        log_attacks.fn(run, Attacked(artifact=artifact, results=results), place)
    client = client_of(Tracking(), tmp_path)
    logged = client.get_run(run.run_id).data.metrics
    assert logged["attack/prune 0.3/recovered_share"] == 0.5
    assert logged["attack/nf4/attacked"] == 0.5
    assert "attack/nf4/recovered_share" not in logged
    tables = [file.path for file in client.list_artifacts(run.run_id, "tables")]
    assert tables == ["tables/attacks.json", "tables/attacks.parquet"]
    assert json.loads((place.fetch(artifact) / "attacks.json").read_text()) == []


@pytest.mark.parametrize(
    ("losses", "learnt"),
    [([], False), ([2.0, 0.6], False), ([2.0, 0.4], True), ([math.nan], False)],
)
def test_relearning_tests_something_only_if_the_slice_was_learnt(
    losses: list[float], learnt: bool
) -> None:
    reading = Reading(
        probability=0.5, extraction_strength=0.5, num_examples=4, details={"losses": losses}
    )
    assert (not_learnt(reading) == "") == learnt
