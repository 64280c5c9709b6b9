"""Prefect's server dies in the middle of a run, and comes back."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest

from tests.aftermath import aftermath
from tests.killed import Drill, pause_in_collect, wait_for
from tests.servers import PrefectService

pytestmark = pytest.mark.e2e
DOWN_S = 10.0


def test_a_run_outlives_its_server_or_is_done_again(
    prefect_service: PrefectService, tmp_path: Path
) -> None:
    drill = Drill(tmp_path, prefect_service.api)
    drill.prepare()
    drill.reset()
    drill.go_on()
    expected = aftermath(drill.cfg)
    drill.reset()
    reached = tmp_path / "reached"
    worker, _ = drill.launch(prepare=partial(pause_in_collect, reached))
    wait_for(reached)
    prefect_service.server.kill()
    try:
        time.sleep(DOWN_S)
    finally:
        prefect_service.server.start().wait_until_healthy()
    worker.join()
    print("EXIT", worker.exitcode, drill.log()[-3000:])
    if worker.exitcode != 0:
        assert aftermath(drill.cfg).lines == expected.lines[:2]
        drill.recover()
    assert aftermath(drill.cfg) == expected
