"""Which requests an edit cannot honour: no token of theirs is specific to what is forgotten."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import torch
from prefect import task

from grom.config import CollectConfig
from tasks.models import open_rendering
from tasks.place import DataRef, EditRef, ModelRef, Place
from tasks.solve import ALPHA

logger = logging.getLogger(__name__)


@task
def find_unreached(
    model: ModelRef, forget: DataRef, edit: EditRef, collect: CollectConfig, place: Place
) -> tuple[str, ...]:
    """Groups of a forget set without one answer token that the edit moves (alpha = 0 for all).

    Alpha is that of the whole solve, all batches together.  It must be asked while the text is
    there, for statistics are kept by token, not by request.
    """
    rendering, _ = open_rendering(Path(model.folder), text_window=collect.text_window)
    alpha = np.load(place.fetch(edit.artifact) / ALPHA, allow_pickle=False)
    moved_V = torch.from_numpy(alpha) > 0
    reached: dict[str, bool] = {}
    for rendered in rendering.render_all(forget.examples()):
        gold_T = torch.tensor(rendered.ids[rendered.start :])
        hit = bool(moved_V[gold_T].any())
        reached[rendered.group] = reached.get(rendered.group, False) or hit
    unreached = tuple(group for group, hit in reached.items() if not hit)
    if unreached:
        logger.warning(
            "solve: %d of %d requests have no token of their own", len(unreached), len(reached)
        )
    return unreached
