"""Decide what a column holds: numbers, booleans, dates, categories or free text; and whether it looks like an id."""

from __future__ import annotations

import datetime
import re
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dubito.core.errors import InputError
from dubito.data.cells import STRAY, Cells
from dubito.data.dates import ISO_DATE, as_datetimes, date_format
from dubito.data.text_column import is_free_text
from dubito.data.text_file import ROW_NUMBERS

Kind = Literal["number", "boolean", "date", "category", "text"]

_WRONG = {"timedelta", "time", "period", "interval", "complex", "bytes"}
_ID_NAME = re.compile(r"(?:^|[\W_])(?:id|uuid|guid|index|idx|row|rownum|rownames|key)$|[a-z](?:Id|ID|Key)$", re.ASCII)
# From so many rows on, texts that are all different look like ids.
_MANY_ROWS = 20
_NEARLY_ALL = 0.95


def kind_of(cells: Cells) -> tuple[Kind, str | None]:
    """Return what a column holds, apart from a few stray cells, and the format of its dates."""
    values = cells.values
    if values.dtype.kind in "fbM":
        return {"f": ("number", None), "b": ("boolean", None), "M": ("date", ISO_DATE)}[values.dtype.kind]  # type: ignore[return-value]
    present = values[~cells.missing()]
    words = np.fromiter((isinstance(value, str) for value in present), bool, len(present))
    if not words.any():
        return _kind_of_objects(present, cells)
    if cells.is_boolean():
        return ("boolean", None) if cells.decimal else ("category", None)
    unread = float(np.isnan(cells.numbers()).sum() - (len(values) - len(present))) / len(present)
    # Text that a program gave is meant as text, unless it is what is left of a column with stray cells.
    if unread <= STRAY and (cells.decimal is not None or unread > 0 or not words.all()):
        return "number", None
    if words.all() and (found := date_format(list(present), STRAY)):
        return "date", found
    return ("text" if words.all() and is_free_text(present.tolist()) else "category"), None


def typed(cells: Cells) -> NDArray[Any]:
    """Return the values of a column as numbers, booleans or dates, where it holds these and nothing else."""
    missing = cells.missing()
    if missing.all():
        return np.full(len(cells), np.nan)
    kind, form = kind_of(cells)
    if kind == "number" and not (np.isnan(found := cells.numbers()) & ~missing).any():
        return found
    if kind == "boolean" and not missing.any():
        return cells.numbers(words=True) > 0
    if kind == "date" and not (np.isnan(days := cells.days(form or ISO_DATE)) & ~missing).any():
        return as_datetimes(days)
    values = cells.values.copy()
    if values.dtype.kind == "O":
        values[missing] = None
    return values


def looks_like_id(cells: Cells, kind: str) -> bool:
    """Return whether a column names its rows: row numbers, or different texts or numbers in (nearly) all rows."""
    if cells.name == ROW_NUMBERS:
        return True
    if kind == "category":
        present = [label for label in cells.labels() if label is not None]
        return len(present) >= _MANY_ROWS and len(set(present)) >= _NEARLY_ALL * len(present)
    if kind != "number" or not _ID_NAME.search(cells.name):
        return False
    numbers = cells.numbers()
    numbers = numbers[~np.isnan(numbers)]
    whole = bool((numbers == np.round(numbers)).all())
    return whole and len(numbers) > 1 and len(np.unique(numbers)) == len(numbers)


def looks_like_row_numbers(cells: Cells, kind: str) -> bool:
    """Return whether a column counts its rows, whatever its name."""
    if kind != "number" or len(cells) < _MANY_ROWS:
        return False
    steps = np.diff(cells.numbers())
    return bool((steps == 1).all())


def _kind_of_objects(present: NDArray[Any], cells: Cells) -> tuple[Kind, str | None]:
    kinds = {type(value) for value in present}
    if all(issubclass(kind, bool | np.bool_) for kind in kinds):
        return "boolean", None
    if all(issubclass(kind, datetime.date | np.datetime64) for kind in kinds):
        return "date", ISO_DATE
    wrong = sorted({kind.__name__.lower().rstrip("0123456789") for kind in kinds} & _WRONG)
    if wrong and np.isnan(cells.numbers()[~cells.missing()]).mean() > STRAY:
        raise InputError(
            f"Column {cells.name!r} holds {wrong[0]} values: turn them into numbers, or leave it out with ignore=."
        )
    unread = np.isnan(cells.numbers()[~cells.missing()]).mean() if len(present) else 1.0
    return ("number" if unread <= STRAY else "category"), None
