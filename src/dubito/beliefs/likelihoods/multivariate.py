"""The Gaussian likelihood with one noise level per output, or correlated noise."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from dubito.beliefs.likelihoods.base import Hyper, blank, rows
from dubito.beliefs.likelihoods.kinds import RegressionLikelihood
from dubito.beliefs.prediction import RegressionPrediction
from dubito.core.constraints import Positive, check
from dubito.core.errors import InputError
from dubito.core.numeric import normal_log_density
from dubito.core.settings import setting
from dubito.core.tensor_checks import at_least_float32


@setting
class MultivariateGaussian(RegressionLikelihood):
    r"""Regression of several targets with known noise, $y \sim \mathcal N(f, \Sigma)$.

    Outputs and targets have shape ``[B, O]``. The Hessian is $\Sigma^{-1}$.

    Args:
        covariance: Σ: O variances, one per output, or an O×O matrix. `of_residuals` estimates it.

    >>> MultivariateGaussian(covariance=(0.25, 1.0)).hessian(torch.zeros(1, 2))[0].tolist()
    [[4.0, 0.0], [0.0, 1.0]]
    """

    setting_name = "likelihoods.MultivariateGaussian"
    covariance: Annotated[tuple[Any, ...], "O positive variances or an O×O matrix (models.LearnedNoise learns them)"]

    def __post_init__(self) -> None:
        try:
            values = np.array(self.covariance, dtype=float)
            values = np.diag(values) if values.ndim == 1 else values
            known = values.ndim == 2 and values.size > 0 and np.isfinite(values).all()
            fits = known and np.allclose(values, values.T, atol=1e-12)
            np.linalg.cholesky(values)
        except (TypeError, ValueError, np.linalg.LinAlgError):
            fits = False
        if not fits:
            raise InputError(
                "`covariance` must be O positive variances or a symmetric, positive definite O×O matrix, got "
                f"{self.covariance!r}."
            )
        plain = tuple(tuple(map(float, row)) if np.ndim(row) else float(row) for row in self.covariance)
        object.__setattr__(self, "covariance", plain)

    @classmethod
    def of_residuals(cls, residuals: Tensor, *, correlated: bool = True) -> MultivariateGaussian:
        """Return the likelihood with the mean square of residuals ``[N, O]``, the estimate of highest likelihood.

        Args:
            residuals: Targets minus predicted means, of a trained network.
            correlated: Whether to estimate the whole matrix, or one variance per output.
        """
        wide = rows(residuals, "residuals").detach().double().cpu()
        if not wide.numel() or not bool(wide.isfinite().all()):
            found = "NaN or infinite values" if wide.numel() else f"none, of shape {tuple(wide.shape)}"
            raise InputError(f"`residuals` must be finite numbers of at least one datum, got {found}.")
        moments = wide.T @ wide / len(wide)
        if torch.linalg.cholesky_ex(moments if correlated else moments.diagonal().diag()).info:
            raise InputError(
                f"The residuals of {len(wide)} data with {wide.shape[1]} outputs have no positive definite covariance: "
                "an output without any error, or too few data. Give `covariance`, or take correlated=False."
            )
        return cls(tuple(map(tuple, moments.tolist())) if correlated else tuple(moments.diagonal().tolist()))

    def canonical(self, outputs: Tensor) -> Tensor:
        """Return the outputs as ``[B, O]``."""
        found = rows(outputs, "outputs")
        if found.shape[1] != len(self.covariance):
            raise InputError(f"A covariance of {len(self.covariance)} outputs does not fit {found.shape[1]} outputs.")
        return found

    def log_prob(self, outputs: Tensor, targets: Tensor, hyper: Hyper = None) -> Tensor:
        """Return the log-density of the targets ``[B]``, jointly over outputs."""
        means = self.canonical(outputs)
        z = self._whitened(rows(targets, "targets").to(means.dtype) - means)
        log_scales = self._factor(means).diagonal().log()
        return normal_log_density(z, log_scales).sum(dim=-1)

    def gradient(self, outputs: Tensor, targets: Tensor, hyper: Hyper = None) -> Tensor:
        r"""Return $\Sigma^{-1}(f - y)$."""
        means = self.canonical(outputs)
        return self._whitened(means - rows(targets, "targets").to(means.dtype)) @ self._inverse_factor(means)

    def hessian(self, outputs: Tensor, targets: Tensor | None = None, hyper: Hyper = None) -> Tensor:
        r"""Return $\Sigma^{-1}$, ``[B, O, O]``."""
        means = self.canonical(outputs)
        inverse = self._inverse_factor(means)
        return (inverse.T @ inverse).expand(len(means), -1, -1)

    def hessian_root(self, outputs: Tensor, targets: Tensor | None = None, hyper: Hyper = None) -> Tensor:
        r"""Return the rows of $L^{-1}$, where $\Sigma = L L^\top$, ``[O, B, O]``."""
        means = self.canonical(outputs)
        return self._inverse_factor(means).unsqueeze(1).expand(-1, len(means), -1)

    def sample(self, outputs: Tensor, hyper: Hyper = None, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw targets ``[B, O]``."""
        means = self.canonical(outputs)
        normal = blank(means, generator).normal_(generator=generator).to(means.device)
        return means + normal @ self._factor(means).T

    def _mixture(self, outputs: Tensor, hyper: Hyper) -> RegressionPrediction:
        return self._prediction(outputs, torch.zeros_like(outputs))

    def predict_gaussian(
        self, mean: Tensor, variance: Tensor, hyper: Hyper = None, *, covariance: Tensor | None = None
    ) -> RegressionPrediction:
        """Return one Gaussian per datum, whose covariance is that of the function plus that of the noise."""
        means, variances = (self.canonical(at_least_float32(part)).unsqueeze(0) for part in (mean, variance))
        return self._prediction(means, variances, covariance)

    def temper(self, outputs: Tensor, temperature: float) -> tuple[Tensor, MultivariateGaussian]:
        """Multiply every standard deviation by the temperature."""
        check("temperature", Positive, temperature)
        scaled = np.array(self.covariance) * temperature**2
        return outputs, self.replace(covariance=tuple(scaled.tolist()))

    def _prediction(self, means: Tensor, variances: Tensor, covariance: Tensor | None = None) -> RegressionPrediction:
        noise = self._matrix().to(means)
        each = noise.expand(means.shape[1], -1, -1)
        return RegressionPrediction(means, noise.diagonal(), variances, covariance, each)

    def _matrix(self) -> Tensor:
        values = torch.tensor(self.covariance, dtype=torch.float64)
        return values.diag() if values.ndim == 1 else values

    def _factor(self, like: Tensor) -> Tensor:
        return torch.linalg.cholesky(self._matrix()).to(like)

    def _inverse_factor(self, like: Tensor) -> Tensor:
        return torch.linalg.inv(torch.linalg.cholesky(self._matrix())).to(like)

    def _whitened(self, residuals: Tensor) -> Tensor:
        return residuals @ self._inverse_factor(residuals).T
