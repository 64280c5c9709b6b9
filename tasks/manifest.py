"""What lies in a deletion batch's folder, by name, and the document that lists it.

inbox/<batch>/manifest.json    files with size, sha256 and rows; nothing that a row says
inbox/<batch>/<file>           JSON Lines or Parquet
inbox/<batch>/_READY.json      written last: the batch is complete
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from grom.errors import DataError
from tasks.artifacts import canonical_json
from tasks.lines import known_kind

INBOX, MANIFEST, READY = "inbox", "manifest.json", "_READY.json"
BATCH_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._ =-]{0,199}")
DOCUMENT_BYTES = 16 * 2**20
"""A manifest of 100,000 files."""


class Refused(DataError):
    """A batch cannot be accepted as it is; `reason` says why, without quoting a row."""

    def __init__(self, batch: str, reason: str) -> None:
        super().__init__(
            f"batch {batch}: {reason}. Correct the batch, then `grom retry {batch}`; or submit the "
            "rows again under another name."
        )
        self.batch, self.reason = batch, reason


class FileEntry(BaseModel):
    """One file of a batch."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str
    bytes: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    rows: int = Field(ge=0)

    @field_validator("name")
    @classmethod
    def _stays_in_the_folder(cls, name: str) -> str:
        if not FILE_NAME.fullmatch(name) or name == MANIFEST or known_kind(name) is None:
            raise ValueError("not the plain name of a .jsonl or .parquet file")
        return name


class Manifest(BaseModel):
    """The files of a batch.  Keys that it does not know are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    files: tuple[FileEntry, ...]
    rows: int = Field(ge=0)
    created: str = ""
    """When, ISO 8601; information only."""

    @property
    def content(self) -> str:
        """Hash of what is in the files, whatever their names and order, 16 hex digits."""
        return content_hash([file.sha256 for file in self.files])

    def to_bytes(self) -> bytes:
        """Canonical JSON."""
        return canonical_json(self.model_dump(mode="json"))


def content_hash(digests: list[str]) -> str:
    """Hash of a set of files, given their sha256, 16 hex digits."""
    return hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest()[:16]


def parse_manifest(batch: str, data: bytes) -> Manifest:
    """Read a manifest that anybody may have written.

    Raises:
        Refused: it breaks the schema, lists no file or one twice, or its rows do not add up.
    """
    document = _parsed(data)
    if not isinstance(document, dict):
        raise Refused(batch, f"{MANIFEST} is not a JSON object")
    try:
        manifest = Manifest.model_validate(document)
    except ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(str(part) for part in problem["loc"])
        raise Refused(batch, f"{MANIFEST}: {field}: {problem['msg'].lower()}") from None
    names = [file.name for file in manifest.files]
    if not names or not manifest.rows:
        raise Refused(batch, "the batch is empty: its manifest lists no file with rows")
    if len(set(names)) < len(names):
        raise Refused(batch, f"{MANIFEST} lists a file twice")
    if sum(file.rows for file in manifest.files) != manifest.rows:
        raise Refused(batch, f"{MANIFEST}: the files' rows do not add up to `rows`")
    return manifest


def parse_marker(batch: str, data: bytes) -> str | None:
    """The manifest's sha256 that a marker pins, or None if it pins none.

    Raises:
        Refused: it is not a JSON object, or pins something else than a sha256.
    """
    marker = _parsed(data)
    if not isinstance(marker, dict):
        raise Refused(batch, f"{READY} is not a JSON object")
    pinned = marker.get("manifest_sha256")
    if pinned is not None and not re.fullmatch("[0-9a-f]{64}", str(pinned)):
        raise Refused(batch, f"{READY}: `manifest_sha256` is not a sha256")
    return pinned


def plain_batch(batch: str) -> str:
    """The same name, if it can name a batch.

    Raises:
        DataError: it cannot.
    """
    if not BATCH_NAME.fullmatch(batch) or batch.endswith(".json"):
        raise DataError(
            "the batch's name has other characters than letters, digits, `.`, `_` and `-`, or over "
            "100 of them. Give it a plain name, without personal data."
        )
    return batch


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return None
