"""Print results on stdout, as a table or JSON, and everything else on stderr."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dubito.cli.failures import QUIET, WORDS
from dubito.data import Availability, Integrity, TableDescription
from dubito.uses.reporting.tables import Column

_WIDE = 300  # columns: where the output is not a terminal, nothing is folded
# Before a fit at most so many columns of a table are listed: those with a remark, and the first of the others.
_LISTED = 40


def note(message: str) -> None:
    """Write one line to stderr, unless ``--quiet`` was given."""
    if not QUIET.get():
        sys.stderr.write(f"{message}\n")


def command_line() -> str | None:
    """Return the command that runs, as it can be typed again; None outside of the command line."""
    return shlex.join(["dubito", *WORDS.get()]) if WORDS.get() else None


def note_description(name: str, description: TableDescription) -> None:
    """Say on stderr what was understood of a table, unless ``--quiet`` was given."""
    if not QUIET.get():
        written = "" if description.dialect is None else f" ({description.dialect})"
        note(f"{name}{written}: {description.num_rows:,} rows")
        rows = list(description.rows())
        shown = sorted(sorted(range(len(rows)), key=lambda place: not rows[place][-1])[:_LISTED])
        _console(sys.stderr).print(_description_table([rows[place] for place in shown]))
        if len(shown) < len(rows):
            note(f"and {len(rows) - len(shown):,} more columns; `dubito data describe` lists all of them")


def print_description(description: TableDescription) -> None:
    """Print what was understood of a table."""
    written = "" if description.dialect is None else f"; {description.dialect}"
    sys.stdout.write(f"{description.num_rows:,} rows{written}\n")
    _console().print(_description_table(description.rows()))


def print_json(value: Any) -> None:
    """Print a value as strict JSON."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def print_columns(names: Sequence[str], columns: Sequence[Column]) -> None:
    """Print one row per method with the best value of each column in bold; number long names if space is short."""
    console = _console()
    titles = [f"{column.title} {column.hint}".strip() for column in columns]
    cells = [[_cell(column, row) for column in columns] for row in range(len(names))]
    widths = [max(len(title), *(len(row[i]) for row in cells)) for i, title in enumerate(titles)]
    if max(map(len, names)) + sum(widths) + 3 * len(widths) > console.width:
        for number, name in enumerate(names, start=1):
            console.print(Text(f"{number}  {name}"), soft_wrap=True)
        names = [str(number) for number in range(1, len(names) + 1)]
    table = _table(left=[""], right=titles)
    for name, row in zip(names, cells, strict=True):
        table.add_row(Text(name), *row)
    console.print(table)


def print_methods(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print one row per method: how it is written, and what it does."""
    table = _table(left=["method", "what it does"], right=[])
    for row in rows:
        trained = "" if row["trains"] else " Starts from a trained network."
        table.add_row(Text(row["method"]), Text(f"{row['what']}{trained}"))
    _console().print(table)


def print_availability(rows: Sequence[Availability], as_json: bool) -> None:
    """Print which data sets are available."""
    if as_json:
        print_json([{"name": row.name, "task": row.task, "found": row.found, "where": row.where} for row in rows])
        return
    table = _table(left=["name", "task", "where"], right=[])
    for row in rows:
        table.add_row(row.name, row.task, Text(row.where) if row.found else Text("not found", style="dim"))
    _console().print(table)
    missing = [row for row in rows if not row.found]
    if missing:
        note(f"{len(missing)} not found; `dubito data check NAME` says what each needs.")


def print_integrity(rows: Sequence[Integrity], as_json: bool) -> None:
    """Print the result of checking data sets."""
    if as_json:
        fields = [{"name": row.name, "ok": row.ok, "where": row.where, "problems": list(row.problems)} for row in rows]
        print_json(fields)
        return
    for row in rows:
        sys.stdout.write(f"{row.name}: {'ok' if row.ok else 'wrong'} ({row.where})\n")
        for problem in row.problems:
            sys.stdout.write(f"  {problem}\n")


def _description_table(rows: Iterable[Sequence[str]]) -> Table:
    table = _table(left=["column", "type"], right=["missing", "levels"])
    for title in ("range", ""):
        table.add_column(title, overflow="fold")
    for name, *cells in rows:
        table.add_row(Text(name), *map(Text, cells))
    return table


def _console(file: Any = None) -> Console:
    file = sys.stdout if file is None else file
    return Console(file=file, width=None if file.isatty() else _WIDE, highlight=False)


def _table(left: Sequence[str], right: Sequence[str]) -> Table:
    """Return a table without frames: columns of text to the left, of numbers to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for title in left:
        table.add_column(title, overflow="fold")
    for title in right:
        table.add_column(title, justify="right", overflow="fold")
    return table


def _cell(column: Column, row: int) -> Text:
    cell = column.cells[row]
    text = Text(cell.text, style="bold" if cell.best else "")
    return text.append(f" ± {cell.spread}", style="not bold dim") if cell.spread else text
