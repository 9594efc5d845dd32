"""The values that a figure says where the pointer is, or where the arrow keys have gone: places in it, and words.

Each function reads them off a drawn figure and the curve that it shows. A page turns them into pixels once the figure
has its final layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dubito.fitting.history import evenly_spaced
from dubito.uses.reporting.evaluation import Band, Histogram, Reliability

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST = 100  # stops of one figure


@dataclass(frozen=True)
class Stop:
    """What a figure says at one place.

    Attributes:
        at: The place on the axis along which one moves.
        title: What is there.
        values: Names, places on the other axis (None for nothing to mark) and values as text.
    """

    at: float
    title: str
    values: tuple[tuple[str, float | None, str], ...]


@dataclass(frozen=True, eq=False)
class Readings:
    """The stops of one pair of axes."""

    axes: Axes  # the axes
    stops: tuple[Stop, ...]  # the stops, in their order
    by: str = "x"  # along which axis one moves, ``"x"`` or ``"y"``

    def to_json(self, width: float, height: float) -> dict[str, Any]:
        """Return the readings in the pixels of a drawing of this size, whose layout is final."""
        figure: Any = self.axes.figure
        to_fraction = self.axes.transData - figure.transFigure
        box = self.axes.get_position()

        def pixel(at: float, other: float | None) -> tuple[float, float | None]:
            point = (at, at if other is None else other) if self.by == "x" else (other or at, at)
            x, y = to_fraction.transform([_inside(self.axes, point)])[0]
            x, y = round(float(x) * width, 1), round((1 - float(y)) * height, 1)
            return (x, y) if self.by == "x" else (y, x)

        stops = []
        for stop in self.stops:
            values = [[name, None if at is None else pixel(stop.at, at)[1], text] for name, at, text in stop.values]
            first = next((at for _, at, _ in stop.values if at is not None), None)
            stops.append([pixel(stop.at, first)[0], stop.title, values])
        ends = [box.x0 * width, (1 - box.y1) * height, box.x1 * width, (1 - box.y0) * height]
        return {"by": self.by, "box": [round(end, 1) for end in ends], "stops": stops}


def _inside(axes: Axes, point: tuple[float, float]) -> tuple[float, float]:
    """Return the point, or the nearest one inside of the axes: a logarithmic axis has no place for a zero."""
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    x, y = (0.0 if math.isnan(value) else value for value in point)
    return min(max(x, left), right), min(max(y, bottom), top)


def percent(value: float) -> str:
    """Return a share as text.

    >>> percent(0.9), percent(0.9567)
    ('90 %', '95.7 %')
    """
    return f"{100 * value:.1f}".removesuffix(".0") + " %"


def number(value: float) -> str:
    """Return a number as text.

    >>> number(0.123456), number(12345.678), number(2e20)
    ('0.1235', '12,346', '2e+20')
    """
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"


def along(
    axes: Axes, drawn: Mapping[str, Any], title: Callable[[float], str], text: Callable[[float], str] = number
) -> Readings:
    """Read several lines at the places of the first: their names, and the title of a place."""
    points = {name: np.asarray(line.get_xydata(), dtype=float) for name, line in drawn.items()}
    places = dict.fromkeys(float(x) for line in points.values() for x in line[:, 0])
    ordered = sorted(places)
    chosen = [ordered[i] for i in evenly_spaced(len(ordered), _MOST).tolist()]
    stops = []
    for x in chosen:
        found = {name: _value_at(line, x) for name, line in points.items()}
        values = tuple((name, y, text(y)) for name, y in found.items() if y is not None)
        stops.append(Stop(x, title(x), values))
    return Readings(axes, tuple(stops))


def _value_at(line: Any, x: float) -> float | None:
    """Return the value of a line at a place, between its points if need be; None beyond its ends."""
    if not line[0, 0] <= x <= line[-1, 0]:
        return None
    found = float(np.interp(x, line[:, 0], line[:, 1]))
    return found if math.isfinite(found) else None


def marked_lines(axes: Axes, names: Iterable[str]) -> dict[str, Any]:
    """Return the lines of methods, which have an id, by name."""
    lines = [line for line in axes.lines if str(line.get_gid() or "").endswith("-line")]
    return dict(zip(names, lines, strict=True))


def reliability(figure: Figure, curve: Reliability) -> tuple[Readings, ...]:
    """Read the bins of a reliability diagram."""
    stops = []
    rows = zip(curve.edges, curve.edges[1:], curve.counts, curve.confidence_sums, curve.correct_sums, strict=False)
    for left, right, count, confidence, correct in rows:
        if count:
            values = (
                ("right", correct / count, percent(correct / count)),
                ("claimed", confidence / count, percent(confidence / count)),
                ("answers", None, f"{count:,.0f}"),
            )
            stops.append(Stop((left + right) / 2, f"confidence {left:.2f} to {right:.2f}", values))
    return (Readings(figure.axes[0], tuple(stops)),)


def histogram(figure: Figure, curve: Histogram, right: float) -> tuple[Readings, ...]:
    """Read the shares of the bins that are shown."""
    stops = []
    for place, (low, high) in enumerate(zip(curve.edges, curve.edges[1:], strict=False)):
        counts = {"evaluated data": curve.inside, **curve.outside}
        shares = {name: each[place] / sum(each) for name, each in counts.items()}
        if low < right and any(shares.values()):
            last = place == len(curve.inside) - 1
            title = f"{low:.3g} or more" if last else f"{low:.3g} to {high:.3g}"
            values = tuple((name, share or None, percent(share)) for name, share in shares.items())
            stops.append(Stop((low + high) / 2, title, values))
    return (Readings(figure.axes[0], tuple(stops)),)


def band(figure: Figure, curve: Band) -> tuple[Readings, ...]:
    """Read a regression along its input."""
    stops = []
    for i in evenly_spaced(len(curve.x), _MOST).tolist():
        ends = f"{number(curve.low[i])} to {number(curve.high[i])}"
        values = (
            ("mean", curve.mean[i], number(curve.mean[i])),
            (f"{percent(curve.level)} interval", None, ends),
            ("target", curve.targets[i], number(curve.targets[i])),
        )
        stops.append(Stop(curve.x[i], f"input {number(curve.x[i])}", values))
    return (Readings(figure.axes[0], tuple(stops)),)


def rows(figure: Figure, titles: Sequence[str], values: Sequence[Sequence[tuple[str, float | None, str]]]) -> Any:
    """Read a figure with one row for each title, the first on top, at the heights 0, -1, -2 and so on."""
    stops = [Stop(-place, title, tuple(each)) for place, (title, each) in enumerate(zip(titles, values, strict=True))]
    return (Readings(figure.axes[0], tuple(stops), by="y"),)
