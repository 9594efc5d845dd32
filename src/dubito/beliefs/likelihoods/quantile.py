"""The asymmetric Laplace likelihood, for regression of a quantile."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dubito.beliefs.likelihoods.base import Hyper, blank, rows
from dubito.beliefs.likelihoods.kinds import DistributionLikelihood
from dubito.beliefs.prediction import DistributionPrediction
from dubito.beliefs.prediction.distributions import gaussian_nodes
from dubito.core.constraints import OpenProbability, Positive, check
from dubito.core.settings import setting

# Nodes of the Gaussian log-scale; the location is integrated in closed form.
_NODES = 32
# The largest absolute log-scale of a prediction, so that squares of scales are finite in single precision.
_WIDEST = 30.0


@setting
class Quantile(DistributionLikelihood):
    r"""Regression of the τ-quantile: the asymmetric Laplace distribution, whose loss is the pinball loss.

    $$-\log p(y \mid m, s) = \rho_\tau\big((y - m) e^{-s}\big) + s - \log \tau(1 - \tau), \qquad
      \rho_\tau(z) = z\,(\tau - [z < 0])$$

    For O targets the network has 2·O outputs ``[B, 2·O]``: first the quantiles $m$, then the log-scales $s$ (Yu &
    Moyeed 2001). Given the outputs, $m$ is the τ-quantile of the target. Whatever the distribution of the data, $m$
    converges to its quantile; the other quantiles are those of this distribution, so read no other level from it.

    The loss is piecewise linear in $m$: its Hessian there is zero almost everywhere and a point mass at $y$. `hessian`
    is the Fisher information $\mathrm{diag}\big(\tau(1-\tau) e^{-2s},\ 1\big)$, the expectation of that mass.

    Args:
        level: τ.

    >>> round(Quantile(level=0.9).predict(torch.tensor([[3.0, 0.0]])).quantile(0.9).item(), 6)
    3.0
    """

    setting_name = "likelihoods.Quantile"
    outputs_per_target = 2
    layout = "a quantile and a log-scale"
    tempers = True
    level: OpenProbability = 0.5

    @property
    def reported_level(self) -> float:
        """The level τ: the mean of this distribution describes no data."""
        return self.level

    def parameters(self, outputs: Tensor, hyper: Hyper = None) -> Tensor:
        """Return quantiles, log-scales and the variances of the quantiles, which are 0, ``[..., 3·O]``."""
        return torch.cat([outputs, torch.zeros_like(outputs.chunk(2, dim=-1)[0])], dim=-1)

    def log_prob(self, outputs: Tensor, targets: Tensor, hyper: Hyper = None) -> Tensor:
        """Return the log-density of the targets ``[B]``, summed over outputs."""
        z, log_scales = self._standardized(outputs, targets)
        return (math.log(self.level * (1 - self.level)) - log_scales - self._pinball(z)).sum(dim=-1)

    def target_log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the log-density of each target; a Gaussian variance of the quantile is integrated out."""
        above, below, _ = self._tails(outputs, y)
        log_scales = outputs.chunk(3, dim=-1)[1]
        return math.log(self.level * (1 - self.level)) - log_scales + torch.logaddexp(above, below)

    def target_cdf(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the distribution function of each target."""
        above, below, distance = self._tails(outputs, y)
        return torch.special.ndtr(distance) - (1 - self.level) * above.exp() + self.level * below.exp()

    def target_moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        r"""Return $m + e^s \frac{1 - 2\tau}{v}$ and $e^{2s} \frac{1 - 2v}{v^2}$ with $v = \tau(1-\tau)$."""
        quantiles, log_scales, _ = outputs.chunk(3, dim=-1)
        tau, both = self.level, self.level * (1 - self.level)
        mean = quantiles + log_scales.exp() * ((1 - 2 * tau) / both)
        return mean, (2 * log_scales).exp() * ((1 - 2 * both) / both**2)

    def function_variance(self, outputs: Tensor) -> Tensor:
        """Return the variances of the quantiles."""
        return outputs.chunk(3, dim=-1)[2]

    def gradient(self, outputs: Tensor, targets: Tensor, hyper: Hyper = None) -> Tensor:
        r"""Return $\big(([z < 0] - \tau) e^{-s},\ 1 - \rho_\tau(z)\big)$ with $z = (y - m) e^{-s}$."""
        z, log_scales = self._standardized(outputs, targets)
        return torch.cat([((z < 0).to(z.dtype) - self.level) * (-log_scales).exp(), 1 - self._pinball(z)], dim=-1)

    def fisher(self, parameters: Tensor) -> Tensor:
        """Return the Fisher information of quantiles and log-scales."""
        log_scales = parameters.chunk(3, dim=-1)[1]
        of_quantiles = self.level * (1 - self.level) * (-2 * log_scales).exp()
        return torch.cat([of_quantiles, torch.ones_like(of_quantiles)], dim=-1)

    def sample(self, outputs: Tensor, hyper: Hyper = None, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw targets ``[B, O]``: the difference of two exponential variables."""
        quantiles, log_scales = self.canonical(outputs).chunk(2, dim=-1)
        up, down = (blank(quantiles, generator).exponential_(generator=generator).to(quantiles) for _ in range(2))
        return quantiles + log_scales.exp() * (up / self.level - down / (1 - self.level))

    def _over_gaussian(self, means: Tensor, variances: Tensor, hyper: Hyper) -> DistributionPrediction:
        """Return the mixture over Gaussian outputs: in closed form over the quantiles, by nodes over the log-scales."""
        quantiles, log_scales = means.chunk(2, dim=-1)
        own, of_scales = variances.clamp_min(0).chunk(2, dim=-1)
        nodes, weights = gaussian_nodes(log_scales, of_scales, _NODES)
        nodes = nodes.clamp(-_WIDEST, _WIDEST)
        found = torch.cat([quantiles.expand_as(nodes), nodes, own.expand_as(nodes)], dim=-1)
        return DistributionPrediction.of(self, found, weights, independent=True)

    def temper(self, outputs: Tensor, temperature: float) -> tuple[Tensor, Quantile]:
        """Multiply every scale by the temperature."""
        check("temperature", Positive, temperature)
        quantiles, log_scales = outputs.chunk(2, dim=-1)
        return torch.cat([quantiles, log_scales + math.log(temperature)], dim=-1), self

    def _standardized(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        quantiles, log_scales = self.canonical(outputs).chunk(2, dim=-1)
        return (rows(targets, "targets").to(quantiles.dtype) - quantiles) * (-log_scales).exp(), log_scales

    def _pinball(self, z: Tensor) -> Tensor:
        return z * (self.level - (z < 0).to(z.dtype))

    def _tails(self, parameters: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        r"""Return the logarithms of both exponential tails after the Gaussian of the quantile, and $(y - m)/\sigma$.

        With $d = (y - m) / s$ and the quantile's standard deviation σ in units of the scale $s$, the upper tail is
        $e^{-\tau d + \tau^2\sigma^2/2}\, \Phi(d/\sigma - \tau\sigma)$.
        """
        quantiles, log_scales, variances = parameters.chunk(3, dim=-1)
        d = (y - quantiles) * (-log_scales).exp()
        # a σ of 0 is a step of Φ, as is one that is far too small to matter
        sigma = (variances.sqrt() * (-log_scales).exp()).clamp_min(1e-30)
        distance = (d / sigma).clamp(-1e15, 1e15)
        return _tail(self.level, d, sigma, distance), _tail(1 - self.level, -d, sigma, -distance), distance


def _tail(rate: float, d: Tensor, sigma: Tensor, distance: Tensor) -> Tensor:
    r"""Return $-r d + r^2\sigma^2/2 + \log\Phi(d/\sigma - r\sigma)$, whose terms cancel where the last one is small."""
    t = rate * sigma - distance
    plain = -rate * d + (rate * sigma).square() / 2 + torch.special.log_ndtr(-t)
    cancelled = -distance.square() / 2 + (torch.special.erfcx(t.clamp_min(0) / math.sqrt(2)) / 2).log()
    return torch.where(t > 0, cancelled, plain)
