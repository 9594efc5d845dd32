"""Predictions of numbers that are not Gaussian given the network's outputs: counts, heavy tails, mixtures."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from dubito.beliefs.prediction.regression import RegressionPrediction
from dubito.core.arguments import checked_arguments
from dubito.core.errors import InputError, UnsupportedError
from dubito.core.tracing import is_tracing
from dubito.core.widest import wide

# The most bisections of a quantile and their relative precision, and the nodes of the CRPS's integral.
_BISECTIONS, _PRECISION, _NODES = 100, 1e-12, 80
# Of the CRPS of counts: the probability that is left out, up to which distance all counts are summed, and the growth
# of the blocks beyond it.
_TAIL, _EXACT, _GROWTH = 1e-9, 64, 1.02
# The most nodes of a Gaussian that are those of Gauss and Hermite, and where the others end, in standard deviations.
_MOST_HERMITE, _EDGE = 64, 10.0


class TargetDistribution(ABC):
    """The distribution of one target given the parameters ``[..., C]`` (the outputs) for all O targets of a datum."""

    is_count: ClassVar[bool] = False
    """Whether targets are whole numbers."""

    @property
    def reported_level(self) -> float | None:
        """The level of the quantile that predictions report; None: they report the mean."""
        return None

    def check_values(self, y: Tensor) -> None:  # noqa: B027 - most distributions allow all numbers
        """Raise an `InputError` for targets of the right shape that cannot occur."""

    @abstractmethod
    def target_log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the log-probability of each target ``[..., O]``."""

    @abstractmethod
    def target_cdf(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the probability ``[..., O]`` that a target is at most y."""

    @abstractmethod
    def target_moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and the variance of each target ``[..., O]``."""

    def joint_log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the log-probability of all targets of a datum ``[...]``; they are independent unless overridden."""
        return self.target_log_prob(outputs, y).sum(dim=-1)

    def function_variance(self, outputs: Tensor) -> Tensor:
        """Return the part ``[..., O]`` of each target's variance that is epistemic within a component: most have 0."""
        return torch.zeros_like(self.target_moments(outputs)[0])


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class DistributionPrediction(RegressionPrediction):
    r"""A mixture of K distributions per datum that need not be Gaussian, $p(y) = \sum_k w_k\, p(y \mid f_k)$.

    `means` and `noise_variance` are the moments of the components, so the variance splits as for all numbers:
    ``stddev**2 == aleatoric + epistemic``. Make one with `of`.

    Args:
        outputs: The parameters of each component ``[K, B, C]``: the network's outputs, and learned numbers.
        distribution: The distribution of the targets given the outputs.
        weights: The weights of the components ``[K]``.
        independent: Whether the targets of a datum are independent mixtures (the components are nodes of a quadrature),
            or share their component (the components are posterior samples).
        loc: What was added to the targets by `rescale` ``[O]``.
        scale: What they were multiplied with before ``[O]``.
    """

    outputs: Tensor
    distribution: TargetDistribution
    weights: Tensor
    independent: bool
    loc: Tensor
    scale: Tensor

    _batch_axis: ClassVar[dict[str, int]] = {**RegressionPrediction._batch_axis, "outputs": 1}

    @classmethod
    def of(
        cls, given: TargetDistribution, outputs: Tensor, weights: Tensor | None = None, *, independent: bool = False
    ) -> DistributionPrediction:
        """Return the mixture of the components with outputs ``[K, B, C]``; equal weights by default."""
        means, variances = given.target_moments(outputs)
        if weights is None:
            weights = outputs.new_full((len(outputs),), 1 / len(outputs))
        width = means.shape[-1]
        return cls(
            means=means, noise_variance=variances, function_variance=given.function_variance(outputs),
            outputs=outputs, distribution=given, weights=weights, independent=independent, loc=means.new_zeros(width),
            scale=means.new_ones(width),
        )  # fmt: skip

    @property
    def family(self) -> TargetDistribution:
        """The old name of `distribution`."""
        warnings.warn("`family` is the old spelling: write `distribution`.", DeprecationWarning, stacklevel=2)
        return self.distribution

    @property
    def mean(self) -> Tensor:
        """The predictive mean ``[B, O]``."""
        return (self._weights * self.means).sum(dim=0)

    @property
    def point(self) -> Tensor:
        """The number to report for each target ``[B, O]``: the mean; the quantile if the likelihood is of one."""
        level = self.distribution.reported_level
        return self.mean if level is None else self.quantile(level)

    @property
    def aleatoric(self) -> Tensor:
        """The mean variance of the components ``[B, O]``."""
        return (self._weights * self.noise_variance).sum(dim=0)

    @property
    def epistemic(self) -> Tensor:
        """The variance of the function ``[B, O]``: of the components' means, and within components."""
        return (self._weights * ((self.means - self.mean).square() + self.function_variance)).sum(dim=0)

    @checked_arguments
    def log_prob(self, y: Tensor) -> Tensor:
        """Return the log-probability (of counts) or the log-density of the targets ``[B]``, jointly over outputs."""
        if self.independent:
            return self.log_prob_each(y).sum(dim=-1)
        at = self._possible_targets(y)
        scale = self.scale.to(at)
        joint = self.distribution.joint_log_prob(self.outputs, (at - self.loc.to(at)) / scale) - scale.log().sum()
        return (self._weights.log()[..., 0] + joint).logsumexp(dim=0)

    def log_prob_each(self, y: Tensor) -> Tensor:
        """Return the log-probability of each output's target ``[B, O]``."""
        at, scale = self._possible_targets(y), self.scale.to(self.means)
        each = self.distribution.target_log_prob(self.outputs, (at - self.loc.to(at)) / scale) - scale.log()
        return (self._weights.log() + each).logsumexp(dim=0)

    def _possible_targets(self, y: Tensor) -> Tensor:
        """Return `checked_targets`, which must be possible ones; those in other units are not compared."""
        at = self.checked_targets(y)
        if bool((self.loc == 0).all() & (self.scale == 1).all()):
            self.distribution.check_values(at)
        return at

    def cdf(self, y: Tensor) -> Tensor:
        """Return the probability that each target is at most `y`, ``[B, O]``."""
        return self._cdf(self.checked_targets(y))

    def pit(self, y: Tensor) -> Tensor:
        """Return the probability integral transform ``[B, O]``; of a count, half-way through the step at it."""
        at = self.checked_targets(y)
        return (self._cdf(at) + self._cdf(at - 1)) / 2 if self.distribution.is_count else self._cdf(at)

    @checked_arguments
    def quantile(self, q: float) -> Tensor:
        """Return the q-quantile of each output ``[B, O]``; of counts, the smallest with a probability of at least q."""
        if not 0 < q < 1:
            raise InputError(f"A quantile must lie strictly between 0 and 1, got {q}.")
        if is_tracing():
            raise UnsupportedError(
                f"A graph cannot compute the quantiles of {self.distribution!r}: leave 'lower' and 'upper' out."
            )
        return self._wide._quantile(q).to(self.means.dtype)

    @checked_arguments
    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return the ends ``[B, O]`` of the central interval with probability `level` (of counts: at least `level`)."""
        if not 0 < level < 1:
            raise InputError(f"The level of an interval must lie strictly between 0 and 1, got {level}.")
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def crps(self, y: Tensor) -> Tensor:
        r"""Return the continuous ranked probability score of each output ``[B, O]``.

        It is $\int (F(t) - [t \ge y])^2\,dt$: a sum over whole numbers for counts, else by quadrature.
        """
        wide = self._wide
        truth = wide.checked_targets(y)
        score = wide._count_crps(truth) if self.distribution.is_count else wide._smooth_crps(truth)
        return score.to(self.means.dtype)

    def summary(self) -> RegressionPrediction:  # type: ignore[override]
        """Return one Gaussian with the same moments; components of a quadrature, whose number is fixed, are kept."""
        if self.independent or len(self.means) == 1:
            return self
        mean, noise, function = (part.unsqueeze(0) for part in (self.mean, self.aleatoric, self.epistemic))
        return RegressionPrediction(mean, noise, function)

    def rescale(self, loc: float | Tensor, scale: float | Tensor) -> DistributionPrediction:
        """Return the prediction of ``loc + scale * y``, to convert standardized targets to their original units."""
        moved = super().rescale(loc, scale)
        shift, factor = (torch.as_tensor(value).to(self.loc) for value in (loc, scale))
        return replace(
            self, means=moved.means, noise_variance=moved.noise_variance, function_variance=moved.function_variance,
            loc=shift + factor * self.loc, scale=factor * self.scale,
        )  # fmt: skip

    @classmethod
    def mixed(cls, parts: list[DistributionPrediction]) -> DistributionPrediction:
        """Return the equal mixture of several predictions of the same distribution for the same data."""
        names = ("means", "noise_variance", "function_variance", "outputs")
        joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
        weights = torch.cat([part.weights for part in parts]) / len(parts)
        return replace(parts[0], **joined, weights=weights, covariance=None)  # type: ignore[arg-type]

    def draw(self, num_samples: int, seed: int) -> Tensor:
        """Draw targets ``[S, B, O]`` in float64, as quantiles of uniform numbers."""
        shape = (num_samples, *self.means.shape[1:])
        levels = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        wide = self._wide
        return torch.stack([wide._quantile(level.to(wide.means)) for level in levels.clamp(1e-9, 1 - 1e-9)])

    @property
    def _weights(self) -> Tensor:
        return self.weights.to(self.means).reshape(-1, 1, 1)

    @property
    def _wide(self) -> DistributionPrediction:
        """The prediction in float64."""
        loc, scale, weights = (wide(part) for part in (self.loc, self.scale, self.weights))
        return replace(self.to(loc.dtype), loc=loc, scale=scale, weights=weights)

    def _cdf(self, y: Tensor) -> Tensor:
        z = (y - self.loc.to(y)) / self.scale.to(y)
        return (self._weights * self.distribution.target_cdf(self.outputs, z)).sum(dim=0).clamp(0, 1)

    def _quantile(self, q: float | Tensor) -> Tensor:
        """Bisect the distribution function between Cantelli's bounds; levels may differ by target."""
        level = torch.as_tensor(q, dtype=self.means.dtype, device=self.means.device)
        odds = (level / (1 - level)).sqrt()
        low = self.mean - 1.001 * self.stddev / odds - 1e-9
        high = self.mean + 1.001 * self.stddev * odds + 1e-9
        if self.distribution.is_count:
            low, high = low.clamp_min(0).floor() - 1, high.ceil() + 1
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            middle = middle.floor() if self.distribution.is_count else middle
            below = self._cdf(middle) < level
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
            enough = 1.0 if self.distribution.is_count else _PRECISION * (low.abs() + high.abs() + self.stddev)
            if bool((high - low <= enough).all()):
                break
        return high

    def _count_crps(self, y: Tensor) -> Tensor:
        """Sum over all counts near the target; farther away, over blocks that grow, by linear interpolation."""
        reach = int((self._quantile(1 - _TAIL).maximum(y) - self._quantile(_TAIL).minimum(y)).amax()) + 1
        steps = [0]
        while steps[-1] < reach:
            steps.append(max(steps[-1] + 1, int(_GROWTH * steps[-1]) if steps[-1] > _EXACT else 0))
        total, before = torch.zeros_like(y), torch.zeros_like(y)
        for step, last in zip(map(float, steps), [-1.0, *map(float, steps)], strict=False):  # beyond 64 bits as well
            value = (1 - self._cdf(y + step)).square() + self._cdf(y - 1 - step).square()
            total += value if step - last == 1 else (step - last) * (before + value) / 2 + (value - before) / 2
            before = value
        return total

    def _smooth_crps(self, y: Tensor) -> Tensor:
        nodes, weights = (part.to(y) for part in _unit_nodes())
        spread = self.stddev + (y - self.mean).abs()
        total = torch.zeros_like(y)
        for t, weight in zip(nodes, weights, strict=True):
            # z = y ± s·t/(1 − t) maps each half line to (0, 1)
            reach, weighted = spread * t / (1 - t), weight * spread / (1 - t) ** 2
            total += weighted * (self._cdf(y - reach).square() + (1 - self._cdf(y + reach)).square())
        return total

    def __repr__(self) -> str:
        components, batch, width = self.means.shape
        outputs = f"{width} output{'s' if width > 1 else ''}"
        return f"DistributionPrediction({self.distribution!r}, {batch} data, {outputs}, {components} components)"


@cache
def _unit_nodes() -> tuple[Tensor, Tensor]:
    """Return Gauss–Legendre nodes and weights on (0, 1)."""
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    return torch.from_numpy((nodes + 1) / 2), torch.from_numpy(weights / 2)


def gaussian_nodes(mean: Tensor, variance: Tensor, num: int) -> tuple[Tensor, Tensor]:
    r"""Return nodes $m + \sqrt v\, z_k$ ``[K, ...]`` of Gaussians, and their weights ``[K]``.

    Up to 64 nodes are those of Gauss and Hermite, more those of the trapezoidal rule. They are closer together, for
    what is much narrower than the Gaussian: a count of thousands as a function of its log-mean, for example.

    >>> nodes, weights = gaussian_nodes(torch.tensor(1.0), torch.tensor(4.0), 5)
    >>> round(float((weights * nodes.square()).sum()), 4)  # E[f²] = 1² + 4
    5.0
    """
    points, weights = _hermite(num) if num <= _MOST_HERMITE else _trapezoidal(num)
    points = points.to(mean).reshape(-1, *[1] * mean.ndim)
    return mean + variance.clamp_min(0).sqrt() * points, weights.to(mean)


def gaussian_grid(mean: Tensor, variance: Tensor, nums: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return a grid ``[K, B, C]`` of nodes of independent Gaussians ``[B, C]``, and its weights ``[K]``.

    The outputs are cut into ``len(nums)`` equal parts; part i has ``nums[i]`` nodes, the same for all of its outputs.
    """
    outputs, weights = mean[None, :, :0], mean.new_ones(1)
    for own_mean, own_variance, num in zip(mean.chunk(len(nums), -1), variance.chunk(len(nums), -1), nums, strict=True):
        nodes, own = gaussian_nodes(own_mean, own_variance, num)
        pairs = outputs.repeat_interleave(num, 0), nodes.repeat(len(outputs), 1, 1)
        outputs, weights = torch.cat(pairs, dim=-1), (weights[:, None] * own).flatten()
    return outputs, weights


def quasi_random(mean: Tensor, variance: Tensor, num: int) -> Tensor:
    """Return fixed quasi-random draws ``[num, B, C]`` of independent Gaussians ``[B, C]``, the same for every datum."""
    normal = _sobol_normals(mean.shape[1], num).to(mean)
    return mean + variance.clamp_min(0).sqrt() * normal.unsqueeze(1)


@cache
def _sobol_normals(width: int, num: int) -> Tensor:
    """Return Sobol points through the normal quantile function; by scipy, as a recorded graph draws no numbers."""
    from scipy import special, stats

    points = stats.qmc.Sobol(width, scramble=True, seed=0).random(num)
    return torch.from_numpy(special.ndtri(np.clip(points, 1e-6, 1 - 1e-6)))


@cache
def _hermite(num: int) -> tuple[Tensor, Tensor]:
    points, weights = np.polynomial.hermite_e.hermegauss(num)
    return torch.from_numpy(points), torch.from_numpy(weights / weights.sum())


@cache
def _trapezoidal(num: int) -> tuple[Tensor, Tensor]:
    r"""Return nodes and weights of the trapezoidal rule after $z = 3 \sinh(u/3)$, which is densest in the middle."""
    edge = 3 * math.asinh(_EDGE / 3)
    points = np.linspace(-edge, edge, num)
    nodes = 3 * np.sinh(points / 3)
    weights = np.exp(-0.5 * nodes**2) * np.cosh(points / 3)
    return torch.from_numpy(nodes), torch.from_numpy(weights / weights.sum())
