"""Prefect's server dies in the middle of a run, and comes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.aftermath import aftermath
from tests.killed import Drill
from tests.servers import PrefectService

pytestmark = pytest.mark.e2e
DOWN_S = 10.0


def test_a_run_outlives_its_server(prefect_service: PrefectService, tmp_path: Path) -> None:
    drill = Drill(tmp_path, prefect_service.api)
    drill.prepare()
    drill.reset()
    drill.go_on()
    expected = aftermath(drill.cfg)
    drill.reset()
    assert drill.outage(prefect_service.server, DOWN_S) == 0, drill.log()
    assert aftermath(drill.cfg) == expected
