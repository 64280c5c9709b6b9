"""Strength has a unit: the drop is what the formula says, and running the band is enough."""

from __future__ import annotations

import math
from contextlib import ExitStack

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from grom.apply import Edit, edited
from grom.calibrate import (
    BandModel,
    Probe,
    Search,
    band_drop,
    direct_drop,
)
from grom.errors import NothingToForget
from grom.evaluate import mean_score, score_examples
from grom.sites import final_norm, find_sites, unembedding_VD
from grom.target import LowRank
from tests.reference import (
    MODELS,
    VOCAB,
    Keys,
    in_batches,
    random_keys,
    random_matrix,
    random_rendered,
    tiny_model,
)

every_model = pytest.mark.parametrize(("family", "tied"), MODELS)
seeds = st.integers(0, 10_000)
V, M, N = 8, 6, 5
RMS = 1.7
ALPHA_V = torch.tensor([0, 0.2, 0, 1, 0.5, 0, 1, 0.1], dtype=torch.float64)
STREAM = in_batches(random_rendered(seed=3, num_examples=6))


def update_of(form: str, seed: int, num_outputs: int = M) -> LowRank:
    """An update as factors, whole, or as three rows; the same seed gives the same one."""
    if form == "factors":
        return LowRank(random_matrix(seed, 2, N), left_MK=random_matrix(seed + 1, num_outputs, 2))
    if form == "whole":
        return LowRank(random_matrix(seed, num_outputs, N))
    rows_K = torch.tensor([6, 0, 3])
    return LowRank(random_matrix(seed, 3, N), rows_K=rows_K, num_outputs=num_outputs)


def drop_of(update: LowRank, keys: Keys, scale: float = 1.0) -> float:
    """The code under test, at an MLP site or, for an update with V outputs, at the head."""
    head = update.dense().shape[0] == V
    unembedding_VM, gain_M = random_matrix(0, V, M), random_matrix(1, 1, M)[0]
    moments = keys.moments()
    return direct_drop(
        update.scaled(scale), moments, ALPHA_V, unembedding_VM, gain_M, RMS, head=head
    )


def drop_by_hand(update: LowRank, keys: Keys) -> float:
    """The drop of each suppressed position's own logit, one position at a time."""
    unembedding_VM, gain_M = random_matrix(0, V, M), random_matrix(1, 1, M)[0]
    drops = []
    for key_N, gold, _ in keys.rows:
        if ALPHA_V[gold] == 0:
            continue
        output = update.dense() @ key_N
        logit = output[gold] if len(output) == V else gain_M * output / RMS @ unembedding_VM[gold]
        drops.append(-float(logit))
    return sum(drops) / len(drops)


CASES = [("factors", M), ("whole", M), ("rows", V), ("whole", V)]


@pytest.mark.parametrize(("form", "outputs"), CASES)
@given(seed=seeds)
def test_the_direct_drop_is_the_mean_over_suppressed_positions(
    form: str, outputs: int, seed: int
) -> None:
    update, keys = update_of(form, seed, outputs), random_keys(seed, 20)
    assert drop_of(update, keys) == pytest.approx(drop_by_hand(update, keys), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("form", "outputs"), CASES)
def test_the_direct_drop_is_linear_in_the_update(form: str, outputs: int) -> None:
    update, keys = update_of(form, 0, outputs), random_keys(0, 20)
    assert drop_of(update, keys, scale=-3) == pytest.approx(-3 * drop_of(update, keys), rel=1e-9)


def test_without_a_suppressed_position_there_is_nothing_to_forget() -> None:
    keys = random_keys(0, 20)
    spared = Keys(keys.keys_TN, torch.full((20,), 2), keys.alt_T)
    with pytest.raises(NothingToForget, match=r"0 of 20 positions.*retain set"):
        drop_of(update_of("factors", 0), spared)


@every_model
def test_the_band_drop_is_read_through_the_final_norm(family: str, tied: bool) -> None:
    model, keys = tiny_model(family, tied=tied, dtype=torch.float64), random_keys(0, 20, 24, VOCAB)
    alpha_V, norm = torch.ones(VOCAB).double(), final_norm(model)
    factors = LowRank(random_matrix(1, 2, 24), left_MK=random_matrix(2, 16, 2))
    updates = {"whole": LowRank(random_matrix(0, 16, 24)), "factors": factors}
    drops = band_drop(
        updates, dict.fromkeys(updates, keys.moments(vocab_size=VOCAB)), alpha_V, model, RMS
    )
    for name, update in updates.items():
        moved_TM = keys.keys_TN @ update.dense().mT
        # The norm is linear but for the size it divides by, and its bias: add it and its negative.
        size_T1 = moved_TM.square().mean(1, keepdim=True).sqrt()
        if isinstance(norm, nn.LayerNorm):
            size_T1 = moved_TM.std(1, correction=0, keepdim=True)
        read_TM = (norm(1e3 * moved_TM) - norm(-1e3 * moved_TM)) / 2 * size_T1 / RMS
        logit_T = (read_TM * unembedding_VD(model)[keys.gold_T]).sum(1)
        # Norms compute in float32.
        assert drops[name] == pytest.approx(-float(logit_T.mean()), rel=1e-4, abs=1e-4)


def test_the_band_drop_at_the_head_is_the_logit_itself() -> None:
    model, keys = tiny_model("gpt2", tied=True), random_keys(0, 20, 16, VOCAB)
    alpha_V, rows_K = torch.ones(VOCAB).double(), torch.tensor([5, 2, 40])
    update = LowRank(random_matrix(0, 3, 16), rows_K=rows_K, num_outputs=VOCAB)
    gold_T = rows_K[keys.gold_T % 3]
    moments = Keys(keys.keys_TN, gold_T, gold_T).moments(vocab_size=VOCAB)
    logit_T = (update.dense()[gold_T] * keys.keys_TN).sum(1)
    drops = band_drop({"head": update}, {"head": moments}, alpha_V, model, RMS)
    assert drops["head"] == pytest.approx(-float(logit_T.mean()), rel=1e-9)


def edit_from(model: nn.Module, first: int) -> Edit:
    """Updates of the MLPs from a layer on; from 3 on of the head alone."""
    sites = find_sites(model)
    if first == 3:
        rows_K = torch.tensor([7, 30])
        return Edit({sites[3]: LowRank(random_matrix(0, 2, 16), rows_K=rows_K, num_outputs=VOCAB)})
    return Edit({site: LowRank(0.1 * random_matrix(0, 16, 24)) for site in sites[first:3]})


@every_model
@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_running_the_band_alone_gives_the_probability_of_a_full_run(
    family: str, tied: bool, first: int
) -> None:
    model = tiny_model(family, tied=tied)
    band = BandModel(model, None if first == 3 else first)
    probe = band.probe(STREAM)
    before = mean_score("all", score_examples(model, STREAM)).probability
    assert band.probability(probe) == pytest.approx(before, rel=1e-6)
    with edited(model, edit_from(model, first)):
        after = mean_score("all", score_examples(model, STREAM)).probability
        assert band.probability(probe) == pytest.approx(after, rel=1e-6)
    assert abs(after / before - 1) > 1e-3
    assert band.probability(probe) == pytest.approx(before, rel=1e-6)


def test_the_probability_of_an_empty_probe_is_not_a_number() -> None:
    assert math.isnan(BandModel(tiny_model("llama"), 1).probability(Probe()))


@pytest.mark.parametrize("nats", [0.0, 3.0])
def test_a_point_of_the_search_is_the_model_with_that_many_nats_of_the_edit(nats: float) -> None:
    model = tiny_model("llama")
    edit, band = edit_from(model, 1), BandModel(model, 1)
    search = Search(model, edit, 4.0, band.probe(STREAM[:1]), band.probe(STREAM[1:]), band)
    point = search.point(nats)
    with ExitStack() as stack:
        if nats:
            stack.enter_context(edited(model, edit.scaled(nats / 4)))
        forget, held_out = (
            mean_score("", score_examples(model, part)) for part in (STREAM[:1], STREAM[1:])
        )
    assert (point.nats, point.beta) == (nats, nats / 4)
    assert point.forget_probability == pytest.approx(forget.probability, rel=1e-6)
    assert point.held_out_probability == pytest.approx(held_out.probability, rel=1e-6)
