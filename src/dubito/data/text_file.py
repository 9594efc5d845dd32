"""Read tables of text in pieces, in any encoding, with any separator, plain or gzipped, from a file or a pipe."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, BinaryIO

from dubito.core import limits
from dubito.core.errors import FileFormatError
from dubito.data.cells import Cells, objects
from dubito.data.dialect import (
    SAMPLE_BYTES,
    Dialect,
    check_encoding,
    detect,
    detect_encoding,
    explain_encoding,
    starts_with_mark,
)
from dubito.data.table import Table

# The name of a first column without one, which holds row numbers, as R and pandas write them.
ROW_NUMBERS = "Unnamed: 0"
# Characters that text does not have, and the share up to which they are stray; of random bytes it is a tenth.
_CONTROL, _STRAY = bytes({*range(32)} - {*b"\t\n\v\f\r"}), 0.003
# How files begin that are no text, and what they are.
_BINARY = {
    b"PK\x03\x04": "a spreadsheet or a zip archive: give it the ending .xlsx, or unpack it",
    b"\xd0\xcf\x11\xe0": "an old spreadsheet (.xls): save it as .xlsx or .csv",
    b"PAR1": "a Parquet file: give it the ending .parquet",
    b"%PDF": "a PDF document, not a table",
    b"\x1f\x8b": "a gzip file: give it the ending .gz",
}


class TextFile:
    """A text file that is read once, from its start.

    Args:
        stream: The bytes.
        name: What messages call it.
        encoding: Its encoding, or None to find it.
        separator: What separates its cells, or None to find it.
        decimal: Its decimal mark, or None to find it.
        usual: What to assume where the file leaves something open.
        again: Opens it a second time, if that is possible, so that all of it tells the encoding.
    """

    def __init__(
        self,
        stream: BinaryIO,
        name: str,
        *,
        encoding: str | None = None,
        separator: str | None = None,
        decimal: str | None = None,
        usual: Dialect | None = None,
        again: Callable[[], BinaryIO] | None = None,
    ) -> None:
        self.name, self._stream = name, stream
        head = stream.read(SAMPLE_BYTES)
        _check_text(head, name, encoding)
        if encoding is None:
            encoding = detect_encoding([head] if again is None else _parts(again), whole=again is not None)
        check_encoding(encoding)
        self._text = io.TextIOWrapper(
            io.BufferedReader(_Joined(head, stream), limits.current().file_part), encoding, newline=""
        )
        sample = head.decode(encoding, errors="ignore")
        self.dialect = detect(sample, encoding, separator=separator, decimal=decimal, usual=usual)
        mark = self.dialect.separator
        self._reader = csv.reader(self._text, delimiter=mark, skipinitialspace=mark == " ")
        self.header = self._read_header()
        self.names = unique_names(self.header)
        self.num_read, self.num_short = 0, 0

    def chunks(self, num_rows: int) -> Iterator[Table]:
        """Yield tables of at most so many rows; their rows are counted from 1."""
        while rows := self._rows(num_rows):
            yield self._table(rows)

    def _table(self, rows: list[list[str]]) -> Table:
        first = self.num_read + 1
        self.num_read += len(rows)
        labels, columns = range(first, first + len(rows)), zip(*rows, strict=True)
        cells = {name: Cells(name, objects(column), self.dialect.decimal, labels)
                 for name, column in zip(self.names, columns, strict=True)}  # fmt: skip
        return Table(cells, self.dialect)

    def _rows(self, num_rows: int) -> list[list[str]]:
        width = len(self.names)
        rows: list[list[str]] = []
        while not rows:
            read = self._next(num_rows)
            if not read:
                return []
            rows = [row for row in read if row]
            if any(len(row) != width for row in rows):
                first = self.num_read + 1
                rows = [self._fitted(row, number, width) for number, row in enumerate(rows, start=first)]
        return rows

    def _fitted(self, row: list[str], number: int, width: int) -> list[str]:
        if len(row) > width and any(cell.strip() for cell in row[width:]):
            raise FileFormatError(
                f"{self.name} has {width} column names, but row {number} has {len(row)} cells: cells are separated by "
                f"{self.dialect.separator!r}, so quote those that hold it, or give another separator."
            )
        self.num_short += len(row) < width  # the cells of a row may end early, as in some spreadsheets
        return row[:width] + [""] * (width - len(row))

    def _read_header(self) -> list[str]:
        for rows in iter(lambda: self._next(1), []):
            if rows[0]:
                return [cell.strip().lstrip("\ufeff").strip() for cell in rows[0]]
        raise FileFormatError(f"{self.name} is not a readable table: it is empty.")

    def _next(self, num_rows: int) -> list[list[str]]:
        try:
            return list(islice(self._reader, num_rows))
        except UnicodeError as error:
            raise explain_encoding(self.name, self.dialect.encoding, error) from error
        except csv.Error as error:
            raise FileFormatError(
                f"{self.name} is not a readable table near line {self._reader.line_num} ({error}): a quote may be "
                "missing there."
            ) from error


class _Joined(io.RawIOBase):
    """Bytes that were read already, and then the rest of their stream."""

    def __init__(self, head: bytes, stream: BinaryIO) -> None:
        self._head, self._stream = head, stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        part, self._head = self._head[: len(buffer)], self._head[len(buffer) :]
        part = part or self._stream.read(len(buffer)) or b""
        buffer[: len(part)] = part
        return len(part)


def unique_names(header: Sequence[str]) -> tuple[str, ...]:
    """Return column names of which no two are equal, as pandas makes them.

    >>> unique_names(["", "a", "a", ""])
    ('Unnamed: 0', 'a', 'a.1', 'Unnamed: 3')
    """
    names: list[str] = []
    for place, name in enumerate(header):
        wanted = name or f"Unnamed: {place}"
        unique, number = wanted, 0
        while unique in names:
            number += 1
            unique = f"{wanted}.{number}"
        names.append(unique)
    return tuple(names)


def _check_text(head: bytes, name: str, encoding: str | None) -> None:
    for start, what in _BINARY.items():
        if head.startswith(start):
            raise FileFormatError(f"{name} is not a table of text but {what}.")
    num_control = len(head) - len(head.translate(None, _CONTROL))
    is_binary = b"\0" in head and num_control > _STRAY * len(head)
    if encoding is None and is_binary and not starts_with_mark(head):
        raise FileFormatError(
            f"{name} is not a table of text: it holds NUL characters, as binary files do. If it is text in an unusual "
            "encoding, give the encoding."
        )


def _parts(opener: Callable[[], BinaryIO]) -> Iterator[bytes]:
    with opener() as stream:
        while part := stream.read(limits.current().file_part):
            yield part
