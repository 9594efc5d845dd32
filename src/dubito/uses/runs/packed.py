"""A run in one file: packed, so that `runs.load` reads it like the folder, or exported for other programs."""

from __future__ import annotations

import io
import os
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dubito.core.arguments import checked_arguments
from dubito.core.atomic import write_atomic
from dubito.core.errors import FileFormatError, InputError
from dubito.data.table_module import describe, numbers_of
from dubito.uses.decisions import ConformalIntervals, Detector, Rejector
from dubito.uses.export import Exported
from dubito.uses.export.formats import check_metadata
from dubito.uses.runs import folder
from dubito.uses.runs.calibration import UNFAMILIAR
from dubito.uses.runs.run import TableRun

# Of the rows that were not trained on, at most so many of each part are kept.
MOST_ROWS = 1000
# A file may unpack to so many times its size, and this many bytes: real runs stay far below.
MOST_RATIO, ALLOWANCE = 200, 2**24
_STAMP = (1980, 1, 1, 0, 0, 0)  # the time of writing is nobody's concern


@checked_arguments
def pack(run: TableRun, path: str | os.PathLike[str]) -> int:
    """Write a run as one file and return its size in bytes: all that `dubito predict FILE TABLE` needs.

    The encoder, the network, the posterior, the calibration and the decision rules are kept in full, of the rows that
    were not trained on at most 1,000 of each part.

    Args:
        run: The run.
        path: The file; an existing one is replaced at once.
    """
    buffer = io.BytesIO()
    with tempfile.TemporaryDirectory() as place, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        folder.write_files(run, Path(place), most_rows=MOST_ROWS)
        for file in sorted(Path(place).rglob("*")):
            if file.is_file():
                entry = zipfile.ZipInfo(file.relative_to(place).as_posix(), _STAMP)
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, file.read_bytes(), compresslevel=9)
    write_atomic(path, buffer.getvalue())
    return len(buffer.getvalue())


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """Provide a folder with the files of a packed run; checksums of all files are verified.

    Names and sizes are checked before anything is written, as the file may come from anybody.
    """
    with tempfile.TemporaryDirectory() as place:
        try:
            with zipfile.ZipFile(path) as archive:
                entries = archive.infolist()
                if sum(entry.file_size for entry in entries) > MOST_RATIO * path.stat().st_size + ALLOWANCE:
                    raise FileFormatError(f"'{path}' would unpack to far more than a run of its size holds.")
                for entry in entries:
                    if not folder.is_file_of_run(entry.filename):
                        raise FileFormatError(f"'{path}' is no run: it holds '{entry.filename[:100]}'.")
                    target = Path(place) / entry.filename
                    target.parent.mkdir(exist_ok=True)
                    target.write_bytes(archive.read(entry))
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
            raise FileFormatError(f"'{path}' is no run, or was altered or damaged: {error}.") from error
        except OSError as error:
            raise FileFormatError(f"'{path}' cannot be read: {error.strerror or error}.") from error
        yield Path(place)


# How many held-out rows the file is compared with `predict` on.
EXAMPLES = 128
# Options of `Posterior.export` that the run gives.
KNOWN = ("example", "decisions", "preprocess", "level", "target_scale")


@checked_arguments
def export(
    run: TableRun, path: str | os.PathLike[str], *, metadata: Mapping[str, Any] | None = None, **options: Any
) -> Exported:
    """Write a run to one ``.onnx`` or ``.pt2`` file that needs nothing else to predict new rows.

    The file takes rows ``[B, columns]`` in float64, one number per column; see `TableModule`. Its metadata list the
    columns, the levels of categories and the classes. It returns the prediction, the parts of its uncertainty and, in
    original units, the calibrated interval; ``unfamiliar`` and, if a risk was stated, ``answer``. `TableRun.predict`
    decides to answer a row that is ``answer`` and not ``unfamiliar``.

    Args:
        run: The run.
        path: The file. Its ending decides the format.
        metadata: More entries for the file's description of itself; values as in JSON.
        options: Options of `Posterior.export`, such as `outputs` and `tolerance`, without those that the run knows.
    """
    known = [name for name in KNOWN if name in options]
    if known:
        raise InputError(f"`{known[0]}` comes from the run: leave it out, or export `run.posterior`, which takes it.")
    check_metadata(metadata)
    inputs, _ = held_out = run.parts["held_out"]
    rows = numbers_of(run.encoder.columns, run.encoder.decode(inputs[:EXAMPLES]))
    about = {
        "columns": describe(run.encoder.columns),
        "target": run.target,
        "classes": list(run.encoder.class_names),
    }
    taken = [name for name in about if name in (metadata or {})]
    if taken:
        raise InputError(f"`metadata` must not hold '{taken[0]}', which comes from the run: choose another name.")
    scale = run.target_scale
    alarms = max(1 - UNFAMILIAR, 1.001 / (len(inputs) + 1))
    decisions: list[Any] = [Detector(run.posterior, held_out, false_positive_rate=alarms)]
    if run.risk is not None:
        loss: Any = "error" if scale is None else "absolute"
        decisions.append(Rejector(run.posterior, held_out, risk=run.risk, loss=loss, target_scale=scale))
    if scale is not None and run.calibration.reach(run.coverage) is not None:
        decisions.append(ConformalIntervals(run.posterior, held_out, coverage=run.coverage, target_scale=scale))
    return run.posterior.export(
        path, example=rows, preprocess=run.encoder, decisions=decisions, target_scale=scale, level=run.coverage,
        metadata={**(metadata or {}), **about}, **options,
    )  # fmt: skip
