"""Settings of the attacks: all by default, impossible ones refused, handed on unchanged."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from pydantic import ValidationError

from grom.attack import Bounds
from grom.attack_config import ALL_ATTACKS, AttackConfig, AttackName, RelearnConfig
from grom.relearn import Training


def test_every_attack_runs_by_default() -> None:
    assert AttackConfig().attacks == ALL_ATTACKS == get_args(AttackName)


@pytest.mark.parametrize(
    "settings",
    [
        {"attacks": ()},
        {"attacks": ("nf3",)},
        {"prune_shares": ()},
        {"prune_shares": (1.5,)},
        {"prune_shares": (0.0,)},
        {"max_recovered_share": 1.1},
        {"min_drop": 0},
        {"relearn": {"slice_share": 1}},
        {"relearn": {"rank": 0}},
        {"relearn": {"steps": -1}},
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        AttackConfig.model_validate(settings)


def test_settings_reach_the_method_unchanged() -> None:
    settings = AttackConfig(max_recovered_share=0.3, min_drop=0.1)
    assert settings.bounds == Bounds(0.3, 0.1)
    relearn = RelearnConfig(steps=7, learning_rate=0.01, rank=3, batch_tokens=99, seed=5)
    assert relearn.training == Training(7, 0.01, 3, 99, seed=5)
