"""Open tables: text such as `.csv`, gzipped or not, `.parquet`, `.xlsx`, pictures, data sets by name."""

from __future__ import annotations

import stat
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from dubito.core.arguments import checked_arguments
from dubito.core.constraints import Positive
from dubito.core.errors import DubitoError, FileFormatError, InputError, MissingDataError, UnsupportedError
from dubito.data import catalog, pictures
from dubito.data.cells import Cells
from dubito.data.dialect import Dialect
from dubito.data.formats import MAX_RATIO, Unpacked, check_unpacked, most_unpacked
from dubito.data.parquet import ParquetFile
from dubito.data.table import Table
from dubito.data.text_file import TextFile, unique_names

STANDARD_INPUT = "-"
TEXT_SUFFIXES = (".csv", ".tsv", ".tab", ".txt")
OTHER_SUFFIXES = (".parquet", ".xlsx", ".npz")
_NEEDS = {".parquet": "pyarrow", ".xlsx": "openpyxl"}


class TableFile(Protocol):
    """A table that is read once, in pieces.

    Attributes:
        name: What messages call it.
        header: The column names as they are in the file, of those columns that predictions are written with: the first.
        names: The same, with names for columns that have none, and without repetitions.
        dialect: How it is written, if it is text.
        num_short: How many rows had fewer cells than there are columns, so far; the rest of them is missing.
    """

    name: str
    header: list[str]
    names: tuple[str, ...]
    dialect: Any
    num_short: int

    def chunks(self, num_rows: int) -> Iterator[Table]:
        """Yield tables of at most so many rows."""


class OpenTable:
    """A table that is open for reading, as a context.

    Args:
        path: The file, or "-" for standard input.
        separator: What separates the cells of a text file, or None to find it.
        encoding: The encoding of a text file, or None to find it.
        decimal: The decimal mark of a text file, or None to find it.
        max_ratio: How many times its own size a packed file may have when it is unpacked.
        usual: What to assume where a text file leaves something open.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        separator: str | None = None,
        encoding: str | None = None,
        decimal: str | None = None,
        max_ratio: float = MAX_RATIO,
        usual: Dialect | None = None,
    ) -> None:
        self.path = path
        self._text: dict[str, Any] = {
            "separator": separator, "encoding": encoding, "decimal": decimal, "usual": usual
        }  # fmt: skip
        self._max_ratio = max_ratio
        self._stream: Any = None
        self._size = 0

    def __enter__(self) -> TableFile:
        name, path = str(self.path), Path(self.path)
        if name == STANDARD_INPUT:
            return self._as_text(sys.stdin.buffer, "standard input", None)
        if (named := named_rows(name)) is not None:
            return named
        if path.is_dir() and (files := pictures.files_in(path)):
            return pictures.open_folder(path, files)
        is_file = _check_exists(path)
        suffix = table_suffix(path)
        check_installed(path)
        shown = f"The file {path}"
        self._size = path.stat().st_size
        if suffix in OTHER_SUFFIXES:
            if suffix == ".npz":
                return pictures.open_archive(path)
            opened = _Parquet if suffix == ".parquet" else _Spreadsheet
            return _explained(shown, suffix, lambda: opened(path, self._max_ratio))
        opener = partial(_opened, path, self._max_ratio)
        self._stream = opener()
        if suffix in (".tsv", ".tab") and self._text["separator"] is None and self._text["usual"] is None:
            self._text["usual"] = Dialect("\t")
        return self._as_text(self._stream, shown, opener if is_file else None)

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.close()

    def fraction(self) -> float | None:
        """Return how much of the file was read, or None if that is not known."""
        if self._stream is None or not self._size or self._stream.closed:
            return None
        return min(1.0, self._stream.tell() / self._size)

    def _as_text(self, stream: BinaryIO, name: str, again: Callable[[], BinaryIO] | None) -> TableFile:
        try:
            return TextFile(stream, name, again=again, **self._text)
        except BaseException:
            self.__exit__()
            raise


def table_suffix(path: Path) -> str:
    """Return the ending that says what kind of table a file is, without `.gz`."""
    suffix = path.suffix.lower()
    return path.with_suffix("").suffix.lower() if suffix == ".gz" else suffix


def check_installed(path: str | PathLike[str]) -> None:
    """Raise, before any work is done, if reading or writing this kind of table needs a package that is missing."""
    suffix = table_suffix(Path(path))
    package = _NEEDS.get(suffix)
    if package is not None and find_spec(package) is None:
        raise UnsupportedError(
            f"A {suffix} table needs {package}, which is not installed: run pip install 'dubito[tables]', or save the "
            "table as .csv."
        )


@checked_arguments
def read_table(
    path: str | PathLike[str],
    *,
    separator: str | None = None,
    encoding: str | None = None,
    decimal: str | None = None,
    max_ratio: Positive = MAX_RATIO,
) -> Table:
    """Read a table from a `.csv` or `.tsv` file (plain or gzipped), standard input, or a `.parquet` or `.xlsx` file.

    A folder of pictures, an `.npz` file of images and a data set by name are tables as well; see `pictures`.
    The encoding, the separator and the decimal mark of a text file are found from its content.

    Args:
        path: The file, or "-" for standard input.
        separator: What separates the cells.
        encoding: The encoding, such as "utf-8" or "latin-1".
        decimal: The decimal mark, "." or ",".
        max_ratio: How many times its own size a packed file may have when it is unpacked; 100 MB are always allowed.
    """
    opened = OpenTable(path, separator=separator, encoding=encoding, decimal=decimal, max_ratio=max_ratio)
    with opened as file:
        parts = list(file.chunks(2**16))
        if file.num_short:
            warnings.warn(
                f"{file.name} has {file.num_short} row(s) with fewer cells than columns: the rest of them is missing.",
                stacklevel=2,
            )
        return Table.joined(parts) if parts else Table({name: Cells.of(name, []) for name in file.names}, file.dialect)


def _check_exists(path: Path) -> bool:
    """Return whether the path is a regular file; raise if there is none, or if it is a folder."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:  # ValueError: a NUL within the name
        raise MissingDataError(f"There is no file {path}: check the path.") from error
    if stat.S_ISDIR(mode):
        inside = sorted(each.name for each in path.iterdir() if table_suffix(each) in (*TEXT_SUFFIXES, *OTHER_SUFFIXES))
        hint = f"such as {path / inside[0]}" if inside else "for example a .csv file"
        raise InputError(f"{path} is a folder, not a table: give a file, {hint}.")
    return stat.S_ISREG(mode)


def _opened(path: Path, max_ratio: float) -> Any:
    try:
        return Unpacked(path, max_ratio) if path.suffix.lower() == ".gz" else path.open("rb")
    except OSError as error:
        raise FileFormatError(f"The file {path} cannot be read: {error.strerror or error}.") from error


def _explained(name: str, suffix: str, call: Callable[[], Any]) -> Any:
    """Call a function of a package that reads files; turn what it raises into one sentence."""
    try:
        return call()
    except DubitoError:
        raise
    except Exception as error:
        why = " ".join(str(error).split())[:200]
        raise FileFormatError(f"{name} is not a readable {suffix[1:]} table ({why}).") from error


class _Rows:
    """A table in memory."""

    def __init__(self, name: str, table: Table) -> None:
        self.name, self.dialect, self.num_short, self._table = name, None, 0, table
        self.header, self.names = list(table.names), table.names

    def chunks(self, num_rows: int) -> Iterator[Table]:
        for start in range(0, len(self._table), num_rows):
            yield self._table.take(slice(start, start + num_rows))


def named_rows(name: str) -> TableFile | None:
    """Return the rows of a data set by name, those of its test part last; None if this is no name, or a file."""
    if name not in catalog.names() or Path(name).exists():
        return None
    raw = catalog.raw(name)
    parts = [part for part in (raw.train, raw.test) if part is not None]
    inputs, targets = (np.concatenate([part[place] for part in parts]) for place in (0, 1))
    shown = f"The data set {name}"
    labels = np.array(raw.class_names, dtype=object)[targets] if raw.class_names else None
    if inputs.ndim > 2:
        return pictures.of_arrays(shown, inputs, labels, unit=raw.unit)
    names = raw.feature_names or [f"x{place}" for place in range(inputs.shape[-1])]
    columns: dict[str, Any] = {"text": inputs} if raw.is_text else dict(zip(names, inputs.T, strict=True))
    return _Rows(shown, Table.of({**columns, pictures.LABEL: targets if labels is None else labels}))


def default_target(name: str) -> str | None:
    """Return the column to predict of pictures and of data sets by name; None if the user must say it."""
    path = Path(name)
    is_named = name in catalog.names() and not path.exists()
    is_pictures = path.suffix.lower() == ".npz" or (path.is_dir() and bool(pictures.files_in(path)))
    return pictures.LABEL if is_named or is_pictures else None


class _Parquet:
    """A Parquet file."""

    def __init__(self, path: Path, max_ratio: float) -> None:
        self.name, self.dialect, self.num_short = f"The file {path}", None, 0
        self._file = ParquetFile(path, max_ratio)
        self.header, self.names = self._file.header, self._file.names

    def chunks(self, num_rows: int) -> Iterator[Table]:
        batches, first = self._file.batches(num_rows), 1
        while columns := _explained(self.name, ".parquet", lambda: next(batches, None)):
            rows = range(first, first + len(columns[0]))
            first += len(rows)
            yield Table({name: Cells.of(name, each, rows) for name, each in zip(self.names, columns, strict=True)})


class _Spreadsheet:
    """The first sheet of an .xlsx file, read by openpyxl."""

    def __init__(self, path: Path, max_ratio: float) -> None:
        from openpyxl import load_workbook

        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())  # no more than that is unpacked
        check_unpacked(path, size, most_unpacked(path, max_ratio), max_ratio)
        self.name, self.dialect, self.num_short = f"The file {path}", None, 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about styles and the like, which are not read
            book = load_workbook(path, read_only=True, data_only=True)
        sheets = book.sheetnames
        if len(sheets) > 1:
            warnings.warn(f"{self.name} has {len(sheets)} sheets; the first, {sheets[0]!r}, is read.", stacklevel=4)
        self._rows = book[sheets[0]].iter_rows(values_only=True)
        header = next(self._rows, ())
        while header and header[-1] is None:
            header = header[:-1]
        if not header:
            raise FileFormatError(f"{self.name} is not a readable table: its first row is empty.")
        self.header = ["" if cell is None else str(cell).strip() for cell in header]
        self.names = unique_names(self.header)

    def chunks(self, num_rows: int) -> Iterator[Table]:
        width, first = len(self.names), 1
        while rows := _explained(self.name, ".xlsx", lambda: list(islice(self._rows, num_rows))):
            kept = [(*row[:width], *[None] * (width - len(row))) for row in rows if any(v is not None for v in row)]
            if kept:
                columns = zip(*kept, strict=True)
                labels = range(first, first + len(kept))
                yield Table({n: Cells.of(n, list(c), labels) for n, c in zip(self.names, columns, strict=True)})
                first += len(kept)
