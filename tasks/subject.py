"""A checkpoint under attack: opened once, and asked for the forget set in every way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from grom.attack_config import AttackConfig, Quantisation
from grom.batches import Batch, batches
from grom.config import CollectConfig, Config
from grom.errors import ConfigError, ExampleTooLong
from grom.evaluate import ExampleScore, mean_score, score_examples
from grom.examples import Example, Rendered, Rendering
from grom.lens import read_layers
from grom.prompts import PREFIXES, with_fact_stated, with_prefix
from grom.prune import pruned
from grom.relearn import relearnt, split_slice
from tasks.models import OpenModel, open_model, pad_id
from tasks.place import DataRef, ModelRef
from tasks.progress import tracked
from tasks.streams import spread

QUANTISED = get_args(Quantisation)
Rewrite = Callable[[Example], Example]


class Probe(Config):
    """A way to measure a model."""

    kind: str
    """plain, rest, relearn, nf4, fp4, int8, int4, prune, paraphrase, prefix, echo, lens."""
    variant: str = ""
    """The share to prune, or the name of the prefix."""

    @property
    def name(self) -> str:
        """`prune 0.3`."""
        return f"{self.kind} {self.variant}".strip()


class CannotProbe(Exception):
    """A probe cannot be applied here; the message says why."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a probe measured."""

    scores: Sequence[ExampleScore]
    details: Mapping[str, Any] = field(default_factory=dict)
    means: Mapping[str, float] = field(default_factory=dict)
    """Means that do not come from the scores."""

    @property
    def summary(self) -> dict[str, float]:
        """Mean answer probability and extraction strength, and the number of examples."""
        mean = mean_score("forget", self.scores)
        return {
            "probability": mean.probability,
            "extraction_strength": mean.extraction_strength,
            "num_examples": mean.num_examples,
            **self.means,
        }


class Subject:
    """A checkpoint with what it is asked.

    Args:
        label: for messages.
        model: the checkpoint; it is opened when the first probe needs it.
        forget: what it was to forget.
        config: attacks.
        collect: batches.
        quantise_head: in quantised loads quantise the LM head as well.
    """

    def __init__(
        self,
        label: str,
        model: ModelRef,
        forget: DataRef,
        config: AttackConfig,
        collect: CollectConfig,
        *,
        quantise_head: bool,
    ) -> None:
        self.label, self.folder, self.forget = label, Path(model.folder), forget
        self.config, self.collect, self.quantise_head = config, collect, quantise_head

    def measure(self, probe: Probe) -> Found:
        """What the model still knows under a probe; its weights are as before afterwards.

        Raises:
            CannotProbe: it cannot be applied to this model or these data.
            ImportError: its library is not installed.
        """
        if probe.kind in QUANTISED:
            return self._quantised(probe)
        how: dict[str, Callable[[Probe], Found]] = {
            "prune": self._pruned,
            "rest": self._rest,
            "relearn": self._relearnt,
            "lens": self._lens,
        }
        return how.get(probe.kind, self._asked)(probe)

    @cached_property
    def _plain(self) -> OpenModel:
        return open_model(self.folder, text_window=self.collect.text_window)

    def _quantised(self, probe: Probe) -> Found:
        try:
            opened = open_model(
                self.folder,
                text_window=self.collect.text_window,
                quantisation=probe.kind,
                quantise_head=self.quantise_head,
            )
        except ConfigError as error:
            raise CannotProbe(str(error)) from error
        scores = self._scores(opened, self._rendered(opened.rendering), probe)
        return Found(scores, {"quantised_modules": list(opened.quantised_modules)})

    def _asked(self, probe: Probe) -> Found:
        """The plain question, the same in other words, behind a prefix, or after the fact."""
        data: DataRef | None = self.forget
        if probe.kind == "paraphrase":
            data = self.forget.paraphrased()
        if data is None:
            raise CannotProbe("the data have no paraphrases; name their column with `paraphrase`")
        rewrites: dict[str, Rewrite] = {
            "prefix": lambda example: with_prefix(example, PREFIXES[probe.variant]),
            "echo": with_fact_stated,
        }
        rendered = self._rendered(self._plain.rendering, data, rewrites.get(probe.kind))
        if not rendered:
            raise CannotProbe("no row has a prompt that can be rewritten within the context")
        return Found(self._scores(self._plain, rendered, probe))

    def _pruned(self, probe: Probe) -> Found:
        rendered = self._rendered(self._plain.rendering)
        with pruned(self._plain.model, float(probe.variant)) as zeroed:
            scores = self._scores(self._plain, rendered, probe)
        return Found(scores, {"zeroed_share": zeroed})

    def _rest(self, probe: Probe) -> Found:
        _, rest = self._sliced()
        return Found(self._scores(self._plain, rest, probe))

    def _relearnt(self, probe: Probe) -> Found:
        chosen, rest = self._sliced()
        training, pad = self.config.relearn.training, pad_id(self._plain.rendering)
        with relearnt(self._plain.model, chosen, training, pad_id=pad) as losses:
            scores = self._scores(self._plain, rest, probe)
        return Found(scores, {"num_relearnt": len(chosen), "losses": losses})

    def _sliced(self) -> tuple[list[Rendered], list[Rendered]]:
        rendered = self._rendered(self._plain.rendering)
        chosen, rest = split_slice(rendered, self.config.relearn.slice_share)
        if not chosen:
            raise CannotProbe("a single example leaves no rest to measure")
        return [rendered[at] for at in chosen], [rendered[at] for at in rest]

    def _lens(self, probe: Probe) -> Found:
        rendered = self._rendered(self._plain.rendering)
        readings = read_layers(self._plain.model, self._batches(self._plain, rendered, probe))
        means = {"probability": readings[-1].probability, "num_examples": len(rendered)}
        return Found([], {"layers": [asdict(reading) for reading in readings]}, means)

    def _rendered(
        self, rendering: Rendering, data: DataRef | None = None, rewrite: Rewrite | None = None
    ) -> list[Rendered]:
        """The examples, spread evenly over the set."""

        def stream() -> Iterator[Rendered]:
            examples = (data or self.forget).examples()
            return (
                render(rendering, examples, rewrite) if rewrite else rendering.render_all(examples)
            )

        total = sum(1 for _ in stream())
        return list(spread(stream(), self.config.max_examples, total))

    def _batches(
        self, opened: OpenModel, rendered: Sequence[Rendered], probe: Probe
    ) -> Iterator[Batch]:
        filled = batches(
            rendered,
            batch_tokens=self.collect.batch_tokens,
            window_examples=self.collect.window_examples,
            pad_id=pad_id(opened.rendering),
        )
        return tracked(filled, f"attack {self.label}: {probe.name}", len(rendered))

    def _scores(
        self, opened: OpenModel, rendered: Sequence[Rendered], probe: Probe
    ) -> list[ExampleScore]:
        return score_examples(opened.model, self._batches(opened, rendered, probe))


def render(
    rendering: Rendering, examples: Iterable[Example], rewrite: Rewrite
) -> Iterator[Rendered]:
    """Examples with rewritten prompts; running text, which has none, and what is too long once
    rewritten are left out."""
    for example in examples:
        if example.prompt is None:
            continue
        try:
            yield rendering.render(rewrite(example))
        except ExampleTooLong:
            continue
