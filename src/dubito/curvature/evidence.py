r"""The marginal likelihood of a Laplace approximation, and its maximization over prior precision and noise.

$$\log p(D) \approx \tfrac1T \log p(D \mid \hat w)
  - \tfrac12 \Big[\log\frac{\det P}{\det \Lambda} + \sum_d \lambda_d (\hat w_d - \mu_d)^2\Big],
  \qquad P = s H + \Lambda$$

with $s = 1/(\sigma^2 T)$ for a Gaussian likelihood of noise σ, else $1/T$ (MacKay 1992). For the empirical Fisher
matrix of a Gaussian $s = 1/(\sigma^4 T)$: its gradients are residuals over $\sigma^2$. One eigendecomposition gives all
determinants, so each step costs at most O(D); only a full matrix with several precisions needs a Cholesky factor in
each step.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dubito.beliefs.likelihoods import Gaussian, Likelihood
from dubito.core.errors import InputError
from dubito.core.numeric import minimize_scalar
from dubito.curvature.matrices import Matrix
from dubito.networks.selection import Selection

# The range of the search for prior precisions, as natural logarithms.
LOW, HIGH = math.log(1e-6), math.log(1e8)


@dataclass(frozen=True)
class DataFit:
    """The fit of the posterior's mean to the data, from which the log-likelihood at any noise follows."""

    log_likelihood: float = 0.0  # the sum of log-probabilities, for likelihoods without noise
    squared_error: float | None = None  # the sum of squared residuals, for a Gaussian; else None
    num_residuals: int = 0  # the number of residuals
    noise_power: int = 2  # of a Gaussian: the curvature is that at unit noise over this power of the noise

    def __add__(self, other: DataFit) -> DataFit:
        squared = None if self.squared_error is None else self.squared_error + (other.squared_error or 0.0)
        total = self.log_likelihood + other.log_likelihood
        return DataFit(total, squared, self.num_residuals + other.num_residuals, self.noise_power)

    @property
    def residual_noise(self) -> Tensor:
        """The root mean square of the residuals of a Gaussian."""
        mean = torch.tensor((self.squared_error or 0.0) / max(self.num_residuals, 1), dtype=torch.float64)
        return mean.clamp_min(1e-12).sqrt()

    def scale(self, noise: Tensor, temperature: float) -> Tensor:
        """Return the factor of the curvature: for a Gaussian ``1/(σ² T)``, or ``1/(σ⁴ T)``, else ``1/T``."""
        is_gaussian = self.squared_error is not None
        return (noise**-self.noise_power if is_gaussian else torch.ones((), dtype=torch.float64)) / temperature

    def at(self, noise: Tensor) -> Tensor:
        """Return the log-likelihood of the data at this noise."""
        if self.squared_error is None:
            return torch.tensor(self.log_likelihood, dtype=torch.float64)
        constant = 0.5 * self.num_residuals * math.log(2 * math.pi)
        return -0.5 * self.squared_error / noise.square() - self.num_residuals * noise.log() - constant


def known_noise(likelihood: Likelihood) -> Tensor:
    """Return the noise of a Gaussian likelihood if it is a number; 1 for all others."""
    known = isinstance(likelihood, Gaussian) and not isinstance(likelihood.noise, str)
    return torch.tensor(likelihood.noise if known else 1.0, dtype=torch.float64)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Evidence:
    """The log marginal likelihood as a function of prior precision and noise.

    Args:
        matrix: The curvature at unit noise.
        deviation: The squared distance of each weight from its prior mean, ``[D]``.
        fit: The fit of the posterior's mean to the data.
        temperature: The number by which the log-likelihood and its curvature are divided.
    """

    matrix: Matrix
    deviation: Tensor
    fit: DataFit
    temperature: float

    def scale(self, noise: Tensor) -> Tensor:
        """Return the factor of the curvature; see `DataFit`."""
        return self.fit.scale(noise, self.temperature)

    def log(self, prior: Tensor, noise: Tensor) -> Tensor:
        """Return the log evidence; differentiable in both arguments."""
        size = self.matrix.size
        log_det_prior = size * prior.log() if prior.ndim == 0 else prior.log().sum()
        scatter = (prior * self.deviation).sum() if prior.ndim else prior * self.deviation.sum()
        log_det = self.matrix.log_det(prior, self.scale(noise)) - log_det_prior
        return self.fit.at(noise) / self.temperature - 0.5 * (log_det + scatter)


def as_precision(value: Tensor | float, selection: Selection, structure: str) -> Tensor:
    """Return a prior precision as a float64 tensor: a number, or one value per random weight."""
    values = torch.as_tensor(value, dtype=torch.float64)
    if values.ndim and values.shape != (selection.num_weights,):
        raise InputError(
            f"`prior_precision` must be a number or have one value for each of the {selection.num_weights:,} random "
            f"weights, got shape {tuple(values.shape)}."
        )
    if not bool(((values > 0) & values.isfinite()).all()):
        raise InputError("`prior_precision` must hold positive, finite numbers only.")
    for name, span in selection.slices.items() if values.ndim and structure in ("kron", "ekfac", "sampled") else ():
        if selection.is_whole(name) and bool((values[span] != values[span.start]).any()):
            raise InputError(
                f"structure='{structure}' needs one prior precision for all of '{name}', because Kronecker factors do "
                "not distinguish single weights: use 'diag', 'full' or 'low-rank'."
            )
    return values


def maximize(
    evidence: Evidence,
    selection: Selection,
    groups: str,
    noise: Tensor,
    tune_noise: bool,
    prior: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the prior precision and the noise that maximize the evidence.

    Args:
        evidence: The function to maximize.
        selection: Which weights are random, for precisions per parameter.
        groups: One precision for ``"all"``, per ``"layer"`` (each parameter), or per ``"weight"`` (diagonal only).
        noise: The initial noise, or the fixed noise.
        tune_noise: Whether the noise is tuned.
        prior: A fixed precision, if only the noise is tuned; else None.
    """
    if prior is not None:
        return prior, _best_noise(lambda value: evidence.log(prior, value), noise) if tune_noise else noise
    if groups == "weight":
        if tune_noise:
            noise = _best_noise(lambda value: evidence.log(_per_weight(evidence, value), value), noise)
        return _per_weight(evidence, noise), noise
    start = _best_scalar(lambda value: evidence.log(value, noise))
    if groups == "all" and not tune_noise:
        return start, noise
    sizes = [span.stop - span.start for span in selection.slices.values()] if groups == "layer" else None
    return _climb(evidence, start, noise, tune_noise, sizes)


def _best_scalar(function: Callable[[Tensor], Tensor], low: float = LOW, high: float = HIGH) -> Tensor:
    """Maximize over one positive number by a coarse grid, refined by golden-section search."""

    def loss(log_value: float) -> float:
        return -float(function(torch.tensor(math.exp(log_value), dtype=torch.float64)))

    grid = torch.linspace(low, high, 13).tolist()
    best = min(range(len(grid)), key=lambda i: loss(grid[i]))
    left, right = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    return torch.tensor(math.exp(minimize_scalar(loss, left, right, tolerance=1e-6)), dtype=torch.float64)


def _best_noise(function: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Maximize over the noise, within a few powers of ten around the initial value."""
    middle = float(start.log())
    return _best_scalar(function, middle - 8, middle + 8)


class _QuickLBFGS(torch.optim.LBFGS):
    """L-BFGS that does not import `torch._dynamo`: it takes a second or more, and is of use to compiled code only."""

    add_param_group = inspect.unwrap(torch.optim.LBFGS.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.LBFGS.zero_grad)


def _climb(
    evidence: Evidence, prior: Tensor, noise: Tensor, tune_noise: bool, sizes: list[int] | None
) -> tuple[Tensor, Tensor]:
    """Maximize over the logarithms of the precisions (one, or one per entry of `sizes`) and the noise by L-BFGS."""
    if tune_noise:  # start from the best noise at the initial precision, not from the residuals
        noise = _best_noise(lambda value: evidence.log(prior, value), noise)
    device = evidence.deviation.device
    log_prior = prior.log().to(device, copy=True).expand(len(sizes) if sizes else ()).clone().requires_grad_()
    log_noise = noise.log().to(device, copy=True).requires_grad_(tune_noise)
    start = [value.detach().clone() for value in (log_prior, log_noise)]

    def settings() -> tuple[Tensor, Tensor]:
        values = log_prior.clamp(LOW, HIGH).exp()
        return values.repeat_interleave(torch.tensor(sizes, device=device)) if sizes else values, log_noise.exp()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = -evidence.log(*settings())
        loss.backward()
        return loss

    optimizer = _QuickLBFGS(
        [log_prior, log_noise] if tune_noise else [log_prior],
        max_iter=200, tolerance_grad=1e-6, tolerance_change=1e-12, line_search_fn="strong_wolfe",
    )  # fmt: skip
    with torch.enable_grad():
        optimizer.step(closure)
    if not all(bool(value.isfinite().all()) for value in (log_prior, log_noise)):  # an exact fit has no best noise
        log_prior.data, log_noise.data = start
    best_prior, best_noise = settings()
    return best_prior.detach(), best_noise.detach()


def _per_weight(evidence: Evidence, noise: Tensor) -> Tensor:
    r"""Return the best λ of each weight for a diagonal, which solves $\lambda^2 + h\lambda = h/\Delta^2$ (ARD)."""
    curvature = evidence.scale(noise) * evidence.matrix.diagonal()
    ratio = curvature / evidence.deviation.clamp_min(1e-30)
    root = (curvature.square() + 4 * ratio).sqrt()
    best = 2 * ratio / (curvature + root).clamp_min(1e-300)  # numerically stable form of (−h + root)/2
    return best.clamp(math.exp(LOW), math.exp(HIGH))
