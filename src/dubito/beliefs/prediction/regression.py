"""Predictions of real numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from dubito.beliefs.prediction import gaussian_mixture
from dubito.beliefs.prediction.base import Prediction, frame
from dubito.core.arguments import checked_arguments
from dubito.core.errors import InputError
from dubito.core.numeric import normal_log_density
from dubito.core.tracing import is_tracing
from dubito.core.widest import wide

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False, repr=False)
class RegressionPrediction(Prediction):
    r"""An equally weighted mixture of K Gaussians per datum, with independent outputs within a component.

    $$p(y) = \frac1K \sum_k \prod_o \mathcal N(y_o;\ m_{ko},\ \sigma^2_{ko} + v_{ko})$$

    Density, distribution function, quantiles and CRPS are those of the mixture, not of a moment-matched Gaussian. The
    variance splits as ``stddev**2 == aleatoric + epistemic``: the aleatoric part is the mean of $\sigma^2$, the
    epistemic part is the mean of $v$ plus the variance of the component means.

    Args:
        means: ``[K, B, O]``; K posterior samples or members, or one closed-form Gaussian.
        noise_variance: The variance of the noise, broadcast to ``[K, B, O]``.
        function_variance: The variance of the function within a component (for a linearized Laplace posterior),
            broadcast to ``[K, B, O]``.
        covariance: ``[B, O, O]``, the joint covariance of the function's outputs, or None if it is unknown. It is not
            used here: `log_prob` treats outputs as independent, unless their noise is correlated.
        noise_covariance: ``[B, O, O]``, the covariance of the noise of the outputs, if it is correlated; its diagonal
            is `noise_variance`.

    >>> prediction = RegressionPrediction(torch.tensor([[[-1.0]], [[1.0]]]), torch.tensor(0.25), torch.tensor(0.0))
    >>> prediction.aleatoric.item(), prediction.epistemic.item()
    (0.25, 1.0)
    """

    means: Tensor
    noise_variance: Tensor
    function_variance: Tensor
    covariance: Tensor | None = None
    noise_covariance: Tensor | None = None

    _batch_axis: ClassVar[dict[str, int]] = {
        "means": 1, "noise_variance": 1, "function_variance": 1, "covariance": 0, "noise_covariance": 0
    }  # fmt: skip

    def __post_init__(self) -> None:
        if self.means.ndim != 3:
            raise InputError(f"The means must be [K, B, O] (components, data, outputs), got {tuple(self.means.shape)}.")
        for name in ("noise_variance", "function_variance"):
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, value.expand(self.means.shape))
            except RuntimeError as error:
                raise InputError(
                    f"A {name} of shape {tuple(value.shape)} does not fit means of shape {tuple(self.means.shape)}."
                ) from error
        _, batch, outputs = self.means.shape
        if self.covariance is not None and self.covariance.shape != (batch, outputs, outputs):
            raise InputError(
                f"The covariance must be [B, O, O] = {(batch, outputs, outputs)}, got {tuple(self.covariance.shape)}."
            )

    @property
    def mean(self) -> Tensor:
        """The predictive mean ``[B, O]``."""
        return self.means.mean(dim=0)

    @property
    def point(self) -> Tensor:
        """The number to report for each target ``[B, O]``: the mean; the quantile if the likelihood is of one."""
        return self.mean

    @property
    def aleatoric(self) -> Tensor:
        """The variance of the noise ``[B, O]``."""
        return self.noise_variance.mean(dim=0)

    @property
    def epistemic(self) -> Tensor:
        """The variance of the function under the posterior ``[B, O]``."""
        return self.function_variance.mean(dim=0) + self.means.var(dim=0, correction=0)

    @property
    def variance(self) -> Tensor:
        """The predictive variance ``[B, O]``: ``aleatoric + epistemic``."""
        return self.aleatoric + self.epistemic

    @property
    def stddev(self) -> Tensor:
        """The predictive standard deviation ``[B, O]``."""
        return self.variance.sqrt()

    @property
    def samples(self) -> Tensor | None:
        """The component means ``[K, B, O]``, or None if there is only one component."""
        return self.means if len(self.means) > 1 else None

    @property
    def _mixture(self) -> tuple[Tensor, Tensor, Tensor]:
        """The means, standard deviations and weights of the components."""
        scales = (self.noise_variance + self.function_variance).sqrt()
        return self.means, scales, self.means.new_full((len(self.means), 1, 1), 1 / len(self.means))

    @checked_arguments
    def log_prob(self, y: Tensor) -> Tensor:
        """Return the log-density of the mixture at the targets ``[B]``, jointly over outputs."""
        means, scales, _ = self._mixture
        if self.noise_covariance is not None:
            return self._correlated_log_prob(self.checked_targets(y) - means)
        z = (self.checked_targets(y) - means) / scales
        per_component = (-0.5 * z.square() - scales.log() - 0.5 * math.log(2 * math.pi)).sum(dim=-1)
        return per_component.logsumexp(dim=0) - math.log(len(means))

    def _correlated_log_prob(self, residuals: Tensor) -> Tensor:
        """Return the joint log-density from residuals ``[K, B, O]``."""
        assert self.noise_covariance is not None
        own = torch.diag_embed(self.function_variance) if self.covariance is None else self.covariance
        factor = torch.linalg.cholesky(self.noise_covariance + own).expand(*residuals.shape, -1)
        z = torch.linalg.solve_triangular(factor, residuals.unsqueeze(-1), upper=False).squeeze(-1)
        log_scale = factor.diagonal(dim1=-2, dim2=-1).log()
        parts = normal_log_density(z, log_scale)
        return parts.sum(dim=-1).logsumexp(dim=0) - math.log(len(residuals))

    def log_prob_each(self, y: Tensor) -> Tensor:
        """Return the log-density of each output's target ``[B, O]``."""
        return gaussian_mixture.log_prob(*self._mixture, self.checked_targets(y))

    def cdf(self, y: Tensor) -> Tensor:
        """Return the cumulative distribution function of each output at the targets ``[B, O]``."""
        return gaussian_mixture.cdf(*self._mixture, self.checked_targets(y))

    def pit(self, y: Tensor) -> Tensor:
        """Return the probability integral transform ``[B, O]``, uniform if the prediction is calibrated."""
        return self.cdf(y).clamp(max=1)  # weights that sum to one still round above it

    @checked_arguments
    def quantile(self, q: float) -> Tensor:
        """Return the q-quantile of each output's mixture ``[B, O]``, solved in float64."""
        if not 0 < q < 1:
            raise InputError(f"A quantile must lie strictly between 0 and 1, got {q}.")
        means, scales, weights = (wide(part) for part in self._mixture)
        return gaussian_mixture.quantile(means, scales, weights, q).to(self.means.dtype)

    @checked_arguments
    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return the ends ``[B, O]`` of the central interval with probability `level`."""
        if not 0 < level < 1:
            raise InputError(f"The level of an interval must lie strictly between 0 and 1, got {level}.")
        levels = ((1 - level) / 2, (1 + level) / 2)
        if is_tracing():
            ends = gaussian_mixture.quantiles_in_steps(*self._mixture, levels)
            return ends[0], ends[1]
        return self.quantile(levels[0]), self.quantile(levels[1])

    def crps(self, y: Tensor) -> Tensor:
        """Return the continuous ranked probability score of each output ``[B, O]``, in the units of the target."""
        return gaussian_mixture.crps(*self._mixture, self.checked_targets(y))

    def summary(self) -> RegressionPrediction:
        """Return one Gaussian with the mean and the aleatoric and epistemic variance of the mixture.

        `mean`, `stddev`, `aleatoric` and `epistemic` stay the same. `log_prob`, `cdf`, `quantile`, `interval` and
        `crps` become those of the Gaussian.
        """
        if len(self.means) == 1:
            return self
        mean, noise, function = (part.unsqueeze(0) for part in (self.mean, self.aleatoric, self.epistemic))
        return RegressionPrediction(mean, noise, function, self.covariance, self.noise_covariance)

    def rescale(self, loc: float | Tensor, scale: float | Tensor) -> RegressionPrediction:
        """Return the prediction of ``loc + scale * y``, to convert standardized targets to their original units.

        Args:
            loc: The shift: a number, or one per output ``[O]``.
            scale: The positive factor: a number, or one per output ``[O]``.
        """
        like = self.means
        shift = torch.as_tensor(loc, dtype=like.dtype, device=like.device)
        factor = torch.as_tensor(scale, dtype=like.dtype, device=like.device)
        if not is_tracing() and not bool((factor > 0).all()):
            raise InputError(f"The scale of the targets must be positive, got {scale!r}.")
        rows = factor.expand(like.shape[-1])
        both = (self.covariance, self.noise_covariance)
        covariances = [None if part is None else part * torch.outer(rows, rows) for part in both]
        noise, function = (v * factor.square() for v in (self.noise_variance, self.function_variance))
        return RegressionPrediction(shift + factor * self.means, noise, function, *covariances)

    def to_frame(self, level: float = 0.95) -> pd.DataFrame:
        """Return one row per datum: mean, stddev, and low and high of the interval; several outputs are numbered."""
        low, high = self.interval(level)
        values = {"mean": self.mean, "stddev": self.stddev, "low": low, "high": high}
        arrays = {name: value.detach().cpu().numpy() for name, value in values.items()}
        num_outputs = self.means.shape[-1]
        if num_outputs == 1:
            return frame({name: value[:, 0] for name, value in arrays.items()})
        return frame({f"{name}_{o}": value[:, o] for o in range(num_outputs) for name, value in arrays.items()})

    def checked_targets(self, y: Tensor) -> Tensor:
        """Return the targets as ``[B, O]`` in the prediction's dtype; raise an error if they do not fit."""
        like = self.means
        y = torch.as_tensor(y, dtype=like.dtype, device=like.device)
        if y.ndim == 1 and like.shape[-1] == 1:
            y = y.unsqueeze(-1)
        if y.shape != like.shape[1:]:
            raise InputError(f"The targets must have shape {tuple(like.shape[1:])}, got {tuple(y.shape)}.")
        if not bool(y.isfinite().all()):
            raise InputError("The targets hold NaN or infinite values: remove those rows first.")
        return y

    def _headlines(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in ("mean", "stddev", "aleatoric", "epistemic")}

    def __repr__(self) -> str:
        components, batch, outputs = self.means.shape
        parts = [f"{batch} data", f"{outputs} output{'s' if outputs > 1 else ''}"]
        parts += [f"mean stddev {self.stddev.mean():.3g}"]
        parts += [f"{components} components"] if components > 1 else []
        return f"RegressionPrediction({', '.join(parts)})"
