"""The Gaussian likelihood whose noise the network predicts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dubito.beliefs.likelihoods.base import Hyper, blank, diagonal_root, rows
from dubito.beliefs.likelihoods.kinds import RegressionLikelihood
from dubito.beliefs.prediction import RegressionPrediction
from dubito.core.constraints import Positive, check
from dubito.core.errors import InputError
from dubito.core.settings import setting
from dubito.core.tensor_checks import at_least_float32


@setting
class HeteroscedasticGaussian(RegressionLikelihood):
    r"""Regression with input-dependent noise, $y_o \sim \mathcal N(m_o, e^{s_o})$ (Nix and Weigend, 1994).

    For O targets the network has 2·O outputs ``[B, 2·O]``: first the means $m$, then the log-variances $s$.

    The Hessian in $s$ and across $(m, s)$ depends on the target and need not be positive semi-definite, so `hessian` is
    its expectation under the model, the Fisher information $\mathrm{diag}(e^{-s}, \tfrac12)$.

    >>> HeteroscedasticGaussian().predict(torch.tensor([[3.0, 0.0]])).stddev.item()
    1.0
    """

    setting_name = "likelihoods.HeteroscedasticGaussian"
    outputs_per_target = 2
    layout = "a mean and a log-variance"

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise an error also where a mean is finite and its log-variance is not."""
        super().check(outputs, targets)
        means, log_variances = self._split(outputs)
        wrong = means.isfinite() & ~log_variances.isfinite()
        if bool(wrong.any()):
            raise InputError(
                f"The network gives a log-variance of {float(log_variances[wrong][0])}: a noise must be positive and "
                "finite, also one that is known (models.KnownNoise)."
            )

    def log_prob(self, outputs: Tensor, targets: Tensor, hyper: Hyper = None) -> Tensor:
        """Return the log-density of the targets ``[B]``, summed over outputs."""
        means, log_variances = self._split(outputs)
        z = (rows(targets, "targets").to(means.dtype) - means) * (-0.5 * log_variances).exp()
        return -0.5 * (z.square() + log_variances + math.log(2 * math.pi)).sum(dim=-1)

    def gradient(self, outputs: Tensor, targets: Tensor, hyper: Hyper = None) -> Tensor:
        r"""Return $(-r e^{-s},\ \tfrac12(1 - r^2 e^{-s}))$ with the residual $r = y - m$."""
        means, log_variances = self._split(outputs)
        inverse_scale = (-0.5 * log_variances).exp()
        return _score((rows(targets, "targets").to(means.dtype) - means) * inverse_scale, inverse_scale)

    def hessian(self, outputs: Tensor, targets: Tensor | None = None, hyper: Hyper = None) -> Tensor:
        r"""Return the expected Hessian $\mathrm{diag}(e^{-s}, \tfrac12)$, ``[B, 2·O, 2·O]``."""
        _, log_variances = self._split(outputs)
        return torch.diag_embed(torch.cat([(-log_variances).exp(), torch.full_like(log_variances, 0.5)], dim=-1))

    def hessian_root(self, outputs: Tensor, targets: Tensor | None = None, hyper: Hyper = None) -> Tensor:
        r"""Return the columns of $\mathrm{diag}(e^{-s/2}, \sqrt{1/2})$, ``[2·O, B, 2·O]``."""
        _, log_variances = self._split(outputs)
        halves = torch.full_like(log_variances, math.sqrt(0.5))
        return diagonal_root(torch.cat([(-0.5 * log_variances).exp(), halves], dim=-1))

    def sample(self, outputs: Tensor, hyper: Hyper = None, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw targets ``[B, O]``."""
        means, log_variances = self._split(outputs)
        normal = blank(means, generator).normal_(generator=generator).to(means.device)
        return means + (0.5 * log_variances).exp() * normal

    def _drawn_gradient(self, outputs: Tensor, hyper: Hyper, generator: torch.Generator | None) -> Tensor:
        # As for the homoscedastic Gaussian: the noise is drawn directly, never recovered from outputs + noise.
        means, log_variances = self._split(outputs)
        normal = blank(means, generator).normal_(generator=generator).to(means.device)
        return _score(normal, (-0.5 * log_variances).exp())

    def moments(self, outputs: Tensor, hyper: Hyper) -> tuple[Tensor, Tensor, Tensor]:
        """Return means, the noise variances, and no function variance."""
        means, log_variances = outputs.chunk(2, dim=-1)
        return means, log_variances.exp(), torch.zeros_like(means)

    def predict_gaussian(
        self, mean: Tensor, variance: Tensor, hyper: Hyper = None, *, covariance: Tensor | None = None
    ) -> RegressionPrediction:
        """Return one Gaussian per datum from Gaussian outputs ``[B, 2·O]``.

        The function variance is that of the mean outputs. The noise is taken at the mean log-variance; uncertainty
        about the noise itself is ignored, because the exact prediction would not be Gaussian.
        """
        means, log_variances = self._split(at_least_float32(mean))
        num_targets = means.shape[-1]
        joint = None if covariance is None else covariance[:, :num_targets, :num_targets]
        function_variance = self._split(at_least_float32(variance))[0].unsqueeze(0)
        return RegressionPrediction(means.unsqueeze(0), log_variances.exp().unsqueeze(0), function_variance, joint)

    def temper(self, outputs: Tensor, temperature: float) -> tuple[Tensor, HeteroscedasticGaussian]:
        """Multiply every noise level by the temperature: add 2 log T to the log-variances."""
        check("temperature", Positive, temperature)
        means, log_variances = outputs.chunk(2, dim=-1)
        return torch.cat([means, log_variances + 2 * math.log(temperature)], dim=-1), self

    def _split(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        means, log_variances = self.canonical(outputs).chunk(2, dim=-1)
        return means, log_variances


def _score(z: Tensor, inverse_scale: Tensor) -> Tensor:
    """Return the gradient of ``-log p`` from the standardised residual ``z = (y − m) e^{−s/2}``."""
    return torch.cat([-z * inverse_scale, 0.5 * (1 - z.square())], dim=-1)
