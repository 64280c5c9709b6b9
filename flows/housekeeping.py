"""The flow that tidies up: after killed workers, and by the service's retention rules."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from prefect import flow
from prefect.artifacts import create_markdown_artifact

from flows.service import ServiceConfig
from grom.errors import GromError
from tasks.housekeep import Tidied, erase_due, remove_orphans, remove_strays, settle_outcomes
from tasks.place import Place
from tasks.reaper import close_killed, mark_crashed, purge_versions
from tasks.scratch import clean_scratch, trim_cache
from tasks.versions import model_of

logger = logging.getLogger(__name__)
SHOWN_PLACES = 20


class NotTidied(GromError):
    """Some steps failed; the others were done."""

    def __init__(self, failed: Sequence[str]) -> None:
        super().__init__(
            f"housekeeping: {', '.join(failed)} failed, the other steps were done. See the logs of "
            "these tasks; every step can be repeated."
        )


@flow(name="housekeeping")
def housekeeping(cfg: ServiceConfig, dry_run: bool = False) -> tuple[Tidied, ...]:
    """Put right and remove what nobody needs any more; or only say what would be (`dry_run`).

    Each step is done whether or not the ones before failed.
    """
    place = Place(work=cfg.work, store=cfg.store)
    rules = cfg.erase_after_days, cfg.failed_after_days
    name, kept = model_of(cfg.tracking, cfg.name), (cfg.keep_versions, cfg.keep_days)
    states = {
        "outcomes": settle_outcomes(place, dry_run, return_state=True),
        "erasure": erase_due(place, *rules, dry_run, return_state=True),
        "flow runs": mark_crashed(place, dry_run, return_state=True),
        "MLflow runs": close_killed(cfg.tracking, place, dry_run, return_state=True),
        "versions": purge_versions(cfg.tracking, name, place, *kept, dry_run, return_state=True),
        "uploads": remove_strays(place, dry_run, return_state=True),
        "orphans": remove_orphans(place, dry_run, return_state=True),
        "scratch": clean_scratch(place, dry_run, return_state=True),
        "downloads": trim_cache(place, dry_run=dry_run, return_state=True),
    }
    tidied = tuple(state.result() for state in states.values() if state.is_completed())
    for one in tidied:
        logger.info("housekeeping: %s: %d, %d bytes", one.step, len(one.places), one.num_bytes)
    create_markdown_artifact(
        report(tidied, dry_run), key="housekeeping-report", description="what was tidied up"
    )
    if failed := [step for step, state in states.items() if not state.is_completed()]:
        raise NotTidied(failed)
    return tidied


def report(tidied: Sequence[Tidied], dry_run: bool) -> str:
    """A page in Markdown: counts, then places."""
    lines = ["# Housekeeping", "", "Nothing was changed: a dry run.", ""][: 4 if dry_run else 2]
    lines += ["| step | places | bytes |", "| --- | ---: | ---: |"]
    lines += [f"| {one.step} | {len(one.places)} | {one.num_bytes:,} |" for one in tidied]
    for one in tidied:
        if one.places:
            lines += ["", f"## {one.step}", ""]
            lines += [f"- `{place}`" for place in one.places[:SHOWN_PLACES]]
            more = len(one.places) - SHOWN_PLACES
            lines += [f"- and {more} more"] if more > 0 else []
    return "\n".join(lines)
