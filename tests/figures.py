"""How tests look at figures: the PNG on disk, and the figure that it was made from."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D


def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved from here on."""
    figures: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *args: Any, **options: Any) -> None:
        figures.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def size_of(path: Path) -> tuple[int, int]:
    """Width and height in pixels of a PNG that has something on it."""
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert 5_000 < len(content) < 300_000
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def xy(line: Line2D) -> list[tuple[float, float]]:
    """The points of a line."""
    return [(float(x), float(y)) for x, y in np.asarray(line.get_xydata())]


def words_on(axes: Axes) -> list[str]:
    """The labels inside a panel."""
    return [text.get_text() for text in axes.texts]


def title_of(figure: Figure) -> str:
    """The finding."""
    return str(figure.get_suptitle())
