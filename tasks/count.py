"""Stage count: tokenise each set once, and see which tokens are specific to the forget set.

A set's counts are kept by its content, so a new deletion batch does not read old retain text again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prefect import task
from torch import Tensor

from grom.config import CollectConfig
from grom.errors import ConfigError, EmptySet, NothingToForget, Overlap
from grom.examples import Rendering, warn_without_template
from grom.target import specificity
from tasks.codecs import read_json, write_json
from tasks.models import open_rendering
from tasks.place import CountRef, DataRef, ModelRef, Part, Place

logger = logging.getLogger(__name__)
DIGEST_BLOCK = 2**20


@dataclass(frozen=True, slots=True)
class Counts:
    """Gold tokens of a part of a set."""

    counts_V: Tensor
    """int64, up to the largest token that occurs in prompt or answer."""
    num_examples: int
    digests: Path
    """uint64 for each row, in order: the first 16 hex digits of what names it."""

    def padded(self, vocab_size: int, uri: str) -> Tensor:
        """Counts of the whole vocabulary.

        Raises:
            ConfigError: a token lies outside of it.
        """
        if len(self.counts_V) > vocab_size:
            raise ConfigError(
                f"{uri}: the tokenizer gives token {len(self.counts_V) - 1}, and the model "
                f"has {vocab_size}. Use the tokenizer that belongs to the model."
            )
        return torch.nn.functional.pad(self.counts_V, (0, vocab_size - len(self.counts_V)))


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
        forgotten = counts_of(rendering, forget, "all", place)
        seen = counts_of(rendering, retain, "seen", place)
        held_out = counts_of(rendering, retain, "held out", place)
        others = None if background is None else counts_of(rendering, background, "all", place)
        if seen.num_examples == 0:
            raise EmptySet("seen retain", retain.config.uri)
        if held_out.num_examples == 0:
            raise ConfigError(
                f"{retain.config.uri}: no retain group is held out, so utility cannot be measured. "
                "Lower `hold_out.every`, or name more and smaller groups (`retain.group`, "
                "`retain.group_rows`)."
            )
        forget_V = forgotten.padded(vocab_size, forget.config.uri)
        kept_V = seen.padded(vocab_size, retain.config.uri)
        if others is not None and background is not None:
            kept_V = kept_V + others.padded(vocab_size, background.config.uri)
        alpha_V = specificity(forget_V, kept_V, special)
        np.save(folder / "alpha.npy", alpha_V.numpy(), allow_pickle=False)
        summary = summarise(alpha_V, forget_V)
        refuse_overlap(forgotten, ((retain, seen), (retain, held_out)))
        if others is not None and background is not None:
            refuse_overlap(forgotten, ((background, others),))
        summary |= {
            "num_forget": forgotten.num_examples,
            "num_seen": seen.num_examples,
            "num_background": 0 if others is None else others.num_examples,
            "num_held_out": held_out.num_examples,
            "num_seen_tokens": int(seen.counts_V.sum()),
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


def counts_of(rendering: Rendering, data: DataRef, part: Part, place: Place) -> Counts:
    """Gold tokens of a part of a set, counted now unless the store has them."""
    facts = {"rendering": rendering.facts, "data": data.facts, "part": part}

    def write(folder: Path) -> None:
        counts, num_examples = torch.zeros(0, dtype=torch.int64), 0
        with (folder / "digests.bin").open("wb") as digests:
            for example in data.examples(part):
                digests.write(int(example.digest, 16).to_bytes(8, "little"))
                for rendered in rendering.render_all([example]):
                    num_examples += 1
                    if (size := max(rendered.ids) + 1) > len(counts):
                        counts = torch.nn.functional.pad(counts, (0, size - len(counts)))
                    gold_T = torch.tensor(rendered.ids[rendered.start :])
                    counts.index_add_(0, gold_T, torch.ones_like(gold_T))
        np.save(folder / "counts.npy", counts.numpy(), allow_pickle=False)
        write_json(folder / "counted.json", {"num_examples": num_examples})

    artifact, _ = place.cached("count", facts, write)
    folder = place.fetch(artifact)
    counts_V = torch.from_numpy(np.load(folder / "counts.npy", allow_pickle=False))
    num_examples = read_json(folder / "counted.json")["num_examples"]
    return Counts(counts_V, num_examples, folder / "digests.bin")


def refuse_overlap(forgotten: Counts, kept: tuple[tuple[DataRef, Counts], ...]) -> None:
    """Raise Overlap if a row is to be both forgotten and kept: the solver would hold on to the
    very keys that it should move.  Holds the forget set's digests, and a block of the others."""
    wanted = np.fromfile(forgotten.digests, dtype="<u8")
    for data, counts in kept:
        if not any(np.isin(block, wanted).any() for block in _blocks(counts.digests)):
            continue
        found = {f"{digest:016x}" for digest in wanted}
        both = [example.place for example in data.examples() if example.digest in found]
        raise Overlap(data.role, both[0], len(both))


def _blocks(path: Path) -> Iterator[np.ndarray[Any, np.dtype[np.uint64]]]:
    with path.open("rb") as file:
        while len(block := np.fromfile(file, dtype="<u8", count=DIGEST_BLOCK)):
            yield block


def summarise(alpha_V: Tensor, counts_V: Tensor) -> dict[str, int]:
    """What a forget set's counts say.

    Raises:
        NothingToForget: no position has alpha > 0.
    """
    num_tokens, num_suppressed = int(counts_V.sum()), int(counts_V[alpha_V > 0].sum())
    if num_suppressed == 0:
        raise NothingToForget(num_tokens)
    return {
        "num_forget_tokens": num_tokens,
        "num_suppressed": num_suppressed,
        "num_forget_types": int((counts_V > 0).sum()),
    }


def read_alpha(counted: CountRef, place: Place) -> Tensor:
    """alpha_V, float64."""
    folder = place.fetch(counted.artifact)
    return torch.from_numpy(np.load(folder / "alpha.npy", allow_pickle=False))
