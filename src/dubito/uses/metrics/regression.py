"""Scores of Gaussian and Gaussian-mixture predictions, of intervals and of quantiles.

A Gaussian prediction is `mean` and `stddev` of the shape of `targets`; a mixture has one more axis in front, [K, ...],
and `weights` [K] or [K, ...] (equal if not given). Several outputs per input count as that many data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dubito.beliefs.prediction import gaussian_mixture
from dubito.core.arguments import checked_arguments
from dubito.core.arrays import to_tensor
from dubito.core.constraints import Range
from dubito.core.errors import InputError
from dubito.core.tensor_checks import check_same_shape


class CheckedMixture(NamedTuple):
    """A checked mixture of Gaussians in float64: means and stddevs [K, ...], and weights that multiply them."""

    means: Tensor
    stddevs: Tensor
    weights: Tensor

    @property
    def mean(self) -> Tensor:
        """The predictive mean [...]."""
        return (self.weights * self.means).sum(0)

    def log_prob_each(self, truth: Tensor) -> Tensor:
        """Return the log-density of each target [...]."""
        return gaussian_mixture.log_prob(*self, truth)

    def crps(self, truth: Tensor) -> Tensor:
        """Return the continuous ranked probability score of each target [...]."""
        return gaussian_mixture.crps(*self, truth)

    def quantile(self, level: float) -> Tensor:
        """Return the quantile of each target [...]."""
        return gaussian_mixture.quantile(*self, level)


class QuantileCalibration(NamedTuple):
    """How often the truth fell below each predicted quantile: calibrated if `observed` equals `levels`.

    Attributes:
        levels: Quantile levels [L], float64.
        observed: Fraction of data at or below the predicted quantile of that level [L], float64.
    """

    levels: Tensor
    observed: Tensor


@checked_arguments
def rmse(mean: Tensor, targets: Tensor) -> Tensor:
    r"""Return the root mean squared error $\sqrt{\frac1N \sum_n (\mu_n - y_n)^2}$.

    >>> float(rmse(torch.tensor([1.0, 2.0]), torch.tensor([4.0, -1.0])))
    3.0
    """
    check_same_shape(mean=mean, targets=targets)
    return (mean.detach().double() - targets.detach().double()).square().mean().sqrt()


@checked_arguments
def gaussian_nll(mean: Tensor, stddev: Tensor, targets: Tensor, *, weights: Tensor | None = None) -> Tensor:
    r"""Return the mean negative log density $-\frac1N \sum_n \log p(y_n)$ of Gaussians or mixtures, in nats.

    Args:
        mean: Means [...] of Gaussians, or [K, ...] of mixtures.
        stddev: Standard deviations, of the shape of `mean`.
        targets: Observed values [...].
        weights: Mixture weights [K] or [K, ...]; equal if not given.

    >>> round(float(gaussian_nll(torch.zeros(1), torch.ones(1), torch.zeros(1))), 6)
    0.918939
    """
    return -gaussian_mixture.log_prob(*as_mixture(mean, stddev, targets, weights), targets.detach().double()).mean()


@checked_arguments
def crps(mean: Tensor, stddev: Tensor, targets: Tensor, *, weights: Tensor | None = None) -> Tensor:
    r"""Return the mean continuous ranked probability score $\int (F(t) - [t \ge y])^2\,dt$, in units of the targets.

    It is exact, also for mixtures; a standard deviation of zero gives the absolute error. Arguments are those of
    `gaussian_nll` (Gneiting & Raftery 2007, https://doi.org/10.1198/016214506000001437).

    >>> round(float(crps(torch.zeros(1), torch.ones(1), torch.zeros(1))), 6)  # (√2 - 1)/√π
    0.233695
    """
    mixture = as_mixture(mean, stddev, targets, weights, allow_zero=True)
    return gaussian_mixture.crps(*mixture, targets.detach().double()).mean()


@checked_arguments
def pit(mean: Tensor, stddev: Tensor, targets: Tensor, *, weights: Tensor | None = None) -> Tensor:
    """Return the probability integral transform F(y) [...], uniform on [0, 1] if the prediction is calibrated.

    Arguments are those of `gaussian_nll`.

    >>> pit(torch.zeros(1), torch.ones(1), torch.zeros(1)).tolist()
    [0.5]
    """
    mixture = as_mixture(mean, stddev, targets, weights)
    # Weights that sum to one still round above it, and a probability must not.
    return gaussian_mixture.cdf(*mixture, targets.detach().double()).clamp(max=1)


@checked_arguments
def interval_coverage(lower: Tensor, upper: Tensor, targets: Tensor) -> Tensor:
    """Return the fraction of targets with `lower <= target <= upper`.

    >>> float(interval_coverage(torch.zeros(2), torch.ones(2), torch.tensor([0.5, 2.0])))
    0.5
    """
    _check_interval(lower, upper)
    check_same_shape(lower=lower, targets=targets)
    return ((lower <= targets) & (targets <= upper)).double().mean()


@checked_arguments
def interval_width(lower: Tensor, upper: Tensor) -> Tensor:
    """Return the mean of `upper - lower`: of two intervals with the same coverage the narrower is better.

    >>> float(interval_width(torch.zeros(2), torch.tensor([1.0, 2.0])))
    1.5
    """
    _check_interval(lower, upper)
    return (upper.detach().double() - lower.detach().double()).mean()


@checked_arguments
def quantile_calibration(pit: Tensor, levels: Sequence[float] | Tensor | None = None) -> QuantileCalibration:
    r"""Return how often the truth fell at or below each predicted quantile, $\frac1N \sum_n [F_n(y_n) \le p]$.

    See Kuleshov et al. (2018, https://arxiv.org/abs/1807.00263).

    Args:
        pit: F(y) of every datum, as from `pit`.
        levels: Quantile levels in [0, 1]; 0.05, 0.10, ..., 0.95 if not given.

    >>> quantile_calibration(torch.tensor([0.1, 0.6]), levels=[0.5, 0.9]).observed.tolist()
    [0.5, 1.0]
    """
    check_same_shape(pit=pit)
    if pit.is_complex() or not Range(0, 1).holds(pit.double()):
        raise InputError("pit must lie in [0, 1]: give the predicted cumulative probability of every target.")
    wanted = torch.arange(5, 100, 5) / 100 if levels is None else to_tensor(levels, "levels", torch.float64)
    wanted = wanted.to(pit.device, torch.float64).flatten().contiguous()
    check_same_shape(levels=wanted)
    if float(wanted.min()) < 0 or float(wanted.max()) > 1:
        raise InputError("levels must lie in [0, 1].")
    ordered = pit.detach().double().flatten().sort().values
    return QuantileCalibration(wanted, torch.searchsorted(ordered, wanted, right=True).double() / len(ordered))


@checked_arguments
def quantile_calibration_error(pit: Tensor, levels: Sequence[float] | Tensor | None = None) -> Tensor:
    """Return the mean over levels of |observed - level|; arguments are those of `quantile_calibration`.

    >>> round(float(quantile_calibration_error(torch.tensor([0.1, 0.6]), levels=[0.5, 0.9])), 6)
    0.05
    """
    calibration = quantile_calibration(pit, levels)
    return (calibration.observed - calibration.levels).abs().mean()


def as_mixture(
    mean: Tensor, stddev: Tensor, targets: Tensor, weights: Tensor | None, *, allow_zero: bool = False
) -> CheckedMixture:
    """Check a Gaussian or mixture prediction and give it the component axis; no gradient, float64."""
    if weights is None and mean.shape == targets.shape:
        mean, stddev = mean[None], stddev[None]
    elif mean.shape[1:] != targets.shape or mean.ndim == 0:
        raise InputError(
            f"mean must have the shape of targets, {tuple(targets.shape)}, or for a mixture one axis of components "
            f"before it, but it has shape {tuple(mean.shape)}."
        )
    check_same_shape(targets=targets)
    check_same_shape(mean=mean, stddev=stddev)
    if not all(bool(values.isfinite().all()) for values in (mean, stddev, targets)):
        raise InputError("`mean`, `stddev` and `targets` must be finite, but an infinite value was found.")
    smallest = float(stddev.min())
    if smallest < 0 or (smallest == 0 and not allow_zero):
        raise InputError(f"`stddev` must be positive, got {smallest:.4g}.")
    return CheckedMixture(mean.detach().double(), stddev.detach().double(), _shares(weights, mean))


def _shares(weights: Tensor | None, mean: Tensor) -> Tensor:
    """Check mixture weights and shape them to multiply `mean` [K, ...]; equal weights if None."""
    if weights is None:
        weights = mean.new_full(mean.shape[:1], 1 / len(mean), dtype=torch.float64)
    if weights.shape not in (mean.shape, mean.shape[:1]):
        raise InputError(
            f"weights must have shape {tuple(mean.shape[:1])} or {tuple(mean.shape)}, but it has shape "
            f"{tuple(weights.shape)}."
        )
    shares = weights.detach().double().reshape(weights.shape + (1,) * (mean.ndim - weights.ndim))
    total = shares.sum(0)
    if not bool((shares >= 0).all() and ((total - 1).abs() < 1e-4).all()):  # written so that NaN fails too
        raise InputError("`weights` must be at least 0 and sum to 1 over the components.")
    return shares / total


def _check_interval(lower: Tensor, upper: Tensor) -> None:
    check_same_shape(lower=lower, upper=upper)
    if bool((lower > upper).any()):
        raise InputError("`lower` exceeds `upper` for some intervals: swap them.")
