"""Held-out rows to look at: those a run is least certain about, and those about which it is most wrongly certain."""

from __future__ import annotations

from typing import Any

import numpy as np

from dubito.uses.reporting.sections import Listing, Section
from dubito.uses.runs.calibration import uncertainty_of
from dubito.uses.runs.prediction import answer_columns
from dubito.uses.runs.run import TableRun

# How many rows are looked at, how many are shown of each kind, and with how many of their columns.
SEEN, SHOWN, COLUMNS = 2000, 5, 8


def row_sections(run: TableRun) -> tuple[Section, ...]:
    """Return the section of a report that shows rows of a run."""
    inputs, targets = (part[:SEEN] for part in run.parts["held_out"])
    prediction = run._draws.predict(inputs)
    reach = run.calibration.reach(run.coverage) if run.task == "regression" else None
    answers = answer_columns(prediction, run.encoder.class_names, reach, run.coverage)
    uncertainty = uncertainty_of(prediction).numpy()
    if run.task == "classification":
        truth: Any = np.array(run.encoder.class_names, dtype=object)[targets.numpy()]
        wrong = answers["prediction"] != truth
        surprise = np.where(wrong, 1 - uncertainty, -np.inf)
    else:
        truth = run._draws.scaled(targets)[:, 0].double().numpy()
        surprise = np.abs(truth - answers["prediction"]) / uncertainty
        wrong = (truth < answers["lower"]) | (truth > answers["upper"])
    shown = [name for name in ("confidence", "stddev") if name in answers]
    own: dict[str, Any] = {
        run.target: truth,
        "prediction": answers["prediction"],
        **{name: answers[name] for name in shown},
    }
    sure = [int(place) for place in np.argsort(-surprise, kind="stable")[:SHOWN] if wrong[place]]
    unsure = np.argsort(-uncertainty, kind="stable")[:SHOWN].tolist()
    kinds: dict[str, list[int]] = {"The least certain rows": unsure, "Wrong and certain of it": sure}
    listings = tuple(_listing(run, told, own, places) for told, places in kinds.items() if places)
    note = (
        f"Held-out rows: the {SHOWN} with the largest uncertainty, and those whose truth surprised the posterior most."
    )
    return (Section("rows", "Rows to look at", note, listings=listings),)


def _listing(run: TableRun, caption: str, own: dict[str, Any], places: list[int]) -> Listing:
    names = run.encoder.column_names[:COLUMNS]
    cells = run.cells("held_out", places)
    head = (*own, *(name if name not in own else f"{name} (column)" for name in names))
    rows = [
        (*(_text(values[place]) for values in own.values()), *(_text(cells[name][number]) for name in names))
        for number, place in enumerate(places)
    ]
    return Listing(caption, head, tuple(rows))


def _text(value: Any) -> str:
    return "–" if value is None else f"{value:.6g}" if isinstance(value, float | np.floating) else str(value)
