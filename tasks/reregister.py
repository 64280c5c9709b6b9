"""Stage register for a withdrawal: nothing is forgotten anew, so only utility can be judged."""

from __future__ import annotations

import logging
from dataclasses import astuple

from prefect import task
from prefect.cache_policies import NO_CACHE

from grom.config import GateConfig
from grom.errors import GromError
from grom.gate import Evidence, judge
from tasks.judge import probabilities
from tasks.place import CheckpointRef, ModelRef, Place, ScoreRef
from tasks.register import Registered, TrackedRun, git_sha, log_scores, shown_conditions
from tasks.registry import register_checkpoint
from tasks.shown import shown_settings
from tasks.versions import model_of

logger = logging.getLogger(__name__)
UTILITY = "held-out retain left"


class UtilityLost(GromError):
    """The model without the withdrawn request is not good enough."""

    def __init__(self, version: str) -> None:
        super().__init__(
            f"version {version}: held-out retain fell below the gate's floor, so nothing was "
            "changed. Lower the strength or the floor, then withdraw again."
        )


@task(cache_policy=NO_CACHE)
def reregister(
    run: TrackedRun,
    model: ModelRef,
    edited: CheckpointRef,
    scores: tuple[ScoreRef, ScoreRef],
    gate: GateConfig,
    about: dict[str, str],
    place: Place,
) -> Registered:
    """Register a checkpoint that forgets less than the one before.

    Raises:
        UtilityLost: the gate's one condition that needs no forgotten text failed.
    """
    log_scores(run, scores)
    before, after = map(probabilities, scores)
    found = judge(gate, Evidence(unedited=before, edited=after))
    (utility,) = (condition for condition in found if condition.name == UTILITY)
    tags = {
        "gate": "passed" if utility.passed else "failed",
        "base_model": str(shown_settings({"source": model.source})["source"]),
        "base_fingerprint": model.fingerprint,
        "git_sha": git_sha(),
        **about,
    }
    name = model_of(run.tracking, run.name)
    made = register_checkpoint(
        *run.where,
        place.fetch(edited.artifact),
        tags=tags,
        uri=edited.artifact.uri,
        name=name,
        deserved=utility.passed,
    )
    logger.info("register: %s, %s %.3f, needs %.3f", made.uri, *astuple(utility)[:3])
    if not utility.passed:
        raise UtilityLost(made.version)
    return Registered(
        model_name=made.name,
        version=made.version,
        uri=made.uri,
        run_id=run.run_id,
        alias=None,
        passed=True,
        conditions=shown_conditions([utility]),
    )
