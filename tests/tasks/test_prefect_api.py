"""A Prefect server that is down, refuses, or is something else: each by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from grom.errors import GromError
from tasks.doorbell import announce, ring
from tasks.prefect_api import ServerRefused, ServerUnreachable, now_of, server
from tests.servers import PrefectService

SHA = "ab" * 32


@pytest.fixture
def impostor() -> Iterator[Callable[[int, str], str]]:
    """An address that answers everything alike."""
    servers: list[ThreadingHTTPServer] = []

    def start(code: int, body: str) -> str:
        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(code)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            do_GET = do_POST = _answer

            def log_message(self, *_: object) -> None:
                pass

        started = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(started)
        Thread(target=started.serve_forever, daemon=True).start()
        return f"http://person:secret@127.0.0.1:{started.server_port}/api"

    yield start
    for started in servers:
        started.shutdown()
        started.server_close()


@pytest.mark.parametrize(
    ("code", "body", "kind", "words"),
    [
        (401, "", ServerRefused, "PREFECT_API_AUTH_STRING"),
        (403, "", ServerRefused, "PREFECT_API_AUTH_STRING"),
        (500, "", ServerUnreachable, "HTTP 500"),
        (404, "", ServerUnreachable, "HTTP 404.*ends in /api"),
        (200, "<html>", ServerUnreachable, "not the API of a Prefect server"),
    ],
)
def test_a_server_that_does_not_help_is_named(
    impostor: Callable[[int, str], str], code: int, body: str, kind: type[GromError], words: str
) -> None:
    address = {PREFECT_API_URL: impostor(code, body)}
    with temporary_settings(updates=address):
        with pytest.raises(kind, match=words) as raised:
            ring("b", SHA, "unlearn-batches/x")
        if code != 200:
            with pytest.raises(kind, match=words):
                announce("b", "x")
    assert "secret" not in str(raised.value)
    assert "127.0.0.1" in str(raised.value)


def test_a_server_that_is_not_there_is_named() -> None:
    with (
        temporary_settings(updates={PREFECT_API_URL: "http://127.0.0.1:9/api"}),
        pytest.raises(ServerUnreachable, match="ConnectError"),
    ):
        announce("b", "x")


def test_without_a_server_none_is_started() -> None:
    with (
        temporary_settings(restore_defaults={PREFECT_API_URL}),
        pytest.raises(ServerUnreachable, match="PREFECT_API_URL is not set"),
    ):
        ring("b", SHA, "unlearn-batches/x")


def test_the_clock_is_the_server_s(
    prefect_service: PrefectService, monkeypatch: pytest.MonkeyPatch
) -> None:
    with prefect_service.used(), server() as (client, where):
        assert where == prefect_service.api
        before = now_of(client)
        monkeypatch.setattr("tasks.prefect_api.time.time", lambda: before + 3600)
        assert 0 <= now_of(client) - before < 60
