"""Decide what a column holds, whether it looks like an id, and what predicting it means: a number, or a class."""

from __future__ import annotations

import datetime
import re
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dubito.core.errors import InputError
from dubito.data.cells import STRAY, Cells
from dubito.data.dataset import Task
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


# Numbers with more different values, or with fractions, are predicted as numbers.
MANY_VALUES = 20


def describe_target(cells: Cells, kind: str | None, task: Task | None) -> tuple[Task, str]:
    """Return the task of a target column, and how to say it; raise where no task fits."""
    if kind is None:
        raise InputError(f"The target column {cells.name!r} has no values: choose another target.")
    task = task or infer_task(cells, kind)
    if task == "regression":
        numbers = cells.numbers()
        if len(np.unique(numbers[~np.isnan(numbers)])) == 1:
            raise InputError(f"The target column {cells.name!r} is always {numbers[0]:g}: there is nothing to predict.")
        return task, "target: a number"
    names = class_levels(cells)
    return task, f"target: {len(names)} classes"


def infer_task(cells: Cells, kind: str) -> Task:
    """Return regression for numbers with more than 20 different values or with fractions, else classification."""
    name, numbers, missing = cells.name, cells.numbers(), cells.missing()
    stray = np.isnan(numbers) & ~missing
    if kind == "date":
        raise InputError(
            f"The target column {name!r} holds dates, but only numbers and classes can be predicted: turn it into a "
            "number first, such as the days since a fixed date."
        )
    if kind == "number" and stray.any():
        row, value = cells.first(stray)
        raise InputError(
            f"The target column {name!r} holds numbers but for row {row!r}, which holds {value}: correct it, or say "
            "that the task is classification."
        )
    if kind == "number":
        present = numbers[~missing]
        many = len(np.unique(present)) > MANY_VALUES or bool((present != np.round(present)).any())
        return "regression" if many else "classification"
    labels = {label for label in cells.labels() if label is not None}
    if len(labels) > max(MANY_VALUES, 0.5 * int((~missing).sum())):
        raise InputError(
            f"The target column {name!r} holds {len(labels):,} different texts in {int((~missing).sum()):,} rows, such "
            f"as {min(labels)!r}, which are neither numbers nor classes: choose another target, correct them, or say "
            "that the task is classification."
        )
    return "classification"


def class_levels(cells: Cells) -> tuple[str, ...]:
    """Return the classes of a target column in ascending order (numbers by value, others by name)."""
    present = {label for label in cells.labels() if label is not None}
    if len(present) < 2:
        only = next(iter(present), "")
        raise InputError(f"The target {cells.name!r} has only one class, {only!r}: there is nothing to predict.")
    return tuple(sorted(present, key=_order))


def _order(label: str) -> tuple[int, float, str]:
    try:
        return 0, float(label), label
    except ValueError:
        return 1, 0.0, label
