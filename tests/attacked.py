"""Small models that know their forget set by heart, edits of them, and a round of attacks."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from grom.apply import Edit
from grom.attack import AttackResult
from grom.attack_config import AttackConfig, AttackName, RelearnConfig
from grom.batches import Batch, batches
from grom.config import CollectConfig, DataConfig, ModelConfig
from grom.examples import Rendering
from grom.prune import layer_linears
from grom.quantize import Scheme, quantise, round_trip
from grom.relearn import answer_loss
from grom.sites import find_sites
from tasks.attack import (
    Attacked,
    edited_parts,
    judge_attacks,
    probes_of,
)
from tasks.checkpoint import write_edited
from tasks.load import load_data, load_model
from tasks.models import open_tokenizer
from tasks.place import ModelRef, Place
from tasks.probe import probe
from tasks.rows import read_examples
from tests.reference import BOS, EOS, PAD, VOCAB
from tests.tiny import forget_rows, save_model, save_tokenizer, write_rows

NUM_ROWS = 6


def forget_set(folder: Path, **settings: Any) -> DataConfig:
    rows = [{**row, "other": f"{row['prompt']} w30"} for row in forget_rows(NUM_ROWS)]
    return DataConfig(uri=str(write_rows(folder / "forget.jsonl", rows)), **settings)


@cache
def forget_batch() -> Batch:
    """The whole forget set as one batch."""
    with TemporaryDirectory() as folder:
        save_tokenizer(Path(folder))
        rendering = Rendering(open_tokenizer(Path(folder)), 64)
        rendered = list(rendering.render_all(read_examples(forget_set(Path(folder)))))
    (batch,) = batches(rendered, batch_tokens=10_000, window_examples=99, pad_id=PAD)
    return batch


@cache
def memorised_state(tied: bool) -> dict[str, Tensor]:
    model = random_model(tied)
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(120):
        answer_loss(model, forget_batch()).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        optimiser.zero_grad()
    return dict(model.state_dict())


def random_model(tied: bool) -> PreTrainedModel:
    """Wide enough for blocks of 64 weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=VOCAB, max_position_embeddings=128,
        tie_word_embeddings=tied, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def memorised(*, tied: bool = False) -> PreTrainedModel:
    """A small model that knows the forget set by heart."""
    model = random_model(tied)
    model.load_state_dict(memorised_state(tied))
    return model


def snapped_(model: PreTrainedModel, scheme: Scheme) -> None:
    """Put every matrix of the layers on the levels of a scheme."""
    with torch.no_grad():
        for module in layer_linears(model).values():
            weight = module.weight
            assert isinstance(weight, Tensor)
            weight.copy_(round_trip(weight, scheme))


BIN: dict[Scheme, float] = {"nf4": 0.0398, "int4": 1 / 14}
"""Half the distance of the closest levels, as a share of a block's largest weight."""


def nudged_(model: PreTrainedModel, scheme: Scheme) -> None:
    """Raise the loss by moving weights less than half a bin: none reaches another code."""
    matrices = [module.weight for module in layer_linears(model).values()]
    boxes = []
    for weight in matrices:
        assert isinstance(weight, Tensor)
        held = quantise(weight, scheme)
        largest_B = held.scales_B * (7 if scheme == "int4" else 1)
        largest_MN = largest_B.repeat_interleave(held.block_weights).view_as(weight)
        inner = weight.abs() < 0.99 * largest_MN  # a largest weight carries its block's scale
        boxes.append((weight, weight.detach().clone(), 0.9 * BIN[scheme] * largest_MN * inner))
    for _ in range(10):
        answer_loss(model, forget_batch()).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for weight, start_MN, box_MN in boxes:
                assert weight.grad is not None
                weight += 0.25 * box_MN * weight.grad.sign()
                weight.copy_(weight.clamp(start_MN - box_MN, start_MN + box_MN))
        model.zero_grad()


class Round:
    """One round of attacks, a task at a time."""

    def __init__(self, folder: Path, unedited: Path, edited: Path) -> None:
        self.place = Place(work=str(folder / "work"), store=str(folder / "work" / "store"))
        self.forget = load_data.fn(forget_set(folder), self.place, "forget")
        self.unedited, self.edited = self.model(unedited), self.model(edited)

    def model(self, folder: Path) -> ModelRef:
        return load_model.fn(ModelConfig(source=str(folder)), self.place)

    def attacked(
        self, *attacks: AttackName, retrained: ModelRef | None = None, **settings: Any
    ) -> Attacked:
        relearn = RelearnConfig(steps=4, slice_share=0.5)
        config = AttackConfig(attacks=attacks, relearn=relearn, **settings)
        parts = edited_parts.fn(self.unedited, self.edited, config)
        models = {"unedited": self.unedited, "edited": self.edited}
        models |= {"retrained": retrained} if retrained else {}
        found = {
            role: probe.fn(
                role, model, self.forget, probes_of(config, role), config, CollectConfig(),
                self.place, parts.quantise_head,
            )
            for role, model in models.items()
        }  # fmt: skip
        return judge_attacks.fn(
            self.unedited, self.edited, parts, found["unedited"], found["edited"],
            found.get("retrained", {}), config, self.place,
        )  # fmt: skip

    def one(self, attack: AttackName, **settings: Any) -> AttackResult:
        (result,) = self.attacked(attack, **settings).results
        return result


def small_edit(folder: Path, scheme: Scheme) -> Round:
    """An edit that forgets, and vanishes in the scheme."""
    model = memorised()
    snapped_(model, scheme)
    unedited = save_model(folder / "unedited", model)
    nudged_(model, scheme)
    return Round(folder, unedited, save_model(folder / "edited", model))


def head_edit(folder: Path) -> Round:
    """An edit of a tied head that takes the answers' tokens down."""
    model = memorised(tied=True)
    unedited = save_model(folder / "unedited", model)
    head = find_sites(model)[-1]
    tokens = sorted(set(forget_batch().gold_T.tolist()))
    P_MN = torch.zeros(VOCAB, 64, dtype=torch.float64)
    P_MN[tokens] = -head.weight_MN(model).double()[tokens]
    (folder / "edited").mkdir()
    write_edited(unedited, Edit({head: P_MN}), folder / "edited")  # type: ignore[dict-item]
    return Round(folder, unedited, folder / "edited")
