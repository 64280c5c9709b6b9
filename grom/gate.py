"""Whether an edited model is good enough: every condition with its value and its limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from grom.config import GateConfig


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition of the gate."""

    name: str
    value: float
    limit: float
    at_most: bool
    """True: the value must not exceed the limit.  False: it must not fall below it."""

    @property
    def passed(self) -> bool:
        """A value that is not a number fails."""
        return self.value <= self.limit if self.at_most else self.value >= self.limit


def judge(
    config: GateConfig,
    unedited: Mapping[str, float],
    edited: Mapping[str, float],
    quantised: Mapping[str, Mapping[str, float]],
) -> list[Condition]:
    """The gate's conditions.

    Args:
        config: limits.
        unedited: mean answer probability by set before the edit.
        edited: the same after it.
        quantised: the same for each quantised load of the edited model, by its name.
    """
    nan = float("nan")
    forget, held_out = edited.get("forget", nan), edited.get("retain, held out", nan)
    before = unedited.get("retain, held out", nan)
    conditions = [
        Condition("forget probability", forget, config.max_forget_probability, at_most=True),
        Condition(
            "held-out retain left",
            held_out / before if before > 0 else nan,
            config.min_held_out_share,
            at_most=False,
        ),
    ]
    for name, scores in quantised.items():
        recovery = scores.get("forget", nan) - forget
        conditions.append(
            Condition(f"recovery under {name}", recovery, config.max_recovery, at_most=True)
        )
    return conditions
