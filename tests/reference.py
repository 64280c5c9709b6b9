"""The slow oracle: formulas written naively, explicit inverses, all keys in memory, float64.

Shapes: T tokens, R retain tokens, S forget tokens, N inputs of W, M outputs of W, V vocabulary,
L tokens of an example.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from grom.batches import Batch, batches
from grom.config import RidgeConfig
from grom.examples import Rendered
from grom.moments import KeyMoments
from grom.sites import Site
from grom.sums import PairSums

VOCAB = 64
PAD, BOS, EOS = 0, 1, 2
UNTIED = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gpt_neox")
TIED = ("llama", "gemma2", "gemma3_text", "gpt2")
MODELS = [(family, False) for family in UNTIED] + [(family, True) for family in TIED]
"""Family and whether its head is tied, for `tiny_model`: every family, llama both ways."""


class Tolerance(TypedDict):
    """How far two tensors may be apart; each test file says why."""

    rtol: float
    atol: float


@dataclass(frozen=True, slots=True)
class Keys:
    """Every key of a set, with what belongs to its position."""

    keys_TN: Tensor
    gold_T: Tensor
    alt_T: Tensor
    """What should be said instead."""

    @property
    def rows(self) -> list[tuple[Tensor, int, int]]:
        """Key, gold token and alternative of each position."""
        return list(zip(self.keys_TN, self.gold_T.tolist(), self.alt_T.tolist(), strict=True))

    def moments(self, vocab_size: int = 8) -> KeyMoments:
        """The same set as the moments under test."""
        moments = KeyMoments.zeros(self.keys_TN.shape[1], vocab_size)
        return moments.update_(self.keys_TN, self.gold_T, self.alt_T)

    def part(self, index: Tensor | slice) -> Keys:
        """Some of the positions."""
        return Keys(self.keys_TN[index], self.gold_T[index], self.alt_T[index])


def dense_VVN(sums: PairSums) -> Tensor:
    """Sums by gold token and alternative, zero for pairs that do not occur."""
    dense = torch.zeros(sums.vocab_size, sums.vocab_size, sums.rows_KN.shape[1]).double()
    for (gold, alt), row_N in sums.items():
        dense[gold, alt] = row_N
    return dense


def random_keys(seed: int, num_tokens: int, num_inputs: int = 5, vocab_size: int = 8) -> Keys:
    """Normal keys with random gold tokens, and alternatives that differ from them."""
    generator = torch.Generator().manual_seed(seed)
    keys_TN = torch.randn(num_tokens, num_inputs, generator=generator, dtype=torch.float64)
    gold_T = torch.randint(vocab_size, (num_tokens,), generator=generator)
    step_T = torch.randint(1, vocab_size, (num_tokens,), generator=generator)
    return Keys(keys_TN, gold_T, (gold_T + step_T) % vocab_size)


def random_matrix(seed: int, num_rows: int, num_columns: int) -> Tensor:
    """Normal entries, float64, independent of `random_keys` with the same seed."""
    generator = torch.Generator().manual_seed(seed + 1_000_003)
    return torch.randn(num_rows, num_columns, generator=generator, dtype=torch.float64)


def moments_of(keys_TN: Tensor) -> KeyMoments:
    """Moments of keys whose gold tokens do not matter."""
    gold_T = torch.zeros(len(keys_TN), dtype=torch.int64)
    return KeyMoments.zeros(keys_TN.shape[1], 1).update_(keys_TN, gold_T)


def specificity_of(
    forget: Sequence[int], retain: Sequence[int], vocab_size: int, special: Sequence[int] = ()
) -> Tensor:
    """alpha_V from lists of gold tokens."""
    alpha = []
    for token in range(vocab_size):
        ff = list(forget).count(token) / max(len(forget), 1)
        rf = list(retain).count(token) / max(len(retain), 1)
        share = 0.0 if ff == 0 or token in special else 1 - rf / ff
        alpha.append(min(max(share, 0.0), 1.0))
    return torch.tensor(alpha, dtype=torch.float64)


def cross_of(shifts_TM: Tensor, keys_TN: Tensor) -> Tensor:
    """D XT, one position at a time; of a set with itself, its gram matrix."""
    cross_MN = torch.zeros(shifts_TM.shape[1], keys_TN.shape[1], dtype=torch.float64)
    for shift_M, key_N in zip(shifts_TM.double(), keys_TN.double(), strict=True):
        cross_MN += torch.outer(shift_M, key_N)
    return cross_MN


def ridge_system(retain_RN: Tensor, forget_SN: Tensor, ridge: RidgeConfig) -> tuple[Tensor, float]:
    """A, and the ridge that it contains."""
    A_NN = ridge.w_forget / len(forget_SN) * (forget_SN.mT @ forget_SN)
    if len(retain_RN):
        A_NN = A_NN + ridge.w_retain / len(retain_RN) * (retain_RN.mT @ retain_RN)
    mu = ridge.ridge(float(A_NN.diagonal().mean()))
    return A_NN + mu * torch.eye(len(A_NN), dtype=torch.float64), mu


def solve_by_lstsq(
    retain_RN: Tensor, forget_SN: Tensor, shifts_SM: Tensor, ridge: RidgeConfig
) -> Tensor:
    """P from least squares on the stacked system, with no normal equations."""
    _, mu = ridge_system(retain_RN, forget_SN, ridge)
    keep = (ridge.w_retain / len(retain_RN)) ** 0.5
    move = (ridge.w_forget / len(forget_SN)) ** 0.5
    identity_NN = torch.eye(forget_SN.shape[1], dtype=torch.float64)
    stacked = torch.cat([move * forget_SN, keep * retain_RN, mu**0.5 * identity_NN])
    wanted = torch.zeros(len(stacked), shifts_SM.shape[1], dtype=torch.float64)
    wanted[: len(forget_SN)] = move * shifts_SM
    solution_NM: Tensor = torch.linalg.lstsq(stacked, wanted, driver="gelsd").solution
    return solution_NM.mT


def objective(
    P_MN: Tensor, retain_RN: Tensor, forget_SN: Tensor, shifts_SM: Tensor, ridge: RidgeConfig
) -> Tensor:
    """w_r/r |P X_r|^2 + w_f/s |P X_f - D|^2 + mu |P|^2."""
    _, mu = ridge_system(retain_RN, forget_SN, ridge)
    keep = (retain_RN @ P_MN.mT).square().sum(1).mean()
    move = (forget_SN @ P_MN.mT - shifts_SM).square().sum(1).mean()
    return ridge.w_retain * keep + ridge.w_forget * move + mu * P_MN.square().sum()


def solve_without(
    left_out: Sequence[int],
    retain_RN: Tensor,
    forget_SN: Tensor,
    shifts_SM: Tensor,
    ridge: RidgeConfig,
) -> Tensor:
    """P = w_f/s D X_fT A^-1, some tokens left out of D X_fT and A; s, r, mu as of the whole."""
    A_NN, _ = ridge_system(retain_RN, forget_SN, ridge)
    scale = ridge.w_forget / len(forget_SN)
    cross_MN = cross_of(shifts_SM, forget_SN)
    for key_N, shift_M in zip(forget_SN[left_out], shifts_SM[left_out], strict=True):
        A_NN = A_NN - scale * torch.outer(key_N, key_N)
        cross_MN = cross_MN - torch.outer(shift_M, key_N)
    inverse_NN: Tensor = torch.linalg.inv(A_NN)
    return scale * cross_MN @ inverse_NN


def tiny_model(
    family: str, *, tied: bool = False, dtype: torch.dtype = torch.float32, seed: int = 0
) -> PreTrainedModel:
    """A random model of a family: 3 layers, hidden size 16, 64 tokens.

    Every parameter is disturbed, so that biases and gains are not 0 and 1.
    """
    sizes = {"hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 64}
    sizes |= {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"head_dim": 8, "num_local_experts": 2}
    if family == "gpt2":
        sizes = {"n_embd": 16, "n_inner": 24, "n_layer": 3, "n_head": 2, "n_positions": 64}
    sizes |= {"vocab_size": VOCAB, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    configure: Callable[..., PreTrainedConfig] = CONFIG_MAPPING[family]
    build: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config
    config = configure(**sizes, tie_word_embeddings=tied, dtype=dtype)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build(config, attn_implementation="eager", dtype=torch.float32)
        for parameter in model.parameters():
            parameter.data = (parameter + 0.3 * torch.randn(parameter.shape)).to(dtype)
            parameter.requires_grad_(False)
    nn.Module.eval(model)
    return model


def embedding_VD(model: Any) -> Tensor:
    """The input embedding, sharing memory with the model."""
    weight_VD: Tensor = model.get_input_embeddings().weight
    return weight_VD


def random_rendered(seed: int, num_examples: int, longest: int = 12) -> list[Rendered]:
    """Random ids without special tokens, of random lengths, in groups of two."""
    generator = torch.Generator().manual_seed(seed)
    rendered = []
    for number in range(num_examples):
        length = int(torch.randint(4, longest + 1, (), generator=generator))
        start = int(torch.randint(1, length, (), generator=generator))
        ids = torch.randint(EOS + 1, VOCAB, (length,), generator=generator).tolist()
        digest = f"example-{seed}-{number}"
        rendered.append(Rendered(tuple(ids), start, digest, f"group-{number // 2}"))
    return rendered


def in_batches(rendered: Sequence[Rendered], batch_tokens: int = 40) -> list[Batch]:
    """The batches that the code under test would make of these examples."""
    return list(batches(rendered, batch_tokens=batch_tokens, window_examples=8, pad_id=PAD))


def all_keys(model: PreTrainedModel, site: Site, stream: Sequence[Batch]) -> tuple[Tensor, Tensor]:
    """All keys (T, N), float64, and gold tokens (T,) of a site: a full forward pass per batch."""
    inputs: list[Tensor] = []
    module = site.module(model)
    handle = module.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
    keys, gold = [], []
    for batch in stream:
        inputs.clear()
        with torch.no_grad():
            model(input_ids=batch.ids_BL, attention_mask=batch.mask_BL, use_cache=False)
        for row, example in enumerate(batch.examples):
            keys.append(inputs[0][row, example.start - 1 : len(example.ids) - 1].double())
            gold.append(torch.tensor(example.ids[example.start :]))
    handle.remove()
    return torch.cat(keys), torch.cat(gold).to(keys[0].device)


def reference_sequential_edit(
    model: PreTrainedModel,
    forget_batches: Sequence[Batch],
    retain_batches: Sequence[Batch],
    sites: Sequence[Site],
    alpha_V: Tensor,
    unembedding_VM: Tensor,
    ridge: RidgeConfig,
    beta: float,
) -> dict[Site, Tensor]:
    """The published algorithm (token suppression), as plainly as it can be written.

    For each layer from below: a full forward pass over both sets with all keys in memory, A in
    float64, a general LU solve, P added in place; then the next layer.  The model stays edited.

    Returns:
        P (M, N), float64, by site.
    """
    unit_VM = unembedding_VM.double() / unembedding_VM.double().norm(dim=1, keepdim=True)
    updates: dict[Site, Tensor] = {}
    for site in sites:
        retain_RN, _ = all_keys(model, site, retain_batches)
        forget_SN, gold_S = all_keys(model, site, forget_batches)
        shifts_SM = -beta * alpha_V.to(unit_VM)[gold_S].unsqueeze(1) * unit_VM[gold_S]
        A_NN, _ = ridge_system(retain_RN, forget_SN, ridge)
        cross_MN = shifts_SM.mT @ forget_SN
        solved_NM = torch.linalg.solve(A_NN, cross_MN.mT)
        updates[site] = ridge.w_forget / len(forget_SN) * solved_NM.mT
        weight_MN = site.weight_MN(model)
        weight_MN.copy_(weight_MN.double() + updates[site])
    return updates
