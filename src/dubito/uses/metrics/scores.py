"""The table of all scores that `evaluate` computes and a report shows: to add a score, add an entry here.

A score is computed in one of two ways. A mean over the data is given as the sum over one batch (`class_sum`,
`number_sum`), which `ClassificationMetrics` and `RegressionMetrics` add up. Any other score is a function of vectors
with one number per scored datum: ``uncertainty`` (the first of `UNCERTAINTIES`), ``loss``, and for regression ``pit``;
detection scores take uncertainties and labels. Accuracy, ECE and MCE come from the calibration bins, coverage and width
from the intervals, which the two accumulators hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from dubito.beliefs.prediction import RegressionPrediction
from dubito.uses.metrics.detection import aupr, aurc, auroc, fpr95
from dubito.uses.metrics.proper import brier_sum, nll_per_row
from dubito.uses.metrics.regression import CheckedMixture, quantile_calibration_error

DETECTION = ("scores", "labels")

_OOD = "with out-of-distribution inputs as positives"
# How uncertain a prediction is, higher for less certain. The first of each task orders the risk-coverage curve.
UNCERTAINTIES = {"classification": ("max-probability", "entropy", "epistemic"), "regression": ("stddev", "epistemic")}


@dataclass(frozen=True)
class Score:
    """How a score is shown, and how it is computed.

    Attributes:
        title: Its title in tables.
        best: Its best value: inf if higher is better, -inf if lower is better, None if neither.
        meaning: One sentence that defines it, for the glossary of a report.
        function: Computes it from vectors.
        vectors: The names of the arguments of `function`.
        class_sum: Sums it over a batch of log-probabilities ``[N, C]``, probabilities and labels ``[N]``.
        number_sum: Sums it over a batch of predictions of numbers and targets.
        power: The power to which the mean of the sums is raised, such as 0.5 for a root.
    """

    title: str
    best: float | None
    meaning: str
    function: Callable[..., Tensor] | None = None
    vectors: tuple[str, ...] = ()
    class_sum: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    number_sum: Callable[[CheckedMixture | RegressionPrediction, Tensor], Tensor] | None = None
    power: float = 1.0


SCORES: dict[str, Score] = {
    "accuracy": Score("Accuracy", math.inf, "Fraction of targets whose most probable class is right."),
    "rmse": Score(
        "RMSE", -math.inf, "Root mean squared error of the predicted mean.", power=0.5,
        number_sum=lambda found, truth: (found.mean - truth).square().sum(),
    ),
    "nll": Score(
        "NLL", -math.inf, "Negative log-probability (of numbers: log-density) of the truth, in nats; a proper score.",
        class_sum=lambda log_probs, probs, labels: nll_per_row(log_probs, labels).sum(),
        number_sum=lambda found, truth: -found.log_prob_each(truth).sum(),
    ),
    "brier": Score(
        "Brier", -math.inf, "Squared distance of the probabilities to the truth, between 0 and 2; a proper score.",
        class_sum=lambda log_probs, probs, labels: brier_sum(probs, labels),
    ),
    "ece": Score("ECE", -math.inf, "Mean gap between confidence and accuracy over 15 bins of equal width."),
    "mce": Score("MCE", -math.inf, "Largest gap between confidence and accuracy over 15 bins of equal width."),
    "crps": Score(
        "CRPS", -math.inf, "Continuous ranked probability score, in the units of the target; a proper score.",
        number_sum=lambda found, truth: found.crps(truth).sum(),
    ),
    "coverage": Score("Coverage", None, "How often the central interval of that level holds the truth."),
    "width": Score("Width", None, "Mean width of the interval; a narrow one is better only at the same coverage."),
    "quantile_error": Score(
        "Quantile error", -math.inf, "Mean distance between a quantile's level and how often the truth falls below it.",
        quantile_calibration_error, ("pit",),
    ),
    "aurc": Score(
        "AURC", -math.inf, "Mean error rate (of numbers: squared error) over all fractions answered, surest first.",
        aurc, ("uncertainty", "loss"),
    ),
    "auroc": Score("AUROC", math.inf, f"Area under the ROC curve, {_OOD}.", auroc, DETECTION),
    "aupr": Score("AUPR", math.inf, f"Area under the precision-recall curve, {_OOD}.", aupr, DETECTION),
    "fpr95": Score(
        "FPR95", -math.inf, "Share of the data rejected where the threshold finds 95 % of out-of-distribution inputs.",
        fpr95, DETECTION,
    ),
    "seconds": Score("s / 1,000", -math.inf, "Wall-clock seconds for 1,000 predictions."),
}  # fmt: skip
CLASS_SUMS = {name: score.class_sum for name, score in SCORES.items() if score.class_sum is not None}
NUMBER_SUMS = {name: score.number_sum for name, score in SCORES.items() if score.number_sum is not None}


def computed(vectors: dict[str, Tensor]) -> dict[str, float]:
    """Return every score whose vectors are there."""
    return {
        name: float(score.function(*(vectors[key] for key in score.vectors)))
        for name, score in SCORES.items()
        if score.function is not None and vectors.keys() >= {*score.vectors}
    }
