"""Say what was understood of each column of a table, before anything is learnt from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dubito.core.arguments import checked_arguments
from dubito.core.errors import InputError
from dubito.data.cells import Cells, Flags, Floats
from dubito.data.dataset import Task
from dubito.data.dates import ISO_DATE, as_datetimes, as_text, check_format, is_ambiguous
from dubito.data.dialect import Dialect
from dubito.data.kinds import Kind, describe_target, kind_of, looks_like_id, looks_like_row_numbers
from dubito.data.number_text import first_groups, parse_number
from dubito.data.table import Table
from dubito.data.text_column import MAX_WORDS

# Only so many levels of a category are told apart.
MAX_LEVELS = 50


@dataclass(frozen=True)
class ColumnDescription:
    """What was understood of one column.

    Attributes:
        name: Its name.
        kind: What it holds; None if it is empty or was not looked at.
        used: Whether it becomes an input.
        date_format: The format of its dates.
        missing: How many cells are missing, or hold something else than the column does.
        levels: How many different values it has.
        low: Its smallest number or first date, as text.
        high: Its largest number or last date, as text.
        remark: What else there is to know.
    """

    name: str
    kind: Kind | None = None
    used: bool = False
    date_format: str | None = None
    missing: int = 0
    levels: int = 0
    low: str = ""
    high: str = ""
    remark: str = ""

    def values_of(self, cells: Cells) -> Floats:
        """Return the cells of this column, or of the same column of another table, as numbers or days."""
        return cells.days(self.date_format or ISO_DATE) if self.kind == "date" else cells.numbers(words=self.is_boolean)

    @property
    def is_boolean(self) -> bool:
        """Whether it holds true and false."""
        return self.kind == "boolean"

    @property
    def holds(self) -> str:
        """What it holds, in words."""
        if self.kind == "date" and self.date_format != ISO_DATE:
            return f"dates in the format {self.date_format!r}"
        return {"date": "dates", "boolean": "true or false"}.get(str(self.kind), "numbers")

    @property
    def range(self) -> str:
        """The range of its numbers or dates, as text."""
        return f"{self.low} to {self.high}" if self.low else ""


@dataclass(frozen=True)
class TableDescription:
    """What was understood of a table; ``print`` it.

    Attributes:
        columns: One description per column, in the order of the table.
        num_rows: The number of rows.
        target: The column to predict, or None.
        task: What predicting it means, or None.
        dialect: How the file is written, if it is text.
    """

    columns: tuple[ColumnDescription, ...]
    num_rows: int
    target: str | None = None
    task: Task | None = None
    dialect: Dialect | None = None

    def __getitem__(self, name: str) -> ColumnDescription:
        return next(column for column in self.columns if column.name == name)

    def rows(self) -> Iterator[tuple[str, str, str, str, str, str]]:
        """Yield name, kind, missing cells, levels, range and remark of every column, as text."""
        for c in self.columns:
            yield c.name, c.kind or "", f"{c.missing:,}", f"{c.levels:,}" if c.kind else "", c.range, c.remark

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        columns = [{"name": c.name, "type": c.kind, "used": c.used, "missing": c.missing, "levels": c.levels,
                    "low": c.low, "high": c.high, "remark": c.remark} for c in self.columns]  # fmt: skip
        return {"rows": self.num_rows, "target": self.target, "task": self.task, "columns": columns,
                "dialect": None if self.dialect is None else str(self.dialect)}  # fmt: skip

    def __str__(self) -> str:
        titles = ("column", "type", "missing", "levels", "range", "")
        rows = [titles, *self.rows()]
        widths = [max(len(row[place]) for row in rows) for place in range(len(titles))]
        lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
                 for row in rows]  # fmt: skip
        return "\n".join(lines)


@checked_arguments
def describe_table(
    table: Any,
    target: str | None = None,
    *,
    task: Task | None = None,
    categorical: Sequence[str] = (),
    dates: Mapping[str, str] | None = None,
    ignore: Sequence[str] = (),
    keep: Sequence[str] = (),
) -> TableDescription:
    """Return what is understood of each column of a table.

    Empty columns, columns that never vary and columns that look like ids are not used as inputs. See `load_table` for
    the arguments.
    """
    table, dates = Table.of(table), dates or {}
    for name in (*categorical, *dates, *ignore, *keep, *([] if target is None else [target])):
        table[name]  # raises if there is no such column
    for name, form in dates.items():
        check_format(name, form)
    columns = []
    for name, cells in table.columns.items():
        if name in ignore and name != target:
            columns.append(ColumnDescription(name, missing=int(cells.missing().sum()), remark="left out, as asked"))
            continue
        forced = ("category", None) if name in categorical else ("date", dates[name]) if name in dates else None
        described = _described(cells, forced)
        wanted = name in keep or name in categorical or name == target
        columns.append(described if wanted or not described.used else _without_ids(cells, described))
    if target is not None:
        place = table.names.index(target)
        task, remark = describe_target(table[target], columns[place].kind, task)
        more = f"; {columns[place].remark}" if columns[place].remark else ""
        columns[place] = replace(columns[place], used=False, remark=remark + more)
    return TableDescription(tuple(columns), len(table), target, task, table.dialect)


def settled(table: Table, description: TableDescription) -> Table:
    """Return the table with its columns of numbers and dates as such; stray cells are missing, with a warning."""
    cells = dict(table.columns)
    for column in description.columns:
        own = cells[column.name]
        if not (column.used or column.name == description.target) or column.kind in (None, "category", "text"):
            continue
        if column.name == description.target and description.task == "classification":
            continue
        found = own.without_strays(column.values_of(own), column.holds)
        values = found if column.kind != "date" else as_datetimes(found)
        cells[column.name] = replace(own, values=values, decimal=None)
    return Table(cells, table.dialect)


def _described(cells: Cells, forced: tuple[Any, str | None] | None) -> ColumnDescription:
    missing = cells.missing()
    name, num_missing = cells.name, int(missing.sum())
    if num_missing == len(cells):
        return ColumnDescription(name, missing=num_missing, remark="empty: left out")
    kind, form = forced or kind_of(cells)
    found = ColumnDescription(name, kind, True, form, num_missing)
    if kind in ("category", "text"):
        levels = {label for label in cells.labels() if label is not None}
        told = f"the {MAX_LEVELS} most frequent levels are told apart" if len(levels) > MAX_LEVELS else ""
        if kind == "text":
            told = f"free text: its {MAX_WORDS:,} most frequent words are used"
        found = replace(found, levels=len(levels), remark=told)
        first = repr(min(levels))
    else:
        found = _described_numbers(cells, found, missing, guessed=forced is None)
        first = found.low
    if found.levels == 1 and found.missing == 0:
        return replace(found, used=False, remark=f"always {first}: left out")
    return found


def _described_numbers(cells: Cells, found: ColumnDescription, missing: Flags, guessed: bool) -> ColumnDescription:
    values = found.values_of(cells)
    stray, present = np.isnan(values) & ~missing, values[~np.isnan(values)]
    if len(present) == 0:
        row, value = cells.first(stray)
        raise InputError(f"Column {cells.name!r} must hold {found.holds}, but row {row!r} holds {value}.")
    shown = as_text if found.kind == "date" else "{:.6g}".format if found.kind == "number" else _truth
    remarks = []
    if found.kind == "date" and found.date_format != ISO_DATE and guessed:
        remarks.append(_date_remark(cells.values[~missing & ~stray], str(found.date_format)))
    if cells.decimal and (groups := first_groups(cells.values)) is not None:
        remarks.append(f"{groups!r} is read as {parse_number(groups, cells.decimal):.12g}")
    if stray.any():
        row, value = cells.first(stray)
        remarks.append(f"{stray.sum():,} of its cells, such as {value} in row {row}, count as missing")
    return replace(
        found, missing=int(np.isnan(values).sum()), levels=len(np.unique(present)), low=shown(float(present.min())),
        high=shown(float(present.max())), remark="; ".join(remarks),
    )  # fmt: skip


def _without_ids(cells: Cells, found: ColumnDescription) -> ColumnDescription:
    if looks_like_id(cells, str(found.kind)):
        return replace(found, used=False, remark="looks like an id: left out")
    if looks_like_row_numbers(cells, str(found.kind)):
        return replace(found, remark="looks like an id, but is used: leave it out if it is one")
    return found


def _date_remark(texts: Any, form: str) -> str:
    words = form.replace("%Y", "year").replace("%m", "month").replace("%d", "day")
    return f"read as {words}" + (", or is the day first?" if is_ambiguous(texts, form) else "")


def _truth(value: float) -> str:
    return "true" if value else "false"
