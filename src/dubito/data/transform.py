"""Turn tables into tensors with a transform that is fitted to the training rows and saved as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dubito.core.arguments import checked_arguments
from dubito.core.errors import FileFormatError, InputError
from dubito.data.cells import LARGEST, Cells, Floats, check_size
from dubito.data.columns import CategoryColumn, Column, DateColumn, NumberColumn, fit_column
from dubito.data.dataset import Standardizer, Task
from dubito.data.describe import MAX_LEVELS, TableDescription, describe_table
from dubito.data.kinds import class_levels
from dubito.data.table import Table
from dubito.data.table_module import TableModule
from dubito.data.tally import Tally
from dubito.data.text_column import TextColumn

_FORMAT = "dubito.table/2"
_KINDS: dict[str, type[Column]] = {
    "number": NumberColumn, "category": CategoryColumn, "date": DateColumn, "text": TextColumn
}  # fmt: skip


@dataclass(frozen=True)
class TableTransform:
    """The transform of table rows into inputs and targets.

    - Numbers and booleans (0 and 1) are standardised; a missing one becomes the median (of booleans: the mode).
    - Categories become one 0/1 feature per level; rare levels share one. A missing one becomes the most frequent level.
      A level that the training rows did not have becomes all zeros.
    - Free text becomes one feature per frequent word; see `TextColumn`.
    - Dates become days, year, month and weekday, each standardised; a missing one becomes the median date.
    - A column of numbers or dates but for at most one cell in ten is one of numbers or dates; the stray cells count as
      missing, with a warning that names the column, the row and the value. Name it in `categorical` to keep its levels.
    - A column that has missing values in the training rows gets one more feature that says where.
    - Columns that are empty, never vary in the training rows, or look like ids are left out.

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
    @checked_arguments
    def fit(
        cls,
        table: Any,
        target: str,
        *,
        task: Task | None = None,
        class_names: Sequence[str] | None = None,
        categorical: Sequence[str] = (),
        dates: Mapping[str, str] | None = None,
        ignore: Sequence[str] = (),
        keep: Sequence[str] = (),
        max_levels: int = MAX_LEVELS,
        standardize: bool = True,
        description: TableDescription | None = None,
    ) -> TableTransform:
        """Fit the transform to the training rows.

        Args:
            table: The training rows: a `Table`, a pandas frame, or a dict of columns.
            target: The column to predict; it must have no missing values.
            task: If None, numbers with more than 20 different values or with fractions mean regression, all else
                classification.
            class_names: The classes, if the training rows may lack some of them.
            categorical: Columns of numbers that are names of categories.
            dates: Columns of text that are dates, with their format (`{"day": "%d.%m.%Y"}`); usual formats are
                recognised.
            ignore: Columns to leave out.
            keep: Columns to use although they look like ids.
            max_levels: Only the most frequent levels of a category get a feature of their own.
            standardize: Whether numbers, dates and targets are standardised.
            description: What `describe_table` understood of a larger table that these rows are part of; it replaces
                the arguments that say what a column holds.
        """
        table = checked_table(table, target)
        described = description or describe_table(
            table, target, task=task, categorical=categorical, dates=dates, ignore=ignore, keep=keep
        )
        fitted = [
            fit_column(table[column.name], column, max_levels=max_levels, standardize=standardize)
            for column in described.columns
            if column.used
        ]
        columns = tuple(column for column in fitted if column is not None)
        if not columns:
            raise _nothing_left(described, target)
        assert described.task is not None
        if described.task == "classification":
            return cls(columns, target, "classification", tuple(class_names or class_levels(table[target])))
        if not standardize:
            return cls(columns, target, "regression")
        loc, scale = Standardizer.fit(_values(table[target]))
        return cls(columns, target, "regression", (), loc.item(), scale.item())

    @cached_property
    def feature_names(self) -> tuple[str, ...]:
        """Return the names of the input features, in order."""
        return tuple(name for column in self.columns for name in column.feature_names)

    @cached_property
    def column_names(self) -> tuple[str, ...]:
        """Return the names of the columns in use, in order."""
        return tuple(column.name for column in self.columns)

    def spans(self) -> dict[str, slice]:
        """Return which features each column becomes."""
        return self._spans

    @cached_property
    def _spans(self) -> dict[str, slice]:
        found, start = {}, 0
        for column in self.columns:
            stop = start + len(column.feature_names)
            found[column.name], start = slice(start, stop), stop
        return found

    @checked_arguments
    def encode(self, table: Any, tally: Tally | None = None) -> Tensor:
        """Return float32 inputs `[N, features]`; the target and columns that were not fitted are ignored.

        Args:
            table: A `Table`, a pandas frame, or a dict of columns.
            tally: Counts cells that the training rows did not prepare for. With it stray cells count as missing;
                without it more than a few of them are an error.
        """
        table = Table.of(table)
        missing = [] if table.names == self.column_names else [n for n in self.column_names if n not in table]
        if missing:
            names = ", ".join(map(repr, missing))
            raise InputError(f"The table lacks the column(s) {names}; it has {table.listed()}.")
        if len(table) == 0:
            raise InputError("The table has no rows; there is nothing to transform.")
        if tally is not None:
            tally.start(len(table))
        inputs = np.zeros((len(table), len(self.feature_names)), dtype=np.float32)
        done = self._encode_plain_numbers(table, inputs, tally)
        for column in self.columns if len(done) < len(self.columns) else ():
            if column.name not in done:
                with np.errstate(over="ignore"):  # the sentence below says more
                    inputs[:, self.spans()[column.name]] = column.encode(table[column.name], tally)
        if not (finite := np.isfinite(inputs).all(axis=0)).all():
            name = self.feature_names[int(finite.argmin())]
            raise InputError(
                f"Feature {name!r} is too large for float32 here, far beyond its training rows: correct it."
            )
        return torch.from_numpy(inputs)

    def _encode_plain_numbers(self, table: Table, inputs: NDArray[np.float32], tally: Tally | None) -> set[str]:
        """Encode all columns at once whose cells are all numbers; return the names of these columns."""
        columns, names, features, learnt = self._numbers
        chosen, values = table.numbers(names)
        low, high, loc, scale = learnt[:, chosen]
        with np.errstate(over="ignore"):
            plain = (np.abs(values) <= LARGEST).all(axis=0)
            encoded = (values - loc) / scale
            inputs[:, features[chosen[plain]]] = encoded[:, plain]
        if tally is not None:
            for place in np.flatnonzero(plain & ((values < low) | (values > high)).any(axis=0)):
                column = columns[chosen[place]]
                tally.count_numbers(table[column.name], values[:, place], column.low, column.high, column.indicator)
        return set(names) if plain.all() and len(chosen) == len(names) else {names[place] for place in chosen[plain]}

    @cached_property
    def _numbers(self) -> tuple[list[NumberColumn], tuple[str, ...], NDArray[np.int64], Floats]:
        """The columns of numbers, their names, their features, and their ends, mean and scale ``[4, columns]``."""
        found = [column for column in self.columns if isinstance(column, NumberColumn) and not column.noise]
        names = tuple(column.name for column in found)
        features = np.array([self.spans()[name].start for name in names], dtype=np.int64)
        learnt = [(column.low, column.high, column.loc, column.scale) for column in found]
        return found, names, features, np.array(learnt, dtype=np.float64).reshape(-1, 4).T  # an unknown end is NaN

    @checked_arguments
    def encode_targets(self, table: Any) -> Tensor:
        """Return the target column as int64 classes `[N]`, or as standardised float32 values `[N, 1]`."""
        cells = checked_table(table, self.target)[self.target]
        if self.task == "regression":
            targets = ((_values(cells) - self.target_loc) / self.target_scale).float()
            if not targets.isfinite().all():
                raise InputError(f"The target {self.target!r} is too large for float32, far beyond its training rows.")
            return targets
        numbers = {name: number for number, name in enumerate(self.class_names)}
        labels = [str(label) for label in cells.labels()]
        unknown = sorted(set(labels) - numbers.keys())
        if unknown:
            known = ", ".join(self.class_names)
            raise InputError(f"The target {self.target!r} holds the unknown class {unknown[0]!r}; known are {known}.")
        return torch.tensor([numbers[label] for label in labels])

    def decode(self, inputs: Tensor) -> dict[str, list[Any]]:
        """Return the columns that `encode` made these inputs of, rounded to six digits, with dates as ISO text.

        What encoding loses stays lost: the level of a rare or an unseen category, and the time of a date.
        """
        features = inputs.cpu().numpy()
        return {column.name: column.decode(features[:, self.spans()[column.name]]) for column in self.columns}

    def texts_of(self, table: Table) -> dict[str, list[str | None]]:
        """Return the columns of free text as they are: `decode` cannot."""
        return {each.name: table[each.name].labels() for each in self.columns if isinstance(each, TextColumn)}

    def to_module(self) -> TableModule:
        """Return the encoding as a network that takes rows of one number per column, for an exported file."""
        return TableModule(self.columns)

    def widened(self, table: Any) -> TableTransform:
        """Return the transform with the ranges of these rows and of the training rows together."""
        table = Table.of(table)
        columns = tuple(column.widened(table[column.name]) for column in self.columns)
        return dataclasses.replace(self, columns=columns)

    def to_json(self) -> str:
        """Return the transform as JSON, to be saved with the model."""
        kinds = {column_type: kind for kind, column_type in _KINDS.items()}
        content = dataclasses.asdict(self)
        content["columns"] = [{"kind": kinds[type(c)], **dataclasses.asdict(c)} for c in self.columns]
        return json.dumps({"format": _FORMAT, **content})

    @classmethod
    @checked_arguments
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


def checked_table(table: Any, target: str) -> Table:
    """Return the table; raise if it has no rows or an incomplete target column."""
    table = Table.of(table)
    if target not in table:
        numbers = all(name.replace(".", "").lstrip("-").isdecimal() for name in table.names)
        hint = ": its first line seems to hold data in place of column names, so add a line of names" if numbers else ""
        raise InputError(f"The table has no target column {target!r}; it has {table.listed()}{hint}.")
    if len(table) == 0:
        raise InputError("The table has no rows; there is nothing to learn from.")
    if table[target].missing().any():
        raise InputError(f"The target column {target!r} has missing values: leave those rows out.")
    return table


def _nothing_left(described: TableDescription, target: str) -> InputError:
    others = [column for column in described.columns if column.name != target and column.remark]
    words = [f"{column.name!r} ({column.remark.partition(': left out')[0]})" for column in others[:5]]
    rest = f"; left out: {', '.join(words)}" if words else ""
    return InputError(f"The table has no column beside {target!r} that varies; there is nothing to learn from{rest}.")


def _values(cells: Cells) -> Tensor:
    numbers = cells.without_strays(cells.numbers(), "numbers")
    if np.isnan(numbers).any():
        row, value = cells.first(np.isnan(numbers))
        raise InputError(f"The target {cells.name!r} must be a number, but row {row!r} holds {value}.")
    return torch.tensor(check_size(numbers, cells.name))[:, None]


def _as_tuples(content: dict[str, Any]) -> dict[str, Any]:
    def convert(value: Any) -> Any:
        return tuple(convert(item) for item in value) if isinstance(value, list) else value

    return {name: convert(value) for name, value in content.items()}
