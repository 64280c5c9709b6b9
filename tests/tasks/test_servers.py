"""Child processes: they come up, start again, and end to the last one; the log says why not."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from threading import Event, Thread

import pytest

from tasks.servers import Server, ServerCommand, ServerFailed, family, is_taken, status_of
from tasks.supervise import AlreadyUp, Restarts, only_one
from tests.servers import free_port, new_mark

WEB = """
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        given = self.headers.get("Authorization")
        self.send_response(200 if given in (None, "Basic dXNlcjpnb29k") else 401)
        self.end_headers()

HTTPServer(("127.0.0.1", {port}), Handler).serve_forever()
"""
STUBBORN = """
import subprocess, sys
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
"""
"""A child in a session of its own, like a worker's flow run, that does not end when asked to."""


def python_server(folder: Path, code: str, port: int = 1, login: str | None = None) -> Server:
    return Server(
        ServerCommand(
            name="web",
            arguments=(sys.executable, "-c", code),
            environment={"SECRET": "tell-nobody"},
            health=f"http://127.0.0.1:{port}/",
            log=folder / "logs" / "web.log",
            mark=new_mark(),
            login=login,
        )
    )


def wait_for(what: object, timeout_s: float = 10) -> None:
    assert callable(what)
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_server_is_healthy_when_it_answers_and_gone_when_it_was_stopped(tmp_path: Path) -> None:
    port = free_port()
    server = python_server(tmp_path, WEB.format(port=port), port, "user:good")
    assert not server.is_running()
    try:
        server.start().wait_until_healthy(timeout_s=20)
        assert is_taken("127.0.0.1", port)
        assert [process.pid for process in family(server.command.mark)] == [server.pid]
    finally:
        server.stop()
    assert not server.is_running()
    assert family(server.command.mark) == []
    assert not is_taken("127.0.0.1", port)
    assert status_of(server.command.health) is None


def test_a_wrong_password_is_said_without_it(tmp_path: Path) -> None:
    port = free_port()
    server = python_server(tmp_path, WEB.format(port=port), port, "user:tell-nobody")
    try:
        with pytest.raises(ServerFailed, match="refuses user and password \\(401\\)") as raised:
            server.start().wait_until_healthy(timeout_s=20)
    finally:
        server.kill()
    assert "tell-nobody" not in str(raised.value) + repr(server.command)


def test_a_server_that_ends_shows_the_end_of_its_log(tmp_path: Path) -> None:
    code = "[print(n) for n in range(100)]; raise SystemExit('no such database')"
    with pytest.raises(ServerFailed) as raised:
        python_server(tmp_path, code).start().wait_until_healthy(timeout_s=20)
    message = str(raised.value)
    assert message.startswith("web: it ended while it started. The end of ")
    assert message.endswith("  no such database")
    assert "  98\n" in message
    assert "  10\n" not in message


def test_a_server_that_never_answers_is_given_up(tmp_path: Path) -> None:
    server = python_server(tmp_path, "import time; time.sleep(600)", free_port())
    try:
        with pytest.raises(ServerFailed, match="did not answer in 0 s"):
            server.start().wait_until_healthy(timeout_s=0.2)
    finally:
        server.kill()


@pytest.mark.parametrize("how", ["stop", "kill", "the server died before"])
def test_what_a_server_started_ends_with_it(tmp_path: Path, how: str) -> None:
    server = python_server(tmp_path, STUBBORN + "import time; time.sleep(600)").start()
    try:
        wait_for(lambda: len(family(server.command.mark)) == 2)
        time.sleep(0.2)  # until the child ignores SIGTERM
        if how == "the server died before":
            (root,) = (one for one in family(server.command.mark) if one.pid == server.pid)
            root.kill()
            wait_for(lambda: not server.is_running())
            assert len(family(server.command.mark)) == 1
    finally:
        server.kill() if how == "kill" else server.stop(grace_s=0.3)
    assert family(server.command.mark) == []


def test_a_server_that_dies_starts_again_after_longer_and_longer_pauses(tmp_path: Path) -> None:
    server = python_server(tmp_path, "raise SystemExit('again')").start()
    stopped, said, when = Event(), list[str](), list[float]()

    def tell(line: str) -> None:
        said.append(line)
        when.append(time.monotonic())

    watch = Thread(target=Restarts([server], tell).keep, args=(stopped, 0.02))
    watch.start()
    wait_for(lambda: len(said) == 2)
    stopped.set()
    watch.join()
    log = server.command.log
    assert said == [
        f"web ended; it starts again in 1 s, its log is {log}",
        f"web ended; it starts again in 2 s, its log is {log}",
    ]
    assert when[1] - when[0] >= 1
    assert log.read_text() == "again\nagain\n"


def test_a_work_folder_has_one_owner_who_ends_what_a_killed_one_left(tmp_path: Path) -> None:
    left = python_server(tmp_path, "import time; time.sleep(600)").start()
    marks = [left.command.mark]
    with only_one(tmp_path, marks) as num_left:
        assert num_left == 1
        assert not left.is_running()
        with pytest.raises(AlreadyUp, match="another folder"), only_one(tmp_path, marks):
            pass
    with only_one(tmp_path, marks) as num_left:
        assert num_left == 0
