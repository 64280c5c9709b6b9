"""Apply and revert are each other's inverse, to the bit; a wrong base is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from grom.apply import Edit
from grom.config import SelectConfig
from grom.errors import ConfigError, MissingInput, NotEnoughDisk
from grom.sites import find_sites
from grom.target import LowRank
from tasks import checkpoint
from tasks import revert as reverting
from tasks.artifacts import CorruptArtifact
from tasks.checkpoint import write_edited
from tasks.codecs import load_edit, save_edit
from tasks.edits import WrongBase, apply_edit, edit_folder, locate, open_base, open_edit
from tasks.revert import revert, revert_in_place
from tasks.store import RESERVED
from tasks.undo import TamperedEdit
from tasks.updates import HeldUpdates, StoredUpdates
from tests.edits import (
    both_edits,
    edited_checkpoint,
    every_edit,
    every_model,
    flip,
    hashes,
    mlp_edit,
)
from tests.reference import random_matrix, tiny_model
from tests.stages import Stages, stages
from tests.tiny import save_model


@every_model
@every_edit
def test_apply_writes_what_the_run_wrote_and_revert_gives_the_base_back(
    make: Callable[[PreTrainedModel], Edit], family: str, tied: bool, tmp_path: Path
) -> None:
    base, edited = edited_checkpoint(tmp_path, family, make, tied=tied)
    again, back = tmp_path / "again", tmp_path / "back"
    applied = apply_edit(base, edited / "edit", again)
    assert applied.reproduced
    assert applied.num_changed > 0
    own = ("applied.json", "rounding.parquet")
    assert hashes(again, own) == hashes(edited, own)
    reverted = revert(again, back)
    assert hashes(back) == hashes(base)
    assert reverted.num_files == len(hashes(base))
    revert_in_place(edited)
    assert hashes(edited) == hashes(base)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [False, True])
@every_edit
def test_sharded_checkpoints_of_every_dtype_go_there_and_back(
    make: Callable[[PreTrainedModel], Edit], tied: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    base, edited = edited_checkpoint(
        tmp_path, "llama", make, tied=tied, dtype=dtype, max_shard_size="4KB"
    )
    assert len(list(base.glob("*.safetensors"))) > 2
    assert apply_edit(base, edited / "edit", tmp_path / "again").reproduced
    assert hashes(tmp_path / "again", ("applied.json", "rounding.parquet")) == hashes(edited)
    revert(edited, tmp_path / "back")
    assert hashes(tmp_path / "back") == hashes(base)
    revert_in_place(edited)
    assert hashes(edited) == hashes(base)


@pytest.mark.parametrize(("family", "site"), [("llama", "mlp"), ("gpt2", "head")])
def test_the_stage_and_the_command_write_the_same_bytes(
    family: str, site: Any, tmp_path: Path
) -> None:
    run: Stages = stages(tmp_path, family, tied=family == "gpt2").but(
        select=SelectConfig(site=site, layers=(1, 2) if site == "mlp" else None)
    )
    made = run.place.fetch(run.edited.artifact)
    base = Path(run.model.folder)
    for name in (str(made), str(made / "edit"), str(made / "edit" / "edit.safetensors")):
        out = tmp_path / "out"
        apply_edit(base, edit_folder(locate(name, tmp_path)), out)
        own = ("applied.json", *RESERVED)  # which has the time that it took
        assert hashes(out, own) == hashes(made, own)
        shutil.rmtree(out)
    revert(made, tmp_path / "back")
    assert hashes(tmp_path / "back") == hashes(base)
    with pytest.raises(ConfigError, match=r"artifact of a store.*Name a folder"):
        revert_in_place(made)
    unit = run.place.fetch(run.edit.artifact)
    with pytest.raises(ConfigError, match="unit strength"):
        apply_edit(base, edit_folder(unit), tmp_path / "out")


def test_rows_in_blocks_give_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("gpt2")  # which stores its matrices the other way round
    base, edit = save_model(tmp_path / "base", model), mlp_edit(model)
    found = []
    for name, num_bytes in (("whole", 1 << 20), ("blocks", 24 * 8 * 5)):
        monkeypatch.setattr(checkpoint, "BLOCK_BYTES", num_bytes)
        (tmp_path / name).mkdir()
        found.append(write_edited(base, edit, tmp_path / name))
    assert hashes(tmp_path / "blocks") == hashes(tmp_path / "whole")
    for whole, blocks in zip(*found, strict=True):
        assert blocks.num_changed == whole.num_changed
        for field in ("update_norm", "weight_norm", "lost"):
            assert getattr(blocks, field) == pytest.approx(getattr(whole, field), rel=1e-12)


def test_blocks_that_rounding_leaves_alone_are_counted_as_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    base = save_model(tmp_path / "base", model)
    P_MN = random_matrix(0, 16, 24)
    P_MN[:8] *= 1e-9
    edit = Edit({find_sites(model)[0]: LowRank(P_MN)})
    found = []
    for rows in (512, 4):
        monkeypatch.setattr(checkpoint, "BLOCK_BYTES", 24 * 8 * rows)
        out = tmp_path / str(rows)
        out.mkdir()
        found += write_edited(base, edit, out)
    assert found[0].num_changed == found[1].num_changed
    assert found[0].lost == pytest.approx(found[1].lost, rel=1e-9)


def test_the_hash_of_an_edit_is_the_same_in_memory_and_on_disk(tmp_path: Path) -> None:
    edit = both_edits(tiny_model("llama"))
    save_edit(tmp_path, edit, {})
    stored = StoredUpdates(tmp_path)
    assert stored.sha256() == HeldUpdates(edit).sha256()
    assert stored.sha256() == HeldUpdates(load_edit(tmp_path)).sha256()
    assert stored.sha256() != HeldUpdates(edit.scaled(1 + 1e-15)).sha256()
    for site, update in edit.updates.items():
        assert torch.equal(stored.whole(site).dense(), update.dense())
        if update.rows_K is None:
            assert torch.equal(stored.rows(site, 3, 9).dense(), update.dense()[3:9])


def test_an_edit_is_refused_on_another_base(tmp_path: Path) -> None:
    base, edited = edited_checkpoint(tmp_path)
    other = save_model(tmp_path / "other", tiny_model("llama", seed=1))
    with pytest.raises(WrongBase, match=r"other: this is not the model.*fingerprint is [0-9a-f]"):
        apply_edit(other, edited / "edit", tmp_path / "out")
    with pytest.raises(WrongBase, match="edited model itself: `grom revert`"):
        apply_edit(edited, edited / "edit", tmp_path / "out")
    (base / "config.json").write_text((base / "config.json").read_text() + " ")
    with pytest.raises(WrongBase):
        apply_edit(base, edited / "edit", tmp_path / "out")
    flip(other / "model.safetensors", -1)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert not (tmp_path / "out").exists()


def test_one_byte_of_the_base_is_one_too_many(tmp_path: Path) -> None:
    base, edited = edited_checkpoint(tmp_path)
    flip(base / "model.safetensors", -1)
    with pytest.raises(WrongBase):
        apply_edit(base, edited / "edit", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "edited"]


def test_an_edit_without_its_record_is_checked_by_the_fingerprint(tmp_path: Path) -> None:
    base, edited = edited_checkpoint(tmp_path)
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("edit.json", "edit.safetensors"):
        shutil.copy(edited / "edit" / name, bare / name)
    applied = apply_edit(base, bare, tmp_path / "again")
    assert applied.reproduced is None
    own = ("applied.json", "rounding.parquet")
    assert hashes(tmp_path / "again", own) == hashes(edited, own)
    flip(base / "model.safetensors", -1)
    with pytest.raises(WrongBase):
        apply_edit(base, bare, tmp_path / "out")


def test_a_base_that_is_an_artifact_goes_by_the_fingerprint_of_its_source(tmp_path: Path) -> None:
    run = stages(tmp_path)
    config = run.config.model.model_copy(update={"dtype": "bfloat16"})
    run = run.but(model=config)
    made = run.place.fetch(run.edited.artifact)
    folder, fingerprint = open_base(config, run.place)
    assert fingerprint == run.model.fingerprint
    assert apply_edit(folder, made / "edit", tmp_path / "one", fingerprint).reproduced
    (made / "edit" / "undo.json").rename(tmp_path / "undo.json")
    (made / "_SUCCESS.json").unlink()
    apply_edit(folder, made / "edit", tmp_path / "two")
    own = ("applied.json", *RESERVED)
    assert hashes(tmp_path / "one", own) == hashes(tmp_path / "two", own)
    flip(folder / "model.safetensors", -1)
    with pytest.raises(WrongBase):
        apply_edit(folder, made / "edit", tmp_path / "three")


@pytest.mark.parametrize("at", [-1, 3000])
def test_one_byte_of_the_factors_is_refused(at: int, tmp_path: Path) -> None:
    base, edited = edited_checkpoint(tmp_path)
    flip(edited / "edit" / "edit.safetensors", at)
    for refused in (
        lambda: apply_edit(base, edited / "edit", tmp_path / "out"),
        lambda: revert(edited, tmp_path / "out"),
        lambda: revert_in_place(edited),
        lambda: open_edit(edited / "edit"),
    ):
        with pytest.raises(TamperedEdit, match=r"edit\.safetensors.*nothing was written"):
            refused()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "edited"]


def test_an_occupied_place_is_refused_and_an_empty_one_taken(tmp_path: Path) -> None:
    base, edited = edited_checkpoint(tmp_path)
    full = tmp_path / "full"
    full.mkdir()
    (full / "notes").write_text("mine")
    for write in (
        lambda: apply_edit(base, edited / "edit", full),
        lambda: revert(edited, full),
        lambda: revert(edited, full / "notes"),
    ):
        with pytest.raises(ConfigError, match=r"something already. Name a new folder"):
            write()
    empty = tmp_path / "empty"
    empty.mkdir()
    revert(edited, empty)
    assert hashes(empty) == hashes(base)


def test_a_full_disk_is_named_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, edited = edited_checkpoint(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "copy_region", full)
    monkeypatch.setattr(reverting, "copy_region", full)
    before = hashes(edited)
    for write in (
        lambda: apply_edit(base, edited / "edit", tmp_path / "out"),
        lambda: revert(edited, tmp_path / "out"),
        lambda: revert_in_place(edited),
    ):
        with pytest.raises(NotEnoughDisk, match="GB free"):
            write()
    assert hashes(edited) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "edited"]


def test_addresses_that_lead_nowhere(tmp_path: Path) -> None:
    for address in ("nowhere", "s3://bucket/what"):
        with pytest.raises(MissingInput):
            locate(address, tmp_path)
    with pytest.raises(MissingInput, match=r"no edit\.safetensors"):
        edit_folder(tmp_path)
    with pytest.raises(MissingInput, match=r"undo\.json"):
        revert(save_model(tmp_path / "base", tiny_model("llama")), tmp_path / "out")


def test_an_artifact_of_a_store_is_found_by_its_address_and_checked(tmp_path: Path) -> None:
    run = stages(tmp_path)
    made = run.place.fetch(run.edited.artifact)
    address = f"file://{run.place.store}/apply/{run.edited.artifact.key}"
    assert edit_folder(locate(address, tmp_path)) == made / "edit"
    text = json.loads((made / "edit" / "edit.json").read_text())
    text["facts"]["nats"] = 1.0
    (made / "edit" / "edit.json").write_text(json.dumps(text))
    with pytest.raises(CorruptArtifact):
        open_edit(made / "edit")
