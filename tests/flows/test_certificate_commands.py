"""`grom certificate`, `verify` and `keygen` from the terminal, exit codes included."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from flows import certificate_commands
from grom.certificate import read_certificate
from grom.signing import public_pem, read_private_key, read_public_key, signature_holds
from tasks.certificates import KEY_FILE
from tests.certified import Certified, certified_service
from tests.edits import flip

pytestmark = pytest.mark.usefixtures("prefect_server", "own_environment")

app = typer.Typer(pretty_exceptions_enable=False)
app.command("certificate")(certificate_commands.show_certificate)
app.command("verify")(certificate_commands.verify_certificate)
app.command("keygen")(certificate_commands.make_key)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, prefect_server: None) -> Certified:
    return certified_service(tmp_path_factory.getbasetemp())


def grom(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})


def document(made: Certified, out: Path, *words: object) -> Path:
    result = grom("certificate", *words, "--store", made.store.root, "--out", out)
    assert result.exit_code == 0, result.output
    return sorted(out.glob("*.json"))[-1]


def test_a_requests_certificate_and_its_page(made: Certified, tmp_path: Path) -> None:
    path = document(made, tmp_path / "out", "person-6@example.org", "--html")
    found = read_certificate(path.read_bytes(), "x")
    assert (found.kind, found.batch) == ("request", "second")
    page = path.with_suffix(".html").read_text()
    assert "Honoured" in page
    assert "person-6" not in page + path.read_text() + path.name


def test_a_batchs_certificate_verifies(made: Certified, tmp_path: Path) -> None:
    path, key = document(made, tmp_path, "--batch", "second"), tmp_path / "key.pub"
    key.write_bytes(public_pem(made.private_key))
    work = ("--work", tmp_path / "work")
    result = grom("verify", path, "--store", made.store.root, "--public-key", key, *work)
    assert result.exit_code == 0, result.output
    assert "11 ok" in result.output
    alone = grom("verify", path, *work)
    assert alone.exit_code == 0
    assert "unknown key" in alone.output
    assert "not checked" in alone.output
    other = grom("verify", path, "--model", made.checkpoint("first"), *work)
    assert other.exit_code == 1
    assert "not the edit of this certificate" in other.output


def test_what_was_changed_ends_with_1(made: Certified, tmp_path: Path) -> None:
    path = document(made, tmp_path, "--batch", "first")
    work = ("--work", tmp_path / "work")
    path.write_bytes(path.read_bytes().replace(b'"approver":"gate"', b'"approver":"kate"'))
    result = grom("verify", path, *work)
    assert result.exit_code == 1
    assert "changed: approver" in result.output
    flip(path, 0)
    broken = grom("verify", path, *work)
    assert broken.exit_code == 1
    assert "not JSON" in broken.output


def test_a_registered_model_is_checked_by_its_alias(made: Certified, tmp_path: Path) -> None:
    path = document(made, tmp_path, "--batch", "second")
    result = grom("verify", path, "--model", "models:/grom-tiny@champion", "--work", made.cfg.work)
    assert result.exit_code == 0, result.output
    assert "2 tensors are the original plus the edit" in result.output


def test_a_key_that_was_made_signs(
    made: Certified, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "key.pem"
    assert grom("keygen", key).exit_code == 0
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    again = grom("keygen", key)
    assert again.exit_code == 1
    (tmp_path / "other.pub").write_text("somebody's")
    assert grom("keygen", tmp_path / "other").exit_code == 1
    assert (tmp_path / "other.pub").read_text() == "somebody's"
    assert not (tmp_path / "other").exists()
    digits = read_public_key((tmp_path / "key.pem.pub").read_bytes(), "pub")
    assert digits == read_public_key(public_pem(read_private_key(key.read_text(), "k")), "k")
    monkeypatch.setenv(KEY_FILE, str(key))
    path = document(made, tmp_path / "out", "person-5@example.org")
    found = read_certificate(path.read_bytes(), "x")
    assert signature_holds(found)
    assert json.loads(path.read_bytes())["signature"]["public_key"] == digits


def test_what_is_not_there_or_too_much_is_said(made: Certified, tmp_path: Path) -> None:
    store = ("--store", made.store.root, "--out", tmp_path)
    for words, reason in (
        (("nobody@example.org",), "no line of it"),
        (("--batch", "never"), "no line of it"),
        ((), "not both"),
        (("x", "--batch", "first"), "not both"),
    ):
        result = grom("certificate", *words, *store)
        assert result.exit_code == 1
        assert reason in result.output
        assert "nobody@" not in result.output
    path = document(made, tmp_path, "--batch", "first")
    result = grom("verify", path, "--public-key", tmp_path / "none.pub")
    assert result.exit_code == 1
    assert "no such file" in result.output
