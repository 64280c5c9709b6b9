"""The audit of a run says what runs that never had a request would have given."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from grom.apply import edited
from grom.config import AuditConfig, CollectConfig, DataConfig, HoldOutConfig, SelectConfig
from grom.evaluate import score_examples
from grom.influence import WHOLE, Influence, TokenWeight
from tasks.audit import AuditRef, Measured, Moments, audit
from tasks.codecs import load_edit, read_json, read_table
from tasks.collect import merge_forget
from tasks.influence import Growth, Protection
from tasks.influence_tables import influence_tables, read_influence
from tasks.models import open_model
from tasks.request_keys import has_keys
from tasks.solve import solve
from tasks.streams import batch_stream
from tests.stages import Stages, stages
from tests.tiny import forget_rows, residue, retain_rows, write_rows

EXACT = 1e-9
"""Relative; float32 models: the keys are the same to the bit, and all sums are in float64."""
SELECTS = {
    "joint": SelectConfig(layers=(1, 2)),
    "one by one": SelectConfig(layers=(0, 2), joint=False),
    "head": SelectConfig(site="head"),
}
ROWS = [row | {"request_id": f"person-{number // 2}"} for number, row in enumerate(forget_rows(8))]
ALL = AuditConfig(refit="all")
KEEP = CollectConfig(keep_request_keys=True)


@pytest.fixture
def base(tmp_path: Path) -> Stages:
    return on(stages(tmp_path), ROWS)


def on(run: Stages, rows: list[Any], **changes: Any) -> Stages:
    """The same run on these rows."""
    names = "-".join(dict.fromkeys(row["request_id"] for row in rows))
    path = write_rows(run.work.parent / f"{names}.jsonl", rows)
    return run.but(forget=DataConfig(uri=str(path)), **changes)


def audited(run: Stages, config: AuditConfig = ALL, moments: Moments | None = None) -> AuditRef:
    moments = moments or Moments(retain=(run.kept,), forget=run.moved, fresh=(run.moved,))
    return audit.fn(
        run.model, moments, run.edit, run.forget, run.retain, run.sites, run.counted,
        run.config.ridge, run.config.target, run.calibrated, run.config.collect, config, run.place,
    )  # fmt: skip


def rows_of(run: Stages, config: AuditConfig = ALL, **how: Any) -> list[Influence]:
    return read_influence(audited(run, config, **how), run.place)


def table(run: Stages, found: AuditRef, name: str, kind: type[Any]) -> list[Any]:
    return read_table(run.place.fetch(found.artifact) / f"{name}.parquet", kind)


def updates(run: Stages) -> dict[str, Tensor]:
    edit = load_edit(run.place.fetch(run.frozen_edit.artifact))
    return {site.name: update.dense() for site, update in edit.updates.items()}


@pytest.mark.parametrize("select", SELECTS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_refit_is_what_a_run_without_the_request_gives(
    tmp_path: Path, family: str, select: str
) -> None:
    run = on(stages(tmp_path, family), ROWS, select=SELECTS[select])
    rows, whole = rows_of(run), updates(run)
    for request in dict.fromkeys(row.request for row in rows):
        left = on(run, [row for row in ROWS if row["request_id"] != request])
        changed = {name: whole[name] - other for name, other in updates(left).items()}
        for row in (row for row in rows if row.request == request):
            names = list(whole) if row.site == WHOLE else [row.site]
            change = math.hypot(*(float(changed[name].norm()) for name in names))
            norm = math.hypot(*(float(whole[name].norm()) for name in names))
            assert row.refit == pytest.approx(change / norm, rel=EXACT)
            assert row.update_norm == pytest.approx(norm * run.calibrated.beta, rel=EXACT)


@pytest.mark.parametrize("select", SELECTS)
def test_every_request_has_a_row_for_each_site_and_shares_add_up(base: Stages, select: str) -> None:
    run = base.but(select=SELECTS[select])
    found = audited(run, AuditConfig(refit="none"))
    rows = read_influence(found, run.place)
    assert (found.num_requests, found.covered, found.warnings) == (4, 1.0, ())
    assert "exact at every site" in found.exactness
    sites = [*updates(run), WHOLE]
    requests = list(dict.fromkeys(row["request_id"] for row in ROWS))
    pairs = {(row.request, row.site) for row in rows}
    assert pairs == {(request, site) for request in requests for site in sites}
    for site in sites:
        assert sum(row.share for row in rows if row.site == site) == pytest.approx(1, abs=EXACT)
    assert all(row.exact and row.refit is None and 0 < row.frozen < 1.5 for row in rows)
    assert all(
        (row.retain_effect is None) == (select == "one by one" and row.site == WHOLE)
        for row in rows
    )
    assert residue(run.work) == []


@pytest.mark.parametrize("select", ["joint", "one by one"])
def test_kept_keys_give_the_same_to_the_bit_without_the_text(base: Stages, select: str) -> None:
    from_text = rows_of(base.but(select=SELECTS[select]))
    kept = base.but(select=SELECTS[select], collect=KEEP)
    assert has_keys(kept.place.fetch(kept.moved.artifact))
    moments = Moments(retain=(kept.kept,), forget=kept.moved, fresh=(), earlier=(kept.moved,))
    assert rows_of(kept, moments=moments) == from_text


def test_keys_are_kept_only_where_that_is_asked_for(base: Stages) -> None:
    folder = base.place.fetch(base.moved.artifact)
    assert not has_keys(folder)
    assert not list(folder.glob("*keys*")) + list(folder.glob("positions*"))


def test_earlier_requests_are_audited_if_their_keys_were_kept(base: Stages) -> None:
    config = base.but(collect=KEEP)
    first, second = on(config, ROWS[:4]), on(config, ROWS[4:])
    merged = merge_forget.fn((first.moved, second.moved), base.place)
    moments = Moments(
        retain=(second.kept,), forget=merged, fresh=(second.moved,), earlier=(first.moved,)
    )
    second.__dict__["frozen_edit"] = solve.fn(
        second.model, (second.kept,), merged, second.sites, second.config.ridge,
        second.config.target, second.place,
    )  # fmt: skip
    found = audited(second, moments=moments)
    rows = read_influence(found, base.place)
    assert (found.num_requests, found.covered) == (4, 1.0)
    together = {(row.request, row.site): row for row in rows_of(config)}
    for row in rows:
        other = together[row.request, row.site]
        assert row.frozen == pytest.approx(other.frozen, rel=EXACT)
        assert row.refit == pytest.approx(other.refit, rel=EXACT)


def test_earlier_requests_without_keys_are_said_to_be_missing(base: Stages) -> None:
    first, second = on(base, ROWS[:4]), on(base, ROWS[4:])
    merged = merge_forget.fn((first.moved, second.moved), base.place)
    moments = Moments(
        retain=(second.kept,), forget=merged, fresh=(second.moved,), earlier=(first.moved,)
    )
    found = audited(second, moments=moments)
    assert found.num_requests == 2
    assert found.covered == pytest.approx(0.5)
    assert "forget positions belong to earlier requests" in found.warnings[0]


def test_keys_may_be_kept_from_one_batch_on(base: Stages) -> None:
    first, second = on(base, ROWS[:4]), on(base.but(collect=KEEP), ROWS[4:])
    merged = merge_forget.fn((first.moved, second.moved), base.place)
    facts = read_json(base.place.fetch(merged.artifact) / "collected.json")["facts"]
    assert len(facts["data"]) == 2


def test_a_sequential_edit_is_exact_at_its_first_site_only(base: Stages) -> None:
    run = base.but(
        collect=CollectConfig(order="sequential"), select=SelectConfig(layers=(1, 2), joint=False)
    )
    found = audited(run)
    assert "first edited site only, layer 1" in found.exactness
    assert found.exactness in found.warnings[0]
    rows = read_influence(found, run.place)
    exact = {row.site: row.exact for row in rows}
    assert list(exact.values()) == [True, False, False]
    assert list(exact) == [*updates(run), WHOLE]


def test_only_extremes_are_refitted_unless_all_are_asked_for(base: Stages) -> None:
    rows = rows_of(base, AuditConfig(top=1))
    wholes = sorted((row for row in rows if row.site == WHOLE), key=lambda row: -row.frozen)
    assert [row.refit is not None for row in wholes] == [True, False, False, True]
    full = {row.request: row.refit for row in rows_of(base) if row.site == WHOLE}
    for row in wholes:
        assert row.refit in (None, full[row.request])


def test_the_most_influential_requests_are_measured_with_and_without(base: Stages) -> None:
    found = audited(base, AuditConfig(refit="none", top=2, exact_log_probs=True))
    measured = table(base, found, "measured", Measured)
    rows = read_influence(found, base.place)
    wholes = sorted((row for row in rows if row.site == WHOLE), key=lambda row: -row.frozen)
    assert [one.request for one in measured] == [row.request for row in wholes[:2]]
    opened = open_model(Path(base.model.folder), text_window=512)
    edit = load_edit(base.place.fetch(base.edit.artifact)).scaled(base.calibrated.beta)
    with edited(opened.model, edit):
        scores = score_examples(
            opened.model, batch_stream(opened.rendering, base.forget, base.config.collect)
        )
    for one in measured:
        own = [score for score in scores if score.group == one.request]
        total = sum(score.mean_logprob * score.num_tokens for score in own)
        expected = total / sum(score.num_tokens for score in own)
        assert one.num_examples == len(own) == 2
        assert one.with_request == pytest.approx(expected, rel=1e-4)  # other batches: float32
        assert one.without_request != one.with_request


def test_retain_groups_are_spread_over_the_set_and_say_what_they_protect(base: Stages) -> None:
    rows = [row | {"request_id": f"kept-{n // 4}"} for n, row in enumerate(retain_rows(32))]
    path = write_rows(base.work.parent / "grouped.jsonl", rows)
    run = base.but(retain=DataConfig(uri=str(path)), hold_out=HoldOutConfig(every=100))
    found = audited(run, AuditConfig(refit="none", retain_groups=4))
    protections = table(run, found, "protection", Protection)
    seen = list(dict.fromkeys(example.group for example in run.retain.examples("seen")))
    assert list(dict.fromkeys(one.group for one in protections)) == [
        seen[number * len(seen) // 4] for number in range(4)
    ]
    assert len(protections) == 4 * 3
    assert all(one.change > 0 and 0 < one.leverage < 1 for one in protections)
    assert {one.num_tokens for one in protections} == {4 * 4}  # three words and the end
    growth = table(run, found, "growth", Growth)
    assert len(growth) == 4 * 4
    assert all(math.isfinite(one.nats) for one in growth)


def test_token_ids_are_written_only_where_keys_are_kept(base: Stages) -> None:
    for collect, known in ((base.config.collect, False), (KEEP, True)):
        run = base.but(collect=collect)
        tokens = table(run, audited(run), "tokens", TokenWeight)
        assert tokens
        assert all((token.token is not None) == known for token in tokens)
        assert all(token.count > 0 and 0 < token.alpha <= 1 for token in tokens)


def test_log_and_report_do_not_name_a_request(
    base: Stages, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        rows = rows_of(base, AuditConfig(top=1))
    assert "audit: 4 requests" in caplog.text
    (shown,) = influence_tables(rows, top=1)
    assert [row.name for row in shown.rows] == ["request 1 of 4", "request 4 of 4"]
    assert "person" not in caplog.text + str(shown)
    assert influence_tables([], top=1) == []


def test_the_same_audit_is_found_in_the_store(base: Stages) -> None:
    first = audited(base)
    assert audited(base) == first
    assert audited(base, AuditConfig(refit="none")).artifact.key != first.artifact.key
