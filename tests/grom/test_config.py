"""Settings are frozen, complete and explained, and refuse what contradicts itself."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from pydantic import ValidationError

from grom import config
from grom.config import (
    AutoStrength,
    CollectConfig,
    Config,
    DataConfig,
    HoldOutConfig,
    ModelConfig,
    RidgeConfig,
    StrengthConfig,
    TargetConfig,
)

CONFIGS = {
    name: cls
    for name, cls in inspect.getmembers(config, inspect.isclass)
    if issubclass(cls, Config) and cls is not Config
}
every_config = pytest.mark.parametrize("name", sorted(CONFIGS))


def default(name: str) -> Config:
    needed: dict[str, dict[str, Any]] = {
        "Band": {"set": "forget", "within": 0.1},
        "DataConfig": {"uri": "file.jsonl"},
        "ModelConfig": {"source": "hub/name"},
    }
    return CONFIGS[name](**needed.get(name, {}))


@every_config
def test_every_field_explains_itself_in_the_schema(name: str) -> None:
    properties = CONFIGS[name].model_json_schema()["properties"]
    assert properties
    for field, schema in properties.items():
        assert len(schema.get("description", "")) > 10, f"{name}.{field}"
    assert CONFIGS[name].__doc__


@every_config
def test_a_configuration_cannot_be_changed(name: str) -> None:
    made = default(name)
    for field in type(made).model_fields:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(made, field, None)


@every_config
def test_a_misspelt_setting_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValidationError, match=r"wdith\n.*Extra inputs are not permitted"):
        CONFIGS[name](**{**default(name).model_dump(), "wdith": 3})


@every_config
def test_a_configuration_survives_json_and_can_be_hashed(name: str) -> None:
    made = default(name)
    again = CONFIGS[name].model_validate_json(made.model_dump_json())
    assert again == made
    assert hash(again) == hash(made)


@every_config
def test_a_mapping_of_a_configuration_is_its_fields(name: str) -> None:
    # The orchestrator calls dict(model), which takes an attribute `keys` for the method.
    made = default(name)
    assert dict(made) == {field: getattr(made, field) for field in type(made).model_fields}


def test_a_ridge_is_absolute_or_a_share_but_not_both() -> None:
    with pytest.raises(ValidationError, match="give `rho` or `mu`, not both"):
        RidgeConfig(rho=0.1, mu=2.0)
    assert RidgeConfig(mu=2.0).ridge(7.0) == 2.0
    assert RidgeConfig(rho=0.1).ridge(7.0) == pytest.approx(0.7)
    assert RidgeConfig().ridge(7.0) == pytest.approx(0.03 * 7)


STRENGTHS: dict[str, Any] = {"nats": 3.0, "beta": 60.0, "auto": AutoStrength()}


@pytest.mark.parametrize(("one", "other"), [("nats", "beta"), ("nats", "auto"), ("beta", "auto")])
def test_two_strengths_are_refused_with_both_names(one: str, other: str) -> None:
    with pytest.raises(ValidationError, match=f"not {one} and {other}"):
        StrengthConfig(**{name: STRENGTHS[name] for name in (one, other)})


def test_a_strength_is_searched_unless_it_is_given() -> None:
    auto = AutoStrength(max_nats=9.0)
    assert StrengthConfig().search == AutoStrength()
    assert StrengthConfig(auto=auto).search is auto
    assert StrengthConfig(nats=3.0).search is None
    assert StrengthConfig(beta=60.0).search is None


@pytest.mark.parametrize(
    "target",
    [{"kind": "redirect"}, {"kind": "suppression", "redirect_to": "no"}, {"redirect_to": "no"}],
)
def test_only_a_redirect_names_a_token(target: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="`redirect_to` goes with `kind: redirect`"):
        TargetConfig(**target)
    assert TargetConfig(kind="redirect", redirect_to="no").redirect_to == "no"


@pytest.mark.parametrize("name", ["keys", "order"])
def test_the_order_of_keys_is_called_keys_in_files(name: str) -> None:
    collect = CollectConfig.model_validate({name: "sequential"})
    assert collect.order == "sequential"
    assert collect.model_dump()["keys"] == "sequential"
    assert "keys" in CollectConfig.model_json_schema()["properties"]
    assert CollectConfig().order == "frozen"


def test_the_facts_of_a_collection_are_what_the_order_of_its_sums_depends_on() -> None:
    facts = CollectConfig().facts
    for field in ("batch_tokens", "window_examples"):
        assert CollectConfig.model_validate({field: 100}).facts != facts
    assert CollectConfig(memory_gb=3.0).facts == facts


@pytest.mark.parametrize("every", [2, 3, 10])
def test_every_so_many_th_group_is_held_out(every: int) -> None:
    held = [number for number in range(30) if HoldOutConfig(every=every).holds(number)]
    assert held == list(range(every - 1, 30, every))


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (RidgeConfig, {"rho": 0}),
        (RidgeConfig, {"mu": -1}),
        (RidgeConfig, {"w_forget": 0}),
        (RidgeConfig, {"w_retain": -1}),
        (StrengthConfig, {"nats": 0}),
        (AutoStrength, {"forget_probability": 1}),
        (AutoStrength, {"utility_floor": 1.1}),
        (AutoStrength, {"tolerance": 0}),
        (HoldOutConfig, {"every": 1}),
        (DataConfig, {"uri": "x", "limit": 0}),
        (ModelConfig, {"source": "x", "dtype": "int8"}),
        (CollectConfig, {"keys": "random"}),
    ],
)
def test_a_value_without_meaning_is_refused_by_name(
    kind: type[Config], values: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError, match=rf"\n{list(values)[-1]}\n"):
        kind(**values)
