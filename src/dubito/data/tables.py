"""Tables with a target column, as data sets."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dubito.core.arguments import checked_arguments
from dubito.core.constraints import OpenProbability, check
from dubito.core.errors import InputError
from dubito.data.dataset import DataSet, Pair, Standardizer, Task
from dubito.data.describe import TableDescription, describe_table, settled
from dubito.data.kinds import class_levels
from dubito.data.pictures import FILE, is_of_pictures
from dubito.data.source import carve
from dubito.data.table import Table
from dubito.data.table_files import read_table
from dubito.data.transform import TableTransform, checked_table

# A table with fewer rows leaves nothing to learn from once some are held out.
MIN_ROWS = 10


@checked_arguments
def load_table(
    table: Any,
    target: str,
    *,
    test: Any = 0.2,
    validation: float = 0.1,
    limit: int | None = None,
    task: Task | None = None,
    categorical: Sequence[str] = (),
    dates: Mapping[str, str] | None = None,
    ignore: Sequence[str] = (),
    keep: Sequence[str] = (),
    standardize: bool | None = None,
    separator: str | None = None,
    encoding: str | None = None,
    decimal: str | None = None,
    generator: torch.Generator | None = None,
) -> DataSet:
    """Make a data set from a table; its `encoder` is the `TableTransform` to apply to later tables.

    Rows without a target are left out, with a warning; for stray cells see `TableTransform`. The parts are drawn at
    random. What a column holds is decided from all rows (`describe_table`); everything else is learnt from the rows
    that remain for training.

    Args:
        table: A pandas frame, a dict of columns, a `Table`, or the path of a file that `read_table` can read.
        target: The column to predict.
        test: The fraction of rows to hold out, or a table of its own.
        validation: The fraction of the remaining rows to carve out; 0 for none.
        limit: Use at most this many rows for training and validation together.
        task: `"classification"` or `"regression"`; inferred from the target if None (see `TableTransform.fit`).
        categorical: Columns of numbers that are names of categories.
        dates: Columns of text that are dates, with their format; usual formats are recognised.
        ignore: Columns to leave out.
        keep: Columns to use although they look like ids.
        standardize: Whether numbers, dates and targets are standardised; by default all but the pixels of pictures are.
        separator: What separates the cells of a text file; found from the file if None.
        encoding: The encoding of a text file; found from the file if None.
        decimal: The decimal mark of a text file, "." or ","; found from the file if None.
        generator: Draws the rows; by default the same ones on every call.
    """
    for name, listed in {"categorical": categorical, "ignore": ignore, "keep": keep}.items():
        check(name, tuple[str, ...], tuple(listed) if isinstance(listed, Sequence) else listed)
    check("dates", Mapping[str, str] | None, dates)
    text = {"separator": separator, "encoding": encoding, "decimal": decimal}
    rows = with_target(as_table(table, **text), target)
    if len(rows) < MIN_ROWS:
        raise InputError(f"The table has {len(rows)} row(s) with a target; at least {MIN_ROWS} are needed.")
    if of_pictures := is_of_pictures(rows):
        ignore = (*ignore, *(name for name in (FILE,) if name in rows))
    described = describe_table(rows, target, task=task, categorical=categorical, dates=dates, ignore=ignore, keep=keep)
    rows = settled(rows, described)
    names = class_levels(rows[target]) if described.task == "classification" else ()
    held_out = rows
    if isinstance(test, float | int):
        check("test", OpenProbability, test)
        kept, others = carve(len(rows), validation=test, generator=generator)
        rows, held_out = rows.take(kept), rows.take(others)
    else:
        held_out = with_target(as_table(test, **text), target)
    train, others = carve(len(rows), validation=validation, limit=limit, generator=generator)
    parts = {"train": rows.take(train), "validation": rows.take(others), "test": held_out}
    transform = TableTransform.fit(
        parts["train"], target, class_names=names, description=described,
        standardize=not of_pictures if standardize is None else standardize,
    )  # fmt: skip
    return _as_dataset(_name(table), transform, parts, described)


def _as_dataset(name: str, transform: TableTransform, tables: dict[str, Table], described: TableDescription) -> DataSet:
    parts: dict[str, Pair] = {
        part: (transform.encode(table), transform.encode_targets(table)) for part, table in tables.items() if len(table)
    }
    loc, scale = torch.tensor([[transform.target_loc], [transform.target_scale]], dtype=torch.float64)
    return DataSet(
        name=name,
        task=transform.task,
        parts=parts,
        num_outputs=max(1, len(transform.class_names)),
        encoder=transform,
        target_scale=Standardizer(loc, scale) if transform.task == "regression" else None,
        class_names=transform.class_names,
        feature_names=transform.feature_names,
        description=described,
        texts={part: transform.texts_of(tables[part]) for part in parts},
    )


def as_table(table: Any, **text: Any) -> Table:
    """Return a table that was given as a path or in memory; `text` says how a text file is written."""
    return read_table(table, **text) if isinstance(table, str | PathLike) else Table.of(table)


def with_target(table: Table, target: str) -> Table:
    """Return the table without the rows that have no target, with a warning if there are any."""
    if target in table and len(table):
        missing = table[target].missing()
        if missing.all():
            raise InputError(f"The target column {target!r} has no values: choose another target.")
        if missing.any():
            told = f"{missing.sum()} of {len(table)} rows have no {target!r} and are left out."
            warnings.warn(told, stacklevel=3)
            table = table.take(np.flatnonzero(~missing))
    return checked_table(table, target)


def _name(table: Any) -> str:
    return Path(table).name if isinstance(table, str | PathLike) else "table"
