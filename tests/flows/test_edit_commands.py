"""`grom apply`, `revert`, `inspect`, `export` and `merge` as a person uses them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner, Result

from flows import edit_commands
from tasks.place import Place
from tests.edits import edited_checkpoint, flip, hashes, head_edit, mlp_edit
from tests.stages import Stages, stages
from tests.tiny import forget_rows, write_rows

OWN = ("applied.json", "rounding.parquet")
app = typer.Typer()
app.command("apply")(edit_commands.apply_edit)
app.command("revert")(edit_commands.revert_edit)
app.command("inspect")(edit_commands.inspect_edit)
app.command("export")(edit_commands.export_edit)
app.command("merge")(edit_commands.merge_edits)


@pytest.fixture(autouse=True)
def terminal(own_environment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wide terminal, in an empty folder."""
    monkeypatch.setenv("COLUMNS", "220")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def grom(*arguments: object, code: int = 0) -> Result:
    """Run a command."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output + result.stderr
    assert "Traceback" not in result.output + result.stderr
    return result


def test_there_and_back(tmp_path: Path) -> None:
    base, edited = edited_checkpoint(tmp_path)
    out = grom("apply", base, edited / "edit", tmp_path / "again").output
    assert "byte-identical to the checkpoint that the edit's run wrote" in out
    assert "3 tensors edited" in out
    assert hashes(tmp_path / "again", OWN) == hashes(edited, OWN)
    assert "files byte-identical" in grom("revert", tmp_path / "again", tmp_path / "back").output
    assert hashes(tmp_path / "back") == hashes(base)
    grom("revert", tmp_path / "again", "--in-place")
    assert hashes(tmp_path / "again") == hashes(base)
    assert list(Path.cwd().iterdir()) == []  # no work folder where none is needed


def test_refusals_are_messages_with_a_cure(tmp_path: Path) -> None:
    base, edited = edited_checkpoint(tmp_path)
    other = tmp_path / "other"
    shutil.copytree(base, other)
    flip(other / "model.safetensors", -1)
    bad = tmp_path / "bad"
    shutil.copytree(edited, bad)
    flip(bad / "edit" / "edit.safetensors", -1)
    new = tmp_path / "new"
    for arguments, words in (
        (("apply", other, edited, new), "not the model that the edit was made for"),
        (("apply", base, bad, new), "not the factors that were written"),
        (("apply", base, edited, base), "Name a new folder"),
        (("apply", base, base, new), "no edit.safetensors"),
        (("apply", base, tmp_path / "nowhere", new), "no such folder"),
        (("revert", edited), "or give --in-place"),
        (("revert", edited, new, "--in-place"), "not both"),
        (("revert", bad, new), "not the factors that were written"),
        (("inspect", bad), "not the factors that were written"),
        (("export", edited, new, "--format", "gguf"), "convert_hf_to_gguf.py"),
        (("export", edited, new, "--format", "peft", "--measure"), "needs --config"),
        (("export", edited, new, "--format", "peft", "--rank", "0"), "at least 1"),
        (("export", edited / "edit", new, "--format", "nf4"), "--base"),
    ):
        assert words in grom(*arguments, code=1).stderr
        assert not new.exists()
    grom("export", edited, new, "--format", "onnx", code=2)


def test_inspect_shows_the_sites_and_what_the_edit_came_from(tmp_path: Path) -> None:
    run: Stages = stages(tmp_path)
    made = run.place.fetch(run.edited.artifact)
    shown = grom("inspect", made).output
    for words in (
        "model.layers.1.mlp.down_proj", "16x24", "4 nats", run.model.fingerprint,
        run.edit.artifact.key, run.moved.artifact.key, run.kept.artifact.key,
        "as recorded", run.forget.digest,
    ):  # fmt: skip
        assert words in shown
    found = json.loads(grom("inspect", made / "edit", "--json").stdout)
    assert found["nats"] == 4
    assert found["origin"]["forget"] == run.moved.artifact.key
    assert found["origin"]["requests"] == str(run.forget.num_rows)
    for site in found["sites"]:
        assert 0 < site["rank"] <= 16
        assert 0 < site["spectral_norm"] <= site["norm"]
        assert site["relative_norm"] > 0
        assert site["num_changed"] > 0
    unit = grom("inspect", run.place.fetch(run.edit.artifact)).output
    assert "at unit strength" in unit
    assert "no record" in unit


def test_inspect_measures_ranks_and_bytes(tmp_path: Path) -> None:
    _, edited = edited_checkpoint(tmp_path)
    found = json.loads(grom("inspect", edited, "--json").stdout)
    assert [site["form"] for site in found["sites"]] == ["factors", "whole", "rows"]
    assert [site["rank"] for site in found["sites"]] == [2, 16, 3]
    assert [site["num_bytes"] for site in found["sites"]] == [2 * 40 * 8, 16 * 24 * 8, 3 * 17 * 8]
    assert found["sites"][0]["relative_norm"] is None  # an edit without rounding.parquet
    assert found["origin"] == {}
    assert "3 rows" in grom("inspect", edited).output


def test_export_writes_an_adapter_and_measures_it(tmp_path: Path) -> None:
    run = stages(tmp_path)
    made = run.place.fetch(run.edited.artifact)
    config = tmp_path / "config.yaml"
    settings = run.config.model_dump(mode="json", exclude_defaults=True, exclude={"select"})
    config.write_text(yaml.safe_dump(settings))
    shown = grom(
        "export", made, tmp_path / "lora", "--format", "peft", "--rank", "2", "--uniform-rank",
        "--measure", "--config", config, "--work", tmp_path / "measured",
    ).output  # fmt: skip
    assert "truncated" in shown
    assert "forget: answer probability unedited" in shown
    report = json.loads((tmp_path / "lora" / "export.json").read_text())
    assert set(report["metrics"]) == {"forget", "retain, seen", "retain, held out"}
    exact = grom("export", made, tmp_path / "exact", "--format", "peft", "--base", run.model.folder)
    assert "exact" in exact.output
    settings = json.loads((tmp_path / "exact" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == run.model.folder


def test_a_tied_head_comes_with_a_warning(tmp_path: Path) -> None:
    _, edited = edited_checkpoint(tmp_path, "gpt2", head_edit, tied=True)
    assert "do not merge" in grom("export", edited, tmp_path / "l", "--format", "peft").output


def test_merging_is_refused_with_the_reason_the_evidence_and_the_way(tmp_path: Path) -> None:
    _, one = edited_checkpoint(tmp_path / "one", make=mlp_edit)
    _, other = edited_checkpoint(tmp_path / "other")
    result = grom("merge", one, other, code=1)
    for words in (
        "edits do not add up", "2 shared sites", "= 1.000", "the same base", "grom submit",
    ):  # fmt: skip
        assert words in result.stderr
    _, head = edited_checkpoint(tmp_path / "head", make=head_edit)
    assert "0 shared sites" in grom("merge", one, head, code=1).stderr
    shown = grom("merge", one, tmp_path / "nowhere", code=1).stderr
    assert "edits do not add up" in shown
    assert "cannot be measured" in shown


def test_two_real_edits_have_something_in_common(tmp_path: Path) -> None:
    run = stages(tmp_path)
    rows = write_rows(tmp_path / "other.jsonl", forget_rows(3))
    other = run.but(forget=run.config.forget.model_copy(update={"uri": str(rows)}))
    folders = [one.place.fetch(one.edited.artifact) for one in (run, other)]
    shown = grom("merge", *folders, code=1).stderr
    cosine = float(shown.split("|Q|) = ")[1].split()[0])
    assert 0.2 < cosine < 1


def test_a_model_from_the_store_is_opened_by_its_configuration(tmp_path: Path) -> None:
    run = stages(tmp_path)
    run = run.but(model=run.config.model.model_copy(update={"dtype": "bfloat16"}))
    made = run.place.fetch(run.edited.artifact)
    config = tmp_path / "config.yaml"
    settings = run.config.model_dump(mode="json", exclude_defaults=True, exclude={"select"})
    config.write_text(yaml.safe_dump(settings))
    work = tmp_path / "other-work"
    grom("apply", f"{config}:model", made, tmp_path / "out", "--work", work)
    found, expected = hashes(tmp_path / "out", OWN), hashes(made, OWN)
    assert all(found[name] == expected[name] for name in found)
    assert Place(work=str(work), store=str(work / "store")).open().entries("load")
