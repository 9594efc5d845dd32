"""The Student-t likelihood, for numbers with outliers."""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from dubito.beliefs.likelihoods.base import Hyper, blank, rows
from dubito.beliefs.likelihoods.kinds import DistributionLikelihood
from dubito.core.constraints import Positive, Range, check
from dubito.core.settings import setting


@setting
class StudentT(DistributionLikelihood):
    r"""Regression with heavy tails: $y \sim m + e^s\, t_\nu$, so that outliers move the fit little.

    For O targets the network has 2·O outputs ``[B, 2·O]``: first the locations $m$, then the log-scales $s$. The
    Hessian depends on the target and need not be positive, so `hessian` is the Fisher information
    $\mathrm{diag}\big(\frac{\nu+1}{\nu+3} e^{-2s},\ \frac{2\nu}{\nu+3}\big)$. As ν → ∞ it is `HeteroscedasticGaussian`.

    Args:
        dof: The degrees of freedom ν, above 2, so that there is a variance.

    >>> prediction = StudentT(dof=4).predict(torch.tensor([[3.0, 0.0]]))
    >>> prediction.mean.item(), round(prediction.stddev.item() ** 2, 5)  # the variance is ν/(ν − 2)
    (3.0, 2.0)
    """

    setting_name = "likelihoods.StudentT"
    outputs_per_target = 2
    layout = "a location and a log-scale"
    nodes = (48, 8)
    tempers = True
    dof: Annotated[float, Range(2, above=True)] = 4.0

    def target_log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the log-density of each target."""
        nu, (z, log_scales) = self.dof, self._standardized(outputs, y)
        constant = math.lgamma((nu + 1) / 2) - math.lgamma(nu / 2) - 0.5 * math.log(nu * math.pi)
        return constant - log_scales - (nu + 1) / 2 * torch.log1p(z.square() / nu)

    def target_cdf(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the distribution function of each target."""
        from scipy.special import stdtr

        z, _ = self._standardized(outputs, y)
        found = torch.as_tensor(np.asarray(stdtr(self.dof, z.detach().cpu().numpy())), device=outputs.device)
        return found.to(outputs.dtype)

    def target_moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        r"""Return $m$ and $e^{2s}\,\nu/(\nu - 2)$."""
        locations, log_scales = outputs.chunk(2, dim=-1)
        return locations, (2 * log_scales).exp() * (self.dof / (self.dof - 2))

    def gradient(self, outputs: Tensor, targets: Tensor, hyper: Hyper = None) -> Tensor:
        r"""Return $(-w z e^{-s},\ 1 - w z^2)$ with $z = (y - m) e^{-s}$ and the weight $w = (\nu+1)/(\nu+z^2)$."""
        found = self.canonical(outputs)
        z, log_scales = self._standardized(found, rows(targets, "targets").to(found.dtype))
        weight = (self.dof + 1) / (self.dof + z.square())
        return torch.cat([-weight * z * (-log_scales).exp(), 1 - weight * z.square()], dim=-1)

    def fisher(self, outputs: Tensor) -> Tensor:
        """Return the Fisher information of locations and log-scales."""
        log_scales, nu = outputs.chunk(2, dim=-1)[1], self.dof
        of_scales = torch.full_like(log_scales, 2 * nu / (nu + 3))
        return torch.cat([(nu + 1) / (nu + 3) * (-2 * log_scales).exp(), of_scales], dim=-1)

    def sample(self, outputs: Tensor, hyper: Hyper = None, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw targets ``[B, O]``: a normal variable over the root of a gamma-distributed one."""
        locations, log_scales = self.canonical(outputs).chunk(2, dim=-1)
        normal = blank(locations, generator).normal_(generator=generator).to(locations.device)
        shapes = torch.full_like(blank(locations, generator), self.dof / 2)
        gamma = torch._standard_gamma(shapes, generator=generator).to(locations) * (2 / self.dof)
        return locations + log_scales.exp() * normal / gamma.sqrt()

    def temper(self, outputs: Tensor, temperature: float) -> tuple[Tensor, StudentT]:
        """Multiply every scale by the temperature."""
        check("temperature", Positive, temperature)
        locations, log_scales = outputs.chunk(2, dim=-1)
        return torch.cat([locations, log_scales + math.log(temperature)], dim=-1), self

    def _standardized(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        locations, log_scales = outputs.chunk(2, dim=-1)
        return (y - locations) * (-log_scales).exp(), log_scales
