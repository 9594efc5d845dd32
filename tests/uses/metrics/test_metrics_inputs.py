"""Bad input is one clear sentence, never a number."""

from __future__ import annotations

import doctest
import importlib
import math
import pkgutil
from collections.abc import Callable

import pytest
import torch
from dubito.errors import InputError
from torch import Tensor

from dubito import metrics

PROBS = torch.tensor([[0.9, 0.1], [0.3, 0.7], [0.5, 0.5]])
TARGETS = torch.tensor([0, 1, 1])
NAN_PROBS = torch.tensor([[0.9, 0.1], [0.3, math.nan], [0.5, 0.5]])
OF_PROBS = (metrics.accuracy, metrics.brier, metrics.ece, metrics.mce, metrics.classwise_ece, metrics.reliability)


def nll_of(probs: Tensor, targets: Tensor, ignore_index: int | None = None) -> Tensor:
    return metrics.nll(probs.log(), targets, ignore_index=ignore_index)


@pytest.mark.parametrize("metric", [*OF_PROBS, nll_of])
@pytest.mark.parametrize(
    ("probs", "targets", "message"),
    [
        (PROBS, torch.tensor([0, 1, 2]), r"targets must lie in 0\.\.1, but 2 was found"),
        (PROBS, torch.tensor([0, -1, 1]), "but -1 was found"),
        (PROBS, TARGETS[:2], r"needs targets of shape \(3,\)"),
        (PROBS, PROBS.long(), r"needs targets of shape \(3,\)"),
        (PROBS, TARGETS.float(), "targets must be integer class indices"),
        (PROBS, TARGETS.bool(), "targets must be integer class indices"),
        (PROBS[:0], TARGETS[:0], "no row to measure"),
        (NAN_PROBS, TARGETS, "contains NaN"),
        (PROBS[:, :1], TARGETS, "at least two classes"),
        (PROBS[0], TARGETS[0], "at least two classes"),
        (10 * PROBS, TARGETS, "is not normalized"),
        (PROBS / 10, TARGETS, "is not normalized"),
    ],
)
def test_class_metrics_refuse(metric: Callable[..., object], probs: Tensor, targets: Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        metric(probs, targets)


@pytest.mark.parametrize("metric", [*OF_PROBS, nll_of])
def test_ignoring_everything_is_an_error(metric: Callable[..., object]) -> None:
    with pytest.raises(InputError, match="every target is the ignored index"):
        metric(PROBS, torch.full((3,), -100), ignore_index=-100)


def test_probabilities_and_log_probabilities_are_told_apart() -> None:
    for metric in OF_PROBS:
        with pytest.raises(InputError, match="is not normalized"):
            metric(PROBS.log(), TARGETS)
    with pytest.raises(InputError, match="is not normalized"):
        metrics.nll(PROBS, TARGETS)
    with pytest.raises(InputError, match="is not normalized"):
        metrics.entropy_decomposition(PROBS[None])
    with pytest.raises(InputError, match=r"negative value -0\.05"):
        metrics.classwise_ece(torch.tensor([[1.0, 0.05, -0.05]]), torch.tensor([0]))


def test_calibration_settings() -> None:
    with pytest.raises(InputError, match="num_bins must lie between 1 and 100000, but it is 0"):
        metrics.ece(PROBS, TARGETS, num_bins=0)
    with pytest.raises(InputError, match="`binning` must be 'equal-width' or 'equal-mass', got 'quantile'"):
        metrics.ece(PROBS, TARGETS, binning="quantile")


@pytest.mark.parametrize("metric", [metrics.auroc, metrics.aupr, metrics.fpr95])
@pytest.mark.parametrize(
    ("scores", "labels", "message"),
    [
        ([0.1, math.nan], [0, 1], "scores contains NaN"),
        ([0.1, 0.2], [0, 2], "`labels` must be 0 or 1"),
        ([0.1, 0.2], [1, 1], "only one value"),
        ([0.1, 0.2], [0, 0], "only one value"),
        ([0.1, 0.2], [0, 1, 1], "same shape"),
        ([], [], "scores is empty"),
    ],
)
def test_detection_refuses(metric: Callable[..., object], scores: list[float], labels: list[int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        metric(torch.tensor(scores), torch.tensor(labels))


@pytest.mark.parametrize("metric", [metrics.risk_coverage, metrics.aurc, metrics.rmse])
def test_pairs_refuse(metric: Callable[..., object]) -> None:
    with pytest.raises(InputError, match="same shape"):
        metric(torch.zeros(3, 1), torch.zeros(3))  # would broadcast to nine differences
    with pytest.raises(InputError, match="is empty"):
        metric(torch.zeros(0), torch.zeros(0))
    with pytest.raises(InputError, match="contains NaN"):
        metric(torch.zeros(2), torch.tensor([0.0, math.nan]))


@pytest.mark.parametrize("metric", [metrics.gaussian_nll, metrics.crps, metrics.pit])
def test_gaussian_metrics_refuse(metric: Callable[..., object]) -> None:
    zeros, ones = torch.zeros(4), torch.ones(4)
    with pytest.raises(InputError, match="mean must have the shape of targets"):
        metric(zeros, ones, torch.zeros(4, 1))
    with pytest.raises(InputError, match="same shape"):
        metric(zeros, torch.ones(4, 1), zeros)
    with pytest.raises(InputError, match="targets is empty"):
        metric(zeros[:0], ones[:0], zeros[:0])
    with pytest.raises(InputError, match="`stddev` must be positive, got -1"):
        metric(zeros, -ones, zeros)
    with pytest.raises(InputError, match="stddev contains NaN"):
        metric(zeros, ones * math.nan, zeros)
    with pytest.raises(InputError, match="must be finite"):
        metric(zeros, ones, ones * math.inf)
    pair = zeros.expand(2, 4), ones.expand(2, 4), zeros
    with pytest.raises(InputError, match=r"weights must have shape \(2,\) or \(2, 4\)"):
        metric(*pair, weights=torch.ones(4) / 4)
    for weights in ([0.5, 0.6], [1.5, -0.5], [math.nan, 1.0]):
        with pytest.raises(InputError, match="sum to 1 over the components"):
            metric(*pair, weights=torch.tensor(weights))


def test_a_density_needs_a_positive_scale() -> None:
    with pytest.raises(InputError, match="`stddev` must be positive, got 0"):
        metrics.gaussian_nll(torch.zeros(1), torch.zeros(1), torch.zeros(1))


def test_intervals_and_quantiles_refuse() -> None:
    with pytest.raises(InputError, match="`lower` exceeds `upper`"):
        metrics.interval_width(torch.ones(2), torch.zeros(2))
    with pytest.raises(InputError, match="same shape"):
        metrics.interval_coverage(torch.zeros(2), torch.ones(2), torch.zeros(2, 1))
    with pytest.raises(InputError, match=r"pit must lie in \[0, 1\]"):
        metrics.quantile_calibration(torch.tensor([1.5]))
    with pytest.raises(InputError, match=r"levels must lie in \[0, 1\]"):
        metrics.quantile_calibration(torch.tensor([0.5]), levels=[50.0])
    with pytest.raises(InputError, match="levels is empty"):
        metrics.quantile_calibration_error(torch.tensor([0.5]), levels=[])


@pytest.mark.parametrize("shape", [(3,), (0, 3, 2), (2, 0, 2), (2, 3, 1)])
def test_entropy_decomposition_refuses_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"shape \[samples, \.\.\., classes\]"):
        metrics.entropy_decomposition(torch.zeros(shape))


def test_entropy_decomposition_refuses_nan() -> None:
    with pytest.raises(InputError, match="contains NaN"):
        metrics.entropy_decomposition(NAN_PROBS.log()[None])


def test_examples_in_docstrings() -> None:
    attempted = 0
    for module in pkgutil.iter_modules(metrics.__path__, "dubito.metrics."):
        result = doctest.testmod(importlib.import_module(module.name))
        assert result.failed == 0, module.name
        attempted += result.attempted
    assert attempted > 20
