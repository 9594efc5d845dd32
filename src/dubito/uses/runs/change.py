"""Change a run: learn from more rows. Gives a new run."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dubito.data import Pair, Table
from dubito.data.source import carve
from dubito.data.tables import as_table, with_target
from dubito.fitting.training import Training
from dubito.uses.reporting import evaluate
from dubito.uses.runs.run import TableRun, Texts, calibrated
from dubito.uses.runs.table_fit import HELD_OUT, sample_rows, take_rows, take_texts

# By how much the NLL of the old held-out rows may grow in an update before it is questioned, in nats.
WORSE = 0.1
# With fewer new rows none is held out: the calibration stays on the old ones.
FEWEST_NEW = 10


def update(
    run: TableRun, table: Any, *, training: Mapping[str, Any] | None = None, seed: int = 0, progress: bool = True
) -> TableRun:
    """Return the run after more rows: its posterior is the prior for them, and a fifth of them joins the held-out rows.

    The encoder stays: a category that the first rows did not have is still unseen.

    Args:
        run: The run; it is not changed.
        table: Rows with the target column.
        training: Training settings, for posteriors that are updated by training.
        seed: The seed of all randomness.
        progress: Whether to show progress bars on a terminal.
    """
    rows = with_target(as_table(table), run.target)
    inputs, targets = run.encoder.encode(rows), run.encoder.encode_targets(rows)
    kept, others = np.arange(len(rows)), np.arange(0)
    if len(rows) >= FEWEST_NEW:
        kept, others = carve(len(rows), validation=HELD_OUT, generator=torch.Generator().manual_seed(seed))
    posterior = run.posterior.update(
        (inputs[kept], targets[kept]),
        training=None if training is None else Training(**training),
        generator=torch.Generator().manual_seed(seed),
        progress=progress,
    )
    old = run.parts["held_out"]
    held_out = tuple(torch.cat([one, new[others]]) for one, new in zip(old, (inputs, targets), strict=True))
    parts: dict[str, Pair] = {**run.parts, "held_out": (held_out[0], held_out[1])}
    texts = _joined_texts(run, rows, {"held_out": others, "train": kept})
    if "train" in parts:
        seen = tuple(torch.cat([one, new[kept]]) for one, new in zip(parts["train"], (inputs, targets), strict=True))
        chosen = sample_rows(len(seen[1]), seed)
        parts["train"], texts["train"] = take_rows((seen[0], seen[1]), chosen), take_texts(texts["train"], chosen)
    updates = [*run.settings.get("updates", []), {"rows": len(kept), "held_out": len(others)}]
    settings = {**run.settings, "updates": updates}
    new = replace(calibrated(posterior, run.encoder.widened(rows), run.network, parts, settings), texts=texts)
    _warn_if_worse(run, new)
    return new


def _joined_texts(run: TableRun, rows: Table, chosen: Mapping[str, NDArray[Any]]) -> dict[str, Texts]:
    """Return the texts of each part of the run, followed by those of its new rows."""
    new = run.encoder.texts_of(rows)
    return {
        part: {name: [*run.texts[part][name], *take_texts(new, torch.from_numpy(places))[name]] for name in new}
        for part, places in chosen.items()
    }


def _warn_if_worse(run: TableRun, new: TableRun) -> None:
    """Warn if an update made the predictions for the old held-out rows much worse."""
    before, after = (
        evaluate(each.posterior, run.parts["held_out"], target_scale=each.target_scale).scores["nll"]
        for each in (run, new)
    )
    if not after <= before + WORSE:
        warnings.warn(
            f"After the update the old held-out rows are predicted worse (NLL {after:.4g}, before {before:.4g}): the "
            "new rows may hold errors, or other data than the first ones.",
            stacklevel=3,
        )
