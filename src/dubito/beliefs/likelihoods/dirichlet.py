"""The Dirichlet likelihood, for shares that sum to one."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from dubito.beliefs.likelihoods.base import Hyper, blank, rows
from dubito.beliefs.likelihoods.kinds import DistributionLikelihood
from dubito.beliefs.prediction import DistributionPrediction
from dubito.beliefs.prediction.distributions import gaussian_grid, quasi_random
from dubito.core.errors import InputError
from dubito.core.settings import setting

# How far the sum of a datum's shares may be from 1, the nodes for each of two outputs, and the draws of more outputs.
_TOLERANCE, _NODES, _DRAWS = 1e-3, (24, 24), 256


@setting
class Dirichlet(DistributionLikelihood):
    r"""Shares of a whole, $y \sim \mathrm{Dir}(\alpha)$ with $\alpha = e^f$: $y_c > 0$ and $\sum_c y_c = 1$.

    Outputs and targets have shape ``[B, C]`` with at least two shares. The mean is the softmax of the outputs; the
    larger they are, the less the targets vary. The Hessian depends on the target, so `hessian` is its expectation, the
    Fisher information $\mathrm{diag}(\alpha_c^2\, \psi_1(\alpha_c)) - \psi_1(\alpha_0)\, \alpha\alpha^\top$ with
    $\alpha_0 = \sum_c \alpha_c$, which is positive definite.

    >>> Dirichlet().predict(torch.zeros(1, 2)).interval(0.5)[0].round(decimals=4).tolist()  # uniform
    [[0.25, 0.25]]
    """

    setting_name = "likelihoods.Dirichlet"
    standardizes: ClassVar[bool] = False
    layout = "the logarithm of a concentration"

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise an error unless the targets are positive shares ``[B, C]`` that sum to one."""
        if self.canonical(outputs).shape[1] < 2:
            raise InputError(
                "Dirichlet needs two shares or more, and so as many targets of each datum, got outputs of shape "
                f"{tuple(outputs.shape)}."
            )
        super().check(outputs, targets)
        self.check_values(targets)

    def check_values(self, y: Tensor) -> None:
        """Raise an error unless the targets are positive shares that sum to one."""
        total = y.double().sum(dim=1)
        wrong = total[(total - 1).abs() > _TOLERANCE]
        if len(wrong):
            raise InputError(f"Dirichlet targets must sum to 1 for every datum, got a sum of {wrong[0]:g}.")
        if not bool((y > 0).all()):
            raise InputError(
                f"Dirichlet targets must be above 0, got {y.min():g}: for N data with C shares, replace y by "
                "(y (N - 1) + 1/C) / N."
            )

    def joint_log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the log-density of all shares of a datum."""
        alpha = outputs.double().exp()  # large terms cancel
        constant = torch.lgamma(alpha.sum(dim=-1)) - torch.lgamma(alpha).sum(dim=-1)
        return (constant + ((alpha - 1) * y.double().log()).sum(dim=-1)).to(outputs.dtype)

    def target_log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the log-density of each share alone, which has a beta distribution."""
        (own, rest), wide = self._beta(outputs.double()), y.double()
        constant = torch.lgamma(own + rest) - torch.lgamma(own) - torch.lgamma(rest)
        found = constant + torch.special.xlogy(own - 1, wide) + torch.special.xlog1py(rest - 1, -wide)
        return found.to(outputs.dtype)

    def target_cdf(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the distribution function of each share."""
        from scipy.special import betainc

        own, rest, at = (part.detach().cpu().numpy() for part in (*self._beta(outputs), y.clamp(0, 1)))
        return torch.as_tensor(np.asarray(betainc(own, rest, at)), device=outputs.device).to(outputs.dtype)

    def target_moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        r"""Return $\mu_c = \alpha_c/\alpha_0$ and $\mu_c (1 - \mu_c) / (1 + \alpha_0)$."""
        mean, total = outputs.softmax(dim=-1), outputs.logsumexp(dim=-1, keepdim=True).exp()
        return mean, mean * (1 - mean) / (1 + total)

    def gradient(self, outputs: Tensor, targets: Tensor, hyper: Hyper = None) -> Tensor:
        r"""Return $\alpha_c\,(\psi(\alpha_c) - \psi(\alpha_0) - \log y_c)$."""
        found = self.canonical(outputs)
        return self._score(found, rows(targets, "targets").double().log())

    def fisher(self, parameters: Tensor) -> Tensor:
        """Return the diagonal of `hessian`."""
        return self.hessian(parameters).diagonal(dim1=-2, dim2=-1)

    def hessian(self, outputs: Tensor, targets: Tensor | None = None, hyper: Hyper = None) -> Tensor:
        """Return the Fisher information ``[B, C, C]``.

        Its smallest eigenvalue, about (C − 1) / 2C, is below the rounding of a float32 for concentrations above a
        million; `hessian_root` has its digits.
        """
        alpha = self.canonical(outputs).double().exp()  # large terms cancel, here and in the root
        own, total = torch.polygamma(1, alpha), torch.polygamma(1, alpha.sum(dim=-1))
        outer = alpha.unsqueeze(-1) * alpha.unsqueeze(-2)
        return (torch.diag_embed(alpha.square() * own) - total[..., None, None] * outer).to(outputs.dtype)

    def hessian_root(self, outputs: Tensor, targets: Tensor | None = None, hyper: Hyper = None) -> Tensor:
        r"""Return the columns of $D^{1/2}(I - \gamma\, u u^\top)$, ``[C, B, C]``.

        The Hessian is $D - t\,vv^\top$, $u = D^{-1/2} v$ and $\gamma = (1 - \sqrt{1 - t\,u^\top u}) / u^\top u$.
        """
        alpha = self.canonical(outputs).double().exp()
        own, total = torch.polygamma(1, alpha), torch.polygamma(1, alpha.sum(dim=-1, keepdim=True))
        u = own.rsqrt()
        square = u.square().sum(dim=-1, keepdim=True)
        gamma = (1 - (1 - total * square).clamp_min(0).sqrt()) / square
        inner = torch.diag_embed(torch.ones_like(u)) - gamma.unsqueeze(-1) * u.unsqueeze(-1) * u.unsqueeze(-2)
        return ((alpha * own.sqrt()).unsqueeze(-1) * inner).movedim(-1, 0).to(outputs.dtype)

    def sample(self, outputs: Tensor, hyper: Hyper = None, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw shares ``[B, C]``."""
        return self._log_shares(self.canonical(outputs), generator).exp()

    def _drawn_gradient(self, outputs: Tensor, hyper: Hyper, generator: torch.Generator | None) -> Tensor:
        # From the logarithms of the shares: a share itself may be too small for its type.
        found = self.canonical(outputs)
        return self._score(found, self._log_shares(found, generator))

    def _over_gaussian(self, means: Tensor, variances: Tensor, hyper: Hyper) -> DistributionPrediction:
        """Return the mixture over independent Gaussian outputs: nodes for two shares, 256 fixed draws for more."""
        if means.shape[1] == 2:
            return DistributionPrediction.of(self, *gaussian_grid(means, variances, _NODES))
        return DistributionPrediction.of(self, quasi_random(means, variances, _DRAWS))

    def _beta(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        alpha = outputs.exp()
        return alpha, (alpha.sum(dim=-1, keepdim=True) - alpha).clamp_min(torch.finfo(alpha.dtype).tiny)

    def _score(self, outputs: Tensor, log_shares: Tensor) -> Tensor:
        alpha = outputs.double().exp()
        expected = torch.digamma(alpha) - torch.digamma(alpha.sum(dim=-1, keepdim=True))
        return (alpha * (expected - log_shares.double())).to(outputs.dtype)

    def _log_shares(self, outputs: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draw the logarithms of shares: those of gamma variables of shape α + 1, times uniform ones to the 1/α."""
        home = blank(outputs, generator)
        alpha = outputs.exp().to(home)
        gamma = torch._standard_gamma(alpha + 1, generator=generator).clamp_min(torch.finfo(home.dtype).tiny)
        uniform = home.exponential_(generator=generator)  # −log U
        return (gamma.log() - uniform / alpha).to(outputs).log_softmax(dim=-1)
