"""Metrics over batches and over processes: sums in one flat float64 tensor, so that merging is adding.

What needs all scores at once (AUROC, AUPR, FPR95, AURC, equal-mass bins) cannot be merged and stays a function.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from dubito.beliefs.prediction import RegressionPrediction
from dubito.core.arguments import checked_arguments
from dubito.core.constraints import Count, OpenProbability
from dubito.core.errors import InputError
from dubito.core.tensor_checks import check_num_bins, class_rows, top_class
from dubito.uses.metrics.calibration import ReliabilityBins, bin_rows
from dubito.uses.metrics.regression import CheckedMixture, as_mixture
from dubito.uses.metrics.scores import CLASS_SUMS, NUMBER_SUMS, SCORES


class _MetricSums:
    """A flat float64 tensor of sums on the CPU, with the settings that give its entries their meaning."""

    def __init__(self, size: int, **settings: Any) -> None:
        self._settings = settings
        self._sums = torch.zeros(size, dtype=torch.float64)

    def state(self) -> Tensor:
        """Return a copy of the sums, flat and float64; the states of two processes add."""
        return self._sums.clone()

    @classmethod
    @checked_arguments
    def from_state(cls, state: Tensor, **settings: Any) -> Self:
        """Rebuild from a (summed) `state()` and the settings that made it, those of the constructor."""
        restored = cls(**settings)
        if state.shape != restored._sums.shape:
            raise InputError(
                f"A state of {cls.__name__} with these settings has {len(restored._sums)} numbers, but the one given "
                f"has shape {tuple(state.shape)}: give the settings it was made with."
            )
        restored._sums = state.detach().to("cpu", torch.float64, copy=True)
        return restored

    @checked_arguments
    def merge(self, other: Self) -> Self:
        """Return the metrics of the data of both; neither is changed."""
        if type(other) is not type(self) or other._settings != self._settings:
            raise InputError(
                f"Metrics with different settings cannot be merged: {type(self).__name__} {self._settings} and "
                f"{type(other).__name__} {getattr(other, '_settings', '')}."
            )
        return self.from_state(self._sums + other._sums, **self._settings)

    def _add(self, *sums: Tensor) -> None:
        self._sums += torch.cat([part.reshape(-1).to("cpu", torch.float64) for part in sums])

    def _check_seen(self, count: Tensor) -> None:
        if not bool(count > 0):
            raise InputError(f"{type(self).__name__} has seen no data: call update first.")


class ClassificationMetrics(_MetricSums):
    """Accuracy, NLL, Brier score and equal-width ECE and MCE, batch by batch.

    Args:
        num_bins: Number of equal-width calibration bins.
        ignore_index: A target whose rows are left out.

    >>> metrics = ClassificationMetrics()
    >>> metrics.update(torch.tensor([[0.75, 0.25], [0.25, 0.75]]).log(), torch.tensor([0, 0]))
    >>> metrics.compute()["accuracy"]
    0.5
    """

    @checked_arguments
    def __init__(self, num_bins: Count = 15, ignore_index: int | None = None) -> None:
        check_num_bins(num_bins)
        super().__init__(len(CLASS_SUMS) + 3 * num_bins, num_bins=num_bins, ignore_index=ignore_index)
        self.num_bins = num_bins
        self.ignore_index = ignore_index

    @checked_arguments
    def update(self, log_probs: Tensor, targets: Tensor) -> None:
        """Add a batch of log-probabilities [..., C] and class indices [...]."""
        rows, labels = class_rows("log_probs", log_probs, targets, self.ignore_index)
        probs = rows.exp()
        confidence, prediction = top_class(probs)
        bins = bin_rows(confidence, prediction == labels, self.num_bins)
        sums = (sum_of(rows, probs, labels) for sum_of in CLASS_SUMS.values())
        self._add(*sums, bins.counts, bins.confidence_sums, bins.correct_sums)

    def reliability(self) -> ReliabilityBins:
        """Return the calibration bins of all data so far."""
        edges = torch.linspace(0, 1, self.num_bins + 1, dtype=torch.float64)
        return ReliabilityBins(edges, *self._sums[len(CLASS_SUMS) :].clone().chunk(3))

    def compute(self) -> dict[str, float]:
        """Return `accuracy`, `nll`, `brier`, `ece`, `mce` and `count` of all data so far."""
        bins = self.reliability()
        count = bins.counts.sum()
        self._check_seen(count)
        first = {"accuracy": float(bins.correct_sums.sum() / count), **_means(CLASS_SUMS, self._sums / count)}
        return {**first, "ece": float(bins.ece), "mce": float(bins.mce), "count": float(count)}


class RegressionMetrics(_MetricSums):
    """RMSE, NLL, CRPS and the coverage and width of central intervals, batch by batch, for Gaussians and mixtures.

    Args:
        levels: Levels of the central intervals, strictly between 0 and 1.

    >>> metrics = RegressionMetrics()
    >>> metrics.update(torch.zeros(2), torch.ones(2), torch.tensor([0.5, 1.0]))
    >>> metrics.compute()["coverage@0.5"]
    0.5
    """

    @checked_arguments
    def __init__(self, levels: Sequence[OpenProbability] = (0.5, 0.9, 0.95)) -> None:
        self.levels = tuple(levels)
        if not all(0 < level < 1 for level in self.levels):
            raise InputError(f"`levels` must lie strictly between 0 and 1, got {self.levels}.")
        super().__init__(1 + len(NUMBER_SUMS) + 2 * len(self.levels), levels=self.levels)

    @checked_arguments
    def update(self, mean: Tensor, stddev: Tensor, targets: Tensor, *, weights: Tensor | None = None) -> None:
        """Add a batch of Gaussians [...] or mixtures [K, ...] and targets [...], as `dubito.metrics.gaussian_nll`."""
        self._add_scores(as_mixture(mean, stddev, targets, weights), targets.detach().double())

    def update_prediction(self, prediction: RegressionPrediction, targets: Tensor) -> None:
        """Add a batch of predictions [B, O], of any distribution, and targets."""
        wide = prediction.to(torch.float64)
        self._add_scores(wide, wide.checked_targets(targets))

    def _add_scores(self, found: CheckedMixture | RegressionPrediction, truth: Tensor) -> None:
        covered, widths = [], []
        for level in self.levels:
            lower, upper = (found.quantile((1 + side * level) / 2) for side in (-1, 1))
            covered.append(((lower <= truth) & (truth <= upper)).sum())
            widths.append((upper - lower).sum())
        self._add(
            torch.tensor(float(truth.numel())),
            *(sum_of(found, truth) for sum_of in NUMBER_SUMS.values()),
            *covered,
            *widths,
        )

    def compute(self) -> dict[str, float]:
        """Return `rmse`, `nll`, `crps`, `coverage@level` and `width@level` for every level, and `count`."""
        count = self._sums[0]
        self._check_seen(count)
        means = self._sums[1:] / count
        values = _means(NUMBER_SUMS, means)
        names = [f"{name}@{level:g}" for name in ("coverage", "width") for level in self.levels]
        values |= dict(zip(names, means[len(NUMBER_SUMS) :].tolist(), strict=True))
        return values | {"count": float(count)}


def _means(names: Iterable[str], means: Tensor) -> dict[str, float]:
    """Return the scores that stand first among the means, by name."""
    return {name: float(mean) ** SCORES[name].power for name, mean in zip(names, means, strict=False)}
