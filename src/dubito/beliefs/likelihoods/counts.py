"""Likelihoods of counts: Poisson, and negative binomial for counts that vary more."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from dubito.beliefs.likelihoods.base import Hyper, rows
from dubito.beliefs.likelihoods.kinds import DistributionLikelihood, with_number
from dubito.core.constraints import Positive
from dubito.core.errors import InputError
from dubito.core.numeric import log_gamma_ratio
from dubito.core.params import Params
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
        self.check_values(targets)

    def check_values(self, y: Tensor) -> None:
        """Raise an error unless the targets are whole numbers of at least 0."""
        wrong = y[(y < 0) | (y != y.round())] if y.is_floating_point() else None
        wrong = y[y < 0] if wrong is None else wrong
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

    def fisher(self, parameters: Tensor) -> Tensor:
        r"""Return $e^f$."""
        return parameters.exp()

    def sample(self, outputs: Tensor, hyper: Hyper = None, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw counts in the shape and type of the outputs."""
        return _poisson(outputs.exp(), generator)


@setting
class NegativeBinomial(_Counts):
    r"""Counts with the mean $\mu = e^f$ and the variance $\mu + \alpha \mu^2$.

    The Hessian depends on the target, so `hessian` is its expectation $\mu / (1 + \alpha\mu)$. As α → 0 it becomes
    `Poisson`.

    Args:
        dispersion: α, a positive number; or ``"learn"`` to train log α along with the weights, which all methods then
            need as ``hyper["log_dispersion"]``.

    >>> round(NegativeBinomial(dispersion=0.5).hessian(torch.tensor([[2.0]]).log()).item(), 6)  # 2 / (1 + 0.5·2)
    1.0
    """

    setting_name = "likelihoods.NegativeBinomial"
    learned_setting = "dispersion"
    dispersion: Positive | Literal["learn"] = "learn"

    def hyper(self) -> Params:
        """Return ``{"log_dispersion": 0}`` if it is learned."""
        return {"log_dispersion": torch.tensor(0.0)} if self.dispersion == "learn" else {}

    def resolved(self, hyper: Mapping[str, Tensor]) -> NegativeBinomial:
        """Return the likelihood with the dispersion as a number."""
        known = self.dispersion != "learn"
        return self if known else self.replace(dispersion=float(hyper["log_dispersion"].double().exp()))

    def parameters(self, outputs: Tensor, hyper: Hyper = None) -> Tensor:
        """Return the log-means and log α ``[..., 2·O]``."""
        return with_number(self, outputs, hyper, math.log)

    def target_log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the log-probability of each count."""
        log_means, log_dispersion = outputs.double().chunk(2, dim=-1)
        wide, size, odds = y.double(), (-log_dispersion).exp(), log_means + log_dispersion
        choose = log_gamma_ratio(size, wide) - torch.lgamma(wide + 1)
        found = choose + size * functional.logsigmoid(-odds) + wide * functional.logsigmoid(odds)
        return found.to(outputs.dtype)

    def target_cdf(self, outputs: Tensor, y: Tensor) -> Tensor:
        r"""Return the regularized incomplete beta function $I_{1/(1+\alpha\mu)}(1/\alpha, \lfloor y \rfloor + 1)$."""
        from scipy.special import betaincc

        # By the complement: with a small dispersion, 1/(1 + αμ) is too near to 1 for a float.
        log_means, log_dispersion = outputs.detach().cpu().double().chunk(2, dim=-1)
        success, size = torch.sigmoid(log_means + log_dispersion).numpy(), (-log_dispersion).exp().numpy()
        order = y.floor().clamp_min(-0.5).detach().cpu().double().numpy() + 1
        found = torch.as_tensor(np.asarray(betaincc(order, size, success))).to(outputs)
        return torch.where(y < 0, 0.0, found)

    def target_moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        r"""Return $\mu$ and $\mu + \alpha\mu^2$."""
        log_means, log_dispersion = outputs.chunk(2, dim=-1)
        mean = _mean(log_means)
        return mean, mean + log_dispersion.exp() * mean.square()

    def gradient(self, outputs: Tensor, targets: Tensor, hyper: Hyper = None) -> Tensor:
        r"""Return $(\mu - y) / (1 + \alpha\mu)$."""
        log_means, log_dispersion = self.parameters(self.canonical(outputs), hyper).chunk(2, dim=-1)
        odds, y = log_means + log_dispersion, rows(targets, "targets").to(log_means.dtype)
        return odds.sigmoid() * (-log_dispersion).exp() - y * (-odds).sigmoid()

    def fisher(self, parameters: Tensor) -> Tensor:
        r"""Return $\mu / (1 + \alpha\mu)$."""
        log_means, log_dispersion = parameters.chunk(2, dim=-1)
        return (log_means + log_dispersion).sigmoid() * (-log_dispersion).exp()

    def sample(self, outputs: Tensor, hyper: Hyper = None, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw counts in the shape and type of the outputs: Poisson counts with gamma-distributed rates."""
        log_dispersion = self.parameters(self.canonical(outputs), hyper).chunk(2, dim=-1)[1].reshape(outputs.shape)
        sizes = (-log_dispersion).exp().to(outputs.device if generator is None else generator.device)
        gamma = torch._standard_gamma(sizes, generator=generator).to(outputs)
        return _poisson(gamma * (log_dispersion + outputs).exp(), generator)


def _mean(outputs: Tensor) -> Tensor:
    """Return the mean of counts, at most e⁴⁰: an input far outside of the data must not make a prediction infinite."""
    return outputs.clamp(max=40.0).exp()


def _poisson(rates: Tensor, generator: torch.Generator | None) -> Tensor:
    device = rates.device if generator is None else generator.device
    return torch.poisson(rates.to(device), generator=generator).to(rates.device)
