"""`Cells`: one column of a table as it was given, before anything is decided about it.

The rule for stray cells: a column of which at least nine in ten present cells are numbers (or dates) is a column of
numbers (or dates); the others, such as a typing error or a damaged byte, count as missing, with a warning that names
the column, the first such row and its value. A column with more of them is text. To keep such a column as categories,
name it in `categorical`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dubito.core.errors import InputError
from dubito.data.dates import ISO_DATE, days_of
from dubito.data.number_text import MISSING, Mark, parse_number

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
# The largest share of a column's present cells that may be stray.
STRAY = 0.1
# Sums of the squares of larger values overflow.
LARGEST = 1e100


@dataclass(frozen=True, eq=False)
class Cells:
    """One column of a table.

    Attributes:
        name: The name of the column.
        values: ``[N]``: float64 with NaN where missing, bool, datetime64, or objects with None where missing.
        decimal: The decimal mark of numbers that are text, in a column of a text file; None if the values have the
            types that a program gave them.
        rows: What the rows are called in messages.
    """

    name: str
    values: NDArray[Any]
    decimal: Mark | None = None
    rows: Sequence[Any] | NDArray[Any] = ()

    @classmethod
    def of(cls, name: str, values: Any, rows: Sequence[Any] | NDArray[Any] = ()) -> Cells:
        """Return the cells of a pandas series, an array or a list."""
        array = _from_pandas(values) if hasattr(values, "isna") and hasattr(values, "dtype") else _as_array(values)
        if array.ndim != 1:
            raise InputError(f"Column {name!r} must be a list of values, but has shape {array.shape}.")
        if array.dtype.kind in "iuf":
            exact = array.dtype.kind == "f" or len(array) == 0 or np.abs(array.astype(np.float64)).max() < 2**53
            array = array.astype(np.float64 if exact else object)
        elif array.dtype.kind not in "bM":
            array = _with_none(array)
        return cls(name, array, None, rows if len(rows) else range(len(array)))

    def __len__(self) -> int:
        return len(self.values)

    @classmethod
    def joined(cls, parts: Sequence[Cells]) -> Cells:
        """Return the cells of several parts of a table, in order."""
        first = parts[0]
        arrays = [part.values for part in parts]
        if len({array.dtype.kind for array in arrays}) > 1:
            arrays = [array if array.dtype.kind == "O" else _with_none(array.astype(object)) for array in arrays]
        rows: Any = range(first.rows[0], first.rows[0] + sum(map(len, arrays)))  # parts of a file count their rows
        return replace(first, values=np.concatenate(arrays), rows=rows)

    def missing(self) -> Flags:
        """Return which cells are empty, or hold one of the words for a missing value."""
        if self.values.dtype.kind == "f":
            return np.isnan(self.values)
        if self.values.dtype.kind == "M":
            return np.isnat(self.values)
        if self.values.dtype.kind == "b":
            return np.zeros(len(self), dtype=bool)
        if self.decimal is None:
            return np.fromiter((value is None for value in self.values), bool, len(self))
        return np.fromiter((value is None or value.strip() in MISSING for value in self.values), bool, len(self))

    def numbers(self, *, words: bool = False) -> Floats:
        """Return the cells as float64, with NaN where a cell is missing or not a number.

        Args:
            words: Whether the texts "true" and "false" are 1 and 0.
        """
        if self.values.dtype.kind in "fb":
            return self.values.astype(np.float64)
        if self.values.dtype.kind == "M":
            return np.full(len(self), np.nan)
        if self.decimal == "." and not words:
            for missing in (None, self.missing):  # one call for all of them is ten times faster
                values = self.values if missing is None else np.where(missing(), "nan", self.values)
                try:
                    return values.astype(np.float64)
                except (ValueError, TypeError, OverflowError):
                    continue
        known = _BOOLEANS if words else {}
        return np.array(
            [known[low] if words and (low := _folded(value)) in known else _number(value, self.decimal)
             for value in self.values],
            dtype=np.float64,
        )  # fmt: skip

    def is_boolean(self) -> bool:
        """Return whether all present cells are true or false, by their type or as words."""
        if self.values.dtype.kind != "O":
            return self.values.dtype.kind == "b"
        return all(_folded(value) in _BOOLEANS for value in self.values[~self.missing()])

    def days(self, date_format: str = ISO_DATE) -> Floats:
        """Return dates as fractional days since 1970-01-01 UTC, with NaN where a cell is missing or no date."""
        return np.full(len(self), np.nan) if self.values.dtype.kind in "fb" else days_of(self.values, date_format)

    def labels(self) -> list[str | None]:
        """Return the cells as names of categories, with None where missing."""
        if self.decimal is None:
            pairs = zip(self.values, self.missing(), strict=True)
            return [None if absent else as_label(value) for value, absent in pairs]
        different = set(self.values)  # few, in most columns of text
        known = {value: None if value is None or value.strip() in MISSING else as_label(value) for value in different}
        return [known[value] for value in self.values]

    def without_strays(self, found: Floats, what: str, *, strict: bool = True) -> Floats:
        """Return what was `found` in the cells, and warn about those that hold something else.

        Args:
            found: The cells as numbers or days, with NaN for stray and missing cells.
            what: What the column must hold, in words.
            strict: Whether more than a tenth of stray cells is an error; otherwise they are missing, without a warning.
        """
        if not strict or not np.isnan(found).any():
            return found
        present = ~self.missing()
        stray = np.isnan(found) & present
        if not stray.any():
            return found
        row, value = self.first(stray)
        if stray.sum() > STRAY * present.sum():
            raise InputError(f"Column {self.name!r} must hold {what}, but row {row!r} holds {value}.")
        rest = "" if stray.sum() == 1 else f" and {stray.sum() - 1} more"
        warnings.warn(
            f"Column {self.name!r} holds {what} but for row {row!r}, which holds {value}{rest}: counted as missing.",
            stacklevel=2,
        )
        return found

    def first(self, chosen: Flags) -> tuple[Any, str]:
        """Return the name of the first chosen row, and its value in words."""
        position = int(np.flatnonzero(chosen)[0])
        row, value = (_plain(one[position]) for one in (self.rows, self.values))
        text = repr(value)
        return row, text if len(text) <= 60 else f"{text[:57]}..."


def _plain(value: Any) -> Any:
    """Return a number of numpy as one of Python."""
    return value.item() if isinstance(value, np.generic) else value


def as_label(value: Any) -> str:
    """Return the name of a category; 3, 3.0 and "3.0" have the same name, since missing values make integers floats.

    >>> as_label(3.0), as_label("3.00"), as_label(" red "), as_label("007")
    ('3', '3', 'red', '007')
    """
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))
    text = str(value).strip()
    whole, point, zeros = text.partition(".")
    return whole if point and zeros and not zeros.strip("0") and whole.lstrip("-").isdecimal() else text


def check_size(values: Floats, name: str) -> Floats:
    """Return the values if they are finite or missing, and not beyond `LARGEST`; raise otherwise."""
    if np.isinf(values).any():
        raise InputError(f"Column {name!r} holds an infinite value: replace it or mark it as missing.")
    if (large := np.abs(values) > LARGEST).any():
        raise InputError(
            f"Column {name!r} holds {values[large][0]:g}, beyond {LARGEST:g}: divide it by a constant first."
        )
    return values


_BOOLEANS = {"true": 1.0, "false": 0.0}


def _folded(value: Any) -> str:
    """Return a truth value or a text in lower case; anything else is no word."""
    return str(value).strip().lower() if isinstance(value, str | bool | np.bool_) else ""


def _number(value: Any, decimal: Mark | None) -> float:
    if isinstance(value, str):
        return np.nan if decimal and value.strip() in MISSING else parse_number(value, decimal or ".")
    if not isinstance(value, int | float | np.integer | np.floating | np.bool_ | Decimal):
        return np.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return np.nan


def _as_array(values: Any) -> NDArray[Any]:
    if isinstance(values, np.ndarray):
        return np.ma.filled(values.astype(object), None) if isinstance(values, np.ma.MaskedArray) else values
    try:
        values = list(values)
    except TypeError as error:
        raise InputError(f"A column is a list of values, not a {type(values).__name__}.") from error
    kinds = set(map(type, values))
    if kinds and kinds <= {int, float}:
        return np.array(values, dtype=np.float64)
    array = objects(values)
    return array.astype(bool) if kinds == {bool} else array


def _from_pandas(series: Any) -> NDArray[Any]:
    kind = series.dtype.kind
    if kind in "iuf":
        return series.to_numpy(dtype=np.float64, na_value=np.nan) if series.isna().any() else series.to_numpy()
    if kind == "M":
        if getattr(series.dtype, "tz", None) is not None:
            series = series.dt.tz_convert("UTC").dt.tz_localize(None)
        return series.to_numpy(dtype="datetime64[us]")
    if kind == "b" and not series.isna().any():
        return series.to_numpy(dtype=bool)
    return objects([None if absent else value for value, absent in zip(series, series.isna(), strict=True)])


def _with_none(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array of objects with None in place of NaN and the like."""
    values = array.tolist() if array.dtype.kind in "US" else array
    absent = (value is None or (isinstance(value, float | np.floating) and value != value) for value in values)
    return objects([None if gone else value for value, gone in zip(values, absent, strict=True)])


def objects(values: Sequence[Any]) -> NDArray[Any]:
    """Return a one-dimensional array of objects, whatever they are."""
    return np.fromiter(values, dtype=object, count=len(values))
