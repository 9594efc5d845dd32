"""Handle stray cells: text in a column of numbers or dates, such as a typing error or a damaged byte.

The rule: a column of which at least nine in ten present cells are numbers (or ISO dates) is a column of numbers (or
dates); the others count as missing, with a warning that names the column, the first such row and its value. A column
with more of them is text. To keep such a column as categories, name it in `categorical`.
"""

from __future__ import annotations

import warnings
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dubito.core.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]
# The largest share of a column's present cells that may be stray.
STRAY = 0.1


def numbers_of(series: pd.Series[Any]) -> Floats:
    """Return the cells as float64, with NaN where a cell is missing or not a number."""
    return np.array([_number(value) for value in series], dtype=np.float64)


def is_mostly(found: Floats) -> bool:
    """Return whether some cells could not be read, but few enough to be strays."""
    return len(found) > 0 and 0 < np.isnan(found).mean() <= STRAY


def drop_strays(series: pd.Series[Any], found: Floats, name: str, what: str) -> Floats:
    """Return the values with NaN for stray cells and warn about the first one; raise if there are too many."""
    stray = np.isnan(found) & ~series.isna().to_numpy()
    if not stray.any():
        return found
    row, value = first_stray(series, found)
    if stray.sum() > STRAY * series.notna().sum():
        raise InputError(f"Column {name!r} must hold {what}, but row {row!r} holds {value}.")
    rest = "" if stray.sum() == 1 else f" and {stray.sum() - 1} more"
    warnings.warn(
        f"Column {name!r} holds {what} but for row {row!r}, which holds {value}{rest}: counted as missing.",
        stacklevel=2,
    )
    return found


def first_stray(series: pd.Series[Any], found: Floats) -> tuple[Any, str]:
    """Return the index of the first cell that could not be read, and its value in words."""
    position = int(np.flatnonzero(np.isnan(found) & ~series.isna().to_numpy())[0])
    row, text = series.index[position], repr(series.iloc[position])
    return getattr(row, "item", lambda: row)(), text if len(text) <= 60 else f"{text[:57]}..."


def _number(value: Any) -> float:
    if not isinstance(value, str | int | float | np.integer | np.floating | np.bool_ | Decimal):
        return np.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return np.nan
