"""The verdict on an attack: was the knowledge removed, or only suppressed?

Every attack is judged by one ratio.  With u the unedited and e the edited model's value of a
measure (mean answer probability, say), a the edited model's under attack, and

    ceiling     the unedited model's value under the same attack: what there is to bring back,
    floor       what a model without the knowledge shows under it (e, unless relearning teaches it),

    recovered share = (a - floor) / (ceiling - floor)

0: nothing came back.  1: as good as never edited.  It may be negative or above 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from grom.lens import LayerReading

Verdict = Literal["removed", "suppressed", "not tested"]
MAX_RECOVERED_SHARE = 0.2
MIN_DROP = 0.05
MIN_ECHO = 0.5
"""Share of the unedited model's echo below which an edited model cannot repeat a stated fact."""


@dataclass(frozen=True, slots=True)
class AttackResult:
    """One attack with its verdict and the numbers behind it."""

    name: str
    measure: str
    """probability or extraction_strength."""
    unedited: float
    edited: float
    attacked: float
    """The edited model under attack."""
    ceiling: float
    """The unedited model under the same attack."""
    floor: float
    """What a model without the knowledge would show under it."""
    recovered_share: float
    """(attacked - floor) / (ceiling - floor); NaN where that says nothing."""
    verdict: Verdict
    reason: str
    """Why this verdict, in words."""
    num_examples: int
    details: Mapping[str, Any] = field(default_factory=dict)
    """Further findings of this attack, as JSON."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Where the verdict changes."""

    max_recovered_share: float = MAX_RECOVERED_SHARE
    """Above it the knowledge counts as suppressed."""
    min_drop: float = MIN_DROP
    """Least drop, by the edit and from ceiling to floor, from which recovery can be told."""


def verdict(
    name: str,
    unedited: float,
    edited: float,
    attacked: float,
    *,
    measure: str = "probability",
    ceiling: float | None = None,
    floor: float | None = None,
    bounds: Bounds = Bounds(),
    reason_not_tested: str = "",
    num_examples: int = 0,
    details: Mapping[str, Any] | None = None,
) -> AttackResult:
    """Judge one attack by one measure.

    `not tested` in this order: a reason is given; a number is NaN or infinite; the edit took away
    less than `min_drop`; ceiling and floor are closer than that, so that recovery could not show
    (the attack destroys the knowledge itself, or teaches it to everybody).  Else `suppressed` if
    the recovered share exceeds its maximum, `removed` if not.

    Args:
        name: of the attack.
        unedited, edited, attacked: see the module.
        measure: what the numbers are; higher means that the model knows more.
        ceiling: not given: `unedited`.
        floor: not given: `edited`.
        bounds: where the verdict changes.
        reason_not_tested: why the attack did not touch what the edit changed, or could not run.
        num_examples: behind the numbers.
        details: further findings.
    """
    top = unedited if ceiling is None else ceiling
    bottom = edited if floor is None else floor
    reason = reason_not_tested or _cannot_tell(unedited, edited, attacked, top, bottom, bounds)
    span = top - bottom if top - bottom >= bounds.min_drop else unedited - edited
    share = math.nan if reason else (attacked - bottom) / span
    found: Verdict = "not tested"
    if not reason:
        found = "suppressed" if share > bounds.max_recovered_share else "removed"
        reason = f"{share:.0%} of what the edit took away comes back"
        if share <= 0:
            reason = f"nothing comes back ({share:.0%})"
        elif found == "removed":
            reason += f", at most {bounds.max_recovered_share:.0%} may"
    return AttackResult(
        name=name,
        measure=measure,
        unedited=unedited,
        edited=edited,
        attacked=attacked,
        ceiling=top,
        floor=bottom,
        recovered_share=share,
        verdict=found,
        reason=reason,
        num_examples=num_examples,
        details=dict(details or {}),
    )


def _cannot_tell(
    unedited: float, edited: float, attacked: float, top: float, bottom: float, bounds: Bounds
) -> str:
    if not all(map(math.isfinite, (unedited, edited, attacked, top, bottom))):
        return "a number is missing (NaN)"
    if unedited - edited < bounds.min_drop:
        return f"the edit took away {unedited - edited:.3f} only, too little to tell"
    if attacked - bottom > bounds.max_recovered_share * (unedited - edited):
        return ""  # much is back, whatever the attack does to other models
    if top - bottom < bounds.min_drop and top < unedited - bounds.min_drop:
        return f"the attack leaves the unedited model {top:.3f}, too little to tell"
    if top - bottom < bounds.min_drop:
        return f"a model without the knowledge gets {bottom:.3f} under it, too much to tell"
    return ""


def stricter(by_probability: AttackResult, by_extraction: AttackResult) -> AttackResult:
    """One verdict from two measures: suppressed by either is suppressed.

    The probability's numbers are shown unless the extraction strength alone shows the recovery; the
    other measure's are in the details.
    """
    extraction_decides = (
        by_extraction.verdict == "suppressed" and by_probability.verdict != "suppressed"
    )
    shown, other = by_probability, by_extraction
    if extraction_decides:
        shown, other = by_extraction, by_probability
    numbers = {
        name: getattr(other, name)
        for name in ("unedited", "edited", "attacked", "ceiling", "floor", "recovered_share")
    }
    reason = f"{shown.reason} (extraction strength)" if extraction_decides else shown.reason
    details = {**shown.details, other.measure: {**numbers, "verdict": other.verdict}}
    return replace(shown, reason=reason, details=details)


def strongest(results: Sequence[AttackResult]) -> AttackResult:
    """The variant of an attack that brings back most; one that was tested if there is one."""
    assert results

    def strength(result: AttackResult) -> tuple[bool, float]:
        tested = result.verdict != "not tested"
        return tested, result.recovered_share if tested else 0.0

    return max(results, key=strength)


def relearnt_floor(edited: float, before: float, after: float) -> float:
    """What a model without the knowledge shows after relearning alike, as seen from the edited one.

    A model that never knew learns the slice's style as well.  Its gain, from `before` to `after`
    on the rest, is granted to the edited model, and so is the level where it ends:
    floor = max(edited + max(0, after - before), after).
    """
    return max(edited + max(0.0, after - before), after)


def lens_verdict(
    unedited: Sequence[LayerReading],
    edited: Sequence[LayerReading],
    reference: Sequence[LayerReading] = (),
    bounds: Bounds = Bounds(),
) -> AttackResult:
    """Whether a layer before the last still holds the answer.

    The attack reads the answer probability at an inner layer; the ceiling is what the unedited
    model shows at the same layer.  The floor is what the edited model says openly, or what the
    reference shows at that layer if that is more.  The layer with the largest gap to its floor
    counts.  All readings, from below; probabilities per token and ranks are in the details.
    """
    name = "lens"
    if len(edited) < 2:
        return verdict(name, *[math.nan] * 3, reason_not_tested="no layer is before the last")
    shown = edited[-1].probability
    floors = [max(shown, reading.probability) for reading in reference[:-1]]
    floors = floors or [shown] * (len(edited) - 1)
    gaps = [reading.probability - low for reading, low in zip(edited[:-1], floors, strict=True)]
    best = max(range(len(gaps)), key=gaps.__getitem__)
    found = verdict(
        name,
        unedited[-1].probability,
        shown,
        edited[best].probability,
        ceiling=unedited[best].probability,
        floor=floors[best],
        bounds=bounds,
        num_examples=edited[-1].num_examples,
        details={
            "best_layer": best,
            "unedited": [asdict(reading) for reading in unedited],
            "edited": [asdict(reading) for reading in edited],
            "reference": [asdict(reading) for reading in reference],
        },
    )
    return replace(found, reason=f"layer {best}: {found.reason}")


def echo(
    stated_unedited: float,
    stated_edited: float,
    *,
    unedited: float,
    edited: float,
    num_examples: int = 0,
) -> AttackResult:
    """The control: asked with the fact stated in the prompt, does the model repeat it?

    Reading is no recovery, so the verdict is always `not tested`; the number is
    `details["echo_share"]`, the edited model's value with the fact stated as a share of the
    unedited model's.  `unedited` and `edited` are the values without it.
    """
    share = stated_edited / stated_unedited if stated_unedited > 0 else math.nan
    reading = f"a control: a stated fact is repeated {share:.2f} times as well as before the edit"
    if math.isnan(share):
        reading = "a control without a number"
    elif share < MIN_ECHO:
        reading += "; over-suppressed, the model cannot even read it"
    return verdict(
        "echo",
        unedited,
        edited,
        stated_edited,
        ceiling=stated_unedited,
        reason_not_tested=reading,
        num_examples=num_examples,
        details={"echo_share": share, "over_suppressed": bool(share < MIN_ECHO)},
    )
