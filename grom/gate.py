"""Whether an edited model is good enough: every condition with its value, limit and margin."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from grom.config import GateConfig

FORGET, HELD_OUT = "forget", "retain, held out"
NAN = math.nan


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

    @property
    def margin(self) -> float:
        """How far the value is on the good side of the limit; negative if it is not."""
        return self.limit - self.value if self.at_most else self.value - self.limit


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was measured of an edited model, all as mean answer probabilities by set."""

    unedited: Mapping[str, float]
    edited: Mapping[str, float]
    attacked: Mapping[str, float] = field(default_factory=dict)
    """Forget probability under each attack, by its name; NaN if it could not be tested."""
    reference: Mapping[str, float] = field(default_factory=dict)
    """The retrained model's; empty without one."""
    health: Mapping[str, float] = field(default_factory=dict)
    """`repetition`, `empty rate` and `degenerate rate` of free answers to forget prompts."""


def judge(config: GateConfig, found: Evidence) -> list[Condition]:
    """The gate's conditions, in the order of the configuration."""
    forget, before = found.edited.get(FORGET, NAN), found.unedited.get(HELD_OUT, NAN)
    kept = found.edited.get(HELD_OUT, NAN) / before if before > 0 else NAN
    conditions = [
        Condition("forget probability", forget, config.max_forget_probability, at_most=True),
        Condition("held-out retain left", kept, config.min_held_out_share, at_most=False),
    ]
    for name, probability in found.attacked.items():
        recovery = probability - forget
        conditions.append(
            Condition(f"recovery under {name}", recovery, config.max_recovery, at_most=True)
        )
    for band in config.reference_bands:
        distance = abs(found.edited.get(band.set, NAN) - found.reference.get(band.set, NAN))
        name = f"distance to reference, {band.set}"
        conditions.append(Condition(name, distance, band.within, at_most=True))
    return [*conditions, *_health(config, found.health)]


def _health(config: GateConfig, health: Mapping[str, float]) -> list[Condition]:
    asked = {
        "repetition": config.max_repetition,
        "empty rate": config.max_empty_rate,
        "degenerate rate": config.max_degenerate_rate,
    }
    return [
        Condition(f"{name} of free answers", health.get(name, NAN), limit, at_most=True)
        for name, limit in asked.items()
        if limit is not None
    ]
