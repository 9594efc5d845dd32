r"""Exact functions of one-dimensional mixtures of Gaussians $\sum_k w_k \mathcal N(\mu_k, \sigma_k^2)$, vectorized.

`means` and `stddevs` have shape [K, ...] and `targets` [...]; `weights` broadcasts with [K, ...] and sums to one over
its first axis. A Gaussian is the case K = 1. Arguments are not checked and results are per datum;
`dubito.metrics.regression` checks and averages.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
# A quantile in a graph: into how many parts its interval is divided, and how often.
_PARTS, _DIVISIONS = 16, 3


def log_prob(means: Tensor, stddevs: Tensor, weights: Tensor, targets: Tensor) -> Tensor:
    r"""Return $\log \sum_k w_k \mathcal N(y; \mu_k, \sigma_k^2)$ [...]."""
    z = (targets - means) / stddevs
    components = -0.5 * z.square() - stddevs.log() - _LOG_SQRT_2PI
    return torch.logsumexp(weights.log() + components, dim=0)


def cdf(means: Tensor, stddevs: Tensor, weights: Tensor, targets: Tensor) -> Tensor:
    r"""Return $\sum_k w_k \Phi((y - \mu_k) / \sigma_k)$ [...]."""
    return (weights * torch.special.ndtr((targets - means) / stddevs)).sum(0)


def quantile(means: Tensor, stddevs: Tensor, weights: Tensor, level: float) -> Tensor:
    """Return the y [...] with `cdf(y) == level`, for a level strictly between 0 and 1.

    It lies between the smallest and the largest quantile of the components; for one Gaussian these are equal. Bisection
    narrows this interval to 1e-9 of its width, and two Newton steps inside it give the remaining digits.
    """
    z = float(torch.special.ndtri(torch.tensor(level, dtype=torch.float64)))
    corners = means + z * stddevs
    low, high = corners.amin(0), corners.amax(0)
    if torch.equal(low, high):
        return low
    for _ in range(30):
        middle = (low + high) / 2
        below = cdf(means, stddevs, weights, middle) < level
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    root = (low + high) / 2
    for _ in range(2):
        density = log_prob(means, stddevs, weights, root).exp()
        step = (cdf(means, stddevs, weights, root) - level) / density.clamp(min=torch.finfo(density.dtype).tiny)
        root = torch.clamp(root - step, low, high)
    return root


def quantiles_in_steps(means: Tensor, stddevs: Tensor, weights: Tensor, levels: tuple[float, ...]) -> Tensor:
    """Return the quantiles of several levels [L, ...] with a fixed number of operations, for a graph.

    The interval of `quantile` is divided into equal parts a few times, then Newton steps give the remaining digits.
    File formats have the error function in float32 only, which limits the precision.
    """
    like = means.new_tensor(levels).reshape(-1, *[1] * (means.ndim - 1))
    corners = means.unsqueeze(1) + torch.special.ndtri(like) * stddevs.unsqueeze(1)  # [K, L, ...]
    if means.shape[0] == 1:
        return corners[0]

    def excess(points: Tensor) -> tuple[Tensor, Tensor]:
        """Return cdf - level at points [..., L, ...], and the standardized points."""
        lead = [1] * (points.ndim - means.ndim + 1)
        mean, stddev, weight = (
            part.reshape(part.shape[0], *lead, *part.shape[1:]) for part in (means, stddevs, weights)
        )
        z = (points - mean) / stddev
        return (weight * 0.5 * (1 + torch.erf((z / math.sqrt(2)).float()).to(z))).sum(0) - like, z

    low = corners.amin(0)
    width = corners.amax(0) - low
    parts = torch.arange(1, _PARTS, dtype=means.dtype, device=means.device).reshape(-1, *[1] * low.ndim)
    for _ in range(_DIVISIONS):
        width = width / _PARTS
        low = low + width * (excess(low + width * parts)[0] < 0).to(width).sum(0)
    root = low + width / 2
    for _ in range(2):
        over, z = excess(root)
        spread = stddevs.unsqueeze(1)
        density = (weights.unsqueeze(1) * (-0.5 * z * z - _LOG_SQRT_2PI).exp() / spread).sum(0)
        step = root - over / density.clamp_min(torch.finfo(torch.float32).tiny)
        root = torch.minimum(torch.maximum(step, low), low + width)
    return root


def crps(means: Tensor, stddevs: Tensor, weights: Tensor, targets: Tensor) -> Tensor:
    r"""Return the continuous ranked probability score [...], $\mathbb E|X - y| - \frac12 \mathbb E|X - X'|$.

    Every pair of components is a Gaussian difference, so both expectations are closed forms (Grimit et al. 2006,
    https://doi.org/10.1256/qj.05.235). It takes O(K²) time and O(K) memory. A component with a standard deviation of
    zero is a point mass.
    """
    score = (weights * _expected_abs(targets - means, stddevs)).sum(0)
    # A component against itself: E|X - X'| = 2σ/√π.
    score = score - (weights.square() * stddevs).sum(0) / math.sqrt(math.pi)
    for k in range(len(means) - 1):
        distance = _expected_abs(means[k] - means[k + 1 :], torch.hypot(stddevs[k], stddevs[k + 1 :]))
        score = score - weights[k] * (weights[k + 1 :] * distance).sum(0)
    return score


def _expected_abs(mean: Tensor, stddev: Tensor) -> Tensor:
    r"""Return $\mathbb E|X| = 2\sigma\varphi(z) + \mu(2\Phi(z) - 1)$ with $z = \mu/\sigma$, for a Gaussian X.

    Only in z is σ kept away from zero, so that the result at σ = 0 is the limit |μ|.
    """
    z = mean / stddev.clamp(min=torch.finfo(stddev.dtype).tiny)
    return math.sqrt(2 / math.pi) * stddev * torch.exp(-0.5 * z.square()) + mean * torch.erf(z / math.sqrt(2))
