"""Rows as JSON: read those of a request, and write what is predicted for them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NoReturn

from numpy.typing import NDArray

from dubito.core.errors import InputError
from dubito.data import Table
from dubito.data.table import RowTable
from dubito.uses.runs.prediction import TablePrediction
from dubito.uses.serving.limits import ServingLimits

# Whole numbers from here on have no float64 of their own; as text they are read as numbers or as names of categories.
_EXACT = 2**53
_FORMS = '{"rows": [{"column": value, ...}, ...]} or {"columns": ["column", ...], "rows": [[value, ...], ...]}'


def read_json(body: bytes) -> Any:
    """Return the value of strict JSON."""
    try:
        return json.loads(body, parse_constant=_refuse_constant)
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"The body is not JSON ({str(error)[:200]}): send {_FORMS}.") from error


def table_of(value: Any, names: Sequence[str], limits: ServingLimits) -> Table:
    """Return the rows of a request as a table with these columns; others are ignored.

    >>> rows = table_of({"rows": [{"size": 50, "town": None, "id": 7}]}, ("size", "town"), ServingLimits())
    >>> rows.rows()
    [(50.0, None)]
    >>> table_of({"columns": ["town", "size"], "rows": [["Ulm", 50]]}, ("size", "town"), ServingLimits()).rows()
    [(50.0, 'Ulm')]
    """
    if not isinstance(value, dict) or not isinstance(value.get("rows"), list):
        raise InputError(f"The body must be an object with rows: {_FORMS}.")
    if unknown := sorted(value.keys() - {"rows", "columns"}):
        raise InputError(f"The body has an unknown entry {unknown[0][:60]!r}: it may have rows and columns.")
    rows, order = value["rows"], _order(value.get("columns"), names)
    if not rows:
        raise InputError("There are no rows: send at least one.")
    if len(rows) > limits.rows:
        raise InputError(f"There are {len(rows):,} rows, but a request may have {limits.rows:,}: send several.")
    found = [_cells(_named(row, order, place), names, place, limits.cell_characters) for place, row in enumerate(rows)]
    return RowTable(tuple(names), found)


def _cells(row: dict[str, Any], names: Sequence[str], place: int, longest: int) -> list[Any]:
    """Return the cells of a row in the order of the names."""
    try:
        cells = [row[name] for name in names]
    except KeyError as error:
        name = error.args[0]
        raise InputError(f"Row {place} lacks the column {name!r}: give null where a value is not known.") from None
    if set(map(type, cells)) <= {int, float} and min(cells) > -_EXACT and max(cells) < _EXACT:
        return cells  # the usual row: there is nothing to check
    return [_cell(value, name, place, longest) for value, name in zip(cells, names, strict=True)]


def as_json(found: TablePrediction, start: int, stop: int) -> list[dict[str, Any]]:
    """Return some rows of a prediction as plain values; a number that is not finite is None."""
    columns = {name: plain_values(values[start:stop]) for name, values in found.columns.items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def plain_values(values: NDArray[Any]) -> list[Any]:
    """Return the values of an array; a number that is not finite is None."""
    return [_plain(value) for value in values.tolist()]


def _order(columns: Any, names: Sequence[str]) -> list[str]:
    """Return the names that the cells of an array have."""
    if columns is None:
        return list(names)
    if not isinstance(columns, list) or not all(isinstance(name, str) for name in columns):
        raise InputError("`columns` must be a list of names.")
    if len(set(columns)) < len(columns):
        raise InputError("`columns` names a column twice: rename one.")
    return columns


def _named(row: Any, order: Sequence[str], place: int) -> dict[str, Any]:
    if isinstance(row, dict):
        return row
    if not isinstance(row, list):
        raise InputError(f"Row {place} is a {_kind(row)}: send an object or an array of cells.")
    if len(row) != len(order):
        shown = ", ".join(order[:10]) + (", ..." if len(order) > 10 else "")
        raise InputError(f"Row {place} has {len(row)} cells for {len(order)} columns ({shown}).")
    return dict(zip(order, row, strict=True))


def _cell(value: Any, name: str, place: int, longest: int) -> Any:
    if isinstance(value, dict | list):
        told = "a number, a text, true, false or null"
        raise InputError(f"Row {place} holds an {_kind(value)} in the column {name!r}: a cell is {told}.")
    if isinstance(value, str) and len(value) > longest:
        raise InputError(
            f"Row {place} holds {len(value):,} characters in the column {name!r}; {longest:,} are allowed."
        )
    large = isinstance(value, int) and not isinstance(value, bool) and abs(value) >= _EXACT
    return str(value) if large else value


def _kind(value: Any) -> str:
    kinds = {dict: "object", list: "array", str: "text", bool: "truth value", type(None): "null"}
    return kinds.get(type(value), "number")


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _refuse_constant(name: str) -> NoReturn:
    raise InputError(f"{name} is not JSON: give null where a value is not known.")
