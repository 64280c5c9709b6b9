"""GROM: a closed-form, auditable edit that makes a language model forget.

    from grom import KeyMoments, RidgeConfig, solve_edit

The room's README explains the method on one page, symbol by symbol.
"""

from grom.apply import Edit, Rounding, edited
from grom.audit import leave_one_out
from grom.calibrate import direct_drop
from grom.collect import Collected, collect_moments
from grom.config import (
    AutoStrength,
    CollectConfig,
    RidgeConfig,
    SelectConfig,
    StrengthConfig,
    TargetConfig,
)
from grom.errors import GromError
from grom.merge import merged, without
from grom.moments import KeyMoments
from grom.select import LayerScore, best_band, layer_scores
from grom.sites import Site, find_sites, untie_
from grom.solve import RidgeFactor, factorise, solve_edit
from grom.sums import PairSums, TokenSums
from grom.sweep import sweep
from grom.target import (
    LowRank,
    corruption_cross,
    random_direction,
    redirect_cross,
    replacement_cross,
    specificity,
    suppression_cross,
)

__all__ = [
    "AutoStrength",
    "CollectConfig",
    "Collected",
    "Edit",
    "GromError",
    "KeyMoments",
    "LayerScore",
    "LowRank",
    "PairSums",
    "RidgeConfig",
    "RidgeFactor",
    "Rounding",
    "SelectConfig",
    "Site",
    "StrengthConfig",
    "TargetConfig",
    "TokenSums",
    "best_band",
    "collect_moments",
    "corruption_cross",
    "direct_drop",
    "edited",
    "factorise",
    "find_sites",
    "layer_scores",
    "leave_one_out",
    "merged",
    "random_direction",
    "redirect_cross",
    "replacement_cross",
    "solve_edit",
    "specificity",
    "suppression_cross",
    "sweep",
    "untie_",
    "without",
]
