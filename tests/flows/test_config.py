"""Every setting explains itself, travels as JSON, and a wrong one is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from flows.config import UnlearnConfig, read_config
from flows.presets import PRESETS
from grom.errors import ConfigError

MINIMAL = """\
model: {source: ./model}
forget: {uri: forget.jsonl}
retain: {uri: retain.jsonl}
"""


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "run.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def refused(folder: Path, text: str | bytes) -> str:
    path = written(folder, text)
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    assert str(caught.value).startswith(str(path))
    return str(caught.value)


def descriptions(schema: dict[str, Any]) -> dict[str, str]:
    """What the schema says of each field: its own words, or those of the model it holds."""
    models = schema["$defs"]
    found = {}
    for name, model in {"UnlearnConfig": schema, **models}.items():
        for field, entry in model["properties"].items():
            target = models.get(entry.get("$ref", "").rsplit("/", 1)[-1], {})
            found[f"{name}.{field}"] = entry.get("description") or target.get("description") or ""
    return found


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_travels_as_json_and_as_yaml(name: str, tmp_path: Path) -> None:
    config = PRESETS[name]()
    values = config.model_dump(mode="json")
    assert UnlearnConfig.model_validate(values) == config
    assert UnlearnConfig.model_validate_json(config.model_dump_json()) == config
    assert read_config(written(tmp_path, yaml.safe_dump(values))) == config


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_says_what_it_is(name: str) -> None:
    assert (PRESETS[name].__doc__ or "").strip()


def test_the_schema_describes_every_setting() -> None:
    silent = [name for name, text in descriptions(UnlearnConfig.model_json_schema()).items()
              if len(text) < 5]  # fmt: skip
    assert silent == []


def test_the_schema_has_every_setting_by_the_name_that_yaml_takes() -> None:
    found = set(descriptions(UnlearnConfig.model_json_schema(mode="serialization")))
    assert "CollectConfig.keys" in found
    assert "CollectConfig.order" not in found
    assert {"StrengthConfig.nats", "TargetConfig.kind", "Tracking.uri"} <= found


def test_three_lines_are_enough(tmp_path: Path) -> None:
    config = read_config(written(tmp_path, MINIMAL))
    assert config.target.kind == "replacement"
    assert config.strength.search is not None
    assert config.evaluate.quantisations == ("nf4", "int4")


def test_keys_is_the_yaml_name_of_the_order(tmp_path: Path) -> None:
    config = read_config(written(tmp_path, f"{MINIMAL}collect: {{keys: sequential}}\n"))
    assert config.collect.order == "sequential"
    assert config.model_dump(mode="json")["collect"]["keys"] == "sequential"


@pytest.mark.parametrize(
    ("line", "setting"),
    [
        ("strenght: {nats: 3}", "strenght: Extra inputs are not permitted"),
        ("ridge: {rh0: 1}", "ridge.rh0: Extra inputs are not permitted"),
        ("also: {facts: {uri: x, colour: red}}", "also.facts.colour: Extra inputs"),
        ("ridge: {rho: 1, mu: 1}", "ridge: Value error, give `rho` or `mu`, not both"),
        ("ridge: {rho: -1}", "ridge.rho: Input should be greater than 0"),
        ("strength: {nats: 3, beta: 5}", "give one of `nats`, `beta` and `auto`, not nats and"),
        ("strength: {nats: 3, auto: {}}", "not nats and auto"),
        ("strength: {nats: .nan}", "strength.nats: Input should be"),
        ("target: {kind: redirect}", "target: Value error, `redirect_to` goes with"),
        ("target: {redirect_to: x}", "target: Value error, `redirect_to` goes with"),
        ("target: {kind: forgetfulness}", "target.kind: Input should be 'replacement'"),
        ("select: {layers: []}", "select.layers: "),
        ("select: {layers: [two]}", "select.layers.0: Input should be a valid integer"),
        (
            "ridge: {cache_retain: true}",
            "`cache_retain` solves from keys: set `collect.keep_request",
        ),
        (
            "ridge: {cache_retain: true}\ncollect: {keys: sequential, keep_request_keys: true}",
            "`cache_retain` keeps what `keys: frozen` collects",
        ),
        ("ridge: {cache_retain: true, w_retain: 0}", "ridge: Value error, `cache_retain` keeps a"),
        ("collect: {keys: random}", "collect.keys: Input should be 'frozen' or 'sequential'"),
        ("evaluate: {quantisations: [int3]}", "evaluate.quantisations.0: Input should be 'nf4'"),
        ("hold_out: {every: 1}", "hold_out.every: Input should be greater than or equal to 2"),
        ("name: my model", "name: Value error, letters, digits, hyphens and underscores only"),
        ("tracking: {uri: ./mlruns}", "tracking.uri: Value error"),
    ],
)
def test_a_wrong_setting_is_named(line: str, setting: str, tmp_path: Path) -> None:
    message = refused(tmp_path, f"{MINIMAL}{line}\n")
    assert f"\n  {setting}" in message or setting in message
    assert message.endswith("`grom schema` prints all settings.")


def test_every_wrong_setting_is_named_at_once(tmp_path: Path) -> None:
    message = refused(tmp_path, "model: {source: m}\nforget: {url: f}\n")
    assert sorted(line.split(":")[0].strip() for line in message.splitlines()[1:-1]) == [
        "forget.uri",
        "forget.url",
        "retain",
    ]


def test_a_syntax_error_names_the_line(tmp_path: Path) -> None:
    message = refused(tmp_path, f"{MINIMAL}ridge: {{rho: 1\nname: x\n")
    assert ", line 5: not valid YAML; check indentation and quotes" in message
    assert "line 2" in refused(tmp_path, "model: {source: m}\n\tforget: x\n")


@pytest.mark.parametrize("text", [b"\xff\xfe", "name: caf\xe9\n".encode("latin-1"), b"a: \x00"])
def test_a_file_that_is_no_text_is_refused(text: bytes, tmp_path: Path) -> None:
    assert "not valid YAML" in refused(tmp_path, text)


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "demo\n", "3\n"])
def test_a_file_without_settings_is_refused(text: str, tmp_path: Path) -> None:
    assert "expected settings by name, like `model:` and `forget:`" in refused(tmp_path, text)


def test_a_file_that_is_not_there_is_refused_with_the_presets(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.yaml", tmp_path):
        with pytest.raises(ConfigError, match="no such file, and no preset of that name"):
            read_config(path)


def test_a_configuration_cannot_be_changed_by_accident() -> None:
    config = PRESETS["demo"]()
    for part, name in ((config, "name"), (config.ridge, "rho")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(part, name, 1.0)


def test_wrong_settings_are_not_repeated_where_they_might_hold_text(tmp_path: Path) -> None:
    assert "zebrafish" not in refused(tmp_path, f"{MINIMAL}ridge: {{rho: zebrafish}}\n")


def test_a_setting_that_is_given_twice_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text("forget: {uri: a.jsonl}\nretain: {uri: b.jsonl}\nforget: {uri: c.jsonl}\n")
    with pytest.raises(ConfigError, match=r"twice\.yaml, line 3: the key 'forget' occurs twice"):
        read_config(path)
