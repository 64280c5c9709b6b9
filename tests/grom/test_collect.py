"""One streamed pass gives the moments of all keys, and sees what no edit could survive."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import PreTrainedModel

from grom.collect import (
    JOINT,
    Collector,
    ForgetPlan,
    RequestKeys,
    batch_keys,
    collect_moments,
    each_batch,
)
from grom.errors import NonFiniteKeys
from grom.examples import Rendered
from grom.forward import recorded_inputs
from grom.moments import KeyMoments
from grom.sites import decoder_layers, final_norm, find_sites, mlp_modules
from tests.reference import (
    MODELS,
    VOCAB,
    Tolerance,
    all_keys,
    cross_of,
    dense_VVN,
    in_batches,
    random_rendered,
    tiny_model,
)

every_model = pytest.mark.parametrize(("family", "tied"), MODELS)
RENDERED = random_rendered(seed=11, num_examples=6)
FLOAT32: Tolerance = {"rtol": 1e-4, "atol": 1e-4}
"""float32 keys of order 1: another batch shape sums in another order."""


def plan(*, replace: bool = False, reference: PreTrainedModel | None = None) -> ForgetPlan:
    return ForgetPlan(replace, reference)


def own_choices(model: PreTrainedModel, examples: list[Rendered]) -> Tensor:
    """The model's best token other than the gold one, in the order of `examples`."""
    choices = []
    for example in examples:
        logits_LV = model(input_ids=torch.tensor([example.ids])).logits[0]
        for position in range(example.start - 1, len(example.ids) - 1):
            ranked = logits_LV[position].argsort(descending=True).tolist()
            ranked.remove(example.ids[position + 1])
            choices.append(ranked[0])
    return torch.tensor(choices)


@every_model
def test_moments_equal_those_of_all_keys_in_memory(family: str, tied: bool) -> None:
    model, stream = tiny_model(family, tied=tied), in_batches(RENDERED)
    sites = find_sites(model)
    collected = collect_moments(model, sites, stream, plan())
    for site in sites:
        keys_TN, gold_T = all_keys(model, site, stream)
        moments = collected.moments[site.name]
        expected = KeyMoments.zeros(keys_TN.shape[1], VOCAB).update_(keys_TN, gold_T)
        assert_close(moments.gram_NN, cross_of(keys_TN, keys_TN), **FLOAT32)
        assert_close(moments.sums_dense(), expected.sums_dense(), **FLOAT32)
        assert torch.equal(moments.counts_V, torch.bincount(gold_T, minlength=VOCAB))
        assert moments.num_tokens == len(gold_T) == sum(e.num_answer_tokens for e in RENDERED)


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("gpt2", True)])
def test_the_batch_size_does_not_matter(family: str, tied: bool) -> None:
    model = tiny_model(family, tied=tied)
    sites = find_sites(model)
    single, large = (
        collect_moments(model, sites, in_batches(RENDERED, tokens), plan(replace=True))
        for tokens in (1, 1000)
    )
    for name, moments in single.moments.items():
        other = large.moments[name]
        assert_close(moments.gram_NN, other.gram_NN, **FLOAT32)
        assert_close(moments.sums_dense(), other.sums_dense(), **FLOAT32)
        assert_close(dense_VVN(moments.pair_sums), dense_VVN(other.pair_sums), **FLOAT32)
        assert torch.equal(moments.counts_V, other.counts_V)
    assert single.mean_rms == pytest.approx(large.mean_rms, rel=1e-5)
    assert set(single.examples) == set(large.examples)


@pytest.mark.parametrize("asked", ["itself", "a reference"])
def test_alternatives_are_the_best_other_choice_of_the_model_that_is_asked(asked: str) -> None:
    model, reference = tiny_model("llama"), tiny_model("qwen3", seed=9)
    site, stream = find_sites(model)[1], in_batches(RENDERED)
    chosen = plan(replace=True, reference=reference if asked == "a reference" else None)
    moments = collect_moments(model, [site], stream, chosen).moments[site.name]
    keys_TN, gold_T = all_keys(model, site, stream)
    examples = [example for batch in stream for example in batch.examples]
    alt_T = own_choices(chosen.reference or model, examples)  # type: ignore[arg-type]
    expected_VVN = torch.zeros(VOCAB, VOCAB, 24, dtype=torch.float64)
    for key_N, gold, alt in zip(keys_TN, gold_T.tolist(), alt_T.tolist(), strict=True):
        expected_VVN[gold, alt] += key_N
    assert not (alt_T == gold_T).any()
    assert_close(dense_VVN(moments.pair_sums), expected_VVN, **FLOAT32)
    assert int(moments.pair_sums.counts_K.sum()) == len(gold_T)


def test_alternatives_are_found_only_when_they_are_wanted() -> None:
    model = tiny_model("llama")
    site = find_sites(model)[0]
    collected = collect_moments(model, [site], in_batches(RENDERED), plan())
    assert len(collected.moments[site.name].pair_sums) == 0
    assert len(collected.moments[site.name].sums) > 0


@every_model
def test_a_retain_pass_stops_at_the_last_site(family: str, tied: bool) -> None:
    model, stream = tiny_model(family, tied=tied), in_batches(RENDERED)
    sites = find_sites(model)[:2]
    later = [mlp_modules(model)[2], final_norm(model)]
    with recorded_inputs(later) as reached:
        collected = collect_moments(model, sites, stream)
    assert not reached
    assert collected.rms_tokens == 0
    for site in sites:
        moments = collected.moments[site.name]
        assert not moments.keeps_sums
        assert len(moments.sums) == 0
        keys_TN, _ = all_keys(model, site, stream)
        assert_close(moments.gram_NN, cross_of(keys_TN, keys_TN), **FLOAT32)


def test_sites_can_be_given_in_any_order() -> None:
    model, stream = tiny_model("llama"), in_batches(RENDERED)
    sites = find_sites(model)[:3]
    upwards = collect_moments(model, sites, stream).moments
    downwards = collect_moments(model, sites[::-1], stream).moments
    for site in sites:
        assert torch.equal(upwards[site.name].gram_NN, downwards[site.name].gram_NN)


@every_model
def test_the_residual_is_measured_where_the_final_norm_divides(family: str, tied: bool) -> None:
    model, stream = tiny_model(family, tied=tied), in_batches(RENDERED)
    collected = collect_moments(model, find_sites(model)[:1], stream, plan())
    norm = final_norm(model)
    spreads = []
    for batch in stream:
        with recorded_inputs([norm]) as inputs:
            model(input_ids=batch.ids_BL, attention_mask=batch.mask_BL)
        for residual_D in inputs[norm][batch.predicts_BL]:
            centre = residual_D.mean() if isinstance(norm, torch.nn.LayerNorm) else 0
            spreads.append(float((residual_D - centre).square().mean().sqrt()))
    assert collected.rms_tokens == len(spreads)
    assert collected.mean_rms == pytest.approx(sum(spreads) / len(spreads), rel=1e-5)


def test_each_example_is_counted_by_digest() -> None:
    model = tiny_model("llama")
    collected = collect_moments(model, find_sites(model)[:1], in_batches(RENDERED), plan())
    by_digest = {example.digest: example for example in collected.examples}
    assert len(by_digest) == len(collected.examples) == len(RENDERED)
    for rendered in RENDERED:
        answer = rendered.ids[rendered.start :]
        statistics = by_digest[rendered.digest]
        assert statistics.group == rendered.group
        assert statistics.num_tokens == len(answer)


def test_of_a_retain_set_nothing_is_kept_by_example() -> None:
    # A retain set may be larger than memory.
    model = tiny_model("llama")
    collected = collect_moments(model, find_sites(model)[:1], in_batches(RENDERED))
    assert collected.examples == []


def test_a_set_without_batches_has_moments_of_nothing() -> None:
    model = tiny_model("llama")
    collected = collect_moments(model, find_sites(model), [], plan())
    assert not collected.examples
    assert all(moments.num_tokens == 0 for moments in collected.moments.values())


def test_nan_in_the_weights_is_reported_with_site_and_example() -> None:
    model, stream = tiny_model("llama"), in_batches(RENDERED)
    model.get_parameter("model.layers.1.mlp.up_proj.weight")[0, 0] = float("nan")
    with pytest.raises(NonFiniteKeys) as error:
        collect_moments(model, find_sites(model)[:3], stream)
    assert str(error.value).startswith("model.layers.1.mlp.down_proj: NaN or Inf in the keys")
    assert stream[0].examples[0].digest in str(error.value)


def test_large_float16_keys_are_finite_although_their_sum_is_not() -> None:
    model = tiny_model("llama", dtype=torch.float16)
    site, (batch, *_) = find_sites(model)[0], in_batches(RENDERED, 1000)
    collector = Collector(model, [site], None)
    keys_TN = torch.full((len(batch.gold_T), 24), 2000.0, dtype=torch.float16)
    collector.add(batch, {site.name: keys_TN}, None)
    assert collector.finish().moments[site.name].num_tokens == len(keys_TN)


def test_collecting_leaves_the_model_without_hooks() -> None:
    model = tiny_model("llama")
    collect_moments(model, find_sites(model), in_batches(RENDERED), plan(replace=True))
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert all("forward" not in vars(layer) for layer in decoder_layers(model))


def test_keys_of_the_head_are_the_final_hidden_states() -> None:
    model, (batch, *_) = tiny_model("llama"), in_batches(RENDERED)
    head = find_sites(model)[-1]
    keys, _, final_TD = batch_keys(model, [head], batch, to_the_end=False)
    assert final_TD is not None
    assert torch.equal(keys[head.name], final_TD)
    assert_close(keys[head.name].double(), all_keys(model, head, [batch])[0], **FLOAT32)


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("gpt2", True), ("gemma2", True)])
@pytest.mark.parametrize("replace", [False, True])
def test_joint_moments_are_those_of_the_keys_side_by_side(
    family: str, tied: bool, replace: bool
) -> None:
    model, stream = tiny_model(family, tied=tied), in_batches(RENDERED)
    sites = [find_sites(model)[layer] for layer in (2, 0, 1)]
    collected = collect_moments(model, sites, stream, plan(replace=replace), joint=True)
    (name, moments), *others = collected.moments.items()
    assert (name, others) == (JOINT, [])
    keys_TN = torch.cat([all_keys(model, site, stream)[0] for site in sites], dim=1)
    gold_T = all_keys(model, sites[0], stream)[1]
    expected = KeyMoments.zeros(72, VOCAB).update_(keys_TN, gold_T)
    assert_close(moments.gram_NN, cross_of(keys_TN, keys_TN), **FLOAT32)
    assert_close(moments.sums_dense(), expected.sums_dense(), **FLOAT32)
    assert torch.equal(moments.counts_V, expected.counts_V)
    assert bool(moments.pair_sums) == replace


@pytest.mark.parametrize("forget", [True, False])
def test_each_block_of_joint_moments_is_what_its_site_alone_gives(forget: bool) -> None:
    model, stream = tiny_model("llama"), in_batches(RENDERED)
    sites, chosen = find_sites(model)[:3], plan(replace=True) if forget else None
    joint = collect_moments(model, sites, stream, chosen, joint=True).moments[JOINT]
    alone = collect_moments(model, sites, stream, chosen).moments
    for number, site in enumerate(sites):
        block, moments = joint.block(24 * number, 24 * number + 24), alone[site.name]
        # The same products; only the strips in which they are multiplied differ.
        assert_close(block.gram_NN, moments.gram_NN, **FLOAT32)
        assert torch.equal(block.sums_dense(), moments.sums_dense())
        assert torch.equal(dense_VVN(block.pair_sums), dense_VVN(moments.pair_sums))
        assert torch.equal(block.counts_V, moments.counts_V)
        assert (block.num_tokens, block.keeps_sums) == (moments.num_tokens, forget)


def test_nan_in_joint_keys_is_reported_with_its_own_site() -> None:
    model, stream = tiny_model("llama"), in_batches(RENDERED)
    model.get_parameter("model.layers.1.mlp.up_proj.weight")[0, 0] = float("nan")
    with pytest.raises(NonFiniteKeys, match=r"^model\.layers\.1\.mlp\.down_proj: NaN or Inf"):
        collect_moments(model, find_sites(model)[:3], stream, joint=True)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("gpt2", True)])
def test_kept_keys_are_the_ones_that_were_summed(family: str, tied: bool, joint: bool) -> None:
    model, stream = tiny_model(family, tied=tied), in_batches(RENDERED, 1)
    sites, kept = find_sites(model)[:2], list[RequestKeys]()
    keep = ForgetPlan(replace=True, keep=kept.append)
    collected = collect_moments(model, sites, stream, keep, joint=joint)
    assert len(kept) == len(RENDERED)
    for name, moments in collected.moments.items():
        expected = KeyMoments.zeros(len(moments.gram_NN), VOCAB)
        parts = [part.keys[name] for part in kept]
        alts = [part.alt_T for part in kept if part.alt_T is not None]
        gold_T = torch.cat([part.gold_T for part in kept])
        expected.update_(torch.cat(parts), gold_T, torch.cat(alts))
        assert parts[0].dtype == torch.float32
        assert torch.equal(moments.gram_NN, expected.gram_NN)
        assert torch.equal(moments.sums_dense(), expected.sums_dense())
        assert torch.equal(dense_VVN(moments.pair_sums), dense_VVN(expected.pair_sums))
    assert [example for part in kept for example in part.examples] == collected.examples
    sums = [float(part.rms_T.double().sum()) for part in kept if part.rms_T is not None]
    assert collected.rms_sum == sum(sums)


def test_keys_found_again_are_equal_to_the_bit() -> None:
    # Examples alone: what else is in a set changes nothing.
    model = tiny_model("llama")
    sites, kept = find_sites(model)[:2], list[RequestKeys]()
    collect_moments(model, sites, in_batches(RENDERED, 1), ForgetPlan(True, keep=kept.append))
    for part in kept:
        (rendered,) = (one for one in RENDERED if one.digest == part.examples[0].digest)
        (again,) = each_batch(model, sites, in_batches([rendered], 1), ForgetPlan(True))
        for name, keys_TN in part.keys.items():
            assert torch.equal(again.keys[name], keys_TN)
        assert part.alt_T is not None
        assert again.alt_T is not None
        assert torch.equal(again.alt_T, part.alt_T)


def test_keys_of_a_retain_set_have_no_alternatives_and_no_residual() -> None:
    model = tiny_model("llama")
    for part in each_batch(model, find_sites(model)[:1], in_batches(RENDERED)):
        assert (part.alt_T, part.rms_T) == (None, None)
