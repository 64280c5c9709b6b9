"""Whether a model's bytes contain the edit of a certificate.

    edited tensors       = originals (edit/undo.safetensors) + P, cast once
    untouched tensors    the bytes that were certified

Shapes: N inputs of W, M outputs of W, K edited rows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grom.apply import ROW_BLOCK
from grom.certificate import Certificate
from grom.errors import DataError, GromError
from grom.sites import Site
from tasks.certified import untouched_sha256
from tasks.edits import edit_folder
from tasks.provenance import Published, find_published
from tasks.store import RESERVED, Store
from tasks.tensors import (
    DTYPES,
    INDEX,
    content_of,
    mapped,
    model_files,
    read_header,
    region_sha256,
    weight_places,
)
from tasks.undo import ORIGINALS
from tasks.updates import FACTORS, StoredUpdates
from tasks.verify import Check
from tasks.verify_later import later_version

SLACK = 1e-12
"""Another machine sums in another order: P differs by that share, which rounding may turn."""
NAMES = ("model files", "model tensors", "edit in the model")


def verify_model(certificate: Certificate, folder: Path, store: Store | None) -> list[Check]:
    """Check a checkpoint's files, its tensors, and that each edited one is the base's plus P.

    A later version of the model that was solved from this batch's statistics as well, or from what
    withdrawals left of them, contains the batch, too; its bytes are checked against its own
    artifact then.

    Args:
        certificate: of the edit.
        folder: the checkpoint.
        store: where artifacts are.
    """
    try:
        edit = edit_folder(folder)
        mine = content_of(edit / FACTORS).sha256 == certificate.edit.files[FACTORS]
    except (GromError, OSError) as error:
        return [_broken(NAMES[2], folder, error)]
    if not mine:
        later = None if store is None else _guarded(NAMES[0], edit, _later, certificate, store)
        return later or [
            *_guarded(NAMES[0], folder, _files, certificate),
            Check(NAMES[2], "failed", f"{edit / FACTORS}: not the edit of this certificate"),
        ]
    return [
        *_guarded(NAMES[0], folder, _files, certificate),
        *_guarded(NAMES[1], folder, _tensors, certificate),
        *_guarded("edit files", edit, _edit_files, certificate),
        *_guarded(NAMES[2], edit, _sums, folder),
    ]


def _guarded(
    name: str, folder: Path, check: Callable[..., list[Check]], *with_: Any
) -> list[Check]:
    """The checks, or one that failed because the files cannot be read."""
    try:
        return check(folder, *with_)
    except (GromError, OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        return [_broken(name, folder, error)]


def _broken(name: str, folder: Path, error: Exception) -> Check:
    reason = (
        str(error) if isinstance(error, GromError) else f"cannot be read ({type(error).__name__})"
    )
    return Check(name, "failed", f"{folder}: {reason}")


def verify_stored_model(certificate: Certificate, store: Store | None) -> list[Check]:
    """The same checks of the store's own copy of the checkpoint."""
    if store is None:
        return [Check(name, "not checked", "no model was given") for name in NAMES]
    name = f"apply/{certificate.edit.checkpoint}"
    try:
        found = find_published(name, store)
        if found is None:
            detail = f"no model was given, and {name} is no longer in the store"
            return [Check(name, "not checked", detail) for name in NAMES]
        folder = store.fetch(found.artifact)
    except DataError as error:
        return [Check(NAMES[0], "failed", str(error))]
    return verify_model(certificate, folder, store)


def _files(folder: Path, certificate: Certificate) -> list[Check]:
    """Whether every file is as certified."""
    expected = certificate.model.files
    there = set(model_files(folder, RESERVED))
    weights = {name for name in expected if name.endswith(".safetensors")}
    resharded = bool(there) and not weights & there
    wanted = expected if not resharded else {n: h for n, h in expected.items() if n not in weights}
    wrong = [
        name
        for name, sha256 in wanted.items()
        if name not in there or content_of(folder / name).sha256 != sha256
    ]
    shards = {path.name for path, _ in weight_places(folder).values()}
    extra = sorted(there - set(expected) - ({*shards, INDEX} if resharded else set()))
    problems = [*(f"{folder / name}: not as certified" for name in wrong)]
    problems += [f"{folder / name}: not part of what was certified" for name in extra]
    if problems:
        return [Check(NAMES[0], "failed", "; ".join(problems))]
    return [Check(NAMES[0], "ok", f"{len(wanted)} files with the certified hashes")]


def _tensors(folder: Path, certificate: Certificate) -> list[Check]:
    places = weight_places(folder)
    wrong = [
        name
        for name, sha256 in certificate.edit.edited.items()
        if name not in places or region_sha256(*places[name]) != sha256
    ]
    if untouched_sha256(folder, certificate.edit.edited) != certificate.model.untouched_sha256:
        wrong.append("a tensor that the edit left alone")
    if wrong:
        return [Check(NAMES[1], "failed", f"not as certified: {', '.join(wrong)}")]
    detail = f"{len(certificate.edit.edited)} edited ones, and all others, as certified"
    return [Check(NAMES[1], "ok", detail)]


def _edit_files(edit: Path, certificate: Certificate) -> list[Check]:
    wrong = [
        str(edit / name)
        for name, sha256 in certificate.edit.files.items()
        if not (edit / name).is_file() or content_of(edit / name).sha256 != sha256
    ]
    if wrong:
        return [Check("edit files", "failed", f"not as certified: {', '.join(wrong)}")]
    return [Check("edit files", "ok", f"{len(certificate.edit.files)} files as certified")]


def _sums(edit: Path, folder: Path) -> list[Check]:
    """Whether each edited tensor is the original plus P, cast once."""
    updates, places = StoredUpdates(edit), weight_places(folder)
    originals = read_header(edit / ORIGINALS, DTYPES | {"I64": torch.int64})
    for site in updates.sites:
        if site.tensor not in places:
            return [Check(NAMES[2], "failed", f"{folder} has no {site.tensor}")]
        number = _first_wrong(site, updates, mapped(*places[site.tensor], write=False), {
            name: mapped(edit / ORIGINALS, stored, write=False)
            for name, stored in originals.items()
            if name.startswith(site.tensor)
        })  # fmt: skip
        if number is not None:
            detail = f"{site.tensor}, row {number}: not the original plus the edit"
            return [Check(NAMES[2], "failed", detail)]
    count = len(updates.sites)
    return [Check(NAMES[2], "ok", f"{count} tensors are the original plus the edit, cast once")]


def _first_wrong(
    site: Site, updates: StoredUpdates, weight: Tensor, originals: dict[str, Tensor]
) -> int | None:
    """The first row of W that is not the original plus P; None if all are."""
    now_MN, update = site.oriented(weight), updates.whole(site)
    if update.rows_K is not None:
        before_KN = originals[f"{site.tensor}.values"]
        fits_K = fits(now_MN[update.rows_K], before_KN, update.right_KN)
        return None if bool(fits_K.all()) else int(update.rows_K[int((~fits_K).nonzero()[0])])
    before_MN = site.oriented(originals[site.tensor])
    for first in range(0, len(now_MN), ROW_BLOCK):
        last = min(first + ROW_BLOCK, len(now_MN))
        part = updates.rows(site, first, last)
        exact_KN = part.right_KN if part.left_MK is None else part.left_MK @ part.right_KN
        fits_K = fits(now_MN[first:last], before_MN[first:last], exact_KN)
        if not bool(fits_K.all()):
            return first + int((~fits_K).nonzero()[0])
    return None


def fits(now_KN: Tensor, before_KN: Tensor, update_KN: Tensor) -> Tensor:
    """Which rows are the original plus P, up to the last digits of P."""
    exact_KN = before_KN.double() + update_KN
    slack_KN = SLACK * (update_KN.abs() + update_KN.abs().max())
    low_KN, high_KN = (exact_KN - slack_KN).to(now_KN.dtype), (exact_KN + slack_KN).to(now_KN.dtype)
    # Where the sum nearly cancels, several numbers lie between the two.
    return ((now_KN >= low_KN) & (now_KN <= high_KN)).all(dim=1)


def _later(edit: Path, certificate: Certificate, store: Store) -> list[Check]:
    """The checks of a later version of the model; none if it is no such version."""
    updates, folder = StoredUpdates(edit), edit.parent
    later = later_version(updates.facts, certificate, store)
    if later is None:
        return []
    if odd := _unlike(folder, later.applied):
        detail = f"{folder / odd}: not as published ({later.what})"
        return [Check(NAMES[0], "failed", detail)]
    files = Check(NAMES[0], "ok", f"files as published; {later.what}; {later.applied.name}")
    if not later.holds:
        return [files, Check(NAMES[2], "failed", f"it is not: {later.what}")]
    return [files, *(_sums(edit, folder) if updates.sites else ())]


def _unlike(folder: Path, applied: Published) -> str | None:
    """A file in which a folder differs from a published checkpoint: other bytes, missing, added."""
    expected = set(applied.files) - set(RESERVED)
    there = {*model_files(folder, RESERVED), *(name for name in expected if "/" in name)}
    there |= {path.name for path, _ in weight_places(folder).values()}
    for name in sorted(expected | there):
        if name not in expected or not (folder / name).is_file():
            return name
        if content_of(folder / name).sha256 != applied.file_sha256(name):
            return name
    return None
