"""The truncated log-uniform prior of gates on units, and its truncated log-normal posterior."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dubito.beliefs.priors.group import GroupPrior
from dubito.core.constraints import Finite
from dubito.core.errors import InputError
from dubito.core.settings import setting


@setting
class TruncatedLogUniform(GroupPrior):
    r"""Structured Bayesian pruning with gates $z_g \in [e^a, e^b]$ on units that are uniform in $\log z$.

    $$w_{gi} = z_g \tilde w_{gi}, \qquad \log z_g \sim \mathrm U[a, b], \qquad
      q(\log z_g) = \mathcal N(m_g, s_g^2) \text{ truncated to } [a, b]$$

    (Neklyudov et al. 2017, https://arxiv.org/abs/1705.07283). The prior is proper, and all moments and the KL
    divergence have closed forms. The weights $\tilde w$ are points: start from a trained network. A gate is closed if
    its signal-to-noise ratio is low, $\mathbb E z / \mathrm{std}\, z \le 1$, or by `evidence_gain`.

    Args:
        low: The lower end a of $\log z$.
        high: The upper end b of $\log z$.
        groups: Which weights share a gate; see `GroupPrior`.
    """

    setting_name = "priors.TruncatedLogUniform"
    random_weights = False
    low: Finite = -20.0
    high: Finite = 0.0

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise InputError(f"`low` must be below `high`, got {self.low!r} and {self.high!r}.")

    def log_normalizer(self, mean: Tensor, scale: Tensor) -> Tensor:
        r"""Return the logarithm of $\Phi(\frac{b - m}s) - \Phi(\frac{a - m}s)$, for means in $[a, b]$."""
        return _log_interval((self.low - mean) / scale, (self.high - mean) / scale)

    def scale_kl(self, mean: Tensor, scale: Tensor) -> Tensor:
        r"""Return the exact KL divergence of each gate.

        $$\mathrm{KL} = \log \frac{b - a}{s} - \tfrac12 \log 2\pi e - \log Z
          - \frac{\alpha \phi(\alpha) - \beta \phi(\beta)}{2 Z}, \qquad
          \alpha = \tfrac{a - m}s,\; \beta = \tfrac{b - m}s,\; Z = \Phi(\beta) - \Phi(\alpha)$$

        Args:
            mean: The means m, within $[a, b]$.
            scale: The scales s.
        """
        lower, upper = (self.low - mean) / scale, (self.high - mean) / scale
        log_z = _log_interval(lower, upper)
        edges = lower * _density_over(lower, log_z) - upper * _density_over(upper, log_z)
        return math.log(self.high - self.low) - scale.log() - 0.5 * math.log(2 * math.pi * math.e) - log_z - edges / 2

    def moment(self, mean: Tensor, scale: Tensor, order: int = 1) -> Tensor:
        r"""Return $\mathbb E z^k = e^{km + k^2 s^2 / 2}\, \frac{\Phi(\beta - ks) - \Phi(\alpha - ks)}{Z}$."""
        lower, upper = (self.low - mean) / scale, (self.high - mean) / scale
        log_ratio = _log_interval(lower - order * scale, upper - order * scale) - _log_interval(lower, upper)
        return (order * mean + (order * scale).square() / 2 + log_ratio).exp()

    def quantile(self, mean: Tensor, scale: Tensor, level: Tensor) -> Tensor:
        """Return the quantile of each gate at `level`; at uniform random levels this is a sample."""
        start = torch.special.ndtr((self.low - mean) / scale)
        mass = self.log_normalizer(mean, scale).exp()
        inner = torch.special.ndtri(start + level * mass) * scale + mean
        return inner.clamp(self.low, self.high).exp()

    def evidence_gain(self, mean: Tensor, scale: Tensor, bits: int = 8) -> Tensor:
        r"""Return the gain in evidence, in nats, of a prior that keeps a gate below $2^{-\text{bits}}$.

        With the narrower prior $\mathrm U[a, c]$, $c = -\text{bits} \log 2$, it is
        $\log \mathbb E_q[\tilde p / p] = \log \frac{b - a}{c - a} + \log q(\log z \le c)$, by Bayesian model reduction
        (Wright et al. 2024, https://arxiv.org/abs/2406.01345). A gate with a gain of 0 or more can be closed. A gate
        whose posterior is the prior has a gain of 0, up to small random differences, so a loss of less than one nat is
        no reason to keep a gate.
        """
        cut = -bits * math.log(2)
        if not self.low < cut < self.high:
            raise InputError(f"bits={bits} would cut log z at {cut:g}, outside of [{self.low:g}, {self.high:g}].")
        lower = (self.low - mean) / scale
        inside = _log_interval(lower, (cut - mean) / scale) - self.log_normalizer(mean, scale)
        return math.log((self.high - self.low) / (cut - self.low)) + inside


def _log_interval(lower: Tensor, upper: Tensor) -> Tensor:
    r"""Return $\log(\Phi(u) - \Phi(l))$ for $l \le 0$, $l < u$, without cancellation."""
    top = torch.special.log_ndtr(upper)
    return top + torch.log(-torch.expm1(torch.special.log_ndtr(lower) - top))


def _density_over(at: Tensor, log_z: Tensor) -> Tensor:
    """Return the standard normal density divided by Z."""
    return (-0.5 * at.square() - 0.5 * math.log(2 * math.pi) - log_z).exp()
