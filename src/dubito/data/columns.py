"""Encode the columns of a table as numbers, with statistics from the training rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dubito.core.errors import InputError
from dubito.data.cells import Cells, Flags, Floats, check_size
from dubito.data.dates import ISO_DATE, as_text
from dubito.data.describe import ColumnDescription
from dubito.data.tally import Tally
from dubito.data.text_column import TextColumn

OTHER_LEVELS = "other levels"


@dataclass(frozen=True)
class NumberColumn:
    """Numbers and booleans (as 0 and 1), standardised; missing ones get the median (of booleans: the mode).

    `low` and `high` are the ends of the training rows. `noise` says that these are the known standard deviations of the
    targets, which must be positive in every row, and have no usual range.
    """

    name: str
    fill: float
    loc: float
    scale: float
    indicator: bool
    boolean: bool = False
    low: float | None = None
    high: float | None = None
    noise: bool = False

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Return the names of the features that the column becomes."""
        return (self.name, *_indicator_name(self.name, self.indicator))

    def ranges(self) -> list[tuple[float, float]]:
        """Return the ends of each feature in the training rows."""
        ends = (None, None) if self.noise else (self.low, self.high)
        return [_encoded_range(*ends, self.loc, self.scale), *[(0.0, 1.0)] * self.indicator]

    def widened(self, cells: Cells) -> NumberColumn:
        """Return the column with the range of these cells and of the training rows together."""
        return replace(self, **_joint_range(self.low, self.high, cells.numbers(words=self.boolean)))

    @property
    def holds(self) -> str:
        """What the cells must be, in words."""
        return "true or false" if self.boolean else "numbers"

    def encode(self, cells: Cells, tally: Tally | None = None) -> Floats:
        """Encode values `[N]` as features `[N, features]`; a tally counts odd cells."""
        found = cells.numbers(words=self.boolean)
        if self.noise and not (found > 0).all():
            row, value = cells.first(~(found > 0))
            raise InputError(f"The noise column {self.name!r} must be positive, but row {row!r} holds {value}.")
        values = check_size(cells.without_strays(found, self.holds, strict=tally is None), self.name)
        if tally is not None:
            tally.count_numbers(cells, values, self.low, self.high, self.indicator)
        filled, missing = _filled(values, self.fill)
        return _columns([(filled - self.loc) / self.scale], missing, self.indicator)

    def decode(self, features: Floats) -> list[Any]:
        """Return the values of features, but for rounding; None where they were missing."""
        values = features[:, 0].astype(np.float64) * self.scale + self.loc
        found = [value >= 0.5 if self.boolean else float(f"{value:.6g}") for value in values.tolist()]
        return _with_missing(found, features, self.indicator)


@dataclass(frozen=True)
class CategoryColumn:
    """Categories: one 0/1 feature per level, and one for all `rare` levels, of which each has too few rows.

    A missing one gets the most frequent level where training rows had missing ones too. Otherwise it is all zeros, as
    is a level that the training rows did not have. `shares` are the shares of the levels in the training rows.
    """

    name: str
    levels: tuple[str, ...]
    fill: str
    indicator: bool
    rare: tuple[str, ...] = ()
    shares: tuple[float, ...] = ()
    holds: ClassVar[str] = "categories"

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Return the names of the features that the column becomes."""
        rare = (f"{self.name}={OTHER_LEVELS}",) if self.rare else ()
        return (*(f"{self.name}={v}" for v in self.levels), *rare, *_indicator_name(self.name, self.indicator))

    @property
    def num_levels(self) -> int:
        """Return the number of features that stand for levels."""
        return len(self.levels) + bool(self.rare)

    def ranges(self) -> list[tuple[float, float]]:
        """Return the ends of each feature in the training rows."""
        return [(0.0, 1.0)] * len(self.feature_names)

    def widened(self, cells: Cells) -> CategoryColumn:
        """Return the column itself: a new level has no feature."""
        return self

    def encode(self, cells: Cells, tally: Tally | None = None) -> Floats:
        """Encode values `[N]` as features `[N, features]`; a tally counts odd cells."""
        places = {level: place for place, level in enumerate(self.levels)} | dict.fromkeys(self.rare, len(self.levels))
        labels = cells.labels()
        missing = np.fromiter((label is None for label in labels), bool, len(labels))
        known = np.array([places.get(label, -1) if label is not None else -2 for label in labels], dtype=np.int64)
        if tally is not None:
            tally.count_levels(cells, known == -1, missing, self.indicator)
        if self.indicator:
            known[missing] = places[self.fill]
        one_hot = np.zeros((len(labels), self.num_levels))
        rows = np.flatnonzero(known >= 0)
        one_hot[rows, known[rows]] = 1
        return _columns(list(one_hot.T), missing, self.indicator)

    def decode(self, features: Floats) -> list[Any]:
        """Return the levels of features; None where they were missing, or a level that training rows did not have."""
        names = (*self.levels, OTHER_LEVELS)
        one_hot = features[:, : self.num_levels]
        found = [names[place] if any_level else None
                 for place, any_level in zip(one_hot.argmax(1), one_hot.max(1) > 0, strict=True)]  # fmt: skip
        return _with_missing(found, features, self.indicator)


@dataclass(frozen=True)
class DateColumn:
    """Dates: days since 1970, year, month and weekday, each standardised; missing ones get the median date.

    `parts` holds the name, mean and deviation of those parts that vary in the training rows; `low` and `high` are the
    first and the last day of these rows.
    """

    name: str
    format: str
    fill: float
    parts: tuple[tuple[str, float, float], ...]
    indicator: bool
    low: float | None = None
    high: float | None = None

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Return the names of the features that the column becomes."""
        return (*(f"{self.name}.{part}" for part, _, _ in self.parts), *_indicator_name(self.name, self.indicator))

    def ranges(self) -> list[tuple[float, float]]:
        """Return the ends of each feature in the training rows; months and weekdays have none: they come again."""
        ends = {"days": (self.low, self.high)}
        if self.low is not None and self.high is not None:
            first, last = _DATE_PARTS["year"](np.array([self.low, self.high])).tolist()
            ends["year"] = (first, last)
        found = [_encoded_range(*ends.get(part, (None, None)), loc, scale) for part, loc, scale in self.parts]
        return [*found, *[(0.0, 1.0)] * self.indicator]

    def widened(self, cells: Cells) -> DateColumn:
        """Return the column with the range of these cells and of the training rows together."""
        return replace(self, **_joint_range(self.low, self.high, cells.days(self.format)))

    @property
    def holds(self) -> str:
        """What the cells must be, in words."""
        return "dates" if self.format == ISO_DATE else f"dates in the format {self.format!r}"

    def encode(self, cells: Cells, tally: Tally | None = None) -> Floats:
        """Encode values `[N]` as features `[N, features]`; a tally counts odd cells."""
        values = cells.without_strays(cells.days(self.format), self.holds, strict=tally is None)
        if tally is not None:
            tally.count_numbers(cells, values, self.low, self.high, self.indicator)
        days, missing = _filled(values, self.fill)
        features = [(_DATE_PARTS[part](days) - loc) / scale for part, loc, scale in self.parts]
        return _columns(features, missing, self.indicator)

    def decode(self, features: Floats) -> list[Any]:
        """Return the dates of features as ISO text; None where they were missing."""
        days = np.full(len(features), self.fill)
        for place, (part, loc, scale) in enumerate(self.parts):
            if part == "days":
                days = features[:, place].astype(np.float64) * scale + loc
        found = [as_text(day + 1e-2) for day in days.tolist()]  # float32 may round to the evening before
        return _with_missing(found, features, self.indicator)


Column = NumberColumn | CategoryColumn | DateColumn | TextColumn


def fit_column(
    cells: Cells, described: ColumnDescription, *, max_levels: int, standardize: bool, max_rare: int = 10_000
) -> Column | None:
    """Fit the encoding of a column to the training rows; return None if these are empty or never vary."""
    missing = cells.missing()
    if missing.all():
        return None
    if described.kind == "text":
        return TextColumn.fit(cells)
    if described.kind == "category":
        return _fit_levels(cells, max_levels, max_rare)
    values = cells.without_strays(described.values_of(cells), described.holds)
    if np.isnan(values).all():
        return None
    if described.kind == "date":
        return _fit_dates(values, cells.name, described.date_format or ISO_DATE, standardize)
    return _fit_numbers(check_size(values, cells.name), cells.name, described.is_boolean, standardize)


def _fit_levels(cells: Cells, max_levels: int, max_rare: int) -> CategoryColumn | None:
    labels = cells.labels()
    counts = Counter(label for label in labels if label is not None)
    indicator = sum(counts.values()) < len(labels)
    if len(counts) == 1 and not indicator:
        return None
    ordered = sorted(counts, key=lambda level: (-counts[level], level))
    levels, rare = tuple(sorted(ordered[:max_levels])), tuple(ordered[max_levels:][:max_rare])
    total = sum(counts.values())
    shares = [counts[level] / total for level in levels]
    return CategoryColumn(
        cells.name, levels, ordered[0], indicator, rare, (*shares, *([1 - sum(shares)] if rare else []))
    )


def _fit_numbers(values: Floats, name: str, boolean: bool, standardize: bool) -> NumberColumn | None:
    present = values[~np.isnan(values)]
    indicator = len(present) < len(values)
    fill = float(present.mean() >= 0.5) if boolean else float(np.median(present))
    low, high = float(present.min()), float(present.max())
    if low == high and not indicator:
        return None
    filled, _ = _filled(values, fill)
    return NumberColumn(name, fill, *_moments(filled, standardize), indicator, boolean, low, high)


def _fit_dates(days: Floats, name: str, date_format: str, standardize: bool) -> DateColumn | None:
    indicator = bool(np.isnan(days).any())
    fill, low, high = (float(function(days)) for function in (np.nanmedian, np.nanmin, np.nanmax))
    filled, _ = _filled(days, fill)
    values = {part: function(filled) for part, function in _DATE_PARTS.items()}
    parts = tuple((part, *_moments(v, standardize)) for part, v in values.items() if v.min() != v.max())
    return DateColumn(name, date_format, fill, parts, indicator, low, high) if parts or indicator else None


def _calendar(days: Floats, unit: str) -> Floats:
    """Return whole years or months since January 1970."""
    return np.floor(days).astype("datetime64[D]").astype(f"datetime64[{unit}]").astype(np.float64)


_DATE_PARTS: dict[str, Callable[[Floats], Floats]] = {
    "days": lambda days: days,
    "year": lambda days: _calendar(days, "Y") + 1970,
    "month": lambda days: _calendar(days, "M") % 12 + 1,
    "weekday": lambda days: (np.floor(days) + 3) % 7,  # 1970-01-01 was a Thursday; Monday is 0
}


def _moments(values: Floats, standardize: bool) -> tuple[float, float]:
    """Return mean and population standard deviation; that of a constant counts as 1."""
    if not standardize:
        return 0.0, 1.0
    return float(values.mean()), float(values.std()) if values.min() != values.max() else 1.0


def _filled(values: Floats, fill: float) -> tuple[Floats, Flags]:
    missing = np.isnan(values)
    return np.where(missing, fill, values), missing


def _columns(features: list[Floats], missing: NDArray[np.bool_], indicator: bool) -> Floats:
    return np.stack([*features, *([missing.astype(np.float64)] if indicator else [])], axis=1)


def _with_missing(values: list[Any], features: Floats, indicator: bool) -> list[Any]:
    """Return the values with None where the last feature says that one was missing."""
    if not indicator:
        return values
    return [None if missing else value for value, missing in zip(values, features[:, -1] >= 0.5, strict=True)]


def _indicator_name(name: str, indicator: bool) -> tuple[str, ...]:
    return (f"{name} missing",) if indicator else ()


def _joint_range(low: float | None, high: float | None, values: Floats) -> dict[str, Any]:
    present = values[~np.isnan(values)].tolist()
    ends = [*present, *(end for end in (low, high) if end is not None)]
    return {"low": min(ends), "high": max(ends)} if ends else {}


def _encoded_range(low: float | None, high: float | None, loc: float, scale: float) -> tuple[float, float]:
    if low is None or high is None:
        return -np.inf, np.inf
    return (low - loc) / scale, (high - loc) / scale
