"""Taking an edit back: from an edited checkpoint to its base, the same to the bit."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch

from grom.errors import ConfigError, MissingInput
from tasks.artifacts import check_room, disk_full_named, flush
from tasks.edits import EDIT, new_folder, open_edit
from tasks.models import damage_named
from tasks.store import MARKER
from tasks.tensors import (
    DTYPES,
    Stored,
    content_of,
    copy_region,
    mapped,
    read_header,
    region_sha256,
    threads,
)
from tasks.undo import ORIGINALS, RECORD, TamperedEdit, Undo, need_undo

ROWS, VALUES = ".rows", ".values"


@dataclass(frozen=True, slots=True)
class Reverted:
    """What taking an edit back came to."""

    num_files: int
    """Files of the base; the hash of every one was checked."""
    num_tensors: int
    """Tensors that were put back."""
    seconds: float


class EditedCheckpoint:
    """A checkpoint with the record of its edit."""

    def __init__(self, folder: Path) -> None:
        """Read where everything lies.

        Raises:
            MissingInput: this is no edited checkpoint.
            TamperedEdit, BrokenCheckpoint: its files cannot be read.
        """
        self.folder = folder
        self.undo: Undo = need_undo(folder / EDIT)
        with damage_named(folder):
            self.originals = _header(folder / EDIT / ORIGINALS)
            self.edited: dict[str, dict[str, Stored]] = {}
            """Edited tensors by file."""
            for path in sorted(folder.glob("*.safetensors")):
                found = read_header(path)
                tensors = {name: found[name] for name in self.undo.edited if name in found}
                self.edited[path.name] = tensors

    def restore_all(self, targets: Mapping[str, Path]) -> None:
        """Write files of the base and check each one, and all else that came with the edit.

        Raises:
            TamperedEdit, CorruptArtifact: a byte is not as the edit left it.
        """
        with threads() as pool:
            written = {name: pool.submit(self._write, name, targets[name]) for name in targets}
            jobs = [
                pool.submit(self._check, written[name], name, targets[name]) for name in targets
            ]
            jobs += [pool.submit(self._check_written, name) for name in self.undo.added]
            factors = pool.submit(open_edit, self.folder / EDIT)
            for job in jobs:
                job.result()
            factors.result()

    def _write(self, name: str, target: Path) -> None:
        if name in self.undo.replaced:
            self._check_written(name)
            target.write_bytes(self.undo.replaced[name].encode())
        else:
            now = self.undo.name_now(name)
            source = self.folder / now
            if not source.is_file():
                raise TamperedEdit(str(source), "the file is missing")
            for tensor, region in self.edited.get(now, {}).items():
                if region_sha256(source, region) != self.undo.edited[tensor]:
                    raise TamperedEdit(str(source), f"{tensor} is not as the edit left it")
            shutil.copyfile(source, target)
            for tensor, region in self.edited.get(now, {}).items():
                self._put_back(tensor, target, region)

    def _check(self, written: Future[None], name: str, target: Path) -> None:
        written.result()
        if content_of(target) != self.undo.files[name]:
            raise TamperedEdit(
                str(self.folder / name), f"without the edit ({ORIGINALS}) it is not the base's file"
            )

    def _check_written(self, name: str) -> None:
        path = self.folder / name
        if not path.is_file() or content_of(path) != self.undo.written[name]:
            raise TamperedEdit(str(path), "this is not the file that was written with the edit")

    def _put_back(self, tensor: str, target: Path, region: Stored) -> None:
        source = self.folder / EDIT / ORIGINALS
        if (whole := self.originals.get(tensor)) is not None and whole.size == region.size:
            copy_region(source, whole, target, region)
            return
        rows, values = (self.originals.get(tensor + part) for part in (ROWS, VALUES))
        if rows is None or values is None or values.shape[1:] != region.shape[1:]:
            raise TamperedEdit(str(source), f"no originals of {tensor}")
        rows_K = mapped(source, rows, write=False)
        if bool(((rows_K < 0) | (rows_K >= region.shape[0])).any()):
            raise TamperedEdit(str(source), f"rows that {tensor} does not have")
        mapped(target, region, write=True)[rows_K] = mapped(source, values, write=False)


def revert(folder: Path, out: Path) -> Reverted:
    """Write the base of an edited checkpoint to a new folder.

    The factors of the edit are checked as well, though only the originals are needed.

    Raises:
        MissingInput: this is no edited checkpoint.
        TamperedEdit, CorruptArtifact: a byte of it is not as it was written.
        ConfigError: `out` has files.
        NotEnoughDisk: the base does not fit.
    """
    started = time.perf_counter()
    edited = EditedCheckpoint(folder)
    files = edited.undo.files
    with new_folder(out, sum(content.num_bytes for content in files.values())) as draft:
        edited.restore_all({name: draft / name for name in files})
    return Reverted(len(files), len(edited.undo.edited), time.perf_counter() - started)


def revert_in_place(folder: Path) -> Reverted:
    """Turn an edited checkpoint into its base.

    Every file that must change is written aside, checked and flushed before the first one is
    renamed.  After a kill the folder may hold some files of either kind, and the same call goes on:
    the record is removed last.

    Raises:
        ConfigError: the folder is an artifact of a store, which never changes.
        MissingInput, TamperedEdit, NotEnoughDisk: as for `revert`; nothing was changed.
    """
    started = time.perf_counter()
    if (folder / MARKER).exists():
        raise ConfigError(
            f"{folder}: an artifact of a store, which never changes. Name a folder for the base."
        )
    if not (folder / EDIT / RECORD).is_file():
        raise MissingInput(str(folder / EDIT / RECORD), "no such file, so there is nothing to undo")
    undo = need_undo(folder / EDIT)
    with threads() as pool:
        same = pool.map(lambda name: _is(folder / name, undo.files[name]), undo.files)
        waiting = [name for name, is_same in zip(undo.files, same, strict=True) if not is_same]
    if waiting:
        _replace(folder, undo, waiting)
    for name in (*undo.renamed.values(), *undo.added):
        (folder / name).unlink(missing_ok=True)
    flush(folder)
    for path in sorted((folder / EDIT).iterdir(), key=lambda path: path.name == RECORD):
        path.unlink()
    (folder / EDIT).rmdir()
    flush(folder)
    return Reverted(len(undo.files), len(undo.edited), time.perf_counter() - started)


def _replace(folder: Path, undo: Undo, names: list[str]) -> None:
    asides = {name: folder / f".{name}.undo" for name in names}
    check_room(folder, sum(undo.files[name].num_bytes for name in names))
    edited = EditedCheckpoint(folder)
    try:
        with disk_full_named(folder):
            edited.restore_all(asides)
            for aside in asides.values():
                flush(aside)
        for name, aside in asides.items():
            os.replace(aside, folder / name)
    finally:
        for aside in asides.values():
            aside.unlink(missing_ok=True)
    flush(folder)


def _is(path: Path, content: object) -> bool:
    return path.is_file() and content_of(path) == content


def _header(path: Path) -> dict[str, Stored]:
    return read_header(path, DTYPES | {"I64": torch.int64}) if path.is_file() else {}
