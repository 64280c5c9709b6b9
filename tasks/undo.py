"""What it takes to undo an edit: beside the exact originals, what every file was before.

edit/undo.safetensors   original tensors, or original rows of a row-sparse edit
edit/undo.json          this record
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, ValidationError

from grom.config import Config
from grom.errors import DataError, MissingInput
from tasks.artifacts import canonical_json
from tasks.tensors import Content

ORIGINALS = "undo.safetensors"
RECORD = "undo.json"


class TamperedEdit(DataError):
    """Bytes of an edit, of its originals or of an edited checkpoint are not what was written."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(
            f"{where}: {what}. Take the folder from its store or a backup, or apply the edit to "
            "its base again; nothing was written."
        )


class Undo(Config):
    """What the base was, and how the edited checkpoint differs from it."""

    edit: str
    """Hash of the edit: `Updates.sha256`."""
    files: dict[str, Content]
    """Every file of the base, by name."""
    edited: dict[str, str]
    """sha256 of the bytes of every edited tensor, after the edit."""
    renamed: dict[str, str] = Field(default_factory=dict)
    """The base's name of a file -> its name now, where a head was untied."""
    replaced: dict[str, str] = Field(default_factory=dict)
    """The base's text of files that were rewritten: config, index."""
    added: tuple[str, ...] = ()
    """Files that the base does not have."""
    written: dict[str, Content] = Field(default_factory=dict)
    """What rewritten and added files hold now."""

    @property
    def untied(self) -> bool:
        """Whether the base's head is tied to its embedding, and the edit untied it."""
        return bool(self.added)

    def name_now(self, name: str) -> str:
        """What a file of the base is called in the edited checkpoint."""
        return self.renamed.get(name, name)


def write_undo(folder: Path, undo: Undo) -> None:
    """Write the record into an `edit/` folder."""
    (folder / RECORD).write_bytes(canonical_json(undo.model_dump(mode="json")))


def read_undo(folder: Path) -> Undo | None:
    """The record of an `edit/` folder; None if it has none.

    Raises:
        TamperedEdit: it cannot be read.
    """
    path = folder / RECORD
    if not path.is_file():
        return None
    try:
        return Undo.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise TamperedEdit(str(path), "this is not a record of an edit") from error


def need_undo(folder: Path) -> Undo:
    """The record of an `edit/` folder.

    Raises:
        MissingInput: it has none.
        TamperedEdit: it cannot be read.
    """
    undo = read_undo(folder)
    if undo is None:
        raise MissingInput(
            str(folder / RECORD),
            "no such file, so this is no edited checkpoint, or one of an older version; apply its "
            "edit to the base again with `grom apply`",
        )
    return undo
