"""What is said of the influence of a request on the edit.  `grom.auditor` measures it.

Effects are direct: the change of the gold token's logit through the final norm's gain alone, in
nats, as the strength is counted (`grom.calibrate.direct_drop`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from grom.target import LowRank

WHOLE = "all"
"""Site name of all sites together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Influence:
    """What one request does to the edit at one site, or at all sites."""

    request: str
    site: str
    """`all` for all sites together."""
    num_tokens: int
    """t_e."""
    num_suppressed: int
    """Those with alpha > 0."""
    leverage: float
    """Largest eigenvalue of w_f/s H of the system, 0 to 1: the share of a direction in key space
    that this request alone decides.  A downdate keeps the digits of 1 - leverage."""
    method: str
    """`downdate`, or `solved again` where a downdate would lose digits or cost more."""
    update_norm: float
    """|P| at the strength of the edit."""
    frozen: float
    """|P - P_-e| / |P|, with s, mu and alpha frozen."""
    refit: float | None = None
    """|P - P'| / |P|, P' solved without the request, s, mu and alpha anew; None: not computed."""
    own_effect_nats: float
    """Drop of the request's own gold logits that is due to it, mean over its suppressed positions;
    NaN without any, and for corruption, which suppresses no token."""
    others_effect_nats: float
    """The same of the other requests' positions: what it forgets for them."""
    retain_effect: float | None
    """Mean over the retain tokens of |(P - P_-e) k|^2; None: sites not solved together."""
    part_norm: float
    """|P_e| / |P|."""
    share: float
    """<P_e, P> / |P|^2: the shares of all requests add up to 1."""
    exact: bool = True
    """False at the sites of a sequential edit after the first: they were solved from other keys."""


@dataclass(frozen=True, slots=True)
class TokenWeight:
    """One of the tokens that a request suppresses most."""

    request: str
    rank: int
    """From 1, by alpha times count."""
    token: int | None
    """Its id, which tells what the request says; None where it is not to be kept."""
    count: int
    """How often the request has it."""
    alpha: float


@dataclass(frozen=True, slots=True)
class RetainChange:
    """What leaving out some retain keys would change, everything else frozen."""

    name: str
    num_tokens: int
    leverage: float
    change: LowRank
    """P - P_-g, at the strength of the edit; the outputs that `grom.changes` keeps."""
    norms: tuple[float, ...]
    """|P - P_-g| / |P| at each site, then of all sites."""


@dataclass(frozen=True, slots=True)
class Audited:
    """All that is known of one request in one system."""

    sites: tuple[Influence, ...]
    whole: Influence
    """Of all sites of the system."""
    tokens: tuple[TokenWeight, ...]
    growth_nats: dict[str, float] = field(default_factory=dict)
    """Retain group -> how much more this request's own gold logits would drop without it."""


def combined(sites: Sequence[Influence]) -> Influence:
    """One request's influence on all sites that were solved one by one."""
    first, norms = sites[0], [site.update_norm for site in sites]
    norm = math.hypot(*norms)

    def root(values: Sequence[float]) -> float:
        scaled = (value * own for value, own in zip(values, norms, strict=True))
        return math.hypot(*scaled) / norm if norm else 0.0

    refits = [site.refit for site in sites if site.refit is not None]
    shares = [site.share * own**2 for site, own in zip(sites, norms, strict=True)]
    return replace(
        first,
        site=WHOLE,
        leverage=max(site.leverage for site in sites),
        update_norm=norm,
        frozen=root([site.frozen for site in sites]),
        refit=root(refits) if len(refits) == len(sites) else None,
        own_effect_nats=math.fsum(site.own_effect_nats for site in sites),
        others_effect_nats=math.fsum(site.others_effect_nats for site in sites),
        retain_effect=None,
        part_norm=root([site.part_norm for site in sites]),
        share=math.fsum(shares) / norm**2 if norm else 0.0,
        exact=all(site.exact for site in sites),
    )
