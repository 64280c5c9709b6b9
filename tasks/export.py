"""Edits for other programs: a LoRA adapter for PEFT, a 4-bit checkpoint for transformers.

Shapes: N inputs of W, M outputs of W, R rank of the adapter.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from grom.apply import Edit
from grom.config import CollectConfig, EvaluateConfig
from grom.errors import ConfigError
from grom.export import Adapter, adapter, total_error
from grom.sites import Site
from tasks.artifacts import canonical_json
from tasks.checkpoint import EMBEDDINGS, checkpoint_bytes, write_edited
from tasks.codes import HEADS
from tasks.edits import need_base, new_folder, open_edit
from tasks.export_card import Exported, SiteExport, card_of
from tasks.models import DTYPES, damage_named, open_model, open_tokenizer
from tasks.place import DataRef, ModelRef, Part, Place
from tasks.tensors import read_sizes
from tasks.undo import Undo
from tasks.updates import HeldUpdates, StoredUpdates, Updates

ADAPTER, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
REPORT, README = "export.json", "README.md"
PREFIX = "base_model.model."
"""What PEFT puts before a module's name."""
GGUF = (
    "no maintained library writes GGUF from a checkpoint. Apply the edit (`grom apply BASE EDIT "
    "OUT`), then let llama.cpp convert it: `python convert_hf_to_gguf.py OUT --outfile model.gguf`."
)


@dataclass(frozen=True, slots=True)
class Measurement:
    """What the adapter's effect is measured on."""

    model: ModelRef
    """The base."""
    sets: Mapping[str, tuple[DataRef, Part]]
    evaluate: EvaluateConfig
    collect: CollectConfig
    place: Place


def export_peft(
    folder: Path,
    out: Path,
    *,
    rank: int | None = None,
    uniform: bool = False,
    dtype: str = "float32",
    base: Path | None = None,
    fingerprint: str | None = None,
    base_name: str | None = None,
    measurement: Measurement | None = None,
) -> Exported:
    """Write an edit as a LoRA adapter that `PeftModel.from_pretrained` loads.

    Args:
        folder: of the edit.
        out: the new folder: adapter, its settings, `export.json` and `README.md`.
        rank: R at most; not given: what makes every site exact.
        uniform: the same R at every site, filled up with zeros, and no patterns in the settings.
        dtype: float32, bfloat16 or float16.
        base: the base checkpoint, which must be that of the edit; also says if its head is tied.
        fingerprint: of the base, if it is not the hash of its files.
        base_name: what PEFT is told the base is.
        measurement: if given, also measure the base with the adapter merged.

    Raises:
        MissingInput, BrokenCheckpoint, TamperedEdit, CorruptArtifact: the edit cannot be read.
        ConfigError: `out` has files; no such dtype; a rank below 1; an edit at unit strength.
        NotEnoughDisk: the adapter does not fit.
        WrongBase: the edit was made for another model.
    """
    _check_options(rank, dtype)
    updates, undo = open_edit(folder)
    updates.need_strength()
    if base is not None:
        need_base(base, updates, fingerprint)
    made = {site: adapter(updates.whole(site), rank).to(DTYPES[dtype]) for site in updates.sites}
    largest = max(part.rank for part in made.values())
    if uniform:
        made = {site: part.padded(largest) for site, part in made.items()}
    found = Exported(
        sites=tuple(
            SiteExport(site.name, part.kept, part.spectrum.rank(), part.error)
            for site, part in made.items()
        ),
        is_exact=all(part.is_exact for part in made.values()),
        error=total_error(list(made.values())),
        num_bytes=sum(_bytes(part.A_RN) + _bytes(part.B_MR) for part in made.values()),
        tied_head=_tied(updates, undo, base),
        metrics=_measure(updates, made, measurement) if measurement else None,
    )
    with new_folder(out, found.num_bytes) as draft:
        save_file(_tensors(made), draft / ADAPTER, metadata={"format": "pt"})
        settings = _settings(made, uniform=uniform, base_name=base_name)
        (draft / SETTINGS).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
        report = asdict(found) | {"base": updates.facts.get("model"), "edit": updates.sha256()}
        (draft / REPORT).write_bytes(canonical_json(report))
        (draft / README).write_text(card_of(found, settings["r"]))
    return found


def _check_options(rank: int | None, dtype: str) -> None:
    if rank is not None and rank < 1:
        raise ConfigError(f"--rank {rank}: at least 1; leave it out for the exact adapter")
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype}: there are {', '.join(DTYPES)}")


def _tensors(made: Mapping[Site, Adapter]) -> dict[str, Tensor]:
    """PEFT's names.  Both matrices are those of a linear layer, in GPT-2's Conv1D as well."""
    tensors = {}
    for site, part in made.items():
        tensors[f"{PREFIX}{site.name}.lora_A.weight"] = part.A_RN.contiguous()
        tensors[f"{PREFIX}{site.name}.lora_B.weight"] = part.B_MR.contiguous()
    return tensors


def _settings(
    made: Mapping[Site, Adapter], *, uniform: bool, base_name: str | None
) -> dict[str, Any]:
    """PEFT's settings.  alpha = R at every site, so that the scaling is 1; so is that of a reader
    that knows one rank only, the largest."""
    ranks = {site.name: part.rank for site, part in made.items()}
    largest = max(ranks.values())
    pattern = {name: rank for name, rank in ranks.items() if rank != largest and not uniform}
    return {
        "alpha_pattern": pattern,
        "base_model_name_or_path": base_name,
        "bias": "none",
        "fan_in_fan_out": any(site.inputs_first for site in made),
        "inference_mode": True,
        "lora_alpha": largest,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": largest,
        "rank_pattern": pattern,
        "target_modules": sorted(ranks),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }


def _tied(updates: StoredUpdates, undo: Undo | None, base: Path | None) -> bool | None:
    if not any(site.kind == "head" for site in updates.sites):
        return False
    if undo is not None:
        return undo.untied
    if base is None:
        return None
    with damage_named(base):
        names = {name for path in base.glob("*.safetensors") for name in read_sizes(path)}
    return bool(names & set(EMBEDDINGS)) and not names & HEADS


def _measure(
    updates: StoredUpdates, made: Mapping[Site, Adapter], how: Measurement
) -> dict[str, dict[str, dict[str, float]]]:
    """Scores of the base, of the edited model and of the base with the adapter merged."""
    from tasks.evaluate import evaluate  # it imports Prefect

    merged = Edit({site: part.update() for site, part in made.items()})
    held: dict[str, Updates] = {"edited": updates, "adapter": HeldUpdates(merged)}
    scores: dict[str, dict[str, dict[str, float]]] = {name: {} for name in how.sets}
    work = Path(how.place.work)
    work.mkdir(parents=True, exist_ok=True)
    for label in ("unedited", *held):
        with tempfile.TemporaryDirectory(dir=work) as scratch:
            folder, fingerprint = how.model.folder, how.model.fingerprint
            if label in held:
                write_edited(Path(folder), held[label], Path(scratch))
                folder, fingerprint = scratch, f"{fingerprint} + {held[label].sha256()}"
            found = evaluate.fn(
                label, folder, fingerprint, dict(how.sets), how.evaluate, how.collect, how.place
            )
        for name, values in found.sets.items():
            scores[name][label] = values
    return scores


def export_nf4(checkpoint: Path, out: Path) -> tuple[str, ...]:
    """Write an edited checkpoint in bitsandbytes' NF4, as plain transformers loads it.

    The head stays in full precision, and arithmetic is in float32, as in the quantised loads that
    an edit is measured with: the logits are the same.

    Returns:
        the quantised modules.

    Raises:
        ConfigError: `out` has files, or bitsandbytes cannot quantise this model.
        BrokenCheckpoint: it does not load.
        NotEnoughDisk: it does not fit.
    """
    opened = open_model(checkpoint, text_window=512, quantisation="nf4", editable=False)
    with new_folder(out, checkpoint_bytes(checkpoint) // 2) as draft:
        opened.model.save_pretrained(draft)
        open_tokenizer(checkpoint).save_pretrained(draft)
        for name in ("edit.json", "undo.json"):
            if (checkpoint / "edit" / name).is_file():
                (draft / "edit").mkdir(exist_ok=True)
                shutil.copyfile(checkpoint / "edit" / name, draft / "edit" / name)
    return opened.quantised_modules


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
