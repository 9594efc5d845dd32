"""Score a run on rows: as `evaluate` does, with rows as a person reads them, and the run's own intervals by group."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dubito.beliefs.prediction import Prediction
from dubito.data import Pair, TableTransform
from dubito.data.columns import CategoryColumn
from dubito.fitting.posterior import Posterior
from dubito.uses.reporting import Evaluation, evaluate
from dubito.uses.reporting.collect import RescaledDraws
from dubito.uses.reporting.evaluation import GroupScores
from dubito.uses.reporting.groups import QUARTERS, by_group, quarters
from dubito.uses.runs.calibration import Calibration, uncertainty_of
from dubito.uses.runs.prediction import answer_columns

MOST_KINDS = 8  # columns whose categories are compared
_PIXEL = re.compile(r"pixel_(\d{1,4})_(\d{1,4})")


def scored(
    posterior: Posterior,
    pair: Pair,
    prediction: Prediction,
    *,
    encoder: TableTransform,
    draws: RescaledDraws,
    calibration: Calibration,
    coverage: float,
    name: str | None,
) -> Evaluation:
    """Return the scores of a run for encoded rows and their targets.

    Args:
        posterior: The posterior of the run.
        pair: The rows and their targets.
        prediction: The prediction for the rows, in original units.
        encoder: Encoded the rows.
        draws: How the run predicts.
        calibration: Sets the intervals.
        coverage: Their level.
        name: The name of the run.
    """
    found = evaluate(
        posterior, pair, target_scale=draws.target_scale, name=name, class_names=encoder.class_names,
        decode=lambda inputs: _pictures_or_columns(encoder.decode(inputs)),
    )  # fmt: skip
    groups = _groups(pair, prediction, encoder, draws, calibration, coverage)
    return replace(found, curves=replace(found.curves, groups=groups))


def _pictures_or_columns(columns: dict[str, list[Any]]) -> Any:
    """Return pictures ``[N, 1, H, W]`` if all columns are pixels, else the columns."""
    found = [_PIXEL.fullmatch(name) for name in columns]
    places = [(int(each[1]), int(each[2])) for each in found if each is not None]
    if not places or len(places) < len(columns):
        return columns
    height, width = (max(each) + 1 for each in zip(*places, strict=True))
    pictures = torch.zeros(len(next(iter(columns.values()))), 1, height, width, dtype=torch.float64)
    for (row, column), values in zip(places, columns.values(), strict=True):
        pictures[:, 0, row, column] = torch.tensor([float(value or 0) for value in values], dtype=torch.float64)
    return pictures


def with_texts(scores: Evaluation, texts: Mapping[str, Sequence[str | None]]) -> Evaluation:
    """Return the scores of held-out rows with the free texts of their examples, which cannot be decoded from inputs."""
    examples = tuple(
        replace(each, cells=each.cells | {name: column[each.index] or "–" for name, column in texts.items()})
        for each in scores.curves.examples
    )
    return replace(scores, curves=replace(scores.curves, examples=examples)) if texts else scores


def _groups(
    pair: Pair,
    prediction: Prediction,
    encoder: TableTransform,
    draws: RescaledDraws,
    calibration: Calibration,
    coverage: float,
) -> dict[str, GroupScores]:
    """Return how often answers are right, or intervals hold the truth, by category and by predicted uncertainty."""
    reach = calibration.reach(coverage) if encoder.task == "regression" else None
    answers = answer_columns(prediction, encoder.class_names, reach, coverage)
    if encoder.task == "classification":
        right: Any = answers["prediction"] == np.array(encoder.class_names, dtype=object)[pair[1].numpy()]
        claimed = torch.as_tensor(answers["confidence"])
    else:
        truth = draws.scaled(pair[1])[:, 0].double().numpy()
        right = (truth >= answers["lower"]) & (truth <= answers["upper"])
        claimed = torch.full((len(truth),), coverage, dtype=torch.float64)
    observed, cells = torch.as_tensor(np.asarray(right, dtype=np.float64)), encoder.decode(pair[0])
    found: dict[str, GroupScores] = {}
    for column in encoder.columns:
        labels = ["missing or unseen" if cell is None else str(cell) for cell in cells[column.name]]
        if isinstance(column, CategoryColumn) and len(set(labels)) > 1 and len(found) < MOST_KINDS:
            found[column.name] = by_group(labels, claimed, observed)
    own = quarters(uncertainty_of(prediction))
    if len(set(own)) > 1:
        found["Predicted uncertainty"] = by_group(own, claimed, observed, QUARTERS)
    return found
