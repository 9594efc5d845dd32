"""`TablePrediction`: what a run says about each row of a table, as columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dubito.beliefs.prediction import ClassPrediction, Prediction, RegressionPrediction
from dubito.beliefs.prediction.base import frame
from dubito.uses.runs.calibration import Calibration

if TYPE_CHECKING:
    import pandas as pd

Columns = dict[str, NDArray[Any]]

ANSWER, ASK = "answer", "ask"


@dataclass(frozen=True, eq=False)
class TablePrediction:
    """What a run says about each row, in original units.

    Attributes:
        columns: ``prediction``, then ``stddev``, ``lower`` and ``upper`` for numbers, or ``confidence`` and one
            ``p_<class>`` per class; then ``epistemic``, ``aleatoric``, ``unfamiliar`` and ``decision``.
        distribution: The prediction as a distribution.
    """

    columns: Columns
    distribution: Prediction

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.columns[name]

    def __len__(self) -> int:
        return len(self.columns["prediction"])

    def to_frame(self) -> pd.DataFrame:
        """Return a pandas frame."""
        return frame(dict(self.columns))


def column_names(class_names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the columns of a prediction; without classes those of numbers."""
    own = ("confidence", *(f"p_{name}" for name in class_names)) if class_names else ("stddev", "lower", "upper")
    return ("prediction", *own, "epistemic", "aleatoric", "unfamiliar", "decision")


def columns_of(
    prediction: Prediction, class_names: tuple[str, ...], calibration: Calibration, coverage: float, risk: float | None
) -> Columns:
    """Return the columns of a prediction that is in original units."""
    own = answer_columns(prediction, class_names, calibration.reach(coverage) if not class_names else None, coverage)
    assert isinstance(prediction, ClassPrediction | RegressionPrediction)
    parts = prediction.epistemic, prediction.aleatoric
    if isinstance(prediction, RegressionPrediction):
        parts = parts[0][:, 0], parts[1][:, 0]
    accepted = calibration.accepts(prediction, risk).numpy()
    own |= dict(zip(("epistemic", "aleatoric"), (part.double().cpu().numpy() for part in parts), strict=True))
    own["unfamiliar"] = calibration.unfamiliar(prediction).numpy()
    own["decision"] = np.where(accepted, ANSWER, ASK)
    return own


def answer_columns(
    prediction: Prediction, class_names: tuple[str, ...], reach: float | None, coverage: float
) -> Columns:
    """Return the columns of the answer alone; without a calibrated `reach` intervals are those of the prediction."""
    if isinstance(prediction, ClassPrediction):
        return _class_columns(prediction, class_names)
    assert isinstance(prediction, RegressionPrediction)
    return _number_columns(prediction, reach, coverage)


def _class_columns(prediction: ClassPrediction, class_names: tuple[str, ...]) -> Columns:
    probs = prediction.probs.double().cpu().numpy()
    names = np.array(class_names, dtype=object)
    own: Columns = {"prediction": names[prediction.mode.cpu().numpy()], "confidence": probs.max(axis=1)}
    return own | {f"p_{name}": probs[:, place] for place, name in enumerate(class_names)}


def _number_columns(prediction: RegressionPrediction, reach: float | None, coverage: float) -> Columns:
    parts = (prediction.point, prediction.mean, prediction.stddev)
    point, mean, stddev = (value[:, 0].double().cpu().numpy() for value in parts)
    if reach is not None:
        return {"prediction": point, "stddev": stddev, "lower": mean - reach * stddev, "upper": mean + reach * stddev}
    low, high = (end[:, 0].double().cpu().numpy() for end in prediction.interval(coverage))
    return {"prediction": point, "stddev": stddev, "lower": low, "upper": high}
