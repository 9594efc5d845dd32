"""Figures with one row for each of several things, or with pictures; like `plots`, they only draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dubito.uses.reporting.plots import INK, MUTED, Look, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH = 3.6  # inches, as of the other figures
_LONGEST = 28  # letters of a label


def shares(
    labels: Sequence[str],
    values: Sequence[float],
    *,
    xlabel: str,
    look: Look | None = None,
    errors: Sequence[tuple[float, float]] | None = None,
    marks: Sequence[float] | None = None,
) -> Figure:
    """Draw one horizontal bar for each label, the first on top, on an axis from 0 to 1.

    Args:
        labels: The names of the rows.
        values: The shares.
        xlabel: What is shown.
        look: How the bars are drawn.
        errors: The lower and the upper end of each share, if it is uncertain.
        marks: A value of each row to compare with, drawn as a line across its bar.
    """
    look = look or Look()
    heights = -np.arange(len(labels))
    with style():
        figure, axes = _rows(len(labels))
        axes.barh(heights, values, height=0.68, color=look.color, alpha=0.85)
        if errors is not None:
            low, high = np.asarray(errors).T
            axes.hlines(heights, low, high, color=INK, linewidth=1)
        if marks is not None:
            axes.vlines(marks, heights - 0.42, heights + 0.42, color=INK, linewidth=1.6)
        axes.set(xlim=(0, 1), ylim=(0.5 - len(labels), 0.5), xlabel=xlabel, yticks=heights)
        axes.set_yticklabels([_short(label) for label in labels], parse_math=False)
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
    return figure


def pictures(images: Sequence[Any], captions: Sequence[str], columns: int = 5) -> Figure:
    """Draw pictures ``[H, W]`` (dark on light) or ``[H, W, 3]``, each with its caption below.

    Args:
        images: Arrays of numbers from 0 to 1.
        captions: A caption for each, of some lines of about 11 letters.
        columns: How many stand side by side.
    """
    from matplotlib.figure import Figure

    lines = -(-len(images) // columns)
    text = 0.06 + 0.24 * max(caption.count("\n") + 1 for caption in captions)  # inches below each picture
    with style():
        figure = Figure((1.15 * columns, (1.13 + text) * lines))
        for place, (image, caption) in enumerate(zip(images, captions, strict=True), 1):
            axes = figure.add_subplot(lines, columns, place)
            axes.imshow(np.asarray(image), cmap="gray_r", interpolation="nearest", vmin=0, vmax=1)
            axes.set_axis_off()
            axes.set_title(caption, y=-0.08, va="top", fontsize=13, parse_math=False, linespacing=1.25)
        bottom = text / (1.13 + text) / lines
        figure.subplots_adjust(left=0.01, right=0.99, top=0.99, bottom=bottom, wspace=0.1, hspace=text / 1.13)
    return figure


def _rows(count: int) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure((_WIDTH, 0.75 + 0.27 * count), layout="constrained")
    axes = figure.subplots()
    axes.axvline(0, color=MUTED, linewidth=1)
    return figure, axes


def _short(label: str) -> str:
    return label if len(label) <= _LONGEST else f"{label[: _LONGEST - 1]}…"
