"""Every family's weights are found the right way round, and other models are refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from grom.errors import MixtureOfExperts, QuantisedBase, UnknownFamily
from grom.forward import recorded_inputs, recorded_outputs
from grom.sites import (
    FAMILIES,
    Site,
    context_length,
    decoder_layers,
    final_gain_D,
    final_norm,
    find_sites,
    is_tied,
    mlp_modules,
    trunk,
    unembedding_VD,
    untie_,
)
from tests.reference import MODELS, VOCAB, Tolerance, embedding_VD, tiny_model

every_model = pytest.mark.parametrize(("family", "tied"), MODELS)
FLOAT32: Tolerance = {"rtol": 1e-4, "atol": 1e-4}
"""float32 products of at most 24 terms of order 1, summed in another order."""


def some_ids() -> Tensor:
    return torch.randint(3, VOCAB, (2, 9))


def test_every_family_has_a_tiny_model() -> None:
    assert {family for family, _ in MODELS} == set(FAMILIES)


@every_model
def test_sites_are_the_mlps_from_below_and_then_the_head(family: str, tied: bool) -> None:
    model = tiny_model(family, tied=tied)
    sites = find_sites(model)
    assert [site.kind for site in sites] == ["mlp", "mlp", "mlp", "head"]
    assert [site.layer for site in sites] == [0, 1, 2, None]
    assert [site.weight_MN(model).shape for site in sites] == 3 * [(16, 24)] + [(VOCAB, 16)]
    names = set(dict(model.named_parameters(remove_duplicate=False)))
    assert {f"{site.name}.weight" for site in sites} <= names


@every_model
def test_the_weight_times_the_key_is_what_the_module_puts_out(family: str, tied: bool) -> None:
    model = tiny_model(family, tied=tied)
    sites = find_sites(model)
    modules = [site.module(model) for site in sites]
    with recorded_inputs(modules) as inputs, recorded_outputs(modules) as outputs:
        model(input_ids=some_ids())
    for site, module in zip(sites, modules, strict=True):
        expected_BLM = inputs[module] @ site.weight_MN(model).mT
        bias = getattr(module, "bias", None)
        expected_BLM += 0 if bias is None else bias
        assert_close(outputs[module], expected_BLM, **FLOAT32)


@every_model
def test_the_site_is_the_last_thing_its_mlp_does(family: str, tied: bool) -> None:
    model = tiny_model(family, tied=tied)
    sites, mlps = find_sites(model)[:-1], mlp_modules(model)
    modules = [site.module(model) for site in sites]
    with recorded_outputs([*modules, *mlps]) as outputs:
        model(input_ids=some_ids())
    for module, mlp in zip(modules, mlps, strict=True):
        found = outputs[module]
        expected = mlp(found) if "norm" in type(mlp).__name__.lower() else found
        assert torch.equal(outputs[mlp], expected)


@every_model
def test_a_site_shares_its_memory_with_the_model(family: str, tied: bool) -> None:
    model = tiny_model(family, tied=tied)
    ids_BL = some_ids()
    before_BLV = model(input_ids=ids_BL).logits
    site = find_sites(model)[1]
    site.weight_MN(model)[3, :] = 5.0
    stored = model.get_parameter(f"{site.name}.weight")
    assert torch.equal(site.oriented(stored)[3], torch.full((24,), 5.0))
    assert not torch.allclose(model(input_ids=ids_BL).logits, before_BLV)


@every_model
def test_the_trunk_ends_in_normed_states_that_the_head_reads(family: str, tied: bool) -> None:
    model = tiny_model(family, tied=tied)
    head = find_sites(model)[-1].module(model)
    ids_BL = some_ids()
    with recorded_inputs([head]) as inputs, recorded_outputs([final_norm(model)]) as normed:
        model(input_ids=ids_BL)
    hidden_BLD = trunk(model)(input_ids=ids_BL).last_hidden_state
    assert torch.equal(hidden_BLD, inputs[head])
    assert torch.equal(hidden_BLD, normed[final_norm(model)])


@every_model
def test_the_gain_is_what_the_final_norm_multiplies_by(family: str, tied: bool) -> None:
    model = tiny_model(family, tied=tied)
    norm = final_norm(model)
    x_TD = torch.randn(5, 16)
    bias = getattr(norm, "bias", None)
    centred_TD = x_TD - x_TD.mean(1, keepdim=True) if bias is not None else x_TD
    unit_TD = centred_TD / centred_TD.square().mean(1, keepdim=True).sqrt()
    expected_TD = unit_TD * final_gain_D(model).float() + (0 if bias is None else bias)
    # The norms add an epsilon of up to 1e-5 to a mean square of about 1.
    assert_close(norm(x_TD), expected_TD, rtol=1e-3, atol=1e-4)


def test_the_orientation_is_its_own_inverse() -> None:
    matrix_MN = torch.randn(3, 4)
    for site in (Site("a", "mlp", 0), Site("a", "mlp", 0, inputs_first=True)):
        assert torch.equal(site.oriented(site.oriented(matrix_MN)), matrix_MN)
    assert site.oriented(matrix_MN).shape == (4, 3)


@every_model
def test_whether_the_head_is_tied_is_seen(family: str, tied: bool) -> None:
    assert is_tied(tiny_model(family, tied=tied)) == tied


@every_model
def test_untying_gives_the_head_numbers_of_its_own(family: str, tied: bool) -> None:
    model = tiny_model(family, tied=tied)
    ids_BL = some_ids()
    before_BLV = model(input_ids=ids_BL).logits
    assert untie_(model) == tied
    assert not is_tied(model)
    assert not model.config.tie_word_embeddings
    assert torch.equal(model(input_ids=ids_BL).logits, before_BLV)
    assert untie_(model) is False
    before_VD = embedding_VD(model).clone()
    unembedding_VD(model).zero_()
    assert torch.equal(embedding_VD(model), before_VD)
    assert not model(input_ids=ids_BL).logits.any()


@every_model
def test_layers_and_context_are_those_of_the_config(family: str, tied: bool) -> None:
    model = tiny_model(family, tied=tied)
    assert len(decoder_layers(model)) == model.config.num_hidden_layers == 3
    assert context_length(model.config, 7) == 64


def test_an_unknown_family_is_refused_with_what_was_searched() -> None:
    model = tiny_model("llama")
    model.config.model_type = "unheard_of"  # type: ignore[misc]
    with pytest.raises(UnknownFamily) as error:
        find_sites(model)
    for part in ("'unheard_of'", *FAMILIES, "grom/sites.py"):
        assert part in str(error.value)


def test_a_mixture_of_experts_is_refused_by_the_module_that_gives_it_away() -> None:
    with pytest.raises(MixtureOfExperts, match=r"layers\.0.*'mixtral'.*Use a dense model"):
        find_sites(tiny_model("mixtral"))


def test_a_quantised_config_is_refused_with_the_cure() -> None:
    model = tiny_model("llama")
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    with pytest.raises(QuantisedBase, match="Edit the unquantised checkpoint"):
        find_sites(model)


def test_a_weight_of_integers_is_refused_by_name() -> None:
    model = tiny_model("llama")
    down = find_sites(model)[1].module(model)
    down.weight = torch.nn.Parameter(torch.zeros(16, 24, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(QuantisedBase, match=r"layers\.1\.mlp\.down_proj.*uint8"):
        find_sites(model)


def test_a_family_without_a_limit_gets_the_default() -> None:
    assert context_length(SimpleNamespace(hidden_size=16), 123) == 123
    assert context_length(SimpleNamespace(max_position_embeddings=None, n_ctx=7), 123) == 7
    assert context_length(tiny_model("gpt2").config, 123) == 64
