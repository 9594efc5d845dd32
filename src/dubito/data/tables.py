"""CSV and Parquet tables with a target column, as data sets."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dubito.core.arguments import checked_arguments
from dubito.core.constraints import check
from dubito.core.errors import FileFormatError, InputError, MissingDataError, UnsupportedError
from dubito.data.columns import without_strays
from dubito.data.dataset import DataSet, Pair, Standardizer, Task
from dubito.data.formats import MAX_RATIO, read_gzip
from dubito.data.source import carve
from dubito.data.transform import TableTransform, checked_frame, class_levels, infer_task

if TYPE_CHECKING:
    import pandas as pd


def read_table(path: str | PathLike[str], *, max_ratio: float = MAX_RATIO) -> pd.DataFrame:
    """Read a `.csv`, `.tsv` or `.parquet` file (text may be gzipped) into a pandas frame.

    A first column of text files that has no name holds row numbers, as R and pandas write them, and is left out.

    Args:
        path: The file.
        max_ratio: How many times its own size a gzipped file may have when it is unpacked; 100 MB are always allowed.
    """
    path = Path(path)
    suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    if suffix not in (".csv", ".tsv", ".parquet"):
        raise InputError(f"The file {path} is not a .csv, .tsv or .parquet table: give one of these.")
    if not path.is_file():
        raise MissingDataError(f"There is no file {path}: check the path.")
    try:
        import pandas as pd

        if suffix == ".parquet":
            return pd.read_parquet(path, engine="pyarrow")
        text = io.BytesIO(read_gzip(path, max_ratio)) if path.suffix == ".gz" else path
        frame = pd.read_csv(text, sep="\t" if suffix == ".tsv" else ",")
        return frame.drop(columns="Unnamed: 0") if frame.columns[0] == "Unnamed: 0" else frame
    except ImportError as error:
        needed = "pandas and pyarrow" if suffix == ".parquet" else "pandas"
        raise UnsupportedError(f"Reading {path.name} needs {needed}: install them with dubito[tables].") from error
    except FileFormatError:
        raise
    except Exception as error:
        why = " ".join(str(error).split())[:200]
        raise FileFormatError(f"The file {path} is not a readable {suffix[1:]} table ({why}).") from error


@checked_arguments
def load_table(
    table: str | PathLike[str] | pd.DataFrame,
    target: str,
    *,
    test: float | str | PathLike[str] | pd.DataFrame = 0.2,
    validation: float = 0.1,
    limit: int | None = None,
    task: Task | None = None,
    categorical: Sequence[str] = (),
    dates: Mapping[str, str] | None = None,
    ignore: Sequence[str] = (),
    generator: torch.Generator | None = None,
) -> DataSet:
    """Make a data set from a table; its `encoder` is the `TableTransform` to apply to later tables.

    Rows without a target are left out, with a warning; for stray cells see `TableTransform`. The parts are drawn at
    random; everything is learnt from the rows that remain for training.

    Args:
        table: A frame, or the path of a CSV or Parquet file.
        target: The column to predict.
        test: The fraction of rows to hold out, or a table of its own.
        validation: The fraction of the remaining rows to carve out; 0 for none.
        limit: Use at most this many rows for training and validation together.
        task: `"classification"` or `"regression"`; inferred from the target if None (see `TableTransform.fit`).
        categorical: Columns of numbers that are names of categories.
        dates: Columns of text that are dates, with their format; ISO dates are recognised.
        ignore: Columns to leave out, such as row numbers.
        generator: Draws the rows; by default the same ones on every call.
    """
    for name, listed in {"categorical": categorical, "ignore": ignore}.items():
        check(name, tuple[str, ...], tuple(listed) if isinstance(listed, Sequence) else listed)
    check("dates", Mapping[str, str] | None, dates)
    frame = _frame(table, target)
    frame = without_strays(frame, keep=(target, *categorical, *(dates or ()), *ignore))
    task = task or infer_task(frame[target])
    class_names = class_levels(frame[target]) if task == "classification" else ()
    if isinstance(test, float | int):
        if not 0 < test < 1:
            raise InputError(f"`test` must be a fraction of the rows between 0 and 1 or a table, got {test}.")
        kept, held_out = carve(len(frame), validation=test, generator=generator)
        frame, test_frame = frame.iloc[kept], frame.iloc[held_out]
    else:
        test_frame = _frame(test, target)
    train, held_out = carve(len(frame), validation=validation, limit=limit, generator=generator)
    transform = TableTransform.fit(
        frame.iloc[train],
        target,
        task=task,
        class_names=class_names,
        categorical=categorical,
        dates=dates,
        ignore=ignore,
    )
    frames = {"train": frame.iloc[train], "validation": frame.iloc[held_out], "test": test_frame}
    return _as_dataset(_name(table), transform, frames)


def _as_dataset(name: str, transform: TableTransform, frames: dict[str, pd.DataFrame]) -> DataSet:
    parts: dict[str, Pair] = {
        part: (transform.encode(frame), transform.encode_targets(frame)) for part, frame in frames.items() if len(frame)
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
    )


def _name(table: str | PathLike[str] | pd.DataFrame) -> str:
    return Path(table).name if isinstance(table, str | PathLike) else "table"


def _frame(table: str | PathLike[str] | pd.DataFrame, target: str) -> pd.DataFrame:
    """Return the table without the rows that have no target."""
    frame = read_table(table) if isinstance(table, str | PathLike) else table
    if not hasattr(frame, "iloc") or not hasattr(frame, "columns"):
        raise InputError(f"a table is a data frame or the path of a file, not a {type(frame).__name__}.")
    frame = frame.rename(columns=str)
    if target in frame.columns and len(frame):
        known = frame[target].notna()
        if not known.any():
            raise InputError(f"The target column {target!r} has no values: choose another target.")
        if not known.all():
            count = int((~known).sum())
            warnings.warn(f"{count} of {len(frame)} rows have no {target!r} and are left out.", stacklevel=3)
            frame = frame[known]
    return checked_frame(frame, target)
