"""`grom deploy`: a service's deployments, from `infra/deployments.yaml`, on a Prefect server."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer
import yaml

from flows.config import StrictLoader
from flows.presets import ROOT
from flows.terminal import console, prepare_environment, readable_errors
from grom.errors import ConfigError

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

    from flows.service import ServiceConfig

DEPLOYMENTS = ROOT / "infra" / "deployments.yaml"
LOCAL_API = "http://127.0.0.1:4200/api"
PLACEHOLDER = re.compile(r"\{\{ service(?:\.(\w+))? \}\}")
SECRETS = (
    re.compile(r"://[^/@\s]*:[^/@\s]+@"),
    re.compile(r"[?&][\w-]*(password|secret|token|signature|credential|apikey|key|sig)=", re.I),
    re.compile(r"\b(hf_[A-Za-z0-9]{20,}|(AKIA|ASIA)[A-Z0-9]{16})\b"),
)
"""A password in an address, one among its parameters, a token of a hub or of AWS."""
Values = Mapping[str, Any]


class SecretSetting(ConfigError):
    """A setting holds a secret."""

    def __init__(self, setting: str) -> None:
        super().__init__(
            f"{setting}: this looks like a secret, and parameters of deployments are shown to "
            "everyone who sees the UI. Give it to the workers in their environment: AWS_* for the "
            "store, MLFLOW_TRACKING_URI or MLFLOW_TRACKING_USERNAME and _PASSWORD for MLflow, "
            "HF_TOKEN for a hub; and leave it out here."
        )


def deploy_service(
    config: Annotated[Path, typer.Option(help="The service's YAML file.")],
    api: Annotated[
        str, typer.Option(envvar="PREFECT_API_URL", help="Address of the Prefect server.")
    ] = LOCAL_API,
    work: Annotated[Path | None, typer.Option(help="Overrides the configuration's work.")] = None,
) -> None:
    """Create or update the pool, limits, schedules and triggers of a service."""
    with readable_errors():
        cfg = load_service(config, work)
        prepare_environment(Path(cfg.work))
        os.environ["PREFECT_API_URL"] = api
        for name in deploy(cfg):
            console.print(f"deployed {name}", highlight=False)


def load_service(config: Path, work: Path | None) -> ServiceConfig:
    """A service as it is deployed: without relative paths, for workers run in folders of their own.

    Raises:
        ConfigError: a setting is wrong.
        SecretSetting: a setting holds a secret.
    """
    from flows.service import ServiceConfig, read_service

    values = read_service(config).model_dump(mode="json")
    if work is not None:
        values["work"] = str(work)
    refuse_secrets(values)
    return ServiceConfig.model_validate(absolute(values))


def refuse_secrets(values: Values) -> None:
    """Refuse settings that hold a secret.

    Raises:
        SecretSetting: names the first of them.
    """
    for setting, text in texts(values):
        if any(secret.search(text) for secret in SECRETS):
            raise SecretSetting(setting)


def texts(values: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """All text of nested settings, with the setting's name."""
    if isinstance(values, str):
        yield where, values
    elif isinstance(values, Mapping):
        for key, value in values.items():
            yield from texts(value, f"{where}.{key}" if where else str(key))
    elif isinstance(values, list):
        for value in values:
            yield from texts(value, where)


def absolute(values: Values) -> dict[str, Any]:
    """A service's settings with relative paths made absolute, from this folder."""
    changed = dict(values)
    for name in ("work", "store"):
        changed[name] = _path(values[name])
    for name in ("retain", "background"):
        changed[name] = _with_paths(values[name], ("uri",))
    changed["also"] = {name: _with_paths(one, ("uri",)) for name, one in values["also"].items()}
    for name in ("model", "reference", "retrained"):
        changed[name] = _with_paths(values[name], ("source", "adapter"), only_there=True)
    changed["benchmark"] = _with_paths(values["benchmark"], ("data",), only_there=True)
    return changed


def deploy(cfg: ServiceConfig, file: Path = DEPLOYMENTS) -> tuple[str, ...]:
    """Make the server of `PREFECT_API_URL` what the file says, for one service.

    Returns:
        the names of the deployments.

    Raises:
        ConfigError: the file is not there.
        ServerUnreachable, ServerRefused: as they say.
    """
    from prefect.client.schemas.actions import WorkPoolCreate

    from tasks.prefect_api import server
    from tasks.versions import model_of

    if not file.is_file():
        raise ConfigError(f"{file}: no such file; `grom deploy` runs from a checkout")
    template = yaml.load(file.read_text(encoding="utf-8"), Loader=StrictLoader)
    settings = cfg.model_dump(mode="json")
    named = {**settings, "model_name": model_of(cfg.tracking, cfg.name)}
    wanted = filled(template, settings, named)
    flows = [_flow_of(one["entrypoint"]) for one in wanted["deployments"]]
    with server() as (client, _):
        client.create_work_pool(WorkPoolCreate(**wanted["work_pool"]), overwrite=True)
        for tag, limit in wanted["tag_limits"].items():
            client.create_concurrency_limit(tag, limit)
        for one, (flow_name, schema) in zip(wanted["deployments"], flows, strict=True):
            _apply(client, one, flow_name, schema, wanted)
    pairs = zip(flows, wanted["deployments"], strict=True)
    return tuple(f"{flow_name}/{one['name']}" for (flow_name, _), one in pairs)


def filled(template: Any, whole: Values, named: Values) -> Any:
    """A template with its placeholders replaced; what they are replaced by is not looked into.

    A key whose setting is null is left out.
    """
    if isinstance(template, Mapping):
        pairs = ((key, filled(value, whole, named)) for key, value in template.items())
        return {key: value for key, value in pairs if value is not None}
    if isinstance(template, list):
        return [filled(value, whole, named) for value in template]
    if not isinstance(template, str):
        return template
    if alone := PLACEHOLDER.fullmatch(template):
        return named[alone[1]] if alone[1] else whole
    return PLACEHOLDER.sub(lambda found: str(named[found[1]]), template)


def _flow_of(entrypoint: str) -> tuple[str, dict[str, Any]]:
    """Name of a flow, and the schema of its parameters."""
    from prefect.flows import Flow, load_flow_from_entrypoint
    from prefect.utilities.callables import parameter_schema

    found: Flow[..., Any] = load_flow_from_entrypoint(entrypoint, use_placeholder_flow=False)
    return found.name, parameter_schema(found).model_dump_for_openapi()


def _apply(
    client: SyncPrefectClient, one: Values, flow_name: str, schema: dict[str, Any], wanted: Values
) -> None:
    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.client.schemas.objects import ConcurrencyOptions
    from prefect.client.schemas.schedules import construct_schedule

    limit = one.get("concurrency_limit", {})
    options = {key: value for key, value in limit.items() if key != "limit"}
    schedules = []
    for described in one.get("schedules", []):
        how = {key: value for key, value in described.items() if key != "slug"}
        if {"cron", "interval"} & set(how):
            schedule = construct_schedule(**how)
            schedules.append(DeploymentScheduleCreate(schedule=schedule, slug=described["slug"]))
    deployment_id = client.create_deployment(
        flow_id=client.create_flow_from_name(flow_name),
        name=one["name"],
        description=one["description"].strip(),
        tags=one["tags"],
        entrypoint=one["entrypoint"],
        pull_steps=wanted["pull"],
        parameters=one["parameters"],
        parameter_openapi_schema=schema,
        enforce_parameter_schema=True,
        work_pool_name=wanted["work_pool"]["name"],
        schedules=schedules,
        concurrency_limit=limit.get("limit"),
        concurrency_options=ConcurrencyOptions(**options) if options else None,
    )
    _set_triggers(client, deployment_id, one.get("triggers", []))


def _set_triggers(
    client: SyncPrefectClient, deployment_id: UUID, described: list[dict[str, Any]]
) -> None:
    from prefect.events import DeploymentEventTrigger

    # A trigger has no key of its own to be found by.  An event that comes between the two calls
    # rings for nobody; the sweep sees its batch.
    client.delete_resource_owned_automations(f"prefect.deployment.{deployment_id}")
    for values in described:
        trigger = DeploymentEventTrigger.model_validate(values)
        trigger.set_deployment_id(deployment_id)
        client.create_automation(trigger.as_automation())


def _path(text: str) -> str:
    return text if ":" in text else os.path.abspath(text)


def _with_paths(
    values: Values | None, names: tuple[str, ...], *, only_there: bool = False
) -> Values | None:
    """Settings with the named ones absolute; `only_there`: if a file is there, else it is an id."""
    if values is None:
        return None
    changed = dict(values)
    for name in names:
        text = values[name]
        if text is not None and (not only_there or os.path.exists(text)):
            changed[name] = _path(text)
    return changed
