"""The Gaussian likelihood with one noise level for all data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from torch import Tensor

from dubito.beliefs.likelihoods.base import Hyper, blank, diagonal_root, rows
from dubito.beliefs.likelihoods.kinds import RegressionLikelihood
from dubito.beliefs.prediction import RegressionPrediction
from dubito.core.constraints import Positive, check
from dubito.core.errors import InputError
from dubito.core.numeric import normal_log_density
from dubito.core.params import Params
from dubito.core.settings import setting
from dubito.core.tensor_checks import at_least_float32


@setting
class Gaussian(RegressionLikelihood):
    r"""Regression with homoscedastic noise, $y \sim \mathcal N(f, \sigma^2 I)$.

    Outputs and targets have shape ``[B]`` or ``[B, O]`` (``[B]`` and ``[B, 1]`` are the same). The Hessian is
    $I / \sigma^2$.

    Args:
        noise: The standard deviation σ: a number; ``"learn"`` to train log σ along with the weights; or ``"evidence"``
            to choose σ by the evidence. Unless it is a number, all methods need ``hyper["log_noise"]``.

    >>> Gaussian(noise=0.5).hessian(torch.zeros(1, 2))[0].tolist()
    [[4.0, 0.0], [0.0, 4.0]]
    """

    setting_name = "likelihoods.Gaussian"
    learned_setting = "noise"
    noise: Annotated[Positive, "a standard deviation, which is a positive number"] | Literal["learn", "evidence"] = (
        "learn"
    )

    def __post_init__(self) -> None:
        if not isinstance(self.noise, str):
            object.__setattr__(self, "noise", float(self.noise))

    def hyper(self) -> Params:
        """Return ``{"log_noise": 0}`` if the noise is not a number."""
        return {"log_noise": torch.tensor(0.0)} if isinstance(self.noise, str) else {}

    def resolved(self, hyper: Mapping[str, Tensor]) -> Gaussian:
        """Return the likelihood with the noise as a number."""
        if not isinstance(self.noise, str):
            return self
        return self.replace(noise=math.exp(self._log_noise(hyper, torch.zeros((), dtype=torch.float64)).item()))

    def canonical(self, outputs: Tensor) -> Tensor:
        """Return the outputs as ``[B, O]``."""
        return rows(outputs, "outputs")

    def log_prob(self, outputs: Tensor, targets: Tensor, hyper: Hyper = None) -> Tensor:
        """Return the log-density of the targets ``[B]``, summed over outputs."""
        means, log_noise = self.canonical(outputs), self._log_noise(hyper, outputs)
        z = (rows(targets, "targets").to(means.dtype) - means) * (-log_noise).exp()
        return normal_log_density(z, log_noise).sum(dim=-1)

    def gradient(self, outputs: Tensor, targets: Tensor, hyper: Hyper = None) -> Tensor:
        r"""Return $(f - y) / \sigma^2$."""
        means = self.canonical(outputs)
        residuals = means - rows(targets, "targets").to(means.dtype)
        return residuals * (-2 * self._log_noise(hyper, outputs)).exp()

    def hessian(self, outputs: Tensor, targets: Tensor | None = None, hyper: Hyper = None) -> Tensor:
        r"""Return $I / \sigma^2$, ``[B, O, O]``."""
        means = self.canonical(outputs)
        return torch.diag_embed((-2 * self._log_noise(hyper, outputs)).exp().expand(means.shape))

    def hessian_root(self, outputs: Tensor, targets: Tensor | None = None, hyper: Hyper = None) -> Tensor:
        r"""Return the columns of $I / \sigma$, ``[O, B, O]``."""
        means = self.canonical(outputs)
        return diagonal_root((-self._log_noise(hyper, outputs)).exp().expand(means.shape))

    def sample(self, outputs: Tensor, hyper: Hyper = None, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw targets in the shape of the outputs."""
        normal = blank(outputs, generator).normal_(generator=generator).to(outputs.device)
        return outputs + self._log_noise(hyper, outputs).exp() * normal

    def _drawn_gradient(self, outputs: Tensor, hyper: Hyper, generator: torch.Generator | None) -> Tensor:
        # The residual is the noise itself; forming outputs + noise - outputs would round it away for large outputs.
        means = self.canonical(outputs)
        normal = blank(means, generator).normal_(generator=generator).to(means.device)
        return -normal * (-self._log_noise(hyper, outputs)).exp()

    def moments(self, outputs: Tensor, hyper: Hyper) -> tuple[Tensor, Tensor, Tensor]:
        """Return the outputs as means, the noise variance, and no function variance."""
        noise_variance = (2 * self._log_noise(hyper, outputs)).exp().reshape(-1, 1, 1)
        return outputs, noise_variance, torch.zeros_like(outputs)

    def predict_gaussian(
        self, mean: Tensor, variance: Tensor, hyper: Hyper = None, *, covariance: Tensor | None = None
    ) -> RegressionPrediction:
        """Return one Gaussian per datum, whose variance is that of the function plus that of the noise."""
        mean, variance = at_least_float32(mean), at_least_float32(variance)
        noise_variance = (2 * self._log_noise(hyper, mean)).exp()
        function_variance = self.canonical(variance).unsqueeze(0)
        return RegressionPrediction(self.canonical(mean).unsqueeze(0), noise_variance, function_variance, covariance)

    def temper(self, outputs: Tensor, temperature: float) -> tuple[Tensor, Gaussian]:
        """Multiply the noise, which must be a number, by the temperature."""
        check("temperature", Positive, temperature)
        if isinstance(self.noise, str):
            raise InputError(self._unknown)
        return outputs, self.replace(noise=self.noise * temperature)

    @property
    def _unknown(self) -> str:
        return f"The noise of {self!r} is not known yet: fit it first, or give the noise as a number."

    def _log_noise(self, hyper: Hyper, like: Tensor) -> Tensor:
        """Return log σ as a tensor in the dtype and on the device of `like`."""
        if not isinstance(self.noise, str):
            return torch.tensor(math.log(self.noise), dtype=like.dtype, device=like.device)
        if hyper is None or "log_noise" not in hyper:
            raise InputError(self._unknown)
        return hyper["log_noise"].to(dtype=like.dtype, device=like.device)
