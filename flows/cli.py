"""The command line: one job (`run`, `demo`, `eval`, `attack`); a service (`up`, `submit` ...)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows import (
    approval_commands,
    attack_command,
    certificate_commands,
    deploy,
    doorbell_commands,
    edit_commands,
    erase_commands,
    inbox_commands,
    measure,
    model_commands,
    reproduce_commands,
    up,
    withdraw_commands,
)
from flows.config import UnlearnConfig
from flows.presets import PRESETS, load
from flows.service import ServiceConfig, read_service
from flows.show import DEMO_NAMES, show_answers, show_outcome
from flows.terminal import console, plain_logs, prepare_environment, readable_errors

if TYPE_CHECKING:
    from flows.unlearn import Outcome

app = typer.Typer(
    help="Closed-form unlearning for language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("eval")(measure.evaluate_model)
app.command("benchmarks")(measure.list_benchmarks)
app.command("attack")(attack_command.attack_model)
app.command("submit")(inbox_commands.submit_batch)
app.command("status")(inbox_commands.show_status)
app.command("retry")(inbox_commands.retry_batch)
app.command("withdraw")(withdraw_commands.withdraw_request)
app.command("approve")(approval_commands.approve_batch)
app.command("sweep")(doorbell_commands.sweep_inbox)
app.command("listen")(doorbell_commands.listen_to_queue)
app.command("models")(model_commands.list_models)
app.command("rollback")(model_commands.roll_back)
app.command("erase")(erase_commands.erase_batches)
app.command("certificate")(certificate_commands.show_certificate)
app.command("verify")(certificate_commands.verify_certificate)
app.command("keygen")(certificate_commands.make_key)
app.command("reproduce")(reproduce_commands.reproduce_run)
app.command("diff")(reproduce_commands.diff_runs)
app.command("apply")(edit_commands.apply_edit)
app.command("revert")(edit_commands.revert_edit)
app.command("inspect")(edit_commands.inspect_edit)
app.command("export")(edit_commands.export_edit)
app.command("merge")(edit_commands.merge_edits)
app.command("deploy")(deploy.deploy_service)
app.command("up")(up.up)
app.command("ui")(up.ui)
Work = Annotated[Path, typer.Option(help="Folder for scratch files, MLflow and Prefect.")]
DEFAULT_WORK = Path("grom-work")


@app.command()
def run(
    config: Annotated[str, typer.Argument(help="A YAML file, or the name of a preset.")],
    work: Annotated[Path | None, typer.Option(help="Overrides the configuration's work.")] = None,
    quiet: Annotated[bool, typer.Option(help="Only warnings and the result.")] = False,
) -> None:
    """Run one unlearning job from end to end."""
    with readable_errors():
        settings = load(config, work)
        show_outcome(execute(settings, quiet=quiet), console)


@app.command()
def demo(
    work: Work = DEFAULT_WORK,
    samples: Annotated[int, typer.Option(help="Before and after answers to show.")] = 3,
) -> None:
    """Unlearn four customers of a support assistant that memorised forty."""
    with readable_errors():
        settings = load("demo", work)
        outcome = execute(settings, quiet=True)
        show_outcome(outcome, console, DEMO_NAMES)
        show_answers(settings, outcome, samples, console)


@app.command()
def presets() -> None:
    """List the presets."""
    for name, build in PRESETS.items():
        console.print(f"[bold]{name}[/]  {(build.__doc__ or '').strip()}")


@app.command()
def schema(
    service: Annotated[bool, typer.Option("--service", help="That of a service.")] = False,
) -> None:
    """Print the JSON schema of the configuration."""
    settings = ServiceConfig if service else UnlearnConfig
    console.print_json(json.dumps(settings.model_json_schema()))


@app.command()
def show_config(
    preset: Annotated[str, typer.Argument(help="Name of a preset.")],
) -> None:
    """Print a preset as YAML, to start a configuration of one's own from."""
    import yaml

    with readable_errors():
        values = load(preset, None).model_dump(mode="json", exclude_defaults=True)
        sys.stdout.write(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


@app.command()
def housekeeping(
    config: Annotated[Path, typer.Option(help="The service's YAML file.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be done.")
    ] = False,
) -> None:
    """Do now what the daily flow does: close what killed runs left, erase and purge by rule."""
    with readable_errors():
        cfg = read_service(config)
        prepare_environment(Path(cfg.work))
        from flows import housekeeping as tidy

        with plain_logs(quiet=False):
            found = tidy.housekeeping(cfg, dry_run)
        for one in found:
            console.print(f"{one.step}: {len(one.places)} places, {one.num_bytes:,} bytes")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(context: typer.Context) -> None:
    """Measure speed and memory against the plain algorithm; needs a checkout with tests/."""
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-m", "tests.bench.run", *context.args]
    raise typer.Exit(subprocess.run(command, cwd=root, check=False).returncode)


def execute(settings: UnlearnConfig, *, quiet: bool) -> Outcome:
    """Run the flow, on the server of `PREFECT_API_URL` or on Prefect's ephemeral one."""
    prepare_environment(Path(settings.work))
    from flows.unlearn import unlearn

    with plain_logs(quiet=quiet):
        return unlearn(settings)
