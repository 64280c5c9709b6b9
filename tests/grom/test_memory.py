"""The forecast counts what is really allocated, names what is largest, and forgets no size."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from grom.apply import Edit, edited
from grom.memory import FLOAT32, FLOAT64, RUNTIME_BYTES, RunShape, forecast
from grom.moments import KeyMoments
from grom.sites import find_sites
from grom.sums import compact
from grom.target import LowRank
from tests.reference import tiny_model

SMALL = RunShape(
    model_bytes=270_000_000,
    reference_bytes=270_000_000,
    num_systems=6,
    num_inputs=1536,
    num_outputs=576,
    hidden_size=576,
    vocab_size=49_152,
    num_layers=30,
    num_forget_types=3000,
    num_forget_pairs=8000,
    batch_tokens=2048,
    probe_tokens=20_000,
)
SIZES = [field.name for field in fields(RunShape)]


def total(shape: RunShape) -> float:
    """All terms of all phases: every size is in some of them."""
    return sum(sum(terms.values()) for terms in forecast(shape).phases.values())


def nbytes(moments: KeyMoments) -> int:
    tensors = [moments.gram_NN, compact(moments.sums).rows_KN, moments.pair_sums.rows_KN]
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("size", SIZES)
def test_the_forecast_grows_with_every_size(size: str) -> None:
    larger = replace(SMALL, **{size: 2 * getattr(SMALL, size)})
    for phase, terms in forecast(SMALL).phases.items():
        for name, value in terms.items():
            assert forecast(larger).phases[phase][name] >= value
    assert total(larger) > total(SMALL)
    assert forecast(larger).peak_bytes >= forecast(SMALL).peak_bytes


def test_no_size_is_a_number_of_retain_tokens() -> None:
    assert not [name for name in SIZES if "retain" in name or "examples" in name]
    few, many = (
        KeyMoments.zeros(4, 8, keeps_sums=False).update_(
            torch.ones(count, 4), torch.zeros(count, dtype=torch.int64)
        )
        for count in (1, 1000)
    )
    assert nbytes(few) == nbytes(many)  # which is why none is needed


def test_moments_take_as_much_as_forecast() -> None:
    num_systems, num_inputs, num_types, num_pairs = 2, 40, 50, 100
    gold_T = torch.arange(num_types).repeat(2)
    alt_T = (gold_T + torch.arange(num_pairs) // num_types + 1) % num_types
    shape = replace(SMALL, num_systems=num_systems, num_inputs=num_inputs)
    shape = replace(shape, num_forget_types=num_types, num_forget_pairs=num_pairs)
    collected = [
        KeyMoments.zeros(num_inputs, 64).update_(torch.ones(num_pairs, num_inputs), gold_T, alt_T)
        for _ in range(num_systems)
    ]
    taken = sum(nbytes(moments) for moments in collected)
    phases = forecast(shape).phases
    assert phases["collecting"]["moments"] + phases["collecting"]["sums by pair"] == taken
    retain = KeyMoments.zeros(num_inputs, 64, keeps_sums=False)
    # A second gram of the retain side, while the moments of several retain sets are added.
    of_a_system = nbytes(collected[0]) + 2 * nbytes(retain)
    solving = phases["solving"]
    assert solving["moments of a system"] + solving["sums by pair"] == of_a_system


def test_updates_and_the_weights_they_replace_take_no_more_than_forecast() -> None:
    model = tiny_model("llama")
    sites = find_sites(model)[:2]
    edit = Edit({site: LowRank(torch.ones(16, 24).double()) for site in sites})
    shape = replace(SMALL, num_systems=2, num_inputs=24, num_outputs=16)
    updates = sum(update.right_KN.nbytes for update in edit.updates.values())
    originals = sum(site.weight_MN(model).nbytes for site in sites)
    with edited(model, edit) as roundings:
        assert sum(rounding.num_weights for rounding in roundings) * FLOAT32 == originals
    phases = forecast(shape).phases
    assert phases["calibrating"]["updates and originals"] == updates + originals
    assert phases["solving"]["updates"] == updates


def test_one_joint_system_takes_more_than_its_sites_one_by_one() -> None:
    joint = replace(SMALL, num_systems=1, num_inputs=6 * SMALL.num_inputs)
    grams = [forecast(shape).phases["solving"]["factor"] / FLOAT64 for shape in (SMALL, joint)]
    assert grams[1] == 36 * grams[0]
    assert (
        forecast(joint).phases["solving"]["updates"]
        == (forecast(SMALL).phases["solving"]["updates"])
    )


@pytest.mark.parametrize(
    ("size", "value", "term"),
    [
        ("num_inputs", 60_000, "moments while collecting"),
        ("model_bytes", 900_000_000_000, "model while"),
        ("reference_bytes", 900_000_000_000, "reference while"),
        ("batch_tokens", 90_000_000, "activations while"),
        ("num_layers", 90_000, "layer outputs while selecting"),
        ("probe_tokens", 900_000_000, "probe while calibrating"),
        ("vocab_size", 9_000_000_000, "logits while"),
    ],
)
def test_the_largest_term_is_named_with_its_phase_and_size(
    size: str, value: int, term: str
) -> None:
    found = forecast(replace(SMALL, **{size: value}))
    terms = found.phases[found.peak_phase]
    assert found.largest_term.startswith(term)
    assert found.largest_term.endswith(f"({max(terms.values()) / 1e9:.1f} GB)")
    assert found.peak_bytes == max(sum(phase.values()) for phase in found.phases.values())


def test_every_phase_holds_the_libraries_and_the_model() -> None:
    for terms in forecast(SMALL).phases.values():
        assert terms["runtime"] == RUNTIME_BYTES
        assert terms["model"] == SMALL.model_bytes
