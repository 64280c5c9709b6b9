"""What the solve would have given without a request: all of it anew, with nothing frozen.

A request whose keys were kept is subtracted from the moments of the whole (`grom.merge.without`),
and the edit follows from what is left: s, mu and alpha become those of a run that never had it.

How exact.  One subtraction after the other, each from what the last one left, against adding up the
rest; 400 requests of TOFU forget10 on SmolLM2-135M, layer 29, relative error of P:

    subtracted                    200     380     395     398     399
    share of the positions left   .51     .05     .012    3e-3    1e-3
    error                         5e-15   6e-15   1e-14   3e-14   7e-14

So how many times one subtracts does not matter, only the share that is left (`grom.merge`, which
refuses below 1e-3): there the moments of the remaining requests are to be added up instead, from
their keys (`moments_of_keys`) or batch by batch (`merged`).

Shapes: T tokens, N inputs of W, M outputs of W, K rank or edited rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from grom.collect import Blocks, Collected, RequestKeys
from grom.config import RidgeConfig, TargetConfig
from grom.moments import KeyMoments
from grom.sites import Site, final_gain_D, norm_centres, unembedding_VD
from grom.solve import RidgeFactor, factorise, solve_factored
from grom.target import LowRank, specificity, target_cross


def moments_of_keys(
    found: Iterable[RequestKeys], sizes: Mapping[str, int], vocab_size: int
) -> Collected:
    """The statistics of one request from its keys.

    Equal to the bit to what collecting the request's examples alone gives, where the keys come
    one example at a time in the order in which they were collected.

    Args:
        found: the request's keys; nothing gives moments of nothing.
        sizes: name of the moments -> inputs.
        vocab_size: of the model.
    """
    moments = {name: KeyMoments.zeros(size, vocab_size) for name, size in sizes.items()}
    collected = Collected(moments)
    blocks = Blocks(collected)
    for part in found:
        blocks.add(part)
        collected.examples += part.examples
    blocks.flush()
    return collected


@dataclass(frozen=True, slots=True)
class Solved:
    """A solved system."""

    alpha_V: Tensor
    factor: RidgeFactor
    update: LowRank
    """P at unit strength, of all sites side by side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One ridge system: a site, or several whose keys stand side by side."""

    sites: tuple[str, ...]
    widths: tuple[int, ...]
    """Inputs of each."""
    head: bool
    retain: KeyMoments
    forget: KeyMoments
    ridge: RidgeConfig
    target: TargetConfig
    unembedding_VM: Tensor
    gain_M: Tensor
    """Of the final norm."""
    centred: bool
    """Whether the final norm takes the mean out first."""
    special: Collection[int] = ()
    """Tokens that are never suppressed."""
    redirect_token: int | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        sites: Collection[Site],
        retain: KeyMoments,
        forget: KeyMoments,
        ridge: RidgeConfig,
        target: TargetConfig,
        special: Collection[int] = (),
        redirect_token: int | None = None,
    ) -> System:
        """The system of some sites of a model, from their moments."""
        return cls(
            sites=tuple(site.name for site in sites),
            widths=tuple(site.weight_MN(model).shape[1] for site in sites),
            head=any(site.kind == "head" for site in sites),
            retain=retain,
            forget=forget,
            ridge=ridge,
            target=target,
            unembedding_VM=unembedding_VD(model),
            gain_M=final_gain_D(model),
            centred=norm_centres(model),
            special=special,
            redirect_token=redirect_token,
        )

    @property
    def columns(self) -> list[slice]:
        """The columns of each site."""
        ends = torch.tensor(self.widths).cumsum(0).tolist()
        return [slice(end - width, end) for end, width in zip(ends, self.widths, strict=True)]

    def solved(self, forget: KeyMoments | None = None) -> Solved:
        """Alpha, factor and P of these forget moments; of all of them if none are given.

        Raises:
            EmptySet, NonFiniteKeys, NotPositiveDefinite: as `factorise`.
        """
        moved = self.forget if forget is None else forget
        alpha_V = specificity(moved.counts_V, self.retain.counts_V, self.special)
        name = " ... ".join(dict.fromkeys((self.sites[0], self.sites[-1])))
        factor = factorise(self.retain, moved, self.ridge, site=name, widths=self.widths)
        cross = self.cross(moved, alpha_V)
        return Solved(alpha_V, factor, solve_factored(cross, factor, self.ridge))

    def cross(self, forget: KeyMoments, alpha_V: Tensor) -> LowRank:
        """D X_fT of some forget moments at unit strength."""
        return target_cross(
            forget,
            alpha_V,
            self.unembedding_VM,
            self.target,
            head=self.head,
            redirect_token=self.redirect_token,
        )

    def matrix(self, factor: RidgeFactor, without_NN: Tensor) -> Tensor:
        """A without some of its forget keys, s and mu as in the factor.

        Args:
            factor: of the whole system.
            without_NN: gram of the keys that are left out.
        """
        A_NN = (self.forget.gram_NN - without_NN) * (self.ridge.w_forget / factor.num_forget)
        if factor.num_retain:
            A_NN.add_(self.retain.gram_NN, alpha=self.ridge.w_retain / factor.num_retain)
        for mu, part in zip(factor.mus, self.columns, strict=True):
            A_NN.diagonal()[part].add_(mu)
        return A_NN

    def norms_without(self, solved: Solved, request: KeyMoments) -> list[float]:
        """|P - P'| at each site, with P' solved without a request: s, mu and alpha of what is left.

        Without any request left P' is zero.

        Args:
            solved: P.
            request: the request's own moments.
        """
        rest = self.forget - request
        if rest.num_tokens == 0:
            change_KN = solved.update.dense()
        else:
            change_KN = _difference(solved.update, self.solved(rest).update)
        return [float(torch.linalg.matrix_norm(change_KN[:, part])) for part in self.columns]


def _difference(one: LowRank, other: LowRank) -> Tensor:
    """one - other, without the rows that neither has.  Not from inner products of the factors:
    the square of a small difference keeps no digits beside that of P."""
    if one.rows_K is None or other.rows_K is None:
        return one.dense() - other.dense()
    rows_U, places = torch.unique(torch.cat([one.rows_K, other.rows_K]), return_inverse=True)
    change_UN = one.right_KN.new_zeros(len(rows_U), one.right_KN.shape[1])
    return change_UN.index_add_(0, places, torch.cat([one.right_KN, -other.right_KN]))
