"""Parquet files, whose size in memory is bounded before anything is made of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dubito.core.errors import FileFormatError
from dubito.data.formats import MAX_RATIO, check_unpacked, most_unpacked
from dubito.data.text_file import unique_names

# Bytes of a number, or of the place of a text, in memory.
CELL = 8


class ParquetFile:
    """A Parquet file, read by pyarrow, of at most `max_ratio` times its size or 100 MB.

    A few bytes can stand for many equal cells. So cells are counted before they are read; texts are read as numbers of
    a dictionary, and measured before they are repeated. Nested columns are left out with a warning.
    """

    def __init__(self, path: Path, max_ratio: float = MAX_RATIO) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        self._path, self._max_ratio, self._most = path, max_ratio, most_unpacked(path, max_ratio)
        with parquet.ParquetFile(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        cells = sum(group.num_rows * group.num_columns for group in groups)
        self._check(max(CELL * cells, sum(group.total_byte_size for group in groups)))
        kinds: tuple[Callable[[Any], bool], ...] = (
            pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary
        )  # fmt: skip
        texts = [field.name for field in schema if any(is_text(field.type) for is_text in kinds)]
        self._file = parquet.ParquetFile(path, read_dictionary=texts)
        index = (schema.pandas_metadata or {}).get("index_columns", [])
        nested = {field.name for field in schema if _is_nested(field.type)}
        names = [name for name in schema.names if name not in index or not name.startswith("__index_level")]
        self.header = [name for name in names if name not in nested]
        self.names = unique_names(self.header)
        if nested:
            shown = ", ".join(repr(name) for name in sorted(nested))
            warnings.warn(f"The file {path} holds lists or structs in {shown}: they are left out.", stacklevel=6)
        if not self.header:
            raise FileFormatError(f"The file {path} has no column of plain values: a table needs at least one.")

    def batches(self, num_rows: int) -> Iterator[list[Any]]:
        """Yield the columns of at most so many rows, as arrays or lists."""
        size = rows = 0
        for batch in self._file.iter_batches(batch_size=num_rows, columns=self.header):
            size, rows = size + sum(map(_size, batch.columns)), rows + batch.num_rows
            self._check(max(size, CELL * rows * batch.num_columns))  # a forged file may have more rows than it says
            if batch.num_rows:
                yield [_values(column) for column in batch.columns]

    def _check(self, size: int) -> None:
        check_unpacked(self._path, size, self._most, self._max_ratio)


def _is_nested(kind: Any) -> bool:
    """Return whether a column holds lists, maps or structs.

    They are no cells of a table. In pyarrow 26, reading such columns of a damaged file can end the process, and so can
    asking for the description of any column; reading the other columns cannot.
    """
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        return _is_nested(kind.storage_type)
    return bool(pa.types.is_nested(kind)) or (pa.types.is_dictionary(kind) and _is_nested(kind.value_type))


def _size(column: Any) -> int:
    """Return the number of bytes of the texts of a column, of which each may occur many times."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_dictionary(column.type) or pa.types.is_primitive(column.type.value_type):
        return 0
    return pc.sum(pc.take(pc.binary_length(column.dictionary), column.indices)).as_py() or 0


def _values(column: Any) -> Any:
    import pyarrow as pa

    kind = column.type
    is_plain_time = pa.types.is_timestamp(kind) and kind.tz is None
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or is_plain_time:
        return column.to_numpy(zero_copy_only=False)
    return column.to_pylist()
