"""Predict a file of any length in bounded memory: rows are read, predicted and written in chunks."""

from __future__ import annotations

import csv
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from dubito.core.atomic import check_place, writing
from dubito.core.errors import InputError
from dubito.data import Table, Tally
from dubito.data.columns import NumberColumn
from dubito.data.dialect import Dialect
from dubito.data.table_files import STANDARD_INPUT, OpenTable, TableFile, check_installed, table_suffix
from dubito.uses.runs.prediction import ASK
from dubito.uses.runs.run import BATCH_SIZE, TableRun

# Significant digits of a number in a text file.
DIGITS = 7


@dataclass(frozen=True)
class Predicted:
    """What was predicted."""

    num_rows: int  # how many rows
    num_asked: int  # for how many of them the decision is to ask
    tally: Tally  # the cells that the training rows did not prepare for

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {"rows": self.num_rows, "asked": self.num_asked, "odd_cells": self.tally.to_json()}


def predict_file(
    run: TableRun,
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    coverage: float | None = None,
    risk: float | None = None,
    text: dict[str, Any] | None = None,
    progress: Callable[[int, float | None], None] | None = None,
) -> Predicted:
    """Predict the rows of a file and write them, with the columns of the prediction added, to another one.

    The output has the separator and the decimal mark of the input, in UTF-8. It appears when it is complete.

    Args:
        run: The run.
        source: The table, or "-" for standard input.
        out: The file to write, `.csv`, `.tsv` or `.parquet`, or "-" for standard output.
        coverage: The probability with which an interval holds the truth; that of the run if None.
        risk: The largest risk of an answer; that of the run if None.
        text: How a text file is written: ``separator``, ``encoding``, ``decimal``.
        progress: Called after each chunk with the number of rows so far and the fraction of the file, if that is known.
    """
    check_output(source, out)
    tally, asked, written = Tally(), 0, run.settings.get("dialect")
    usual = Dialect(**written) if written else None
    opened = OpenTable(source, usual=usual, **(text or {}))
    with opened as file:
        _check_columns(run, file)
        with _writer(out, file, run) as write:
            for chunk in file.chunks(BATCH_SIZE):
                if tally.num_rows == 0:
                    run.encoder.encode(chunk)  # a column that holds something else altogether is an error
                found = run.predict(chunk, coverage=coverage, risk=risk, tally=tally)
                tally.finish()
                asked += int((found["decision"] == ASK).sum())
                write(chunk, found.columns)
                if progress is not None:
                    progress(tally.num_rows, opened.fraction())
            if tally.num_rows == 0:
                raise InputError(f"{file.name} has column names but no rows: there is nothing to predict.")
    return Predicted(tally.num_rows, asked, tally)


def check_output(source: str | os.PathLike[str], out: str | os.PathLike[str]) -> None:
    """Raise, before any work is done, if a prediction cannot be written to a file."""
    path = Path(out)
    if str(out) == STANDARD_INPUT:
        return
    check_installed(path)
    if table_suffix(path) == ".xlsx" or path.suffix.lower() == ".gz":
        raise InputError(
            f"Predictions are written as .csv, .tsv or .parquet, not as {path.suffix}: choose one of them."
        )
    check_place(path, "Predictions")
    if path.exists() and Path(source).exists() and path.samefile(source):
        raise InputError(f"Predictions cannot be written to '{out}': it is the input itself.")


def _check_columns(run: TableRun, file: TableFile) -> None:
    twice = [name for name in run.columns if name in file.names]
    if twice:
        raise InputError(
            f"{file.name} has a column {twice[0]!r} already, which the prediction would add: rename or drop it."
        )


Writer = Callable[[Table, dict[str, NDArray[Any]]], None]


@contextmanager
def _writer(out: str | os.PathLike[str], file: TableFile, run: TableRun) -> Iterator[Writer]:
    if str(out) == STANDARD_INPUT:
        yield _text_writer(_to_stdout, file.dialect or Dialect(), file.header, run.columns)
        return
    with writing(out) as write_bytes:
        if table_suffix(Path(out)) == ".parquet":
            with _parquet_writer(write_bytes, run, len(file.header)) as write:
                yield write
        else:
            dialect = file.dialect or Dialect("\t" if str(out).endswith((".tsv", ".tab")) else ",")
            yield _text_writer(write_bytes, dialect, file.header, run.columns)


def _text_writer(
    write_bytes: Callable[[bytes], None], dialect: Dialect, header: list[str], columns: tuple[str, ...]
) -> Writer:
    num_own = len(header)

    def lines(rows: Any) -> bytes:
        buffer = io.StringIO()
        csv.writer(buffer, delimiter=dialect.separator, lineterminator="\n").writerows(rows)
        return buffer.getvalue().encode()

    write_bytes((b"\xef\xbb\xbf" if dialect.encoding == "utf-8-sig" else b"") + lines([[*header, *columns]]))

    def write(table: Table, columns: dict[str, NDArray[Any]]) -> None:
        own = [_shown(table[name].values, dialect) for name in table.names[:num_own]]
        new = [_shown(values, dialect) for values in columns.values()]
        write_bytes(lines(zip(*own, *new, strict=True)))

    return write


def _shown(values: NDArray[Any], dialect: Dialect) -> list[Any]:
    """Return cells as text; those that were text stay as they are."""
    if values.dtype.kind != "f":
        return ["" if value is None else value for value in values.tolist()]
    found = ["" if value != value else f"{value:.{DIGITS}g}" for value in values.tolist()]
    return found if dialect.decimal == "." else [text.replace(".", ",") for text in found]


def _to_stdout(part: bytes) -> None:
    sys.stdout.write(part.decode())


@contextmanager
def _parquet_writer(write_bytes: Callable[[bytes], None], run: TableRun, num_own: int) -> Iterator[Writer]:
    import pyarrow as pa
    from pyarrow import parquet

    numbers = {column.name for column in run.encoder.columns if isinstance(column, NumberColumn) and not column.boolean}
    writer: list[Any] = []

    def write(table: Table, columns: dict[str, NDArray[Any]]) -> None:
        # The numbers that the run uses become numbers; other cells of a text file stay text, as chunks may differ.
        own = {name: cells.numbers() if cells.decimal and name in numbers else cells.values
               for name, cells in list(table.columns.items())[:num_own]}  # fmt: skip
        batch = pa.table({name: pa.array(values.tolist()) for name, values in {**own, **columns}.items()})
        if not writer:
            writer.append(parquet.ParquetWriter(_Sink(write_bytes), batch.schema))
        writer[0].write_table(batch.cast(writer[0].schema))

    yield write
    if writer:
        writer[0].close()


class _Sink(io.RawIOBase):
    """A file to write to for pyarrow."""

    def __init__(self, write_bytes: Callable[[bytes], None]) -> None:
        self._write, self._count = write_bytes, 0

    def writable(self) -> bool:
        return True

    def write(self, part: Any) -> int:
        content = bytes(part)
        self._write(content)
        self._count += len(content)
        return len(content)

    def tell(self) -> int:
        return self._count
