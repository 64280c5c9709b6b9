"""`grom certificate`, `verify`, `keygen`: what was done for a request, and whether it is so."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from flows.inbox_commands import StoreOption
from flows.terminal import console, prepare_environment, readable_errors
from grom.errors import ConfigError

if TYPE_CHECKING:
    from grom.certificate import Certificate
    from tasks.store import Store
    from tasks.verify import Check

STYLES = {"ok": "green", "failed": "bold red", "not checked": "yellow"}
FAILED_EXIT = 1
SHORT = 12
"""Digits of a hash in a file's name."""
DEFAULT_WORK = Path("grom-work")
Work = Annotated[Path, typer.Option(help="Work folder: downloads, and the embedded registry.")]


def show_certificate(
    store: StoreOption,
    request: Annotated[
        str | None, typer.Argument(help="Id of a request, as it was submitted.")
    ] = None,
    batch: Annotated[str | None, typer.Option(help="Instead: the certificate of a batch.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the documents.", file_okay=False)] = Path(),
    html: Annotated[bool, typer.Option("--html", help="Also as a page for people.")] = False,
) -> None:
    """Write the certificate of a request, or of a whole batch."""
    with readable_errors():
        if (request is None) == (batch is None):
            raise ConfigError("name a request's id, or a batch with --batch, not both")
        from tasks.certificates import certificates_of_request, latest_of_batch

        opened = _open(store, DEFAULT_WORK)
        if request is not None:
            found = certificates_of_request(request, opened)
        else:
            found = [latest_of_batch(str(batch), opened)]
        out.mkdir(parents=True, exist_ok=True)
        for certificate in found:
            _write(certificate, out, html=html)


def verify_certificate(
    certificate: Annotated[
        Path, typer.Argument(help="The JSON document.", exists=True, dir_okay=False)
    ],
    store: Annotated[
        str | None,
        typer.Option(help="Its store: ledger and artifacts are checked, too.", envvar="GROM_STORE"),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A checkpoint: folder or models:/NAME@ALIAS.  Else the store's copy."),
    ] = None,
    public_key: Annotated[
        Path | None, typer.Option(help="The key that is trusted: PEM, or 64 hex digits.")
    ] = None,
    work: Work = DEFAULT_WORK,
) -> None:
    """Check a certificate: hashes, signature, ledger, and that the model's bytes have the edit."""
    with readable_errors():
        if model is not None and model.startswith("models:/"):
            prepare_environment(work)
        checks = _checks(certificate, store, model, public_key, work)
        _show(checks)
    if any(check.state == "failed" for check in checks):
        raise typer.Exit(FAILED_EXIT)


def make_key(
    path: Annotated[Path, typer.Argument(help="A new file for the private key.")],
) -> None:
    """Make a key that certificates are signed with; the public half goes beside it."""
    from grom.signing import new_private_key, public_pem, read_private_key

    with readable_errors():
        pem, public = new_private_key(), path.with_name(f"{path.name}.pub")
        _write_new(public, public_pem(read_private_key(pem.decode(), str(path))), mode=0o644)
        _write_new(path, pem, mode=0o600)
        console.print(f"private key: {path}   for GROM_SIGNING_KEY_FILE; keep it", soft_wrap=True)
        console.print(f"public key:  {public}   for those who verify", soft_wrap=True)


def _write_new(path: Path, data: bytes, *, mode: int) -> None:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        raise ConfigError(f"{path}: there is something already. Name a new file.") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None
    with os.fdopen(handle, "wb") as file:
        file.write(data)


def _checks(
    path: Path, store: str | None, model: str | None, public_key: Path | None, work: Path
) -> list[Check]:
    from grom.certificate import BrokenCertificate, read_certificate
    from grom.signing import read_public_key
    from tasks.edits import locate
    from tasks.verify import Check, verify_document, verify_in_store
    from tasks.verify_model import verify_model, verify_stored_model

    trusted = None
    if public_key is not None:
        if not public_key.is_file():
            raise ConfigError(f"{public_key}: no such file; give the public key's PEM file")
        trusted = read_public_key(public_key.read_bytes(), str(public_key))
    try:
        certificate = read_certificate(path.read_bytes(), str(path))
    except BrokenCertificate as error:
        return [Check("schema", "failed", str(error))]
    opened = None if store is None else _open(store, work)
    checks = [*verify_document(certificate, trusted), *verify_in_store(certificate, opened)]
    if model is not None:
        return [*checks, *verify_model(certificate, locate(model, work), opened)]
    return [*checks, *verify_stored_model(certificate, opened)]


def _open(store: str, work: Path) -> Store:
    from tasks.retries import BRIEF
    from tasks.store import Store

    return Store(store, work / "scratch", patience=BRIEF)


def _write(certificate: Certificate, out: Path, *, html: bool) -> None:
    from grom.certificate_page import render_certificate

    name = f"certificate-{certificate.batch}"
    if certificate.kind == "request":
        name += f"-{certificate.requests[0].request[:SHORT]}"
    path = out / f"{name}.json"
    path.write_bytes(certificate.to_bytes())
    console.print(f"{path}: {certificate.authenticity}", highlight=False, soft_wrap=True)
    if html:
        page = out / f"{name}.html"
        page.write_text(render_certificate(certificate), encoding="utf-8")
        console.print(str(page), highlight=False, soft_wrap=True)


def _show(checks: list[Check]) -> None:
    table = Table(title="certificate")
    for column in ("check", "state", "what was found"):
        table.add_column(column, overflow="fold")
    for check in checks:
        table.add_row(check.name, Text(check.state, STYLES[check.state]), Text(check.detail))
    console.print(table)
    counts = {state: sum(check.state == state for check in checks) for state in STYLES}
    words = ", ".join(f"{number} {state}" for state, number in counts.items() if number)
    console.print(words, highlight=False)
