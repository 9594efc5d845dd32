"""Decide what predicting a column means: a number, or one of some classes."""

from __future__ import annotations

import numpy as np

from dubito.core.errors import InputError
from dubito.data.cells import Cells
from dubito.data.dataset import Task

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
