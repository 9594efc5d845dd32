"""`RowTable`: few rows of many columns, such as those of a request; cells are made when they are needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dubito.data.cells import Cells, Floats
from dubito.data.table import Table

_NUMBERS = {int, float}


class RowTable(Table):
    """A table that is given by rows.

    Most columns of most rows are plain numbers. `numbers` returns them without making `Cells` for each column, which
    takes a hundred times longer for the 784 pixels of one picture.

    Args:
        names: The names of the columns.
        rows: The cells of each row, in this order: texts, numbers, truth values and None.

    >>> table = RowTable(("size", "town"), [(50, "Ulm"), (70.5, None)])
    >>> table.numbers(["size"])[1].tolist(), table["town"].missing().tolist()
    ([[50.0], [70.5]], [False, True])
    """

    def __init__(self, names: tuple[str, ...], rows: Sequence[Sequence[Any]]) -> None:
        super().__init__(_RowColumns(names, rows))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns, in order."""
        return self._by_row.names

    @property
    def _by_row(self) -> _RowColumns:
        assert isinstance(self.columns, _RowColumns)
        return self.columns

    def __len__(self) -> int:
        return len(self._by_row.rows)

    def numbers(self, names: Sequence[str]) -> tuple[NDArray[np.int64], Floats]:
        """Return all of these columns; a cell that is not a number is NaN."""
        columns = self._by_row
        found = np.array([_numbers(row) for row in columns.rows], dtype=np.float64).reshape(len(self), -1)
        if tuple(names) != columns.names:
            found = found[:, [columns.places[name] for name in names]]
        return np.arange(len(names)), found


class _RowColumns(Mapping[str, Cells]):
    """The columns of rows, made one by one."""

    def __init__(self, names: tuple[str, ...], rows: Sequence[Sequence[Any]]) -> None:
        self.names, self.rows = names, rows

    @cached_property
    def places(self) -> dict[str, int]:
        """The place of each column in a row."""
        return {name: place for place, name in enumerate(self.names)}

    def __getitem__(self, name: str) -> Cells:
        place = self.places[name]
        return Cells.of(name, [row[place] for row in self.rows])

    def __contains__(self, name: object) -> bool:
        return name in self.places

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def _numbers(row: Sequence[Any]) -> Sequence[float]:
    return row if set(map(type, row)) <= _NUMBERS else [cell if type(cell) in _NUMBERS else np.nan for cell in row]
