"""The controls of the page of `dubito play`: a slider, a list, a date or a text per column, or a canvas for pixels."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dubito.data import TableTransform
from dubito.data.columns import CategoryColumn, Column, DateColumn
from dubito.data.dates import as_text
from dubito.data.text_column import TextColumn

Kind = Literal["number", "boolean", "category", "date", "text"]
# How far a slider goes beyond the training rows, as a share of their range; and how many steps it has at least.
BEYOND, STEPS = 0.3, 100
# How many of the rare levels of a category are offered.
RARE = 50
# The smallest side of a picture, and how many of its pixels may have been left out because they never vary.
SIDE, LEFT_OUT = 4, 0.6
_PIXEL = re.compile(r"(?P<stem>\D*?)_?(?P<first>\d+)(?:[_x](?P<second>\d+))?")


@dataclass(frozen=True)
class Control:
    """One input of the page."""

    name: str  # the column
    kind: Kind  # what the column holds
    start: Any  # the value that the page starts with: the median, or the most frequent
    low: Any = None  # the smallest value of the training rows: a number, or a date as text
    high: Any = None  # the largest
    first: float = 0.0  # the first value of the slider
    last: float = 1.0  # the last value of the slider
    step: float = 1.0  # the step of the slider
    levels: tuple[str, ...] = ()  # the known categories
    may_be_missing: bool = False  # whether training rows lacked the value

    def steps(self, num: int) -> list[float]:
        """Return evenly spaced values of the slider's range."""
        return [self.first + (self.last - self.first) * place / (num - 1) for place in range(num)]


@dataclass(frozen=True)
class Picture:
    """Columns that are the pixels of a picture."""

    height: int  # the number of its rows
    width: int  # the number of its columns
    names: tuple[str | None, ...]  # the column of each pixel, row by row; None for one that is left out
    low: float  # the value of an empty pixel
    high: float  # the value of a full one


def controls_of(encoder: TableTransform, rows: Mapping[str, Sequence[Any]]) -> tuple[Control, ...]:
    """Return one control per column; `rows` are some of the training rows."""
    return tuple(_control(column, rows[column.name]) for column in encoder.columns)


def picture_of(controls: Sequence[Control]) -> Picture | None:
    """Return how the columns are the pixels of a picture, by their names, or None if they are not.

    Known are ``pixel_3_5`` and ``3x5`` (row and column), and ``pixel17`` (a square, row by row).

    >>> pixels = [Control(f"pixel_{i}_{j}", "number", 0.0, 0.0, 16.0) for i in range(4) for j in range(5)]
    >>> picture = picture_of(pixels[1:])
    >>> picture.height, picture.width, picture.names[:2], picture.high
    (4, 5, (None, 'pixel_0_1'), 16.0)
    >>> picture_of([*pixels, Control("age", "number", 3.0)]) is None
    True
    """
    found = [_PIXEL.fullmatch(control.name) for control in controls]
    if len(controls) < SIDE**2 or any(control.kind != "number" for control in controls):
        return None
    matches = [match for match in found if match is not None]
    if len(matches) < len(found) or len({(m["stem"], m["second"] is None) for m in matches}) > 1:
        return None
    places = [(int(m["first"]), int(m["second"] or 0)) for m in matches]
    if matches[0]["second"] is None:
        side = math.isqrt(max(place for place, _ in places)) + 1
        places = [divmod(place, side) for place, _ in places]
        height = width = side
    else:
        base = min(min(place) for place in places) if "x" in controls[0].name else 0  # 1x1 is a first pixel too
        base = min(base, 1)
        places = [(row - base, column - base) for row, column in places]
        height, width = (max(place[axis] for place in places) + 1 for axis in (0, 1))
    if min(height, width) < SIDE or len(places) < (1 - LEFT_OUT) * height * width or len(set(places)) < len(places):
        return None
    names: list[str | None] = [None] * (height * width)
    for (row, column), control in zip(places, controls, strict=True):
        names[row * width + column] = control.name
    low, high = min(control.low for control in controls), max(control.high for control in controls)
    return Picture(height, width, tuple(names), low, high)


def _control(column: Column, values: Sequence[Any]) -> Control:
    missing = column.indicator
    if isinstance(column, TextColumn):
        return Control(column.name, "text", next((value for value in values if value), ""))
    if isinstance(column, CategoryColumn):
        levels = (*column.levels, *column.rare[:RARE])
        return Control(column.name, "category", column.fill, levels=levels, may_be_missing=missing)
    low, high = (column.fill if end is None else end for end in (column.low, column.high))
    if isinstance(column, DateColumn):
        ends = as_text(column.fill), as_text(low), as_text(high)
        return Control(column.name, "date", *ends, may_be_missing=missing)
    if column.boolean:
        return Control(column.name, "boolean", column.fill >= 0.5, may_be_missing=missing)
    whole = all(value is None or float(value).is_integer() for value in (*values, low, high))
    step = 1.0 if whole and high - low < 10_000 else _round_step((high - low or 1.0) / STEPS)
    margin = BEYOND * (high - low or 1.0)
    first, last = (step * math.floor((low - margin) / step), step * math.ceil((high + margin) / step))
    first = max(first, 0.0) if low >= 0 else first  # sizes and counts are not negative
    start = float(f"{column.fill:.6g}")  # a median is a mean of two rows, with all of its digits
    return Control(column.name, "number", start, low, high, first, last, step, may_be_missing=missing)


def _round_step(size: float) -> float:
    """Return 1, 2 or 5 times a power of ten that is at most `size`.

    >>> _round_step(0.034), _round_step(7.0)
    (0.02, 5.0)
    """
    power = 10.0 ** math.floor(math.log10(size))
    return next(factor * power for factor in (5.0, 2.0, 1.0) if factor * power <= size * (1 + 1e-9))
