"""One byte that is not as it was written is refused, and a kill while reverting is made good."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from grom.errors import GromError
from tasks.revert import revert, revert_in_place
from tasks.undo import TamperedEdit
from tests.edits import (
    edited_checkpoint,
    flip,
    hashes,
)


@pytest.mark.parametrize("tied", [False, True])
def test_one_byte_of_any_file_of_the_checkpoint_is_refused(tied: bool, tmp_path: Path) -> None:
    _, edited = edited_checkpoint(tmp_path, tied=tied)
    before = hashes(edited)
    names = [name for name in before if "/" not in name] + ["edit/undo.safetensors"]
    assert ("model-head.safetensors" in names) == tied
    for name in names:
        size = (edited / name).stat().st_size
        for at in sorted({9, size // 2, size - 1}):
            flip(edited / name, at)
            with pytest.raises(GromError):
                revert(edited, tmp_path / "out")
            with pytest.raises(GromError):
                revert_in_place(edited)
            flip(edited / name, at)
    assert hashes(edited) == before
    assert not (tmp_path / "out").exists()


def test_every_edited_weight_counts(tmp_path: Path) -> None:
    _, edited = edited_checkpoint(tmp_path)
    stored = load_file(edited / "model.safetensors")
    stored["model.layers.0.mlp.down_proj.weight"][3, 4] += 1  # an edited tensor, which undo covers
    save_file(stored, edited / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TamperedEdit, match=r"layers\.0\.mlp\.down_proj.* as the edit left it"):
        revert(edited, tmp_path / "out")


@pytest.mark.parametrize("in_place", [False, True])
def test_factors_that_are_read_last_are_still_checked_before_anything_appears(
    in_place: bool, tmp_path: Path
) -> None:
    _, edited = edited_checkpoint(tmp_path, tied=True, max_shard_size="4KB")
    flip(edited / "edit" / "edit.safetensors", -1)
    before = hashes(edited)
    with pytest.raises(TamperedEdit, match=r"edit\.safetensors"):
        revert_in_place(edited) if in_place else revert(edited, tmp_path / "out")
    assert hashes(edited) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "edited"]


@pytest.mark.parametrize("name", ["edit/undo.json", "edit/undo.safetensors", "model.safetensors"])
def test_a_missing_file_is_named(name: str, tmp_path: Path) -> None:
    _, edited = edited_checkpoint(tmp_path)
    (edited / name).unlink()
    with pytest.raises(GromError, match=name.split("/")[-1].replace(".", r"\.")):
        revert(edited, tmp_path / "out")
    with pytest.raises(GromError, match=name.split("/")[-1].replace(".", r"\.")):
        revert_in_place(edited)


@pytest.mark.parametrize("how", [{}, {"max_shard_size": "4KB"}])
@pytest.mark.parametrize("tied", [False, True])
def test_a_kill_at_any_point_of_reverting_in_place_is_made_good(
    tied: bool, how: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, edited = edited_checkpoint(tmp_path, tied=tied, **how)
    whole, killed = hashes(base), 0
    for calls in range(60):
        copy = tmp_path / "copy"
        shutil.copytree(edited, copy)
        with monkeypatch.context() as patch:
            left = [calls]
            for owner, name in (
                (os, "replace"), (Path, "unlink"), (Path, "rmdir"), (shutil, "copyfile"),
            ):  # fmt: skip
                patch.setattr(owner, name, killing(getattr(owner, name), left))
            try:
                revert_in_place(copy)
            except KeyboardInterrupt:
                killed += 1
        if (copy / "edit").is_dir() and any((copy / "edit").iterdir()):
            revert_in_place(copy)
        found = hashes(copy)
        assert {name: found[name] for name in found if not name.startswith(".")} == whole
        shutil.rmtree(copy)
        if left[0] > 0:
            break
    assert left[0] > 0
    assert killed > 6


def killing(call: Any, left: list[int]) -> Any:
    """A function that raises once its count is used up, like a kill between two system calls."""

    def counted(*arguments: Any, **options: Any) -> Any:
        if left[0] <= 0:
            raise KeyboardInterrupt
        left[0] -= 1
        return call(*arguments, **options)

    return counted
