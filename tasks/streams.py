"""From a data set's reference to batches of token ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from grom.batches import Batch, batches
from grom.config import CollectConfig
from grom.examples import Rendered, Rendering
from tasks.models import pad_id
from tasks.place import DataRef, Part


def batch_stream(
    rendering: Rendering,
    data: DataRef,
    config: CollectConfig,
    *,
    part: Part = "all",
    sample: tuple[int, int] | None = None,
    alone: bool = False,
) -> Iterator[Batch]:
    """Batches of a set, filled to the token budget unless `alone`.

    Args:
        rendering: how text becomes tokens.
        data: the set.
        config: budget and window.
        part: all rows, those whose keys the solver sees, or those held out.
        sample: (size, total): that many of so many renderings, spread evenly over the set.
        alone: one rendering per batch, in the order of the set.
    """
    rendered: Iterable[Rendered] = rendering.render_all(data.examples(part))
    if sample is not None:
        rendered = spread(rendered, *sample)
    return batches(
        rendered,
        batch_tokens=1 if alone else config.batch_tokens,
        window_examples=1 if alone else config.window_examples,
        pad_id=pad_id(rendering),
    )


def spread(examples: Iterable[Rendered], size: int, total: int) -> Iterator[Rendered]:
    """`size` of `total` examples, evenly spaced; all of them if there are not more."""
    for number, example in enumerate(examples):
        if total <= size or (number * size) // total != ((number - 1) * size) // total:
            yield example
