"""`grom apply`, `revert`, `inspect`, `export`, `merge`: an edit as a thing of its own."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.measure import MODEL_HELP
from flows.presets import load, model_named
from flows.show_edit import show_edit, show_exported, show_no_sum
from flows.terminal import console, prepare_environment, quiet_libraries, readable_errors
from grom.config import ModelConfig
from grom.errors import ConfigError, GromError

if TYPE_CHECKING:
    from tasks.edit_facts import Overlap
    from tasks.export import Measurement

EDIT_HELP = (
    "An edit: folder of an edited checkpoint, its edit/ folder, STORE/apply/KEY, or "
    "models:/NAME@ALIAS."
)
Edit = Annotated[str, typer.Argument(help=EDIT_HELP)]
Work = Annotated[Path, typer.Option(help="Work folder, for downloads and conversions.")]
DEFAULT_WORK = Path("grom-work")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


class Format(StrEnum):
    """What an edit can be exported as."""

    peft = "peft"
    nf4 = "nf4"
    gguf = "gguf"


def apply_edit(
    base: Annotated[str, typer.Argument(help=f"The model that the edit is for. {MODEL_HELP}")],
    edit: Edit,
    out: Annotated[Path, typer.Argument(help="A new folder for the edited checkpoint.")],
    work: Work = DEFAULT_WORK,
) -> None:
    """Write the edited checkpoint of a base and an edit, to the byte as its run wrote it."""
    with readable_errors():
        _prepare(work, base, edit)
        from tasks import edits

        folder, fingerprint = _base(model_named(base), work)
        where = edits.edit_folder(edits.locate(edit, work))
        done = edits.apply_edit(folder, where, out, fingerprint)
        console.print(
            f"{out}: {done.num_sites} tensors edited, {done.num_changed} weights changed, at most "
            f"{done.lost:.1e} of an update lost to rounding, {done.seconds:.1f} s",
            highlight=False,
            soft_wrap=True,
        )
        if done.reproduced:
            console.print("byte-identical to the checkpoint that the edit's run wrote")
        elif done.reproduced is False:
            console.print(
                "[yellow]not byte-identical to the checkpoint that the edit's run wrote: another "
                "kind of machine rounds some last digits differently[/]"
            )


def revert_edit(
    model: Annotated[str, typer.Argument(help="An edited checkpoint: a folder, or as EDIT.")],
    out: Annotated[Path | None, typer.Argument(help="A new folder for the base.")] = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Change MODEL itself; safe against a kill.")
    ] = False,
    work: Work = DEFAULT_WORK,
) -> None:
    """Take an edit back: the base, every file the same to the bit."""
    with readable_errors():
        if (out is None) != in_place:
            raise ConfigError("name a folder OUT for the base, or give --in-place, not both")
        _prepare(work, model)
        from tasks.edits import locate
        from tasks.revert import revert, revert_in_place

        folder = locate(model, work)
        done = revert_in_place(folder) if out is None else revert(folder, out)
        console.print(
            f"{out or folder}: {done.num_tensors} tensors put back, {done.num_files} files "
            f"byte-identical to the base's, {done.seconds:.1f} s",
            highlight=False,
            soft_wrap=True,
        )


def inspect_edit(
    edit: Edit,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    store: Annotated[
        str | None, typer.Option(help="Store with the statistics; not given: the edit's own.")
    ] = None,
    work: Work = DEFAULT_WORK,
) -> None:
    """Show what an edit is: sites, ranks, norms, strength, and what it came from."""
    with readable_errors():
        _prepare(work, edit)
        from tasks import edit_facts
        from tasks.edits import edit_folder, locate

        found = edit_facts.inspect_edit(edit_folder(locate(edit, work)), store)
        if as_json:
            sys.stdout.write(json.dumps(asdict(found), indent=1) + "\n")
        else:
            show_edit(found)


def export_edit(
    edit: Edit,
    out: Annotated[Path, typer.Argument(help="A new folder.")],
    format: Annotated[Format, typer.Option(help="peft: a LoRA adapter; nf4: a 4-bit model.")],
    rank: Annotated[
        int | None, typer.Option(help="Largest rank; not given: exact at every site.")
    ] = None,
    uniform_rank: Annotated[
        bool, typer.Option("--uniform-rank", help="One rank for all sites, for vLLM.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="Of the adapter.")] = "float32",
    base: Annotated[
        str | None, typer.Option(help="The model that the edit is for; as in `grom apply`.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure what the adapter forgets and keeps.")
    ] = False,
    config: Annotated[
        str | None, typer.Option(help="With --measure: preset or YAML file that names the data.")
    ] = None,
    work: Work = DEFAULT_WORK,
) -> None:
    """Export an edit for PEFT, or an edited model in NF4 for transformers."""
    with readable_errors():
        _prepare(work, edit, *([base] if base else []), always=measure)
        from tasks import export
        from tasks.edits import edit_folder, locate

        if format is Format.gguf:
            raise ConfigError(f"--format gguf: {export.GGUF}")
        if config is not None and not measure:
            raise ConfigError("--config names the data of --measure, which was not asked for")
        folder = locate(edit, work)
        if format is Format.nf4:
            if rank is not None or uniform_rank or measure or dtype != "float32":
                raise ConfigError("--rank, --uniform-rank, --dtype and --measure are of adapters")
            with _checkpoint(folder, base, work) as checkpoint:
                modules = export.export_nf4(checkpoint, out)
            console.print(f"{out}: {len(modules)} matrices in NF4", highlight=False, soft_wrap=True)
            return
        plain, fingerprint = _base(model_named(base), work) if base else (None, None)
        found = export.export_peft(
            edit_folder(folder),
            out,
            rank=rank,
            uniform=uniform_rank,
            dtype=dtype,
            base=plain,
            fingerprint=fingerprint,
            base_name=_name_for_peft(base),
            measurement=_measurement(config, base, work) if measure else None,
        )
        show_exported(found, out)


def merge_edits(edit_a: Edit, edit_b: Edit, work: Work = DEFAULT_WORK) -> None:
    """Refuse to add two edits, show what they have in common, and say what to do instead."""
    with readable_errors():
        _prepare(work, edit_a, edit_b)
        from tasks.edit_facts import overlap
        from tasks.edits import edit_folder, locate

        found: Overlap | GromError
        try:
            found = overlap(*(edit_folder(locate(edit, work)) for edit in (edit_a, edit_b)))
        except GromError as error:
            found = error
        show_no_sum(found)
        raise typer.Exit(1)


def _prepare(work: Path, *addresses: str, always: bool = False) -> None:
    """The work folder is made only if something must be downloaded, converted or measured."""
    quiet_libraries()
    if always or not all(Path(address).exists() for address in addresses):
        prepare_environment(work)


def _base(config: ModelConfig, work: Path) -> tuple[Path, str | None]:
    from tasks.edits import open_base
    from tasks.place import Place

    return open_base(config, Place(work=str(work), store=str(work / "store")))


@contextmanager
def _checkpoint(folder: Path, base: str | None, work: Path) -> Iterator[Path]:
    """The edited checkpoint: the folder itself, or made of base and edit for this block."""
    if (folder / "config.json").is_file():
        yield folder
        return
    if base is None:
        raise ConfigError(f"{folder}: an edit without a model; name its base with --base")
    from tasks import edits

    where, fingerprint = _base(model_named(base), work)
    work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work) as scratch:
        out = Path(scratch) / "edited"
        edits.apply_edit(where, edits.edit_folder(folder), out, fingerprint)
        yield out


def _name_for_peft(base: str | None) -> str | None:
    """What PEFT can open again: a folder or a hub id; nothing for a role of a preset."""
    if base is not None and Path(base).is_dir():
        return str(Path(base).resolve())
    return base if base is not None and HUB_ID.fullmatch(base) else None


def _measurement(config: str | None, base: str | None, work: Path) -> Measurement:
    """What a configuration says is to be forgotten and kept."""
    if config is None:
        raise ConfigError("--measure needs --config with a preset or YAML file that names the data")
    from tasks.export import Measurement
    from tasks.load import load_data, load_model
    from tasks.place import Place

    settings = load(config, work)
    place = Place(work=settings.work, store=settings.store or str(work / "store"))
    model = load_model.fn(model_named(base) if base else settings.model, place, settings.tracking)
    forget = load_data.fn(settings.forget, place, "forget")
    retain = load_data.fn(settings.retain, place, "retain", settings.hold_out)
    return Measurement(
        model=model,
        sets={
            "forget": (forget, "all"),
            "retain, seen": (retain, "seen"),
            "retain, held out": (retain, "held out"),
        },
        evaluate=settings.evaluate,
        collect=settings.collect,
        place=place,
    )
