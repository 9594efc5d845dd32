"""Likelihoods of counts: Poisson, and negative binomial for counts that vary more."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from dubito.beliefs.likelihoods.base import Hyper, rows
from dubito.beliefs.likelihoods.kinds import DistributionLikelihood
from dubito.core.constraints import Positive
from dubito.core.errors import InputError
from dubito.core.settings import setting


@setting
class _Counts(DistributionLikelihood):
    """A likelihood of counts, whose outputs ``[B]`` or ``[B, O]`` are the logarithms of the means."""

    is_count = True
    standardizes: ClassVar[bool] = False
    layout = "the logarithm of a mean"

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise an error unless the targets are whole numbers of at least 0, one per output."""
        super().check(outputs, targets)
        wrong = targets[(targets < 0) | (targets != targets.round())] if targets.is_floating_point() else None
        wrong = targets[targets < 0] if wrong is None else wrong
        if len(wrong):
            raise InputError(f"{type(self).__name__} targets must be whole numbers of at least 0, got {wrong[0]:g}.")

    def canonical(self, outputs: Tensor) -> Tensor:
        """Return the log-means as ``[B, O]``."""
        return rows(outputs, "outputs")


@setting
class Poisson(_Counts):
    r"""Counts with the rate $e^f$: $\log p(y \mid f) = y f - e^f - \log y!$.

    The Hessian is $e^f$, exactly. Under Gaussian outputs the prediction is a Poisson–log-normal mixture.

    >>> Poisson().hessian(torch.zeros(1, 1)).item()
    1.0
    """

    setting_name = "likelihoods.Poisson"

    def target_log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the log-probability of each count."""
        return y * outputs - outputs.exp() - torch.lgamma(y + 1)

    def target_cdf(self, outputs: Tensor, y: Tensor) -> Tensor:
        r"""Return the regularized incomplete gamma function $Q(\lfloor y \rfloor + 1, e^f)$."""
        found = torch.special.gammaincc(y.floor().clamp_min(-0.5) + 1, outputs.exp())
        return torch.where(y < 0, 0.0, found)

    def target_moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rate twice."""
        rate = _mean(outputs)
        return rate, rate

    def gradient(self, outputs: Tensor, targets: Tensor, hyper: Hyper = None) -> Tensor:
        r"""Return $e^f - y$."""
        found = self.canonical(outputs)
        return found.exp() - rows(targets, "targets").to(found.dtype)

    def fisher(self, outputs: Tensor) -> Tensor:
        r"""Return $e^f$."""
        return outputs.exp()

    def sample(self, outputs: Tensor, hyper: Hyper = None, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw counts in the shape and type of the outputs."""
        return _poisson(outputs.exp(), generator)


@setting
class NegativeBinomial(_Counts):
    r"""Counts with the mean $\mu = e^f$ and the variance $\mu + \alpha \mu^2$.

    The Hessian depends on the target, so `hessian` is its expectation $\mu / (1 + \alpha\mu)$. As α → 0 it becomes
    `Poisson`.

    Args:
        dispersion: α, a positive number.

    >>> round(NegativeBinomial(dispersion=0.5).hessian(torch.tensor([[2.0]]).log()).item(), 6)  # 2 / (1 + 0.5·2)
    1.0
    """

    setting_name = "likelihoods.NegativeBinomial"
    dispersion: Positive = 1.0

    def target_log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the log-probability of each count."""
        size, odds = 1 / self.dispersion, outputs + math.log(self.dispersion)
        # In double precision: with a small dispersion, the difference of the two log-gammas loses their digits.
        wide = y.double()
        choose = torch.lgamma(wide + size) - math.lgamma(size) - torch.lgamma(wide + 1)
        return choose.to(outputs.dtype) + size * functional.logsigmoid(-odds) + y * functional.logsigmoid(odds)

    def target_cdf(self, outputs: Tensor, y: Tensor) -> Tensor:
        r"""Return the regularized incomplete beta function $I_{1/(1+\alpha\mu)}(1/\alpha, \lfloor y \rfloor + 1)$."""
        from scipy.special import betainc

        failure = torch.sigmoid(-(outputs + math.log(self.dispersion))).detach().cpu().numpy()
        order = y.floor().clamp_min(-0.5).detach().cpu().numpy() + 1
        found = torch.as_tensor(np.asarray(betainc(1 / self.dispersion, order, failure)), device=outputs.device)
        return torch.where(y < 0, 0.0, found.to(outputs.dtype))

    def target_moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        r"""Return $\mu$ and $\mu + \alpha\mu^2$."""
        mean = _mean(outputs)
        return mean, mean + self.dispersion * mean.square()

    def gradient(self, outputs: Tensor, targets: Tensor, hyper: Hyper = None) -> Tensor:
        r"""Return $(\mu - y) / (1 + \alpha\mu)$."""
        found = self.canonical(outputs)
        odds = found + math.log(self.dispersion)
        return odds.sigmoid() / self.dispersion - rows(targets, "targets").to(found.dtype) * (-odds).sigmoid()

    def fisher(self, outputs: Tensor) -> Tensor:
        r"""Return $\mu / (1 + \alpha\mu)$."""
        return (outputs + math.log(self.dispersion)).sigmoid() / self.dispersion

    def sample(self, outputs: Tensor, hyper: Hyper = None, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw counts in the shape and type of the outputs: Poisson counts with gamma-distributed rates."""
        sizes = torch.full_like(outputs, 1 / self.dispersion, device=None if generator is None else generator.device)
        gamma = torch._standard_gamma(sizes, generator=generator).to(outputs)
        return _poisson(gamma * self.dispersion * outputs.exp(), generator)


def _mean(outputs: Tensor) -> Tensor:
    """Return the mean of counts, at most e⁴⁰: an input far outside of the data must not make a prediction infinite."""
    return outputs.clamp(max=40.0).exp()


def _poisson(rates: Tensor, generator: torch.Generator | None) -> Tensor:
    device = rates.device if generator is None else generator.device
    return torch.poisson(rates.to(device), generator=generator).to(rates.device)
