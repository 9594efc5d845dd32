"""Scores of predictive distributions: pure functions of tensors, and two accumulators that merge exactly.

Predictions come first, targets second. Classes are the last axis: `probs` [N, C] (or `log_probs`, where the name says
so) with integer `targets` [N]; further position axes, [N, T, C] with [N, T], are flattened. Means of Gaussians are
[N], of mixtures of K Gaussians [K, N]. A score is a 0-dim float64 tensor without a gradient.
"""

from dubito.beliefs.prediction.uncertainty import EntropyDecomposition, entropy_decomposition
from dubito.uses.metrics.accumulator import ClassificationMetrics, RegressionMetrics
from dubito.uses.metrics.calibration import ReliabilityBins, classwise_ece, ece, mce, reliability
from dubito.uses.metrics.detection import RiskCoverage, aupr, aurc, auroc, fpr95, risk_coverage
from dubito.uses.metrics.proper import accuracy, brier, nll
from dubito.uses.metrics.regression import (
    QuantileCalibration,
    crps,
    gaussian_nll,
    interval_coverage,
    interval_width,
    pit,
    quantile_calibration,
    quantile_calibration_error,
    rmse,
)

__all__ = [
    "ClassificationMetrics",
    "EntropyDecomposition",
    "QuantileCalibration",
    "RegressionMetrics",
    "ReliabilityBins",
    "RiskCoverage",
    "accuracy",
    "aupr",
    "aurc",
    "auroc",
    "brier",
    "classwise_ece",
    "crps",
    "ece",
    "entropy_decomposition",
    "fpr95",
    "gaussian_nll",
    "interval_coverage",
    "interval_width",
    "mce",
    "nll",
    "pit",
    "quantile_calibration",
    "quantile_calibration_error",
    "reliability",
    "risk_coverage",
    "rmse",
]
