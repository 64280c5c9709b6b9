"""Reading rows: JSON Lines and Parquet from any fsspec address, or a hub data set, as a stream.

Constant memory: one line or one record batch at a time.  A bad row is named by file and line; its
content never enters a message.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import fsspec

from grom.config import DataConfig
from grom.errors import MalformedRow, MissingInput
from grom.examples import Example
from tasks.lines import SUFFIXES, checked_text, known_kind, own_rows

HUB = "hub:"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a data set, pinned as it was found."""

    path: str
    version: str
    """Changes when the file does: the store's version or entity tag, or size and time."""


def source_files(uri: str) -> list[SourceFile]:
    """The data files at an address: a file, a glob, or all under a folder, in natural order.

    Raises:
        MissingInput: nothing there, or no file of a known kind.
    """
    fs, path = fsspec.core.url_to_fs(uri)
    fs.invalidate_cache()
    if "*" in path:
        paths = fs.glob(path)
    elif fs.isfile(path):
        paths = [path]
    elif fs.isdir(path):
        paths = fs.find(path)
    else:
        raise MissingInput(uri, "there is nothing at this address")
    known = [found for found in paths if known_kind(found) is not None]
    if not known:
        raise MissingInput(uri, f"no file there ends in {', '.join(SUFFIXES)} (or with .gz, .zst)")
    return [
        SourceFile(fs.unstrip_protocol(found), str(fs.ukey(found)))
        for found in sorted(known, key=_natural)
    ]


def read_examples(
    config: DataConfig, on_bad: Callable[[MalformedRow], None] | None = None
) -> Iterator[Example]:
    """Stream the examples of a data set in order.

    Args:
        config: address, columns and which rows.
        on_bad: told of each bad row, which is then left out; not given: the first one raises.

    Raises:
        MissingInput: nothing at the address.
        MalformedRow: a row that breaks the schema, if `on_bad` is not given.
    """
    taken = 0
    for number, (place, line, row) in enumerate(read_rows(config.uri)):
        if number < config.skip or (number - config.skip) % config.every:
            continue
        try:
            if isinstance(row, MalformedRow):
                raise row
            example = _example(config, row, number, place, line)
        except MalformedRow as bad:
            if on_bad is None:
                raise
            on_bad(bad)
            continue
        if _wanted(config, example.group):
            yield example
            taken += 1
            if taken == config.limit:
                return


def digest(config: DataConfig) -> str:
    """SHA-256 over the content of all files of a data set, or over the rows of a hub set."""
    sha = hashlib.sha256()
    if config.uri.startswith(HUB):
        for _, _, row in read_rows(config.uri):
            sha.update(json.dumps(row, sort_keys=True, default=str).encode())
        return sha.hexdigest()
    for file in source_files(config.uri):
        with fsspec.open(file.path, "rb") as opened:
            while block := opened.read(2**20):
                sha.update(block)
        sha.update(b"\0")
    return sha.hexdigest()


def read_rows(uri: str) -> Iterator[tuple[str, int, Any]]:
    """File name, line and content of each row at an address; a bad row is a MalformedRow."""
    if uri.startswith(HUB):
        yield from _hub_rows(uri)
        return
    for file in source_files(uri):
        name = file.path.rsplit("/", 1)[-1]
        with fsspec.open(file.path, "rb") as raw:
            yield from ((name, line, row) for line, row in own_rows(name, raw))


def _hub_rows(address: str) -> Iterator[tuple[str, int, Any]]:
    from datasets import load_dataset

    name, config, split = [*address.removeprefix(HUB).split(":"), "", ""][:3]
    try:
        rows = load_dataset(name, config or None, split=split or "train", streaming=True)
    except Exception as error:
        raise MissingInput(
            address, f"the hub data set did not open ({type(error).__name__})"
        ) from (error)
    for number, row in enumerate(cast(Any, rows), start=1):
        yield name, number, dict(row)


def _example(config: DataConfig, row: object, number: int, place: str, line: int) -> Example:
    if not isinstance(row, Mapping):
        raise MalformedRow(place, line, "the row is not an object")
    named = row.get(config.group)
    group_number = number // (config.group_rows or 1) if named is None else _hashed(str(named))
    group = f"group-{group_number:06d}" if named is None else str(named)
    where = f"{place}, line {line}"
    prompt, answer, text = (row.get(key) for key in (config.prompt, config.answer, config.text))
    if prompt is None and answer is None and text is not None:
        whole = checked_text(text, config.text, place, line)
        return Example(where, group, group_number, text=whole)
    return Example(
        where,
        group,
        group_number,
        prompt=checked_text(prompt, config.prompt, place, line),
        answer=checked_text(answer, config.answer, place, line),
    )


def _hashed(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")


def _wanted(config: DataConfig, group: str) -> bool:
    return group not in config.without and (config.only is None or group in config.only)


def _natural(path: str) -> list[tuple[int, str]]:
    """part-2 before part-10."""
    parts, digits = [], ""
    for character in [*path, ""]:
        if character.isdigit():
            digits += character
            continue
        if digits:
            parts.append((int(digits), ""))
            digits = ""
        parts.append((-1, character))
    return parts
