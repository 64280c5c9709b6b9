"""Settings of the attacks on an edited checkpoint."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from grom.attack import MAX_RECOVERED_SHARE, MIN_DROP, Bounds
from grom.config import Config
from grom.relearn import Training

Quantisation = Literal["nf4", "fp4", "int8", "int4"]
AttackName = Literal[
    "nf4", "fp4", "int8", "int4", "prune", "relearn", "paraphrase", "prefix", "echo", "lens"
]
ALL_ATTACKS: tuple[AttackName, ...] = (
    "nf4", "fp4", "int8", "int4", "prune", "relearn", "paraphrase", "prefix", "echo", "lens",
)  # fmt: skip


class RelearnConfig(Config):
    """Relearning: LoRA steps on a slice of the forget set, measured on the rest."""

    slice_share: float = Field(default=0.25, gt=0, lt=1)
    """Share of the forget groups that is relearnt, evenly spaced."""
    steps: int = Field(default=50, ge=1)
    """Optimiser steps."""
    learning_rate: float = Field(default=5e-4, gt=0)
    """Of AdamW, constant.  The default relearns a slice to a loss near 0 in 50 steps; an attacker
    would not stop before."""
    rank: int = Field(default=16, ge=1)
    """Rank of the adapters on every linear matrix of the layers."""
    batch_tokens: int = Field(default=256, ge=16)
    """Tokens of one step, padding included."""
    seed: int = 0
    """Of the adapters' start and the order of the examples."""

    @property
    def training(self) -> Training:
        """As the loop takes it."""
        return Training(
            self.steps, self.learning_rate, self.rank, self.batch_tokens, seed=self.seed
        )


class AttackConfig(Config):
    """What an edited checkpoint is attacked with, and where the verdict changes."""

    attacks: tuple[AttackName, ...] = Field(default=ALL_ATTACKS, min_length=1)
    """nf4, fp4, int8, int4: quantised loads.  prune: magnitude pruning.  relearn: LoRA steps on a
    slice.  paraphrase: the question in other words, where the data have them.  prefix: jailbreak
    prefixes.  echo: the fact stated in the prompt, a control.  lens: the answer read at inner
    layers."""
    max_examples: int = Field(default=200, ge=1)
    """Forget examples that are asked, spread evenly over the set."""
    quantise_head: bool | None = None
    """Quantise the LM head as well.  Not given: only if the edit changed it, for an edit of weights
    that a load leaves alone is not tested by it."""
    prune_shares: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = Field(
        default=(0.1, 0.3, 0.5), min_length=1
    )
    """Shares of each matrix that are pruned, one after the other."""
    relearn: RelearnConfig = RelearnConfig()
    max_recovered_share: float = Field(default=MAX_RECOVERED_SHARE, ge=0, le=1)
    """Share of what the edit took away that an attack may bring back before it counts as
    suppressed."""
    min_drop: float = Field(default=MIN_DROP, gt=0, lt=1)
    """Least drop of the measure by the edit from which recovery can be told."""

    @property
    def bounds(self) -> Bounds:
        """As the verdict takes them."""
        return Bounds(self.max_recovered_share, self.min_drop)
