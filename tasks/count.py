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
from grom.errors import EmptySet, NothingToForget
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

    def write(folder: Path) -> None:
        sets: dict[str, Counts] = {
            "forget": count_tokens(rendering, forget, "all", vocab_size),
            "seen": count_tokens(rendering, retain, "seen", vocab_size),
            "held_out": count_tokens(rendering, retain, "held out", vocab_size),
        }
        if sets["seen"].num_examples == 0:
            raise EmptySet("seen retain", retain.config.uri)
        kept_V, num_background = sets["seen"].counts_V, 0
        if background is not None:
            found = count_tokens(rendering, background, "all", vocab_size)
            kept_V, num_background = kept_V + found.counts_V, found.num_examples
        special = () if suppress_special else rendering.special_ids()
        alpha_V = specificity(sets["forget"].counts_V, kept_V, special)
        forget_counts_V = sets["forget"].counts_V
        num_tokens, suppressed = int(forget_counts_V.sum()), int(forget_counts_V[alpha_V > 0].sum())
        if suppressed == 0:
            raise NothingToForget(num_tokens)
        np.save(folder / "alpha.npy", alpha_V.numpy(), allow_pickle=False)
        summary = {
            "num_forget": sets["forget"].num_examples,
            "num_seen": sets["seen"].num_examples,
            "num_background": num_background,
            "num_held_out": sets["held_out"].num_examples,
            "num_forget_tokens": num_tokens,
            "num_seen_tokens": int(sets["seen"].counts_V.sum()),
            "num_suppressed": suppressed,
            "num_forget_types": int((forget_counts_V > 0).sum()),
        }
        (folder / "counts.json").write_text(json.dumps(summary))

    artifact, _ = place.cached("count", facts, write)
    summary = json.loads((place.fetch(artifact) / "counts.json").read_text())
    logger.info(
        "count: %(num_forget)d forget, %(num_seen)d retain and %(num_held_out)d held-out examples; "
        "%(num_suppressed)d of %(num_forget_tokens)d forget positions have alpha > 0",
        summary,
    )
    return CountRef(artifact=artifact, **summary)


def count_tokens(rendering: Rendering, data: DataRef, part: Part, vocab_size: int) -> Counts:
    """Gold tokens of a set's examples."""
    counts = Counts(torch.zeros(vocab_size, dtype=torch.int64))
    for rendered in rendering.render_all(data.examples(part)):
        gold_T = torch.tensor(rendered.ids[rendered.start :])
        counts.counts_V.index_add_(0, gold_T, torch.ones_like(gold_T))
        counts.num_examples += 1
    return counts


def read_alpha(counted: CountRef, place: Place) -> Tensor:
    """alpha_V, float64."""
    folder = place.fetch(counted.artifact)
    return torch.from_numpy(np.load(folder / "alpha.npy", allow_pickle=False))
