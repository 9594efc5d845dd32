"""Export a run: one file takes rows of the table, one number per column, and returns predictions with uncertainty."""

from __future__ import annotations

import os
from typing import Any

from dubito.data.table_module import describe, numbers_of
from dubito.uses.decisions import ConformalIntervals, Detector, Rejector
from dubito.uses.export import Exported
from dubito.uses.runs.calibration import UNFAMILIAR
from dubito.uses.runs.run import TableRun

# How many held-out rows the file is compared with `predict` on.
EXAMPLES = 128


def export(run: TableRun, path: str | os.PathLike[str], **options: Any) -> Exported:
    """Write a run to one ``.onnx`` or ``.pt2`` file that needs nothing else to predict new rows.

    The file takes rows ``[B, columns]`` in float64, one number per column; see `TableModule`. Its metadata list the
    columns, the levels of categories and the classes. It returns the prediction, the parts of its uncertainty and, in
    original units, the calibrated interval; ``unfamiliar`` and, if a risk was stated, ``answer``. `TableRun.predict`
    decides to answer a row that is ``answer`` and not ``unfamiliar``.

    Args:
        run: The run.
        path: The file. Its ending decides the format.
        options: Options of `Posterior.export`, such as `outputs` and `tolerance`.
    """
    inputs, _ = held_out = run.parts["held_out"]
    rows = numbers_of(run.encoder.columns, run.encoder.decode(inputs[:EXAMPLES]))
    metadata = {
        "columns": describe(run.encoder.columns),
        "target": run.target,
        "classes": list(run.encoder.class_names),
    }
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
        metadata=metadata, **options,
    )  # fmt: skip
