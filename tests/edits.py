"""Edits of tiny checkpoints, and how to tell whether a byte of a folder changed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from grom.apply import Edit
from grom.config import ModelConfig
from grom.sites import find_sites
from grom.target import LowRank
from tasks import models
from tasks.checkpoint import write_edited
from tasks.codecs import save_edit
from tests.reference import MODELS, VOCAB, random_matrix, tiny_model
from tests.tiny import save_model

every_model = pytest.mark.parametrize(("family", "tied"), MODELS)


def mlp_edit(model: PreTrainedModel) -> Edit:
    """Factors at one site, a whole matrix at another."""
    first, _, last = find_sites(model)[:3]
    factors = LowRank(random_matrix(0, 2, 24) * 0.1, left_MK=random_matrix(1, 16, 2))
    return Edit({first: factors, last: LowRank(random_matrix(2, 16, 24) * 0.1)})


def head_edit(model: PreTrainedModel) -> Edit:
    """Three rows of the head."""
    rows_K = torch.tensor([40, 5, 12])
    update = LowRank(random_matrix(0, 3, 16) * 0.1, rows_K=rows_K, num_outputs=VOCAB)
    return Edit({find_sites(model)[-1]: update})


def both_edits(model: PreTrainedModel) -> Edit:
    return Edit({**mlp_edit(model).updates, **head_edit(model).updates})


every_edit = pytest.mark.parametrize("make", [mlp_edit, head_edit, both_edits])


def hashes(folder: Path, without: tuple[str, ...] = ()) -> dict[str, str]:
    """sha256 of every file below a folder."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in without
    }


def edited_checkpoint(
    folder: Path,
    family: str = "llama",
    make: Callable[[PreTrainedModel], Edit] = both_edits,
    *,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    **how: Any,
) -> tuple[Path, Path]:
    """Folders of a base and of the checkpoint as the stage `apply` writes it."""
    model = tiny_model(family, tied=tied, dtype=dtype)
    base = save_model(folder / "base", model, **how)
    out, edit = folder / "edited", make(model)
    out.mkdir()
    write_edited(base, edit, out)
    facts = {"model": models.fingerprint(ModelConfig(source=str(base)), base), "beta": 3.0}
    save_edit(out / "edit", edit, facts | {"edit": "0" * 16, "nats": 4.0})
    return base, out


def flip(path: Path, at: int) -> None:
    """Change one bit of a file, counted from the end if negative."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def write_edit_of(base: Path, edit: Edit, folder: Path) -> Path:
    """Write an edit that belongs to a base, without its record."""
    folder.mkdir()
    fingerprint = models.fingerprint(ModelConfig(source=str(base)), base)
    save_edit(folder, edit, {"model": fingerprint, "beta": 3.0, "nats": 4.0, "edit": "0" * 16})
    return folder
