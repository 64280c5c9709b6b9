"""The command line: `grom run`, `demo`, `eval`, `attack`, `presets`, `schema`, `ui`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows import attack_command, inbox_commands, measure
from flows.config import UnlearnConfig
from flows.presets import PRESETS, load
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
def schema() -> None:
    """Print the JSON schema of the configuration."""
    console.print_json(json.dumps(UnlearnConfig.model_json_schema()))


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
def ui(
    work: Work = DEFAULT_WORK,
    mlflow_port: Annotated[int, typer.Option(help="Port of MLflow.")] = 5000,
    prefect_port: Annotated[int, typer.Option(help="Port of Prefect.")] = 4200,
) -> None:
    """Start the MLflow and Prefect UIs over a work folder, on this machine only."""
    from tasks.tracking import Tracking, address_of

    prepare_environment(work)
    mlflow = [
        "mlflow",
        "server",
        "--backend-store-uri",
        address_of(Tracking(), work),
        "--workers",
        "1",
    ]
    mlflow += ["--host", "127.0.0.1", "--port", str(mlflow_port)]
    mlflow += ["--default-artifact-root", (work / "mlartifacts").resolve().as_uri()]
    # The page asks the API at this address; its own default is port 4200 whatever the port is.
    os.environ["PREFECT_SERVER_UI_API_URL"] = f"http://127.0.0.1:{prefect_port}/api"
    prefect = ["prefect", "server", "start", "--host", "127.0.0.1", "--port", str(prefect_port)]
    servers = [subprocess.Popen([sys.executable, "-m", *command]) for command in (mlflow, prefect)]
    console.print(f"MLflow:  http://127.0.0.1:{mlflow_port}")
    console.print(f"Prefect: http://127.0.0.1:{prefect_port}")
    console.print("Ctrl-C stops both.")
    try:
        while all(server.poll() is None for server in servers):
            time.sleep(0.5)
    except KeyboardInterrupt:
        pass
    finally:
        for server in servers:
            server.terminate()
        for server in servers:
            server.wait()


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
