r"""Log scores of a Laplace posterior for many prior precisions at once, with the best noise for each.

For a Gaussian likelihood of noise σ at temperature T, the covariance of the weights is
$\sigma^2 T (H + \rho I)^{-1}$ with $\rho = \lambda \sigma^2 T$, so the predictive variance of a target is
$\sigma^2 (1 + T v_n(\rho))$, where $v_n = J_n (H + \rho I)^{-1} J_n^\top$. Given ρ, the noise with the highest log
score is in closed form: the mean of $r_n^2 / (1 + T v_n)$.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dubito.beliefs.likelihoods import Likelihood
from dubito.core import batches, distributed, limits
from dubito.core.batches import Batch
from dubito.core.errors import InputError
from dubito.core.limits import numbers, slices
from dubito.curvature import links, positions
from dubito.curvature.leave_one_out import MOST_ROWS
from dubito.methods.laplace.posterior import LaplacePosterior


class GridScores:
    """The sum of the log scores of targets, for every prior precision of a grid.

    Args:
        posterior: The posterior, whose own prior precision is not used.
        grid: The prior precisions λ.

    Attributes:
        most_rows: About how many examples of the training data are scored.
    """

    most_rows = MOST_ROWS

    def __init__(self, posterior: LaplacePosterior, grid: Tensor) -> None:
        self.posterior, self.grid = posterior, grid
        self.covariances = posterior.matrix.covariances(grid, self._scale())
        self.centred = links.has_null_direction(posterior.likelihood)
        self.total = torch.zeros(len(grid), dtype=torch.float64)
        self.num_rows = torch.zeros(1, dtype=torch.float64)

    def _scale(self) -> Tensor:
        return self.posterior.scale

    def _moments(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        self.num_rows += batch.size
        return self.posterior.linearized.variances(batch.inputs, self.covariances, centred=self.centred)

    def add(self, batch: Batch, factors: Tensor | float = 1.0) -> None:
        """Add the scores of a batch; `factors` multiply the residuals of a regression."""
        outputs, variances = self._moments(batch)
        moved = _moved(outputs, batch.targets, factors)
        self._add_scores(self.posterior.likelihood, moved, variances, batch.targets)

    def _add_scores(self, likelihood: Likelihood, outputs: Tensor, variances: list[Tensor], targets: Tensor) -> None:
        share = links.against_others(likelihood.canonical(outputs).shape[-1], self.centred) ** 2
        scores = [log_score(likelihood, outputs, share * each, targets).double().sum() for each in variances]
        self.total += torch.stack(scores).cpu()

    def result(self) -> tuple[Tensor, Tensor | None]:
        """Return the summed log scores ``[G]`` over all processes, and the best noise of each if it is free."""
        distributed.sum_([self.total, self.num_rows])
        return _finite(self.total), None


class PositionScores(GridScores):
    """The same for many outputs: of each example a few positions count, chosen at random.

    Args:
        posterior: The posterior.
        grid: The prior precisions λ.
        count: The number of positions of each example.
        most_rows: About how many examples are scored.
    """

    def __init__(self, posterior: LaplacePosterior, grid: Tensor, count: int, most_rows: int) -> None:
        super().__init__(posterior, grid)
        self.count, self.most_rows = count, most_rows

    def add(self, batch: Batch, factors: Tensor | float = 1.0) -> None:
        """Add the scores of a batch, some of its rows at a time."""
        linearized, likelihood = self.posterior.linearized, self.posterior.likelihood
        labels = positions.targets_by_position(likelihood, batch.targets).reshape(batch.num_rows, -1)
        chosen = positions.some_positions(likelihood, batch.targets, self.count)
        width = likelihood.canonical(linearized.outputs_of_one(batch.inputs)).shape[-1]
        self.num_rows += batch.size
        most = numbers(limits.current().outputs) // (len(self.grid) * chosen.shape[1] * width)
        for rows in slices(batch.num_rows, most):
            outputs, variances = linearized.variances_at(
                batches.take(batch.inputs, rows), self.covariances, chosen[rows], centred=self.centred
            )
            one = likelihood.replace(next_token=False)
            self._add_scores(one, outputs, variances, positions.at(labels[rows], chosen[rows]).flatten())


class FreeNoiseScores(GridScores):
    """The same for a regression whose noise is free; the grid holds the ratios ρ.

    Args:
        posterior: The posterior, at any noise.
        grid: The ratios ρ.
        assumed: A variance of the noise that is assumed before any target is seen.
        weight: The number of targets that this assumption counts for.
    """

    def __init__(self, posterior: LaplacePosterior, grid: Tensor, assumed: float, weight: float) -> None:
        super().__init__(posterior, grid)
        self.assumed, self.weight = assumed, weight
        self.squares, self.logs = torch.zeros_like(self.total), torch.zeros_like(self.total)
        self.count = torch.zeros(1, dtype=torch.float64)

    def _scale(self) -> Tensor:
        return torch.ones((), dtype=torch.float64)

    def add(self, batch: Batch, factors: Tensor | float = 1.0) -> None:
        """Add the scores of a batch; `factors` multiply the residuals."""
        outputs, variances = self._moments(batch)
        outputs = self.posterior.likelihood.canonical(outputs)
        residuals = (outputs - batch.targets.reshape(outputs.shape)).double() * factors
        relative = 1 + self.posterior.recipe.temperature * torch.stack(list(variances)).double()
        self.squares += (residuals.square() / relative).flatten(1).sum(1).cpu()
        self.logs += relative.log().flatten(1).sum(1).cpu()
        self.count += residuals.numel()

    def result(self) -> tuple[Tensor, Tensor | None]:
        """Return the summed log scores ``[G]`` and the best noise of each."""
        distributed.sum_([self.squares, self.logs, self.count, self.num_rows])
        variance = (self.weight * self.assumed + self.squares) / (self.weight + self.count)
        variance = variance.clamp_min(1e-12)
        scores = -0.5 * (self.count * (2 * math.pi * variance).log() + self.logs + self.squares / variance)
        return _finite(scores), variance.sqrt()


def log_score(likelihood: Likelihood, outputs: Tensor, variance: Tensor, targets: Tensor, ratio: float = 1.0) -> Tensor:
    """Return the predictive log-probability of each target, by the probit link or in closed form."""
    if not links.is_classification(likelihood):
        return likelihood.predict_gaussian(outputs, likelihood.restore(variance, outputs)).log_prob(targets)
    logits = likelihood.restore(links.probit(likelihood.canonical(outputs), variance), outputs)
    return likelihood.log_prob(logits, targets)


def _moved(outputs: Tensor, targets: Any, factors: Tensor | float) -> Tensor:
    """Return outputs whose residuals are `factors` times as large."""
    if isinstance(factors, float):
        return outputs
    targets = targets.reshape(outputs.shape)
    return (targets + factors.reshape(outputs.shape) * (outputs - targets)).to(outputs.dtype)


def _finite(scores: Tensor) -> Tensor:
    if not bool(scores.isfinite().all()):
        raise InputError("The log scores of the data are not finite: check the validation data for extreme inputs.")
    return scores
