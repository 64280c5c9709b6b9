"""Workers that are killed at points spread over a whole run: tried, survived, lost.

    grom bench --kills 44 [--seed 0]

Each trial starts from the same state, kills one worker at its point, lets others go on, and then
compares what is there with an undisturbed history.  Further trials kill the second worker, too.
Last, Prefect's server dies for half a minute.
"""

from __future__ import annotations

import logging
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tasks.server_commands import prefect_server
from tasks.servers import Server
from tests.aftermath import Aftermath, aftermath, everything
from tests.killed import Drill
from tests.points import Moment, Point
from tests.servers import free_port, new_mark, running

logger = logging.getLogger(__name__)
DOWN_S = 30.0
TWICE = 4
"""One further trial in so many kills the second worker as well."""


@dataclass(slots=True)
class Campaign:
    """The trials, and what an undisturbed history comes to."""

    drill: Drill
    points: tuple[Point, ...] = ()
    expected: Aftermath | None = None
    files: Counter[str] = field(default_factory=Counter)
    tried: Counter[str] = field(default_factory=Counter)
    lost: dict[str, list[str]] = field(default_factory=dict)
    left: Counter[str] = field(default_factory=Counter)
    """What is there in the end beyond that, with the number of trials that left it."""

    def undisturbed(self) -> None:
        """The history that all others are compared with."""
        self.drill.prepare()
        self.drill.reset()
        self.points = self.drill.run().points
        self.drill.recover()
        self.expected = aftermath(self.drill.cfg)
        self.files = everything(self.drill.cfg)

    def trial(self, moments: Sequence[Moment]) -> None:
        """Kill one worker after the other, let others go on, compare."""
        self.drill.reset()
        ends = []
        for moment in moments:
            ended = self.drill.run(moment)
            ends.append(ended.points[-1])
            self.drill.lapse()
        self.drill.recover()
        assert self.expected is not None
        differences = aftermath(self.drill.cfg).differences(self.expected)
        stage = ends[0].stage if len(moments) == 1 else "two kills in a row"
        self.left.update(set(everything(self.drill.cfg) - self.files))
        self.note(stage, ", then ".join(f"{end.number} {end.what}" for end in ends), differences)

    def outage(self, server: Server) -> None:
        """Stop Prefect's server in the middle of a run; one that fails is done again."""
        self.drill.reset()
        exit_code = self.drill.outage(server, DOWN_S)
        self.drill.recover()
        assert self.expected is not None
        differences = aftermath(self.drill.cfg).differences(self.expected)
        how = "the run went on" if exit_code == 0 else "the run failed and was done again"
        self.note(f"server down for {DOWN_S:.0f} s: {how}", "collect", differences)

    def note(self, stage: str, where: str, differences: list[str]) -> None:
        """How a trial ended."""
        self.tried[stage] += 1
        if differences:
            self.lost.setdefault(stage, []).append(f"{where}: {', '.join(differences)}")
        logger.info("%s, %s: %s", stage, where, differences or "survived")


def spread(total: int, count: int) -> list[int]:
    """So many of the numbers from 1 to `total`, evenly, the first and the last among them."""
    return sorted({1 + round(step * (total - 1) / (count - 1)) for step in range(count)})


def kill(count: int, seed: int) -> Campaign:
    """All trials."""
    with tempfile.TemporaryDirectory() as name, served(Path(name)) as (api, server):
        campaign = Campaign(Drill(Path(name), api))
        campaign.undisturbed()
        total = len(campaign.points)
        for number in spread(total, count):
            campaign.trial([Moment(number)])
        chance = random.Random(seed)
        for _ in range(count // TWICE):
            campaign.trial([Moment(chance.randint(1, total)) for _ in range(2)])
        campaign.outage(server)
    return campaign


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, Server]]:
    """A real Prefect server; its address, and itself."""
    port = free_port()
    command = prefect_server("127.0.0.1", port, folder, new_mark())
    api = f"http://127.0.0.1:{port}/api"
    own = {"PREFECT_HOME": str(folder / "home"), "PREFECT_API_URL": api}
    command = replace(command, environment={**command.environment, **own})
    with contextmanager(running)(command) as server:
        yield api, server


def show(campaign: Campaign, seconds: float) -> None:
    """Tried, survived and lost by stage, and what stays behind."""
    table = Table(title=f"SIGKILL at points of {len(campaign.points)}, {seconds:.0f} s")
    for heading in ("stage", "points", "tried", "survived", "lost"):
        table.add_column(heading, justify="left" if heading == "stage" else "right")
    points = Counter(point.stage for point in campaign.points)
    for stage, tried in campaign.tried.items():
        lost = len(campaign.lost.get(stage, []))
        row = (stage, points[stage] or "", tried, tried - lost, lost)
        table.add_row(*map(str, row))
    total, lost = campaign.tried.total(), sum(map(len, campaign.lost.values()))
    table.add_row("all", str(points.total()), str(total), str(total - lost), str(lost))
    console = Console()
    console.print(table)
    for found in campaign.lost.values():
        console.print(*found, sep="\n")
    for name, times in sorted(campaign.left.items()):
        console.print(f"left behind in {times} of {total}: {name}")


def main(count: int, seed: int) -> None:
    """Run the trials and print their table."""
    started = time.perf_counter()
    show(kill(count, seed), time.perf_counter() - started)
