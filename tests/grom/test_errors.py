"""Every error says where and what is wrong and how to cure it, and has its place in the tree."""

from __future__ import annotations

import inspect
import re

import pytest

import grom
from grom import errors
from grom.errors import GromError

WHERE = "some/place.jsonl"
ARGUMENTS: dict[str, tuple[object, ...]] = {
    "MissingInput": (WHERE, "no such file"),
    "MalformedRow": (WHERE, 17, "`answer` is missing"),
    "EmptySet": ("forget", WHERE),
    "EmptyAnswer": (WHERE,),
    "BrokenLedger": (WHERE, 17, "its hash is another"),
    "LedgerConflict": (WHERE, 17),
    "ExampleTooLong": (WHERE, 9000, 8192),
    "UnknownFamily": (WHERE, ["gpt2", "llama"]),
    "MixtureOfExperts": ("mixtral", WHERE),
    "QuantisedBase": (WHERE, "dtype uint8"),
    "BrokenCheckpoint": (WHERE, "OSError: no file named model.safetensors"),
    "MissingTensor": (WHERE, "lm_head.weight"),
    "NonFiniteKeys": (WHERE, "the forget set"),
    "NothingToForget": (40,),
    "Overlap": ("retain", WHERE, 3),
    "AlreadyForgotten": (0.1, 0.2),
    "FloorTooHigh": (0.9, 0.99),
    "NotPositiveDefinite": (WHERE, 3, 24, 0.5),
    "ErasedByRounding": (WHERE, "bfloat16"),
    "NotEnoughMemory": (12.0, 8.0, "moments while collecting"),
    "NotEnoughDisk": (WHERE, 3.0, 1.0),
}
"""What each error is raised with; the others take a finished sentence."""
OF_THE_WHOLE_RUN = {"NothingToForget", "AlreadyForgotten", "FloorTooHigh", "NotEnoughMemory"}
"""Errors that no single place is to blame for."""
CURES = ("Add", "Check", "Edit", "Free", "Give", "Lower", "Name", "Raise", "Shorten", "Take", "Use")
IMPERATIVE = re.compile(rf"(?:^|[.;] )(?:{'|'.join(CURES)}|correct|load) ")
CLASSES = {
    name: cls
    for name, cls in inspect.getmembers(errors, inspect.isclass)
    if cls.__module__ == errors.__name__
}
every_error = pytest.mark.parametrize("name", sorted(ARGUMENTS))


def message(name: str) -> str:
    return str(CLASSES[name](*ARGUMENTS[name]))


def tree() -> dict[str, str]:
    """Class -> base, as the module's docstring draws them."""
    lines = re.findall(r"^    ([ |`-]*)([A-Z]\w+)", errors.__doc__ or "", flags=re.MULTILINE)
    bases: dict[str, str] = {}
    path: list[str] = []
    for indent, name in lines:
        depth = len(indent) // 3
        path = [*path[:depth], name]
        if depth:
            bases[name] = path[depth - 1]
    return bases


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes() -> None:
    drawn = {"GromError": "Exception", **tree()}
    assert drawn == {name: cls.__mro__[1].__name__ for name, cls in CLASSES.items()}


def test_every_error_is_a_grom_error_and_documented() -> None:
    assert grom.GromError is GromError
    for cls in CLASSES.values():
        assert issubclass(cls, GromError)
        assert cls.__doc__


def test_every_error_with_a_message_of_its_own_is_tested_here() -> None:
    own = {name for name, cls in CLASSES.items() if "__init__" in vars(cls)}
    assert own == set(ARGUMENTS)


@every_error
def test_a_message_ends_with_a_cure(name: str) -> None:
    text = message(name)
    assert IMPERATIVE.search(text), text
    assert text.endswith(".")
    assert "  " not in text  # two string literals that were joined with one space too many
    assert not re.search(r"[,;.][A-Z`]", text), text  # or one too few


@every_error
def test_a_message_says_where_and_every_fact_that_it_was_given(name: str) -> None:
    text = message(name)
    assert (WHERE in text) == (name not in OF_THE_WHOLE_RUN)
    for argument in ARGUMENTS[name]:
        for part in argument if isinstance(argument, list) else [argument]:
            assert f"{part:g}" in text if isinstance(part, float) else str(part) in text


def test_a_malformed_row_carries_its_place_for_the_quarantine_list() -> None:
    error = errors.MalformedRow(WHERE, 17, "not JSON")
    assert (error.file, error.line, error.reason) == (WHERE, 17, "not JSON")
