"""Which weights can be edited, and where each model family keeps them.

Shapes: N inputs of W, M outputs of W, V vocabulary, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from grom.errors import MixtureOfExperts, QuantisedBase, UnknownFamily


@dataclass(frozen=True, slots=True)
class Family:
    """Names of the parts of one model series, as paths of attributes."""

    layers: str
    mlp: str
    """The MLP within a layer."""
    down: str
    """The output matrix within the MLP."""
    norm: str
    head: str = "lm_head"
    stored_head: str | None = None
    """The head's tensor in checkpoints, where transformers renames it on loading."""
    inputs_first: bool = False
    """True where the checkpoint stores W as (N, M): transformers' Conv1D."""
    adds: str | None = None
    """What adds the MLP's part to the residual stream, if not the MLP itself: a norm after it."""
    gain_offset: float = 0.0
    """Added to the final norm's weight to get its gain (Gemma stores the gain minus one)."""


LLAMA = Family("model.layers", "mlp", "down_proj", "model.norm")
GEMMA = Family(
    "model.layers",
    "mlp",
    "down_proj",
    "model.norm",
    adds="post_feedforward_layernorm",
    gain_offset=1.0,
)
FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "phi3": LLAMA,
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "gpt2": Family("transformer.h", "mlp", "c_proj", "transformer.ln_f", inputs_first=True),
    "gpt_neox": Family(
        "gpt_neox.layers",
        "mlp",
        "dense_4h_to_h",
        "gpt_neox.final_layer_norm",
        stored_head="embed_out.weight",
    ),
}
EXPERT_NAMES = ("experts", "block_sparse_moe", "router")


@dataclass(frozen=True, slots=True)
class Site:
    """One editable weight, and which way round the checkpoint stores it."""

    name: str
    """Module path; its parameter is `<name>.weight`."""
    kind: Literal["mlp", "head"]
    layer: int | None
    """Index of the layer; None for the head."""
    inputs_first: bool = False
    stored: str | None = None
    """The tensor in checkpoints, if it is not `<name>.weight`."""

    @property
    def tensor(self) -> str:
        """Name of the weight in checkpoints."""
        return self.stored or f"{self.name}.weight"

    def module(self, model: nn.Module) -> nn.Module:
        """The linear module."""
        return model.get_submodule(self.name)

    def weight_MN(self, model: nn.Module) -> Tensor:
        """W as (M, N), sharing memory with the model."""
        weight = cast(Tensor, self.module(model).weight)
        return self.oriented(weight.detach())

    def oriented(self, stored: Tensor) -> Tensor:
        """A stored weight as (M, N), or a (M, N) matrix as it is stored.  Its own inverse."""
        return stored.mT if self.inputs_first else stored


def config_of(model: nn.Module) -> Any:
    """The model's transformers configuration."""
    return model.config


def family_of(model: nn.Module) -> Family:
    """The names of this model's parts.

    Raises:
        UnknownFamily: there is no rule for this model.
    """
    model_type = str(config_of(model).model_type)
    if model_type not in FAMILIES:
        raise UnknownFamily(model_type, sorted(FAMILIES))
    return FAMILIES[model_type]


def find_sites(model: nn.Module) -> tuple[Site, ...]:
    """All editable weights: the MLP output matrix of each layer from the first on, then the head.

    Raises:
        MixtureOfExperts, QuantisedBase, UnknownFamily: this model cannot be edited.
    """
    model_type = str(config_of(model).model_type)
    if getattr(config_of(model), "quantization_config", None) is not None:
        raise QuantisedBase(model_type, "its config has `quantization_config`")
    for name, _ in model.named_modules():
        if name.rsplit(".", 1)[-1] in EXPERT_NAMES:
            raise MixtureOfExperts(model_type, name)
    family = family_of(model)
    sites = []
    for layer in range(len(decoder_layers(model))):
        name = f"{family.layers}.{layer}.{family.mlp}.{family.down}"
        sites.append(Site(name, "mlp", layer, family.inputs_first))
    sites.append(Site(family.head, "head", None, stored=family.stored_head))
    for site in sites:
        weight = site.module(model).weight
        if not cast(Tensor, weight).is_floating_point():
            raise QuantisedBase(site.name, f"dtype {weight.dtype}")
    return tuple(sites)


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The list of layers."""
    return cast(nn.ModuleList, model.get_submodule(family_of(model).layers))


def mlp_modules(model: nn.Module) -> list[nn.Module]:
    """The module of each layer whose output is what the MLP adds to the residual stream."""
    family = family_of(model)
    name = family.adds or family.mlp
    return [layer.get_submodule(name) for layer in decoder_layers(model)]


def final_norm(model: nn.Module) -> nn.Module:
    """The norm between the last layer and the head."""
    return model.get_submodule(family_of(model).norm)


def norm_centres(model: nn.Module) -> bool:
    """Whether the final norm takes the mean out first: LayerNorm does, RMSNorm does not."""
    return isinstance(final_norm(model), nn.LayerNorm)


def trunk(model: nn.Module) -> nn.Module:
    """The model without its head: ids in, final normed hidden states out."""
    return model.get_submodule(family_of(model).layers.split(".")[0])


def final_gain_D(model: nn.Module) -> Tensor:
    """Gain of the final norm, (D,) float64."""
    weight = cast(Tensor, final_norm(model).weight).detach()
    return weight.double() + family_of(model).gain_offset


def unembedding_VD(model: nn.Module) -> Tensor:
    """Rows of the LM head, one per token, sharing memory with the model."""
    return cast(Tensor, model.get_submodule(family_of(model).head).weight).detach()


def is_tied(model: nn.Module) -> bool:
    """Whether the head shares its storage with the input embedding."""
    embedding = cast(nn.Module, model.get_input_embeddings())  # type: ignore[operator]
    return cast(Tensor, embedding.weight).data_ptr() == unembedding_VD(model).data_ptr()


def untie_(model: nn.Module) -> bool:
    """Give the head a parameter of its own, and say so in the config.

    Without this an edit of the head also edits the input embedding.  Returns whether the model
    was tied.
    """
    if not is_tied(model):
        return False
    head = model.get_submodule(family_of(model).head)
    head.weight = nn.Parameter(unembedding_VD(model).clone(), requires_grad=False)
    config_of(model).tie_word_embeddings = False
    return True


def answer_logits_TV(model: nn.Module, hidden_TD: Tensor) -> Tensor:
    """Logits of final normed hidden states, float32, soft-capped where the family does so."""
    head = model.get_submodule(family_of(model).head)
    logits_TV: Tensor = head(hidden_TD).float()
    cap = getattr(config_of(model), "final_logit_softcapping", None)
    return logits_TV if cap is None else cap * torch.tanh(logits_TV / cap)


CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")


def context_length(config: Any, default: int) -> int:
    """Longest sequence that a model of this configuration takes, in tokens.

    Args:
        config: transformers configuration.
        default: for families without a limit (ALiBi, state spaces).
    """
    named = (getattr(config, name, None) for name in CONTEXT_NAMES)
    return next((int(limit) for limit in named if isinstance(limit, int) and limit > 0), default)


def is_known(model: nn.Module) -> bool:
    """Whether there is a rule for this family; any other model can be measured, not edited."""
    return str(config_of(model).model_type) in FAMILIES


def device_of(model: nn.Module) -> torch.device:
    """Where the model's parameters are."""
    return next(model.parameters()).device
