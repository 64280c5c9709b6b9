"""Stage count: tokenise both sets once, and see which tokens are specific to the forget set."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from prefect import task
from torch import Tensor

from grom.config import CollectConfig
from grom.errors import ConfigError, EmptySet, NothingToForget, Overlap
from grom.examples import Rendering, warn_without_template
from grom.target import specificity
from tasks.models import open_rendering
from tasks.place import CountRef, DataRef, ModelRef, Part, Place

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Counts:
    """Gold tokens of a set."""

    counts_V: Tensor
    num_examples: int = 0


@task
def count(
    model: ModelRef,
    forget: DataRef,
    retain: DataRef,
    background: DataRef | None,
    collect: CollectConfig,
    suppress_special: bool,
    place: Place,
) -> CountRef:
    """Count gold tokens, end of answer included, alike on both sides.  Returns alpha's reference.

    Raises:
        EmptyAnswer, ExampleTooLong: an example cannot be used.
        NothingToForget: no position has alpha > 0.
        EmptySet: hold-out left no retain example.
    """
    rendering, vocab_size = open_rendering(Path(model.folder), text_window=collect.text_window)
    warn_without_template(rendering.tokenizer)
    facts = {
        "rendering": rendering.facts,
        "forget": forget.facts,
        "retain": retain.facts,
        "background": background and background.facts,
        "suppress_special": suppress_special,
        "vocab_size": vocab_size,
    }

    special = () if suppress_special else rendering.special_ids()

    def write(folder: Path) -> None:
        forgotten = count_tokens(rendering, forget, "all", vocab_size)
        seen = count_tokens(rendering, retain, "seen", vocab_size)
        others = Counts(torch.zeros(vocab_size, dtype=torch.int64))
        if background is not None:
            others = count_tokens(rendering, background, "all", vocab_size)
        if seen.num_examples == 0:
            raise EmptySet("seen retain", retain.config.uri)
        alpha_V = specificity(forgotten.counts_V, seen.counts_V + others.counts_V, special)
        np.save(folder / "alpha.npy", alpha_V.numpy(), allow_pickle=False)
        held_out = count_tokens(rendering, retain, "held out", vocab_size)
        if held_out.num_examples == 0:
            raise ConfigError(
                f"{retain.config.uri}: no retain group is held out, so utility cannot be measured. "
                "Lower `hold_out.every`, or name more and smaller groups (`retain.group`, "
                "`retain.group_rows`)."
            )
        summary = summarise(alpha_V, forgotten, seen, others, held_out)
        refuse_overlap(forget, (retain, *((background,) if background else ())))
        (folder / "counts.json").write_text(json.dumps(summary))

    artifact, _ = place.cached("count", facts, write)
    summary = json.loads((place.fetch(artifact) / "counts.json").read_text())
    logger.info(
        "count: %(num_forget)d forget, %(num_seen)d retain and %(num_held_out)d held-out examples; "
        "%(num_suppressed)d of %(num_forget_tokens)d forget positions have alpha > 0",
        summary,
    )
    return CountRef(artifact=artifact, **summary)


def refuse_overlap(forget: DataRef, kept: tuple[DataRef, ...]) -> None:
    """Raise Overlap if a row is to be both forgotten and kept: the solver would hold on to the
    very keys that it should move.  Holds the forget set's digests, nothing of the retain set."""
    forgotten = {example.digest for example in forget.examples()}
    for data in kept:
        both = [example.place for example in data.examples() if example.digest in forgotten]
        if both:
            raise Overlap(data.role, both[0], len(both))


def summarise(
    alpha_V: Tensor, forgotten: Counts, seen: Counts, others: Counts, held_out: Counts
) -> dict[str, int]:
    """The numbers of a `CountRef`.

    Raises:
        NothingToForget: no position has alpha > 0.
    """
    counts_V = forgotten.counts_V
    num_tokens, num_suppressed = int(counts_V.sum()), int(counts_V[alpha_V > 0].sum())
    if num_suppressed == 0:
        raise NothingToForget(num_tokens)
    return {
        "num_forget": forgotten.num_examples,
        "num_seen": seen.num_examples,
        "num_background": others.num_examples,
        "num_held_out": held_out.num_examples,
        "num_forget_tokens": num_tokens,
        "num_seen_tokens": int(seen.counts_V.sum()),
        "num_suppressed": num_suppressed,
        "num_forget_types": int((counts_V > 0).sum()),
    }


def count_tokens(rendering: Rendering, data: DataRef, part: Part, vocab_size: int) -> Counts:
    """Gold tokens of a set's examples."""
    counts = Counts(torch.zeros(vocab_size, dtype=torch.int64))
    for rendered in rendering.render_all(data.examples(part)):
        gold_T = torch.tensor(rendered.ids[rendered.start :])
        if max(rendered.ids) >= vocab_size:
            raise ConfigError(
                f"{data.config.uri}: the tokenizer gives token {max(rendered.ids)}, and the model "
                f"has {vocab_size}. Use the tokenizer that belongs to the model."
            )
        counts.counts_V.index_add_(0, gold_T, torch.ones_like(gold_T))
        counts.num_examples += 1
    return counts


def read_alpha(counted: CountRef, place: Place) -> Tensor:
    """alpha_V, float64."""
    folder = place.fetch(counted.artifact)
    return torch.from_numpy(np.load(folder / "alpha.npy", allow_pickle=False))
