"""The Student-t likelihood, for numbers with outliers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from dubito.beliefs.likelihoods.base import Hyper, blank, rows
from dubito.beliefs.likelihoods.kinds import DistributionLikelihood, with_number
from dubito.core.constraints import Positive, Range, check
from dubito.core.numeric import log_gamma_ratio
from dubito.core.params import Params
from dubito.core.settings import setting


@setting
class StudentT(DistributionLikelihood):
    r"""Regression with heavy tails: $y \sim m + e^s\, t_\nu$, so that outliers move the fit little.

    For O targets the network has 2·O outputs ``[B, 2·O]``: first the locations $m$, then the log-scales $s$. The
    Hessian depends on the target and need not be positive, so `hessian` is the Fisher information
    $\mathrm{diag}\big(\frac{\nu+1}{\nu+3} e^{-2s},\ \frac{2\nu}{\nu+3}\big)$. As ν → ∞ it is `HeteroscedasticGaussian`.

    Args:
        dof: The degrees of freedom ν, above 2, so that there is a variance; or ``"learn"`` to train log(ν − 2) along
            with the weights, which all methods then need as ``hyper["log_dof"]``.

    >>> prediction = StudentT(dof=4).predict(torch.tensor([[3.0, 0.0]]))
    >>> prediction.mean.item(), round(prediction.stddev.item() ** 2, 5)  # the variance is ν/(ν − 2)
    (3.0, 2.0)
    """

    setting_name = "likelihoods.StudentT"
    learned_setting = "dof"
    outputs_per_target = 2
    layout = "a location and a log-scale"
    nodes = (96, 8)
    tempers = True
    dof: Annotated[float, Range(2, above=True)] | Literal["learn"] = 4.0

    def hyper(self) -> Params:
        """Return ``{"log_dof": log 2}`` (ν = 4) if the degrees of freedom are learned."""
        return {"log_dof": torch.tensor(math.log(2.0))} if self.dof == "learn" else {}

    def resolved(self, hyper: Mapping[str, Tensor]) -> StudentT:
        """Return the likelihood with the degrees of freedom as a number."""
        return self if self.dof != "learn" else self.replace(dof=2 + float(hyper["log_dof"].double().exp()))

    def parameters(self, outputs: Tensor, hyper: Hyper = None) -> Tensor:
        """Return locations, log-scales and log(ν − 2), ``[..., 3·O]``."""
        return with_number(self, outputs, hyper, lambda dof: math.log(dof - 2))

    def target_log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the log-density of each target."""
        z, log_scales, nu = _standardized(outputs, y)
        constant = log_gamma_ratio(nu.double() / 2, 0.5) - 0.5 * (nu.double() * math.pi).log()
        return constant.to(outputs.dtype) - log_scales - (nu + 1) / 2 * torch.log1p(z.square() / nu)

    def target_cdf(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the distribution function of each target."""
        from scipy.special import stdtr

        z, _, nu = (part.detach().cpu().numpy() for part in _standardized(outputs, y))
        return torch.as_tensor(np.asarray(stdtr(nu, z)), device=outputs.device).to(outputs.dtype)

    def target_moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        r"""Return $m$ and $e^{2s}\,\nu/(\nu - 2)$."""
        locations, log_scales, log_excess = outputs.chunk(3, dim=-1)
        return locations, (2 * log_scales).exp() * (1 + 2 * (-log_excess).exp())

    def gradient(self, outputs: Tensor, targets: Tensor, hyper: Hyper = None) -> Tensor:
        r"""Return $(-w z e^{-s},\ 1 - w z^2)$ with $z = (y - m) e^{-s}$ and the weight $w = (\nu+1)/(\nu+z^2)$."""
        found = self.parameters(self.canonical(outputs), hyper)
        z, log_scales, nu = _standardized(found, rows(targets, "targets").to(found.dtype))
        weight = (nu + 1) / (nu + z.square())
        return torch.cat([-weight * z * (-log_scales).exp(), 1 - weight * z.square()], dim=-1)

    def fisher(self, parameters: Tensor) -> Tensor:
        """Return the Fisher information of locations and log-scales."""
        _, log_scales, log_excess = parameters.chunk(3, dim=-1)
        nu = 2 + log_excess.exp()
        return torch.cat([(nu + 1) / (nu + 3) * (-2 * log_scales).exp(), 2 * nu / (nu + 3)], dim=-1)

    def sample(self, outputs: Tensor, hyper: Hyper = None, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw targets ``[B, O]``: a normal variable over the root of a gamma-distributed one."""
        locations, log_scales, log_excess = self.parameters(self.canonical(outputs), hyper).chunk(3, dim=-1)
        normal = blank(locations, generator).normal_(generator=generator).to(locations.device)
        half = 1 + log_excess.exp() / 2
        device = locations.device if generator is None else generator.device
        gamma = torch._standard_gamma(half.to(device), generator=generator).to(locations) / half
        return locations + log_scales.exp() * normal / gamma.sqrt()

    def temper(self, outputs: Tensor, temperature: float) -> tuple[Tensor, StudentT]:
        """Multiply every scale by the temperature."""
        check("temperature", Positive, temperature)
        locations, log_scales = outputs.chunk(2, dim=-1)
        return torch.cat([locations, log_scales + math.log(temperature)], dim=-1), self


def _standardized(parameters: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the standardized residuals, the log-scales and ν."""
    locations, log_scales, log_excess = parameters.chunk(3, dim=-1)
    return (y - locations) * (-log_scales).exp(), log_scales, 2 + log_excess.exp()
