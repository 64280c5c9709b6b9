"""Edits as things of their own: found, checked, and applied to the base that they belong to."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from grom.config import ModelConfig
from grom.errors import ConfigError, MissingInput, ModelError
from tasks import models
from tasks.artifacts import CorruptArtifact, check_room, disk_full_named, verify
from tasks.checkpoint import write_edited
from tasks.codecs import read_json, write_json, write_table
from tasks.place import Place
from tasks.registry import registered_folder
from tasks.store import MARKER, RESERVED, Artifact, Store
from tasks.tensors import model_files
from tasks.tracking import Tracking
from tasks.undo import ORIGINALS, TamperedEdit, Undo, need_undo, read_undo
from tasks.updates import FACTORS, SITES, StoredUpdates

EDIT = "edit"
REGISTERED = "models:/"
ARTIFACT = re.compile(r"(?P<root>.+)/(?P<stage>[a-z]+)/(?P<key>[0-9a-f]{16})(/[0-9a-f]{8})?/?")


class WrongBase(ModelError):
    """The edit was made for another model."""

    def __init__(self, base: str, expected: str, hint: str) -> None:
        super().__init__(
            f"{base}: this is not the model that the edit was made for, whose fingerprint is "
            f"{expected}{hint}. Name that model: the configuration of the run that made the edit "
            "says which it is. Nothing was written."
        )


@dataclass(frozen=True, slots=True)
class Applied:
    """What applying an edit came to."""

    num_sites: int
    num_changed: int
    """Weights whose stored value changed."""
    lost: float
    """Largest share of a site's update that rounding lost."""
    seconds: float
    reproduced: bool | None
    """Whether the edited tensors are those that the edit's own run wrote, to the byte; None if the
    edit came without its record."""


def locate(address: str, work: Path, tracking: Tracking | None = None) -> Path:
    """The local folder that an address means.

    Args:
        address: a folder or a file in it, `models:/name@alias`, or an artifact in a store,
            `<store>/<stage>/<key>`.
        work: where downloads go.
        tracking: the registry of `models:/`.

    Raises:
        MissingInput: nothing is there.
        CorruptArtifact: the artifact's bytes are not the ones that were published.
    """
    if address.startswith(REGISTERED):
        return registered_folder(tracking or Tracking(), work, address)
    if "://" in address:
        match = ARTIFACT.fullmatch(address)
        if match is None:
            raise MissingInput(address, "in a store, name an artifact: STORE/apply/KEY")
        artifact = Artifact(stage=match["stage"], key=match["key"], uri=address)
        return Store(match["root"], work / "scratch").fetch(artifact)
    path = Path(address).expanduser()
    if not path.exists():
        raise MissingInput(address, "no such folder")
    return path.resolve() if path.is_dir() else path.resolve().parent


def edit_folder(folder: Path) -> Path:
    """The folder of the edit: this one, or `edit/` of an edited checkpoint.

    Raises:
        MissingInput: there is no edit.
    """
    for candidate in (folder / EDIT, folder):
        if (candidate / FACTORS).is_file():
            return candidate
    raise MissingInput(str(folder), f"no {FACTORS} there or in {EDIT}/")


def open_edit(folder: Path, *, check: bool = True) -> tuple[StoredUpdates, Undo | None]:
    """An edit and, if it has one, its record; checked against it and against a store's digests.

    Args:
        folder: of the edit.
        check: False where the caller compares the hash of the factors himself.

    Raises:
        MissingInput, BrokenCheckpoint: see `StoredUpdates`.
        TamperedEdit: the factors are not those of the record.
        CorruptArtifact: a file is not as it was published.
    """
    checkpoint = folder.parent if folder.name == EDIT else folder
    verify_marked(checkpoint, (FACTORS, SITES, ORIGINALS))
    updates, undo = StoredUpdates(folder), read_undo(folder)
    if check and undo is not None:
        _check_factors(folder, undo, updates.sha256())
    return updates, undo


def _check_factors(folder: Path, undo: Undo, sha256: str) -> None:
    if undo.edit != sha256:
        raise TamperedEdit(str(folder / FACTORS), "these are not the factors that were written")


def verify_marked(folder: Path, names: tuple[str, ...]) -> None:
    """Check an artifact's files of these names against its marker; any other folder has none.

    Raises:
        CorruptArtifact: one of them was changed.
    """
    marker = folder / MARKER
    if marker.is_file():
        files = read_json(marker)["files"]
        verify(folder, {name: files[name] for name in files if Path(name).name in names})


def open_base(
    config: ModelConfig, place: Place, tracking: Tracking | None = None
) -> tuple[Path, str | None]:
    """A base as a plain checkpoint, with its fingerprint unless its files are it.

    Raises:
        MissingInput, QuantisedBase: as their messages say.
    """
    folder = Path(config.source).expanduser()
    if folder.is_dir() and models.is_plain(config, folder):
        models.refuse_quantised(folder)
        return folder.resolve(), None  # hashed while it is copied
    from tasks.load import load_model  # it imports Prefect, which takes as long as a small copy

    found = load_model.fn(config, place, tracking)
    return Path(found.folder), found.fingerprint


def apply_edit(base: Path, folder: Path, out: Path, fingerprint: str | None = None) -> Applied:
    """Write the checkpoint that the stage `apply` wrote for this edit, to the byte.

    `out` appears when it is complete.  It is not flushed to the disk first: base and edit are still
    there, and its record tells whether every byte arrived.

    Args:
        base: the plain checkpoint.
        folder: the edit's.
        out: the new folder.
        fingerprint: of the base, if it is not the hash of its files.

    Raises:
        WrongBase: the edit was made for another model.
        ConfigError: `out` has files, or the edit has no strength yet.
        TamperedEdit, CorruptArtifact: the edit is not as it was written.
        NotEnoughDisk: the checkpoint does not fit.
        MissingTensor, ErasedByRounding: see `write_edited`.
    """
    started = time.perf_counter()
    updates, undo = open_edit(folder, check=False)
    updates.need_strength()
    sizes = {name: (base / name).stat().st_size for name in model_files(base, RESERVED)}
    alike = undo is not None and sizes == {n: f.num_bytes for n, f in undo.files.items()}
    if not alike:
        need_base(base, updates, fingerprint)
    with new_folder(out, sum(sizes.values())) as draft:
        roundings = write_edited(base, updates, draft)
        record = need_undo(draft / EDIT)
        if undo is not None:
            _check_factors(folder, undo, record.edit)
            if alike and record.files != undo.files:
                need_base(base, updates, fingerprint)
        for name in (FACTORS, SITES):
            shutil.copyfile(folder / name, draft / EDIT / name)
        write_table(draft / EDIT / "rounding.parquet", roundings)
        applied = Applied(
            num_sites=len(roundings),
            num_changed=sum(rounding.num_changed for rounding in roundings),
            lost=max(rounding.lost for rounding in roundings),
            seconds=time.perf_counter() - started,
            reproduced=None if undo is None else record.edited == undo.edited,
        )
        summary = {"seconds": applied.seconds, "num_changed": applied.num_changed}
        write_json(draft / EDIT / "applied.json", summary | {"lost": applied.lost})
    return applied


def need_base(base: Path, updates: StoredUpdates, fingerprint: str | None) -> None:
    """Compare fingerprints: of the source, of the files, or of the artifact that they are.

    Raises:
        WrongBase: the edit was made for another model.
    """
    expected = updates.facts.get("model")
    if fingerprint is None:
        fingerprint = models.fingerprint(ModelConfig(source=str(base)), base)
    if expected in (fingerprint, _published(base)):
        return
    hint = ""
    if (base / EDIT / FACTORS).is_file():
        hint = " (it is an edited model itself: `grom revert` takes an edit back)"
    raise WrongBase(str(base), str(expected), hint)


def _published(base: Path) -> str | None:
    """The fingerprint of the source that a plain checkpoint in a store was made from."""
    if not (base / MARKER).is_file():
        return None
    marker = read_json(base / MARKER)
    try:
        verify(base, marker["files"])
    except CorruptArtifact:
        return None
    found: str | None = marker["facts"].get("model") if base.parent.name == "load" else None
    return found


@contextmanager
def new_folder(out: Path, expected_bytes: int) -> Iterator[Path]:
    """A draft that becomes the folder `out` when the block ends without error, or is gone.

    Raises:
        ConfigError: `out` is a file, or has files.
        NotEnoughDisk: so many bytes are not free, or the disk ran full.
    """
    out = out.expanduser().absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}: there is something already. Name a new folder.")
    check_room(out.parent, expected_bytes)
    draft = out.with_name(f".{out.name}.{uuid4().hex}")
    draft.mkdir()
    try:
        with disk_full_named(draft, expected_bytes):
            yield draft
            draft.rename(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
