"""The table of all scores that `evaluate` computes and a report shows: to add a score, add an entry here.

A score without a function comes from the sums of `ClassificationMetrics` or `RegressionMetrics`. The function of
another is called with the named vectors, which hold one number per scored datum: ``uncertainty`` (the first of
`UNCERTAINTIES`), ``loss``, and for regression ``pit``. Detection scores are called with uncertainties and labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from dubito.uses.metrics.detection import aupr, auroc, fpr95
from dubito.uses.metrics.regression import quantile_calibration_error
from dubito.uses.metrics.selective import aurc

DETECTION = ("scores", "labels")


@dataclass(frozen=True)
class Score:
    """How a score is shown, and how it is computed.

    Attributes:
        title: Its title in tables.
        best: Its best value: inf if higher is better, -inf if lower is better.
        function: What computes it, if it is not computed from sums.
        vectors: The names of the arguments of `function`.
    """

    title: str
    best: float
    function: Callable[..., Tensor] | None = None
    vectors: tuple[str, ...] = ()


SCORES: dict[str, Score] = {
    "accuracy": Score("Accuracy", math.inf),
    "nll": Score("NLL", -math.inf),
    "brier": Score("Brier", -math.inf),
    "ece": Score("ECE", -math.inf),
    "mce": Score("MCE", -math.inf),
    "rmse": Score("RMSE", -math.inf),
    "crps": Score("CRPS", -math.inf),
    "quantile_error": Score("Quantile error", -math.inf, quantile_calibration_error, ("pit",)),
    "aurc": Score("AURC", -math.inf, aurc, ("uncertainty", "loss")),
    "auroc": Score("AUROC", math.inf, auroc, DETECTION),
    "aupr": Score("AUPR", math.inf, aupr, DETECTION),
    "fpr95": Score("FPR95", -math.inf, fpr95, DETECTION),
    "seconds": Score("s / 1,000", -math.inf),
}

# How uncertain a prediction is, higher for less certain. The first of each task orders the risk-coverage curve.
UNCERTAINTIES = {
    "classification": ("max-probability", "entropy", "epistemic"),
    "regression": ("stddev", "epistemic"),
}


def computed(vectors: dict[str, Tensor]) -> dict[str, float]:
    """Return every score whose vectors are there."""
    return {
        name: float(score.function(*(vectors[key] for key in score.vectors)))
        for name, score in SCORES.items()
        if score.function is not None and vectors.keys() >= {*score.vectors}
    }
