"""Verdicts from readings: which numbers stand against each other in each attack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grom.attack import (
    AttackResult,
    echo,
    lens_verdict,
    relearnt_floor,
    stricter,
    strongest,
    verdict,
)
from grom.attack_config import AttackConfig, AttackName, Quantisation
from grom.config import Config
from grom.lens import LayerReading
from grom.prompts import PREFIXES
from tasks.codes import HEADS, code_changes
from tasks.probe import Reading

Readings = Mapping[str, Reading]
HEAD = "lm_head"
MEASURES = ("probability", "extraction_strength")
NO_REFERENCE = "without a retrained model, learning the slice's style counts as recovery"


LEARNT_NATS = 0.5
"""Loss on the slice from which it counts as learnt; an attack that did not train tests nothing."""


def not_learnt(relearnt: Reading) -> str:
    """Why relearning tested nothing: its slice was not learnt.  Empty if it was."""
    losses = relearnt.details.get("losses", [])
    last = float(losses[-1]) if losses else float("nan")
    if relearnt.missing or last <= LEARNT_NATS:
        return ""
    return f"the slice was not learnt (loss {last:.2f} nats); raise the steps or the rate"


class EditedParts(Config):
    """Which matrices an edit changed."""

    stored: tuple[str, ...]
    """Their names in the checkpoint, without `.weight`."""
    quantise_head: bool
    """Whether quantised loads are to quantise the LM head as well."""

    @property
    def modules(self) -> tuple[str, ...]:
        """Their names in the model."""
        return tuple(HEAD if f"{name}.weight" in HEADS else name for name in self.stored)


@dataclass(frozen=True, slots=True)
class Judge:
    """Compares the readings of all models, attack by attack."""

    before: Readings
    after: Readings
    reference: Readings
    """Empty without a retrained model."""
    config: AttackConfig
    parts: EditedParts
    folders: tuple[Path, Path]
    """Of the unedited and the edited checkpoint."""

    def results(self, name: AttackName) -> list[AttackResult]:
        """The verdict on an attack; on pruning one for each share."""
        match name:
            case "nf4" | "fp4" | "int8" | "int4":
                return [self.quantised(name)]
            case "prune":
                return [self.plain(f"prune {share:g}") for share in self.config.prune_shares]
            case "prefix":
                return [strongest([self.plain(f"prefix {prefix}") for prefix in PREFIXES])]
            case "paraphrase":
                return [self.plain(name)]
            case "relearn":
                return [self.relearn()]
            case "echo":
                return [self.echo()]
            case "lens":
                return [self.lens()]

    def plain(
        self, name: str, *, untested: str = "", details: Mapping[str, Any] | None = None
    ) -> AttackResult:
        """An attack whose ceiling is the unedited model under it."""
        return self._both(
            name,
            (self.before["plain"], self.after["plain"], self.after[name], self.before[name]),
            untested=untested,
            details=details,
        )

    def quantised(self, name: Quantisation) -> AttackResult:
        """A quantised load, which tests the edit only where it quantised an edited module."""
        reading, parts = self.after[name], self.parts
        touched = set(parts.modules) & set(reading.details.get("quantised_modules", ()))
        untested = ""
        if parts.modules and not touched and not reading.missing:
            untested = f"the load left all {len(parts.modules)} edited modules in full precision"
            untested += "; quantise the head, too" if HEAD in parts.modules else ""
        changes = code_changes(*self.folders, parts.stored, name)
        details = {
            "edited_modules": len(parts.modules),
            "edited_modules_quantised": len(touched),
            "quantised_modules": len(reading.details.get("quantised_modules", ())),
            "changed_code_share": {site: change.code_share for site, change in changes.items()},
            "changed_value_share": {site: change.value_share for site, change in changes.items()},
        }
        return self.plain(name, untested=untested, details=details)

    def relearn(self) -> AttackResult:
        """Relearning, measured on the rest, with what a retrained model gains granted."""
        before, rest, after = self.before["rest"], self.after["rest"], self.after["relearn"]
        floors = {}
        details: dict[str, Any] = {"losses": after.details.get("losses", [])}
        known = [self.reference[name] for name in ("rest", "relearn") if name in self.reference]
        if compared := len(known) == 2 and not any(one.missing for one in known):
            for measure in MEASURES:
                levels = [getattr(one, measure) for one in known]
                floors[measure] = relearnt_floor(getattr(rest, measure), *levels)
                details[f"retrained_{measure}"] = levels
        readings = (before, rest, after, before)
        found = self._both(
            "relearn", readings, untested=not_learnt(after), floors=floors, details=details
        )
        if compared or found.verdict != "suppressed":
            return found
        return replace(found, reason=f"{found.reason}; {NO_REFERENCE}")

    def echo(self) -> AttackResult:
        """The fact stated in the prompt, a control."""
        if self.after["echo"].missing:
            return self.plain("echo")
        return echo(
            self.before["echo"].probability,
            self.after["echo"].probability,
            unedited=self.before["plain"].probability,
            edited=self.after["plain"].probability,
            num_examples=self.after["echo"].num_examples,
        )

    def lens(self) -> AttackResult:
        """The answer read at inner layers."""
        readings = [
            [LayerReading(**layer) for layer in found["lens"].details["layers"]]
            for found in (self.before, self.after, self.reference)
            if "lens" in found
        ]
        reference = readings[2] if len(readings) > 2 else ()
        return lens_verdict(readings[0], readings[1], reference, self.config.bounds)

    def _both(
        self,
        name: str,
        readings: tuple[Reading, Reading, Reading, Reading],
        *,
        floors: Mapping[str, float] | None = None,
        untested: str = "",
        details: Mapping[str, Any] | None = None,
    ) -> AttackResult:
        unedited, edited, attacked, ceiling = readings
        missing = next((one.missing for one in readings if one.missing), "")
        results = [
            verdict(
                name,
                *(getattr(one, measure) for one in (unedited, edited, attacked)),
                measure=measure,
                ceiling=getattr(ceiling, measure),
                floor=(floors or {}).get(measure),
                bounds=self.config.bounds,
                reason_not_tested=untested or missing,
                num_examples=attacked.num_examples,
                details=details,
            )
            for measure in MEASURES
        ]
        return stricter(*results)
