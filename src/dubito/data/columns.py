"""Encode the columns of a table as numbers, with statistics from the training rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dubito.core.errors import InputError
from dubito.data.cells import STRAY, Floats, drop_strays, is_mostly, numbers_of

if TYPE_CHECKING:
    import pandas as pd

ISO_DATE = "ISO8601"
LARGEST = 1e100  # sums of the squares of larger values overflow
_ISO_PATTERN = r"\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}.*)?"


@dataclass(frozen=True)
class NumberColumn:
    """Numbers and booleans (as 0 and 1), standardised; missing ones get the median (of booleans: the mode)."""

    name: str
    fill: float
    loc: float
    scale: float
    indicator: bool

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Return the names of the features that the column becomes."""
        return (self.name, *_indicator_name(self.name, self.indicator))

    def encode(self, series: pd.Series[Any]) -> Floats:
        """Encode values `[N]` as features `[N, features]`."""
        values, missing = _filled(as_numbers(series, self.name), self.fill)
        return _columns([(values - self.loc) / self.scale], missing, self.indicator)


@dataclass(frozen=True)
class CategoryColumn:
    """Categories: one 0/1 feature per level; missing ones get the most frequent level, an unseen one is all zeros."""

    name: str
    levels: tuple[str, ...]
    fill: str
    indicator: bool

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Return the names of the features that the column becomes."""
        return (*(f"{self.name}={level}" for level in self.levels), *_indicator_name(self.name, self.indicator))

    def encode(self, series: pd.Series[Any]) -> Floats:
        """Encode values `[N]` as features `[N, features]`."""
        missing = series.isna().to_numpy()
        labels = np.array([self.fill if absent else as_label(v) for v, absent in zip(series, missing, strict=True)])
        return _columns([(labels == level).astype(np.float64) for level in self.levels], missing, self.indicator)


@dataclass(frozen=True)
class DateColumn:
    """Dates: days since 1970, year, month and weekday, each standardised; missing ones get the median date.

    `parts` holds the name, mean and deviation of those parts that vary in the training rows.
    """

    name: str
    format: str
    fill: float
    parts: tuple[tuple[str, float, float], ...]
    indicator: bool

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Return the names of the features that the column becomes."""
        return (*(f"{self.name}.{part}" for part, _, _ in self.parts), *_indicator_name(self.name, self.indicator))

    def encode(self, series: pd.Series[Any]) -> Floats:
        """Encode values `[N]` as features `[N, features]`."""
        days, missing = _filled(as_days(series, self.name, self.format), self.fill)
        features = [(_DATE_PARTS[part](days) - loc) / scale for part, loc, scale in self.parts]
        return _columns(features, missing, self.indicator)


Column = NumberColumn | CategoryColumn | DateColumn


def fit_column(
    series: pd.Series[Any], name: str, *, categorical: bool, date_format: str | None, max_levels: int
) -> Column | None:
    """Fit the encoding of a column to the training rows; return None if its value never varies."""
    missing = series.isna()
    if missing.all():
        raise InputError(f"Column {name!r} has no value in the training rows: leave it out with ignore=({name!r},).")
    indicator = bool(missing.any())
    kind = "category" if categorical else "date" if date_format else kind_of(series[~missing], name)
    if kind in ("number", "boolean"):
        return _fit_numbers(series, name, kind == "boolean")
    if kind == "date":
        return _fit_dates(series, name, date_format or ISO_DATE)
    counts = Counter(as_label(value) for value in series[~missing])
    if len(counts) == 1 and not indicator:
        return None
    frequent = sorted(counts, key=lambda level: (-counts[level], level))[:max_levels]
    return CategoryColumn(name, tuple(sorted(frequent)), frequent[0], indicator)


def kind_of(values: pd.Series[Any], name: str) -> str:
    """Return the kind of a column, ignoring a few stray cells: number, boolean, date or category."""
    import pandas as pd

    inferred = pd.api.types.infer_dtype(values, skipna=True)
    if inferred == "boolean":
        return "boolean"
    if inferred in ("integer", "floating", "mixed-integer-float", "decimal"):
        return "number"
    if inferred in ("datetime64", "datetime", "date"):
        return "date"
    if inferred in ("timedelta64", "timedelta", "time", "period", "interval", "complex", "bytes"):
        raise InputError(
            f"Column {name!r} holds {inferred} values: turn them into numbers, or leave it out with ignore=."
        )
    if inferred in ("string", "mixed", "mixed-integer") and is_mostly(numbers_of(values)):
        return "number"
    if inferred == "string" and values.str.fullmatch(_ISO_PATTERN).mean() >= 1 - STRAY:
        return "date"
    return "category"


def without_strays(frame: pd.DataFrame, keep: Sequence[str]) -> pd.DataFrame:
    """The frame with numbers and dates in the columns that hold them but for stray cells, except in those to `keep`.

    This looks at all rows: those of one part of the data alone may have no stray cell, and would be text.
    """
    changes: dict[str, Any] = {}
    for name in frame.columns:
        present = frame[name].dropna()
        if name in keep or len(present) == 0 or frame[name].dtype.kind in "biufM":
            continue
        kind = kind_of(present, name)
        if kind == "number" and is_mostly(numbers_of(present)):
            changes[name] = as_numbers(frame[name], name)
        elif kind == "date" and np.isnan(days := as_days(frame[name], name, ISO_DATE)).any():
            changes[name] = frame[name].where(~np.isnan(days))
    return frame.assign(**changes)


def _fit_numbers(series: pd.Series[Any], name: str, boolean: bool) -> NumberColumn | None:
    values = as_numbers(series, name)
    present = values[~np.isnan(values)]
    indicator = len(present) < len(values)
    fill = float(present.mean() >= 0.5) if boolean else float(np.median(present))
    if present.min() == present.max() and not indicator:
        return None
    filled, _ = _filled(values, fill)
    return NumberColumn(name, fill, *_moments(filled), indicator)


def _fit_dates(series: pd.Series[Any], name: str, date_format: str) -> DateColumn | None:
    days = as_days(series, name, date_format)
    indicator = bool(np.isnan(days).any())
    fill = float(np.nanmedian(days))
    filled, _ = _filled(days, fill)
    values = {part: function(filled) for part, function in _DATE_PARTS.items()}
    parts = tuple((part, *_moments(v)) for part, v in values.items() if v.min() != v.max())
    return DateColumn(name, date_format, fill, parts, indicator) if parts or indicator else None


def as_numbers(series: pd.Series[Any], name: str) -> Floats:
    """Return the values as float64, with NaN for missing and stray cells; raise for an infinite value."""
    if series.dtype.kind in "biuf":
        values = series.to_numpy(dtype=np.float64, na_value=np.nan)
    else:  # not by pandas, which reads text only up to a NUL
        values = drop_strays(series, numbers_of(series), name, "numbers")
    if np.isinf(values).any():
        raise InputError(f"Column {name!r} holds an infinite value: replace it or mark it as missing.")
    if (large := np.abs(values) > LARGEST).any():
        raise InputError(
            f"Column {name!r} holds {values[large][0]:g}, beyond {LARGEST:g}: divide it by a constant first."
        )
    return values


def as_label(value: Any) -> str:
    """Return the name of a category; 3 and 3.0 have the same name, since missing values turn integers into floats."""
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))
    return str(value)


def as_days(series: pd.Series[Any], name: str, date_format: str) -> Floats:
    """Return dates as fractional days since 1970-01-01 UTC, with NaN for missing and stray cells."""
    import pandas as pd

    try:
        stamps = pd.to_datetime(series, format=date_format, utc=True, errors="coerce")
    except (TypeError, ValueError) as error:
        raise InputError(f"Column {name!r} must hold dates in the format {date_format!r} ({error}).") from error
    elapsed = stamps.dt.tz_localize(None).to_numpy() - np.datetime64("1970-01-01")
    what = "dates" if date_format == ISO_DATE else f"dates in the format {date_format!r}"
    return drop_strays(series, elapsed / np.timedelta64(1, "D"), name, what)


def _calendar(days: Floats, unit: str) -> Floats:
    """Return whole years or months since January 1970."""
    return np.floor(days).astype("datetime64[D]").astype(f"datetime64[{unit}]").astype(np.float64)


_DATE_PARTS: dict[str, Callable[[Floats], Floats]] = {
    "days": lambda days: days,
    "year": lambda days: _calendar(days, "Y") + 1970,
    "month": lambda days: _calendar(days, "M") % 12 + 1,
    "weekday": lambda days: (np.floor(days) + 3) % 7,  # 1970-01-01 was a Thursday; Monday is 0
}


def _moments(values: Floats) -> tuple[float, float]:
    """Return mean and population standard deviation; that of a constant counts as 1."""
    return float(values.mean()), float(values.std()) if values.min() != values.max() else 1.0


def _filled(values: Floats, fill: float) -> tuple[Floats, NDArray[np.bool_]]:
    missing = np.isnan(values)
    return np.where(missing, fill, values), missing


def _columns(features: list[Floats], missing: NDArray[np.bool_], indicator: bool) -> Floats:
    return np.stack([*features, *([missing.astype(np.float64)] if indicator else [])], axis=1)


def _indicator_name(name: str, indicator: bool) -> tuple[str, ...]:
    return (f"{name} missing",) if indicator else ()
