"""`Calibration`: what held-out rows say about intervals, unfamiliar inputs, and when to answer.

It holds a few numbers per held-out row, so that any coverage and any risk can be asked for later.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dubito.beliefs.prediction import ClassPrediction, Prediction, RegressionPrediction
from dubito.core.constraints import OpenProbability, Positive, check
from dubito.core.errors import InputError
from dubito.uses import metrics
from dubito.uses.decisions.rejection import largest_threshold
from dubito.uses.decisions.scores import score_prediction
from dubito.uses.fixed_draws import rank_for

# Inputs that are less familiar than this share of the held-out rows are asked about.
UNFAMILIAR = 0.99


@dataclass(frozen=True, eq=False)
class Calibration:
    """Numbers per held-out row, in float64.

    Attributes:
        uncertainty: What answers are ordered by ``[N]``: one minus the largest probability, or the standard deviation.
        loss: The loss of each answer ``[N]``: 1 for a wrong class, else 0; the absolute error of a number.
        familiarity: How unfamiliar each row was ``[N]``, ascending: the mutual information of target and weights.
        nonconformity: For numbers, the absolute error in standard deviations ``[N]``, ascending; empty for classes.
    """

    uncertainty: Tensor
    loss: Tensor
    familiarity: Tensor
    nonconformity: Tensor

    @classmethod
    def of(cls, prediction: Prediction, targets: Tensor) -> Calibration:
        """Return the calibration by the prediction for held-out rows and their targets, in the same units."""
        familiarity = score_prediction(prediction, "mutual-information").double().cpu().sort().values
        if isinstance(prediction, ClassPrediction):
            loss = (prediction.mode != prediction.checked_targets(targets)).double().cpu()
            return cls(uncertainty_of(prediction), loss, familiarity, torch.empty(0, dtype=torch.float64))
        assert isinstance(prediction, RegressionPrediction)
        loss, error = (
            (each - prediction.checked_targets(targets)).abs().double().cpu()[:, 0]
            for each in (prediction.point, prediction.mean)
        )
        deviation = uncertainty_of(prediction)
        return cls(deviation, loss, familiarity, (error / deviation).sort().values)

    @property
    def num_rows(self) -> int:
        """The number of held-out rows."""
        return len(self.loss)

    def reach(self, coverage: float) -> float | None:
        """Return how many standard deviations an interval reaches from the mean, or None if there are too few rows.

        An interval of that reach holds a new number with at least this probability (split-conformal prediction).
        """
        check("coverage", OpenProbability, coverage)
        try:
            rank = rank_for(coverage, len(self.nonconformity), "An interval")
        except InputError:
            return None
        return float(self.nonconformity[rank - 1])

    def threshold(self, risk: float | None) -> float:
        """Return the largest uncertainty at which to answer, so that the mean loss of answers is at most `risk`."""
        if risk is None:
            return math.inf
        check("risk", Positive, risk)
        curve = metrics.risk_coverage(self.uncertainty, self.loss)
        found = largest_threshold(curve, risk)
        if found is None:
            told = f"No answer is certain enough for a risk of {risk:g}: on {self.num_rows} held-out rows the lowest"
            warnings.warn(f"{told} is {float(curve.risk.min()):.4g}, so every row is to be asked about.", stacklevel=3)
            return -math.inf
        return found

    def unfamiliar(self, prediction: Prediction) -> Tensor:
        """Return for each row the share of held-out rows that were more familiar ``[B]``."""
        scores = score_prediction(prediction, "mutual-information").double().cpu()
        return torch.searchsorted(self.familiarity, scores, right=False).double() / self.num_rows

    def accepts(self, prediction: Prediction, risk: float | None) -> Tensor:
        """Return which rows to answer ``[B]``: those certain enough for the risk, and not unfamiliar."""
        certain = uncertainty_of(prediction) <= self.threshold(risk)
        return certain & (self.unfamiliar(prediction) < UNFAMILIAR)

    def to_tree(self) -> dict[str, Tensor]:
        """Return the numbers by name, as `core.io` saves them."""
        return dict(vars(self))

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Calibration:
        """Undo `to_tree`."""
        return cls(*(tree[name].double() for name in ("uncertainty", "loss", "familiarity", "nonconformity")))


def uncertainty_of(prediction: Prediction) -> Tensor:
    """Return what answers are ordered by ``[B]``, in float64."""
    if isinstance(prediction, ClassPrediction):
        return score_prediction(prediction, "max-probability").cpu()
    assert isinstance(prediction, RegressionPrediction)
    return prediction.stddev[:, 0].double().cpu()
