"""Turn tables into tensors with a transform that is fitted to the training rows and saved as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dubito.core.errors import FileFormatError, InputError
from dubito.data.cells import first_stray, is_mostly, numbers_of
from dubito.data.columns import CategoryColumn, Column, DateColumn, NumberColumn, as_label, as_numbers, fit_column
from dubito.data.dataset import Standardizer, Task

if TYPE_CHECKING:
    import pandas as pd

_FORMAT = "dubito.table/1"
_KINDS: dict[str, type[Column]] = {"number": NumberColumn, "category": CategoryColumn, "date": DateColumn}
_MANY = 20


@dataclass(frozen=True)
class TableTransform:
    """The transform of table rows into inputs and targets.

    - Numbers and booleans (0 and 1) are standardised; a missing one becomes the median (of booleans: the mode).
    - Categories become one 0/1 feature per level; a missing one becomes the most frequent level; a level that the
      training rows did not have becomes all zeros.
    - Dates become days, year, month and weekday, each standardised; a missing one becomes the median date.
    - A column of numbers or dates but for at most one cell in ten is one of numbers or dates; the stray cells count as
      missing, with a warning that names the column, the row and the value. Name it in `categorical` to keep its levels.
    - A column that has missing values in the training rows gets one more feature that says where.
    - Columns that never vary in the training rows are dropped.

    Attributes:
        columns: The columns in use, in order, with what was learnt of each.
        target: The name of the target column.
        task: `"classification"` or `"regression"`.
        class_names: The classes in order; empty for regression.
        target_loc: Mean of the training targets; regression only.
        target_scale: Standard deviation of the training targets; regression only.
    """

    columns: tuple[Column, ...]
    target: str
    task: Task
    class_names: tuple[str, ...] = ()
    target_loc: float = 0.0
    target_scale: float = 1.0

    @classmethod
    def fit(
        cls,
        frame: pd.DataFrame,
        target: str,
        *,
        task: Task | None = None,
        class_names: Sequence[str] | None = None,
        categorical: Sequence[str] = (),
        dates: Mapping[str, str] | None = None,
        ignore: Sequence[str] = (),
        max_levels: int = 50,
    ) -> TableTransform:
        """Fit the transform to the training rows.

        Args:
            frame: The training rows.
            target: The column to predict; it must have no missing values.
            task: If None, numbers with more than 20 different values or with fractions mean regression, all else
                classification.
            class_names: The classes, if the training rows may lack some of them.
            categorical: Columns of numbers that are names of categories.
            dates: Columns of text that are dates, with their format (`{"day": "%d.%m.%Y"}`); ISO dates are recognised.
            ignore: Columns to leave out.
            max_levels: Only the most frequent levels of a category get a feature; the others count as unseen.
        """
        frame, dates = checked_frame(frame, target), dates or {}
        unknown = [name for name in (*categorical, *dates, *ignore) if name not in frame.columns]
        if unknown:
            raise InputError(f"The table has no column {unknown[0]!r}; it has {_listed(frame)}.")
        fitted = [
            fit_column(
                frame[name],
                name,
                categorical=name in categorical,
                date_format=dates.get(name),
                max_levels=max_levels,
            )
            for name in frame.columns
            if name != target and name not in ignore
        ]
        columns = tuple(column for column in fitted if column is not None)
        if not columns:
            raise InputError(f"The table has no column beside {target!r} that varies; there is nothing to learn from.")
        task = task or infer_task(frame[target])
        if task == "classification":
            return cls(columns, target, task, tuple(class_names or class_levels(frame[target])))
        loc, scale = Standardizer.fit(_values(frame[target], target))
        return cls(columns, target, task, (), loc.item(), scale.item())

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Return the names of the input features, in order."""
        return tuple(name for column in self.columns for name in column.feature_names)

    def encode(self, frame: pd.DataFrame) -> Tensor:
        """Return float32 inputs `[N, features]`; the target and columns that were not fitted are ignored."""
        frame = frame.rename(columns=str)
        missing = [column.name for column in self.columns if column.name not in frame.columns]
        if missing:
            raise InputError(f"The table lacks the column(s) {', '.join(map(repr, missing))}; it has {_listed(frame)}.")
        if len(frame) == 0:
            raise InputError("The table has no rows; there is nothing to transform.")
        features = np.concatenate([column.encode(frame[column.name]) for column in self.columns], axis=1)
        inputs = torch.from_numpy(features).float()
        if not (finite := inputs.isfinite().all(dim=0)).all():
            name = self.feature_names[int(finite.int().argmin())]
            raise InputError(
                f"Feature {name!r} is too large for float32 here, far beyond its training rows: correct it."
            )
        return inputs

    def encode_targets(self, frame: pd.DataFrame) -> Tensor:
        """Return the target column as int64 classes `[N]`, or as standardised float32 values `[N, 1]`."""
        series = checked_frame(frame, self.target)[self.target]
        if self.task == "regression":
            targets = ((_values(series, self.target) - self.target_loc) / self.target_scale).float()
            if not targets.isfinite().all():
                raise InputError(f"The target {self.target!r} is too large for float32, far beyond its training rows.")
            return targets
        numbers = {name: number for number, name in enumerate(self.class_names)}
        labels = [as_label(value) for value in series]
        unknown = sorted(set(labels) - numbers.keys())
        if unknown:
            known = ", ".join(self.class_names)
            raise InputError(f"The target {self.target!r} holds the unknown class {unknown[0]!r}; known are {known}.")
        return torch.tensor([numbers[label] for label in labels])

    def to_json(self) -> str:
        """Return the transform as JSON, to be saved with the model."""
        kinds = {column_type: kind for kind, column_type in _KINDS.items()}
        content = dataclasses.asdict(self)
        content["columns"] = [{"kind": kinds[type(c)], **dataclasses.asdict(c)} for c in self.columns]
        return json.dumps({"format": _FORMAT, **content})

    @classmethod
    def from_json(cls, text: str) -> TableTransform:
        """Read what `to_json` wrote."""
        try:
            content = json.loads(text)
            if content.pop("format") != _FORMAT:
                raise ValueError(f"its format is not {_FORMAT}")
            columns = tuple(_KINDS[column.pop("kind")](**_as_tuples(column)) for column in content.pop("columns"))
            return cls(columns=columns, **_as_tuples(content))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FileFormatError(f"This JSON was not written by TableTransform.to_json ({error}).") from error


def checked_frame(frame: pd.DataFrame, target: str) -> pd.DataFrame:
    """Return the frame with column names as text; raise if it has no rows or an incomplete target column."""
    frame = frame.rename(columns=str)
    if target not in frame.columns:
        raise InputError(f"The table has no target column {target!r}; it has {_listed(frame)}.")
    if len(frame) == 0:
        raise InputError("The table has no rows; there is nothing to learn from.")
    twice = frame.columns[frame.columns.duplicated()]
    if len(twice):
        raise InputError(f"The table has two columns named {twice[0]!r}: rename one.")
    if frame[target].isna().any():
        raise InputError(f"The target column {target!r} has missing values: leave those rows out.")
    return frame


def infer_task(targets: pd.Series[Any]) -> Task:
    """Return regression for numbers with more than 20 distinct values or with fractions, else classification."""
    import pandas as pd

    inferred = pd.api.types.infer_dtype(targets)
    if inferred not in ("integer", "floating", "mixed-integer-float", "decimal"):
        if is_mostly(found := numbers_of(targets)):
            row, value = first_stray(targets, found)
            raise InputError(
                f"The target column {targets.name!r} holds numbers but for row {row!r}, which holds {value}: correct "
                "it, or say task='classification'."
            )
        return "classification"
    values = targets.to_numpy(dtype=np.float64)
    many = len(np.unique(values)) > _MANY or bool((values != np.round(values)).any())
    return "regression" if many else "classification"


def class_levels(targets: pd.Series[Any]) -> tuple[str, ...]:
    """Return the classes of a target column in ascending order (numbers by value, others by name)."""
    present = targets.unique().tolist()
    if len(present) < 2:
        raise InputError(f"The target has only one class, {as_label(present[0])!r}; classification needs two.")
    try:
        present.sort()
    except TypeError:  # mixed types have no order of their own
        present.sort(key=as_label)
    return tuple(as_label(value) for value in present)


def _values(targets: pd.Series[Any], name: str) -> Tensor:
    return torch.tensor(as_numbers(targets, name))[:, None]


def _listed(frame: pd.DataFrame) -> str:
    names = [repr(name) for name in frame.columns]
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "") or "none"


def _as_tuples(content: dict[str, Any]) -> dict[str, Any]:
    def convert(value: Any) -> Any:
        return tuple(convert(item) for item in value) if isinstance(value, list) else value

    return {name: convert(value) for name, value in content.items()}
