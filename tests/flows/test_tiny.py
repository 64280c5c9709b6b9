"""A whole run on a GPT-2-shaped model: Parquet in, head edited, registered; and one that fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from flows.config import UnlearnConfig
from flows.unlearn import Outcome, unlearn
from grom.config import DataConfig, GateConfig, SelectConfig, StrengthConfig
from grom.errors import ErasedByRounding
from tasks.registry import registered_folder
from tasks.tracking import Tracking, client_of
from tests.tiny import residue, retain_rows, tiny_config


def config_of(folder: Path, dtype: torch.dtype = torch.float32) -> UnlearnConfig:
    """The run, with other columns and groups."""
    config = tiny_config(folder, "gpt2", tied=True, dtype=dtype)
    rows = [
        {"question": row["prompt"], "reply": row["answer"], "author": f"author-{number // 2}"}
        for number, row in enumerate(retain_rows(40))
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "retain.parquet")
    retain = DataConfig(
        uri=str(folder / "retain.parquet"), prompt="question", answer="reply", group="author"
    )
    changes = {
        "name": "tiny-head",
        "retain": retain,
        "also": {"forget again": config.forget},
        "select": SelectConfig(site="head"),
    }
    return config.model_copy(update=changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One MLflow database for the module: making its tables takes seconds."""
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def outcome(folder: Path, prefect_server: None) -> Outcome:
    return unlearn(config_of(folder))


def test_the_run_forgets_and_registers(outcome: Outcome, folder: Path) -> None:
    unedited, edited = outcome.scores
    assert edited.sets["forget"]["probability"] < 0.8 * unedited.sets["forget"]["probability"]
    assert edited.sets["forget again"] == edited.sets["forget"]
    assert outcome.counted.num_seen + outcome.counted.num_held_out == 40
    assert outcome.layers == ()
    assert residue(folder / "work") == []


def test_the_gate_judges_what_was_measured_and_the_version_says_so(
    outcome: Outcome, folder: Path
) -> None:
    unedited, edited = (score.sets["retain, held out"]["probability"] for score in outcome.scores)
    share = next(
        condition for condition in outcome.registered.conditions if not condition["at_most"]
    )
    assert share["value"] == pytest.approx(edited / unedited)
    assert share["passed"] == (share["value"] >= share["limit"])
    assert outcome.registered.passed == all(c["passed"] for c in outcome.registered.conditions)
    client = client_of(Tracking(), folder / "work")
    version = client.get_model_version(outcome.registered.model_name, outcome.registered.version)
    assert version.tags["gate"] == ("passed" if outcome.registered.passed else "failed")


def test_a_version_whose_gate_failed_gets_no_alias(outcome: Outcome, folder: Path) -> None:
    assert not outcome.registered.passed  # a random model: too much is lost
    assert outcome.registered.alias is None
    client = client_of(Tracking(), folder / "work")
    model = client.get_registered_model(outcome.registered.model_name)
    assert model.aliases == {}


def test_a_version_whose_gate_passes_gets_the_alias(outcome: Outcome, folder: Path) -> None:
    lenient = GateConfig(
        max_forget_probability=1,
        min_held_out_share=0,
        max_repetition=None,
        max_empty_rate=None,
        max_degenerate_rate=None,
    )
    passed = unlearn(config_of(folder).model_copy(update={"gate": lenient}))
    assert passed.registered.passed
    client = client_of(Tracking(), folder / "work")
    version = client.get_model_version_by_alias(passed.registered.model_name, "candidate")
    assert version.tags["gate"] == "passed"
    # The same checkpoint is the same version: only its gate was judged anew.
    assert str(version.version) == outcome.registered.version
    unlearn(config_of(folder))
    assert client.get_registered_model(passed.registered.model_name).aliases == {}


def test_the_run_has_its_report_on_disk_and_in_mlflow(outcome: Outcome, folder: Path) -> None:
    (page,) = (folder / "work" / "reports").glob(f"*{outcome.registered.run_id[:8]}/report.html")
    assert "held-out retain left" in page.read_text(encoding="utf-8")
    client = client_of(Tracking(), folder / "work")
    names = {file.path for file in client.list_artifacts(outcome.registered.run_id)}
    assert "report.html" in names


def test_the_registered_version_is_the_edited_checkpoint(outcome: Outcome, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    registered = registered_folder(Tracking(), folder / "work", outcome.registered.uri)
    model: Any = AutoModelForCausalLM.from_pretrained(registered)
    base = load_file(Path(outcome.before.folder) / "model.safetensors")
    assert torch.equal(model.transformer.wte.weight, base["transformer.wte.weight"])
    assert not torch.equal(model.lm_head.weight, base["transformer.wte.weight"])


def test_the_run_in_mlflow_is_finished_with_settings_numbers_and_data(
    outcome: Outcome, folder: Path
) -> None:
    run = client_of(Tracking(), folder / "work").get_run(outcome.registered.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["select.site"] == "head"
    assert run.data.metrics["edit/nats"] == 4
    assert {"forget/probability/unedited", "forget/probability/edited"} <= set(run.data.metrics)
    assert run.inputs is not None
    assert "retain, held out" in {entry.dataset.name for entry in run.inputs.dataset_inputs}


def test_a_run_that_fails_late_registers_nothing_and_leaves_nothing_half_made(
    outcome: Outcome, folder: Path
) -> None:
    later = folder / "later"
    later.mkdir()
    config = config_of(later, torch.bfloat16)
    changes = {
        "name": "erased",
        "work": str(folder / "work"),
        "strength": StrengthConfig(nats=1e-7),
    }
    client = client_of(Tracking(), folder / "work")
    with pytest.raises(ErasedByRounding, match="lm_head: 0 weights changed"):
        unlearn(config.model_copy(update=changes))
    (experiment,) = client.search_experiments(filter_string="name = 'unlearning'")
    runs = client.search_runs([experiment.experiment_id])
    assert {(run.info.run_name, run.info.status) for run in runs} == {
        ("tiny-head", "FINISHED"),
        ("erased", "FAILED"),
    }
    assert [model.name for model in client.search_registered_models()] == ["grom-tiny-head"]
    assert residue(folder / "work") == []
