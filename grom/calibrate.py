"""How hard to push: strength in nats of direct logit drop, given or searched.

Shapes: N inputs of W, M outputs of W = hidden size, V vocabulary, K distinct tokens, B examples,
L positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from grom.apply import Edit, edited
from grom.batches import Batch
from grom.config import AutoStrength, StrengthConfig
from grom.errors import NothingToForget
from grom.evaluate import mean_score, score_hidden
from grom.forward import recorded_inputs, run, starting_at
from grom.moments import KeyMoments
from grom.sites import decoder_layers, final_gain_D, norm_centres, unembedding_VD
from grom.sums import compact
from grom.target import LowRank

DEFAULT_FORGET_PROBABILITY = 0.2
FIRST_NATS = 4.0
UNIT_NATS = 1.0
"""Below it the tolerance of the search is absolute: a bracket that starts at 0 has to close."""


def direct_drop(
    update: LowRank,
    forget: KeyMoments,
    alpha_V: Tensor,
    unembedding_VM: Tensor,
    gain_M: Tensor,
    rms: float,
    *,
    head: bool,
) -> float:
    """Mean drop of the suppressed tokens' logits that an update causes directly, in nats.

        drop(P) = - mean over positions with alpha > 0 of (gain * W_U[g_j]) . P k_j / rms

    from the sums by token alone.  At the head the output is the logit itself: -(P k_j)[g_j].
    Linear in P.  Positive when the tokens are pushed down.

    Raises:
        NothingToForget: no position has alpha > 0.
    """
    sums, counts_V = compact(forget.sums), forget.counts_V
    ids_K = sums.ids_K
    active = alpha_V.to(ids_K.device)[ids_K] > 0
    ids_K, sums_KN = ids_K[active], sums.rows_KN[active]
    num_suppressed = int(counts_V[ids_K].sum())
    if num_suppressed == 0:
        raise NothingToForget(forget.num_tokens)
    if head:
        return -_sum_over_rows(update, ids_K, sums_KN) / num_suppressed
    reader_KM = unembedding_VM[ids_K.to(unembedding_VM.device)].to(sums_KN) * gain_M.to(sums_KN)
    if update.left_MK is None:
        moved_KM = sums_KN @ update.right_KN.mT
    else:
        moved_KM = (sums_KN @ update.right_KN.mT) @ update.left_MK.mT
    return -float((reader_KM * moved_KM).sum()) / num_suppressed / rms


def _sum_over_rows(update: LowRank, ids_K: Tensor, sums_KN: Tensor) -> float:
    """sum_v P[v] . sums_v, without forming P."""
    if update.rows_K is None:
        return float((update.dense()[ids_K] * sums_KN).sum())
    assert update.num_outputs is not None
    slot_V = torch.full((update.num_outputs,), -1, device=ids_K.device)
    slot_V[ids_K] = torch.arange(len(ids_K), device=ids_K.device)
    slots = slot_V[update.rows_K]
    return float((update.right_KN[slots >= 0] * sums_KN[slots[slots >= 0]]).sum())


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """What one strength does to the probe."""

    nats: float
    beta: float
    forget_probability: float
    held_out_probability: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """The strength that was chosen, and why."""

    beta: float
    nats: float
    stopped_by: str
    """given, forget level, utility floor, or search limit."""
    target_probability: float | None = None
    floor_probability: float | None = None
    before: CurvePoint | None = None
    curve: tuple[CurvePoint, ...] = ()
    """Every strength that was tried, by nats."""


@dataclass(slots=True)
class Probe:
    """A few examples of one set with their hidden states at the first edited layer."""

    batches: list[Batch] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)


class BandModel:
    """A model of which only the layers from the first edited one on are run again."""

    def __init__(self, model: nn.Module, first_layer: int | None) -> None:
        """first_layer: None for an edit of the head alone, where only the head is run again."""
        self.model, self.first_layer = model, first_layer

    def probe(self, stream: Iterable[Batch]) -> Probe:
        """Run the unedited model up to the band and keep what flows into it."""
        probe, device = Probe(), unembedding_VD(self.model).device
        for cpu_batch in stream:
            batch = cpu_batch.to(device)
            if self.first_layer is None:
                hidden_BLD = run(self.model, batch)
                assert hidden_BLD is not None
            else:
                layer = decoder_layers(self.model)[self.first_layer]
                with recorded_inputs([layer], stop=True) as inputs:
                    run(self.model, batch)
                hidden_BLD = inputs[layer]
            probe.batches.append(batch)
            probe.hidden.append(hidden_BLD)
        return probe

    def probability(self, probe: Probe) -> float:
        """Mean answer probability on a probe, with the model as it is now; NaN if it is empty."""
        hidden = iter(probe.hidden)
        scores = score_hidden(
            self.model, probe.batches, lambda batch: self._finish(batch, next(hidden))
        )
        return mean_score("probe", scores).probability

    def _finish(self, batch: Batch, hidden_BLD: Tensor) -> Tensor:
        if self.first_layer is None:
            return hidden_BLD[batch.predicts_BL]
        with starting_at(self.model, self.first_layer, hidden_BLD):
            final_BLD = run(self.model, batch)
        assert final_BLD is not None
        return final_BLD[batch.predicts_BL]


@dataclass(frozen=True, slots=True)
class Search:
    """Everything a search for the strength needs."""

    model: nn.Module
    edit: Edit
    """At unit strength."""
    nats_per_beta: float
    forget: Probe
    held_out: Probe
    band: BandModel

    def point(self, nats: float) -> CurvePoint:
        """Measure one strength; 0 is the unedited model."""
        beta = nats / self.nats_per_beta
        if nats == 0:
            return self._measure(nats, beta)
        with edited(self.model, self.edit.scaled(beta)):
            return self._measure(nats, beta)

    def _measure(self, nats: float, beta: float) -> CurvePoint:
        probes = (self.forget, self.held_out)
        return CurvePoint(nats, beta, *(self.band.probability(probe) for probe in probes))


def search_strength(
    search: Search, auto: AutoStrength, reference_probability: float | None
) -> Calibration:
    """Least strength that forgets enough, or the most that the utility floor allows.

    Doubles the strength until the forget probability reaches its level or the held-out retain
    probability falls below its floor, then bisects between the last two.  If forgetting stopped
    it, the stronger end is taken (the level is reached); if the floor did, the weaker one (the
    floor is kept).
    """
    before = search.point(0.0)
    target = _first_given(auto.forget_probability, reference_probability)
    floor = None
    if auto.utility_floor is not None and not math.isnan(before.held_out_probability):
        floor = auto.utility_floor * before.held_out_probability
    curve: dict[float, CurvePoint] = {0.0: before}

    def stop(nats: float) -> str | None:
        point = curve[nats] = search.point(nats)
        if floor is not None and not point.held_out_probability >= floor:  # NaN is below it
            return "utility floor"
        return "forget level" if point.forget_probability <= target else None

    low, high = 0.0, min(FIRST_NATS, auto.max_nats)
    while (reason := stop(high)) is None and high < auto.max_nats:
        low, high = high, min(2 * high, auto.max_nats)
    while reason is not None and high - low > auto.tolerance * max(high, UNIT_NATS):
        middle = (low + high) / 2
        if (found := stop(middle)) is None:
            low = middle
        else:
            high, reason = middle, found
    chosen = curve[low if reason == "utility floor" else high]
    return Calibration(
        beta=chosen.beta,
        nats=chosen.nats,
        stopped_by=reason or "search limit",
        target_probability=target,
        floor_probability=floor,
        before=before,
        curve=tuple(curve[nats] for nats in sorted(curve)),
    )


def given_strength(strength: StrengthConfig, nats_per_beta: float) -> Calibration:
    """The strength that the configuration states."""
    if strength.beta is not None:
        return Calibration(strength.beta, strength.beta * nats_per_beta, "given")
    assert strength.nats is not None
    return Calibration(strength.nats / nats_per_beta, strength.nats, "given")


def band_drop(
    updates: Mapping[str, LowRank],
    forget: Mapping[str, KeyMoments],
    alpha_V: Tensor,
    model: nn.Module,
    rms: float,
) -> dict[str, float]:
    """Direct drop of each site's update, in nats; the band's is their sum.

    Where the final norm is a LayerNorm, what P adds counts without its mean, which the norm takes
    out again.
    """
    gain_M, unembedding_VM = final_gain_D(model), unembedding_VD(model)
    drops = {}
    for name, update in updates.items():
        head = update.rows_K is not None and update.num_outputs == len(unembedding_VM)
        counted = _centred(update) if norm_centres(model) and not head else update
        drops[name] = direct_drop(
            counted, forget[name], alpha_V, unembedding_VM, gain_M, rms, head=head
        )
    return drops


def _centred(update: LowRank) -> LowRank:
    """The update without the mean over its outputs."""
    if update.left_MK is None:
        return replace(update, right_KN=update.right_KN - update.right_KN.mean(0))
    return replace(update, left_MK=update.left_MK - update.left_MK.mean(0))


def _first_given(*values: float | None) -> float:
    return next((value for value in values if value is not None), DEFAULT_FORGET_PROBABILITY)
