"""From stored statistics and keys to the rows of an audit: systems are solved again.

Each system is solved anew, once for the influence of all requests, and once more if some are to be
refitted: only one system is in memory at a time.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from pathlib import Path

from grom.auditor import Auditor
from grom.batches import Batch, batches
from grom.collect import JOINT, ForgetPlan, each_batch
from grom.config import CollectConfig, RidgeConfig, TargetConfig
from grom.examples import Rendered
from grom.influence import (
    WHOLE,
    Audited,
    Influence,
    RetainChange,
    TokenWeight,
    combined,
)
from grom.sites import Site, unembedding_VD
from grom.target import LowRank
from grom.withdraw import System
from tasks.codecs import read_json
from tasks.collect import forget_plan, read_moments, read_rms
from tasks.models import OpenModel, pad_id
from tasks.place import CollectRef, CountRef, DataRef, ModelRef, Place, SitesRef
from tasks.progress import tracked
from tasks.request_keys import KeySource, KeyWriter, StoredKeys, has_keys
from tasks.select import chosen_sites
from tasks.solver import redirect_token
from tasks.streams import batch_stream

GROUP_POSITIONS = 2048
"""Of a retain group at most so many positions are left out."""


@dataclass(frozen=True, slots=True)
class Protection:
    """What leaving out a retain group changes at a site, or at all sites of a system."""

    group: str
    site: str
    num_tokens: int
    leverage: float
    """Largest eigenvalue of w_r/r H of the system."""
    change: float
    """|P - P_-g| / |P|."""


@dataclass(frozen=True, slots=True)
class Growth:
    """What leaving out a retain group adds to the effect on a request's own gold logits."""

    group: str
    request: str
    nats: float
    """Over all sites; NaN for a request without suppressed positions."""


@dataclass(slots=True)
class Findings:
    """What an audit found."""

    rows: dict[str, list[Influence]] = field(default_factory=dict)
    """Request -> its influence at each site, then of all sites."""
    tokens: dict[str, tuple[TokenWeight, ...]] = field(default_factory=dict)
    protections: list[Protection] = field(default_factory=list)
    growth: dict[tuple[str, str], float] = field(default_factory=dict)
    """(Retain group, request) -> nats over all sites."""

    def by_influence(self) -> list[str]:
        """The requests, the most influential one first."""
        return sorted(self.rows, key=lambda request: (-self.rows[request][-1].frozen, request))

    def put_refits(self, request: str, refits: Sequence[float], joint: bool) -> None:
        """Put in what refitting gave at each site, and of all sites if they were one system."""
        *sites, whole = self.rows[request]
        sites = [replace(row, refit=found) for row, found in zip(sites, refits, strict=False)]
        whole = replace(whole, refit=refits[-1]) if joint else combined(sites)
        self.rows[request] = [*sites, whole]


@dataclass(frozen=True)
class Stage:
    """What the audit of every system needs."""

    opened: OpenModel
    retain: Sequence[CollectRef]
    forget: CollectRef
    sites: SitesRef
    ridge: RidgeConfig
    target: TargetConfig
    beta: float
    collect: CollectConfig
    place: Place

    @cached_property
    def systems(self) -> dict[str, tuple[Site, ...]]:
        """Name of the moments -> sites."""
        chosen = chosen_sites(self.opened.model, self.sites)
        return {JOINT: chosen} if self.sites.joint else {site.name: (site,) for site in chosen}

    @cached_property
    def rms(self) -> float:
        """Of the final residual."""
        return read_rms(self.forget, self.place)

    @property
    def num_positions(self) -> int:
        """s."""
        name = next(iter(self.systems))
        return int(read_json(self.place.fetch(self.forget.artifact) / f"{name}.json")["num_tokens"])

    def auditors(self) -> Iterator[tuple[str, Auditor]]:
        """Each system solved, one at a time."""
        model, rendering = self.opened.model, self.opened.rendering
        device = unembedding_VD(model).device
        for name, members in self.systems.items():
            kept = (read_moments(ref, name, self.place) for ref in self.retain)
            system = System.of(
                model,
                members,
                reduce(operator.add, kept).to(device),
                read_moments(self.forget, name, self.place).to(device),
                self.ridge,
                self.target,
                () if self.target.suppress_special else rendering.special_ids(),
                redirect_token(self.opened, self.target),
            )
            yield name, Auditor(system, self.rms, self.beta)

    def findings(self, keys: KeySource, retained: StoredKeys | None) -> Findings:
        """The influence of every request, and of the retain groups."""
        found = Findings()
        audited: dict[str, list[Audited]] = {request: [] for request in keys.requests}
        for name, auditor in self.auditors():
            changes = self._retain_changes(name, auditor, retained, found)
            requests = (keys.of(request, name) for request in keys.requests)
            for one in auditor.influences(requests, changes):
                audited[one.whole.request].append(one)
        for request, parts in audited.items():
            sites = [row for part in parts for row in part.sites]
            whole = parts[0].whole if len(parts) == 1 else combined(sites)
            found.rows[request] = [*sites, whole]
            found.tokens[request] = parts[0].tokens
            for part in parts:
                for group, nats in part.growth_nats.items():
                    pair = group, request
                    found.growth[pair] = found.growth.get(pair, 0.0) + nats
        return found

    def refit(self, found: Findings, keys: KeySource, requests: Collection[str]) -> None:
        """Solve without each of some requests, and put in what that gives."""
        refits: dict[str, list[float]] = {request: [] for request in requests}
        for name, auditor in self.auditors() if requests else ():
            for request in requests:
                solved = auditor.refits(keys.of(request, name))
                refits[request] += solved if self.sites.joint else solved[:1]
        for request, values in refits.items():
            found.put_refits(request, values, self.sites.joint or len(self.systems) == 1)

    def updates_without(
        self, keys: KeySource, requests: Collection[str]
    ) -> dict[str, dict[Site, LowRank]]:
        """Request -> the edit at its strength without it, s, mu and alpha frozen."""
        updates: dict[str, dict[Site, LowRank]] = {request: {} for request in requests}
        for name, auditor in self.auditors() if requests else ():
            for request in requests:
                parts = auditor.update_without(keys.of(request, name))
                updates[request] |= zip(self.systems[name], parts, strict=True)
        return updates

    def key_source(
        self,
        fresh: Sequence[CollectRef],
        earlier: Sequence[CollectRef],
        forget: DataRef,
        counted: CountRef,
        scratch: Path,
        reference: ModelRef | None,
    ) -> KeySource:
        """Keys that were kept; those of the fresh batches from their text if they were not."""
        folders = {ref: self.place.fetch(ref.artifact) for ref in (*fresh, *earlier)}
        kept = [folders[ref] for ref in earlier if has_keys(folders[ref])]
        if all(has_keys(folders[ref]) for ref in fresh):
            kept += [folders[ref] for ref in fresh]
        else:
            plan = forget_plan(self.opened, self.target, self.collect, reference)
            stream = batch_stream(self.opened.rendering, forget, self.collect, alone=True)
            stream = tracked(stream, "audit forget", counted.num_forget)
            self._record(stream, plan, scratch)
            kept.append(scratch)
        return KeySource([StoredKeys(folder) for folder in kept])

    def retain_keys(self, retain: DataRef, size: int, scratch: Path) -> StoredKeys | None:
        """Keys of some retain groups, spread evenly over the set."""
        if not size:
            return None
        names = list(dict.fromkeys(example.group for example in retain.examples("seen")))
        size = min(size, len(names))
        wanted = {names[number * len(names) // size] for number in range(size)}
        rendering, left = self.opened.rendering, dict.fromkeys(wanted, GROUP_POSITIONS)

        def chosen() -> Iterator[Rendered]:
            rows = (one for one in retain.examples("seen") if one.group in wanted)
            for rendered in rendering.render_all(rows):
                left[rendered.group] -= rendered.num_answer_tokens
                if left[rendered.group] >= 0:
                    yield rendered

        stream = batches(chosen(), batch_tokens=1, window_examples=1, pad_id=pad_id(rendering))
        self._record(stream, None, scratch)
        return StoredKeys(scratch)

    def _record(self, stream: Iterable[Batch], plan: ForgetPlan | None, folder: Path) -> None:
        model = self.opened.model
        members = chosen_sites(model, self.sites)
        with KeyWriter(folder) as write:
            for found in each_batch(model, members, stream, plan, joint=self.sites.joint):
                write(found)

    def _retain_changes(
        self, name: str, auditor: Auditor, retained: StoredKeys | None, found: Findings
    ) -> list[RetainChange]:
        changes = []
        for group in retained.groups if retained else ():
            assert retained is not None
            keys = retained.request(group, name)
            assert keys is not None
            change = auditor.without_retain(keys)
            changes.append(change)
            sites = [*auditor.system.sites, WHOLE] if self.sites.joint else auditor.system.sites
            found.protections += [
                Protection(group, site, change.num_tokens, change.leverage, norm)
                for site, norm in zip(sites, change.norms, strict=False)
            ]
        return changes
