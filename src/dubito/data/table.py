"""`Table`: named columns in memory, from a file, a frame, a dict or an array; `RowTable`: the rows of a request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dubito.core.errors import InputError, UnsupportedError
from dubito.data.cells import Cells, Floats
from dubito.data.dialect import Dialect

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class Table:
    """Named columns of equal length.

    Attributes:
        columns: The cells by column name, in order.
        dialect: How the text file was written that the table comes from; None for other tables.

    >>> table = Table.of({"size": [50, 70], "town": ["Ulm", None]})
    >>> len(table), table.names, table["town"].missing().tolist()
    (2, ('size', 'town'), [False, True])
    """

    columns: Mapping[str, Cells]
    dialect: Dialect | None = None

    @classmethod
    def of(cls, table: Any) -> Table:
        """Return a table made of a table, a pandas frame, a dict of columns, or an array ``[rows, columns]``."""
        if isinstance(table, Table):
            return table
        if hasattr(table, "iloc") and hasattr(table, "columns"):
            names, rows = [str(name) for name in table.columns], table.index
            return cls._of(names, [table.iloc[:, place] for place in range(len(names))], list(rows))
        if isinstance(table, Mapping):
            return cls._of([str(name) for name in table], list(table.values()))
        if isinstance(table, np.ndarray) and table.ndim == 2:
            return cls._of([f"x{place}" for place in range(table.shape[1])], list(table.T))
        raise InputError(f"a table is a data frame or the path of a file, not a {type(table).__name__}.")

    @classmethod
    def _of(cls, names: Sequence[str], values: Sequence[Any], rows: Sequence[Any] = ()) -> Table:
        twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        if twice:
            raise InputError(f"The table has two columns named {twice[0]!r}: rename one.")
        columns = {name: Cells.of(name, each, rows) for name, each in zip(names, values, strict=True)}
        lengths = {len(cells): name for name, cells in columns.items()}
        if len(lengths) > 1:
            told = " and ".join(f"{name!r} has {length}" for length, name in sorted(lengths.items())[:2])
            raise InputError(f"The columns of a table must have the same number of rows, but {told}.")
        return cls(columns)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns, in order."""
        return tuple(self.columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()))) if self.columns else 0

    def __contains__(self, name: object) -> bool:
        return name in self.columns

    def __getitem__(self, name: str) -> Cells:
        if name not in self.columns:
            raise InputError(f"The table has no column {name!r}; it has {self.listed()}.")
        return self.columns[name]

    def numbers(self, names: Sequence[str]) -> tuple[NDArray[np.int64], Floats]:
        """Return which of these columns hold numbers alone, and their values ``[rows, such columns]``."""
        places = [place for place, name in enumerate(names) if self[name].values.dtype.kind == "f"]
        found = np.empty((len(self), len(places)))
        for column, place in enumerate(places):
            found[:, column] = self[names[place]].values
        return np.array(places, dtype=np.int64), found

    def take(self, index: slice | NDArray[Any] | Sequence[int]) -> Table:
        """Return some of the rows."""
        place: Any = index if isinstance(index, slice) else np.asarray(index)
        rows: Any = next(iter(self.columns.values())).rows if self.columns else ()
        rows = np.asarray(rows, dtype=None if isinstance(rows, range) else object)[place]
        cells = {name: replace(each, values=each.values[place], rows=rows) for name, each in self.columns.items()}
        return Table(cells, self.dialect)

    @classmethod
    def joined(cls, parts: Sequence[Table]) -> Table:
        """Return one table of the parts of a file, in order."""
        names, dialect = parts[0].names, parts[0].dialect
        return cls({name: Cells.joined([part.columns[name] for part in parts]) for name in names}, dialect)

    def drop(self, names: Iterable[str]) -> Table:
        """Return the table without some of its columns; names that it lacks are ignored."""
        gone = set(names)
        return Table({name: cells for name, cells in self.columns.items() if name not in gone}, self.dialect)

    def rows(self) -> list[tuple[Any, ...]]:
        """Return the rows as they were given: text for a text file."""
        return list(zip(*(cells.values.tolist() for cells in self.columns.values()), strict=True))

    def listed(self) -> str:
        """Return the names of the columns as text."""
        names = [repr(name) for name in self.columns]
        return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "") or "none"

    def to_frame(self) -> pd.DataFrame:
        """Return a pandas frame: numbers and dates are converted, other cells stay as they are."""
        try:
            import pandas as pd
        except ImportError as error:
            raise UnsupportedError("A data frame needs pandas: install it with pip install pandas.") from error
        from dubito.data.kinds import typed

        return pd.DataFrame({name: typed(cells) for name, cells in self.columns.items()})

    def __repr__(self) -> str:
        return f"<Table of {len(self):,} rows: {self.listed()}>"


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
