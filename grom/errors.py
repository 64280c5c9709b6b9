"""Everything that can go wrong, and what to do about it.

    GromError
    |- ConfigError                  a setting, or two settings together, make no sense
    |- DataError                    rows, files and sets
    |  |- MissingInput              nothing at that address
    |  |- MalformedRow              a row breaks the schema; names file and line
    |  |- EmptySet                  a forget or retain set without rows
    |  |- Overlap                   rows that are to be forgotten and kept
    |  |- EmptyAnswer               an answer without tokens
    |  |- BrokenLedger              the ledger's lines are not the ones that were written
    |  |- LedgerConflict            a line contradicts what the ledger says
    |  `- ExampleTooLong            longer than the model's context
    |- ModelError                   the model cannot be edited
    |  |- UnknownFamily             no rule says where its MLP output matrix is
    |  |- MixtureOfExperts          several MLPs per layer
    |  |- QuantisedBase             weights are not plain numbers
    |  |- BrokenCheckpoint          the checkpoint's files cannot be opened
    |  |- MissingTensor             the checkpoint lacks the weight to edit
    |  `- NonFiniteKeys             NaN or Inf in the activations
    |- SolveError
    |  |- NothingToForget           no position has alpha > 0
    |  |- AlreadyForgotten          the model is at the level to reach before any edit
    |  |- FloorTooHigh              no strength leaves enough of the held-out retain set
    |  |- NotPositiveDefinite       the ridge system has no Cholesky factor
    |  `- ErasedByRounding          the edit vanishes in the checkpoint's dtype
    `- ResourceError
       |- NotEnoughMemory
       `- NotEnoughDisk

Each message says where, what, and the cure, and never quotes the text of an example.
"""

from __future__ import annotations

from collections.abc import Sequence


class GromError(Exception):
    """Base class: a failure the user can understand and cure."""


class ConfigError(GromError):
    """A setting is wrong, or contradicts another one."""


class DataError(GromError):
    """Something is wrong with the rows, files or sets that were given."""


class MissingInput(DataError):
    """Nothing is at the address that the configuration names."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"{where}: {what}. Check the path or the address in the configuration.")


class MalformedRow(DataError):
    """A row breaks the schema.  The message names the place, never the content."""

    def __init__(self, file: str, line: int, reason: str) -> None:
        super().__init__(
            f"{file}, line {line}: {reason}. Every row needs either `prompt` and `answer` or "
            "`text`, all of them non-empty strings; correct or remove the row."
        )
        self.file, self.line, self.reason = file, line, reason


class EmptySet(DataError):
    """A set without rows cannot be forgotten, kept or measured."""

    def __init__(self, name: str, where: str) -> None:
        super().__init__(f"{where}: the {name} set has no rows. Name at least one row for it.")


class Overlap(DataError):
    """Rows are in the forget set and in a set that is to be kept."""

    def __init__(self, name: str, where: str, count: int) -> None:
        super().__init__(
            f"{where}: {count} rows of the {name} set are in the forget set, too, this one first. "
            f"Take them out of the {name} set, for instance by group with `without`."
        )


class EmptyAnswer(DataError):
    """The answer of an example has no tokens."""

    def __init__(self, where: str) -> None:
        super().__init__(f"{where}: the answer has no tokens. Give it text or remove the row.")


class BrokenLedger(DataError):
    """The chain of hashes does not hold: a line was changed, removed or put in."""

    def __init__(self, where: str, number: int, reason: str) -> None:
        super().__init__(
            f"{where}, line {number}: {reason}, so it and what follows cannot be relied on. Take "
            "the ledger from a backup; find out who can write there."
        )
        self.number = number


class LedgerConflict(DataError):
    """The ledger says something else about this request and run."""

    def __init__(self, where: str, number: int) -> None:
        super().__init__(
            f"{where}, line {number}: there is a line of the same request, batch and run with "
            "another result. Check which of two runs under one id is right; nothing was added."
        )


class ExampleTooLong(DataError):
    """An example does not fit in the model's context."""

    def __init__(self, where: str, num_tokens: int, limit: int) -> None:
        super().__init__(
            f"{where}: {num_tokens} tokens, and the limit is {limit}. Shorten the row, split it, "
            "or give it as `text`, which is cut into windows."
        )


class ModelError(GromError):
    """This model cannot be edited."""


class UnknownFamily(ModelError):
    """No rule says where this model keeps its MLP output matrices."""

    def __init__(self, model_type: str, searched: Sequence[str]) -> None:
        super().__init__(
            f"model type {model_type!r} is not a known family; searched {', '.join(searched)}. "
            "Add one row to FAMILIES in grom/sites.py and one model to its test."
        )


class MixtureOfExperts(ModelError):
    """A layer has several MLPs, so one key does not determine one output."""

    def __init__(self, model_type: str, module: str) -> None:
        super().__init__(
            f"{module}: {model_type!r} is a mixture of experts, which this method does not edit. "
            "Use a dense model of the same series."
        )


class QuantisedBase(ModelError):
    """The base model's weights are quantised."""

    def __init__(self, where: str, found: str) -> None:
        super().__init__(
            f"{where}: the weights are quantised ({found}), so an update cannot be added to them. "
            "Edit the unquantised checkpoint, then quantise the result."
        )


class BrokenCheckpoint(ModelError):
    """The checkpoint's files cannot be opened."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(
            f"{where}: the model does not open ({what}). Check that config, tokenizer and weights "
            "are all there and whole, or save them again with `save_pretrained`."
        )


class MissingTensor(ModelError):
    """The checkpoint does not hold the weight that is to be edited."""

    def __init__(self, where: str, name: str) -> None:
        super().__init__(
            f"{where}: no tensor named {name}. The checkpoint's names differ from the model's; "
            "load it with transformers and save it again with `save_pretrained`."
        )


class NonFiniteKeys(ModelError):
    """NaN or Inf among the keys of a site."""

    def __init__(self, site: str, where: str) -> None:
        super().__init__(
            f"{site}: NaN or Inf in the keys of {where}. Check the checkpoint for NaN, or load "
            "it in bfloat16 or float32 instead of float16."
        )


class SolveError(GromError):
    """There is no usable edit."""


class NothingToForget(SolveError):
    """Every forget token is at least as frequent in the retain set."""

    def __init__(self, num_positions: int) -> None:
        super().__init__(
            f"nothing would change: 0 of {num_positions} positions have alpha > 0. Each forget "
            "token is at least as frequent in the retain set. Take the forget rows out of the "
            "retain set, or use a retain set on other subjects."
        )


class AlreadyForgotten(SolveError):
    """The unedited model does not know the forget set better than it may."""

    def __init__(self, before: float, level: float) -> None:
        super().__init__(
            f"the forget set's answer probability is {before:.3f} before any edit, and the level "
            f"to reach is {level:.3f}: there is nothing to forget. Check model, chat template and "
            "forget set, or give a lower `strength.auto.forget_probability`."
        )


class FloorTooHigh(SolveError):
    """Even the weakest edit takes held-out retain below the utility floor."""

    def __init__(self, floor: float, before: float) -> None:
        super().__init__(
            f"no strength keeps held-out retain ({before:.3f} before the edit) above the floor of "
            f"{floor:.3f}. Lower `strength.auto.utility_floor`, or name more retain or "
            "`background` rows."
        )


class NotPositiveDefinite(SolveError):
    """The ridge system has no Cholesky factor."""

    def __init__(self, site: str, pivot: int, size: int, mu: float) -> None:
        super().__init__(
            f"{site}: A is not positive definite (Cholesky stopped at pivot {pivot} of {size}, "
            f"mu={mu:.3g}). Raise `rho` or `mu`, or collect more retain tokens; check the keys "
            "for NaN first."
        )


class ErasedByRounding(SolveError):
    """Casting to the checkpoint's dtype left no weight changed."""

    def __init__(self, site: str, dtype: str) -> None:
        super().__init__(
            f"{site}: 0 weights changed, the edit is smaller than the rounding of {dtype}. "
            "Raise the strength, or keep the checkpoint in float32."
        )


class ResourceError(GromError):
    """The machine is too small for this run."""


class NotEnoughMemory(ResourceError):
    """The forecast exceeds the memory that is free."""

    def __init__(self, needed_gb: float, free_gb: float, largest: str) -> None:
        super().__init__(
            f"this run needs about {needed_gb:.1f} GB of memory and {free_gb:.1f} GB are free; "
            f"the largest term is {largest}. Use fewer layers, smaller batches or a larger machine."
        )


class NotEnoughDisk(ResourceError):
    """The result does not fit on the disk."""

    def __init__(self, where: str, needed_gb: float, free_gb: float) -> None:
        super().__init__(
            f"{where}: {needed_gb:.2f} GB to write and {free_gb:.2f} GB free. Free some space or "
            "put `work` or `store` on another disk. Nothing was written."
        )
