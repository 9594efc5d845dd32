r"""The Laplace approximation around the trained weights at a given prior precision, as selections need it.

Its precision is $\tfrac{1}{\sigma^2} \sum_n J_n^\top H_n J_n + \lambda I$, where σ is the noise of a Gaussian
likelihood and 1 for other likelihoods.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Categorical, Likelihood
from dubito.core import distributed, io
from dubito.core.batches import Source
from dubito.curvature import Engine
from dubito.curvature import matrices as linalg
from dubito.curvature.curvature_pass import CurvaturePass
from dubito.curvature.evidence import known_noise
from dubito.curvature.linearized import Linearized
from dubito.networks.selection import Selection


@dataclass(frozen=True)
class LocalGaussian:
    """A Gaussian over selected weights."""

    engine: Engine  # the engine that computes the gradients of the outputs
    selection: Selection  # the weights
    likelihood: Likelihood  # the likelihood; the noise of a Gaussian one is a number
    matrix: linalg.Matrix  # the curvature of the loss, at noise 1
    prior: Tensor  # the prior precision

    @property
    def scale(self) -> Tensor:
        """The factor of the curvature: ``1/σ²`` for a Gaussian likelihood, 1 for others."""
        return 1 / known_noise(self.likelihood).square()

    @property
    def covariance(self) -> linalg.Covariance:
        """The covariance of the weights."""
        return self.matrix.covariance(self.prior, self.scale)

    def precision(self) -> Tensor:
        """Return the whole precision matrix in float64."""
        size = self.selection.num_weights
        eye = torch.eye(size, dtype=torch.float64, device=self.prior.device)
        return self.matrix.precision_matmul(eye, self.prior, self.scale)

    def total_variance(self, inputs: Any) -> float:
        """Return the predictive variance of the outputs, summed over outputs and inputs; logits are centred."""
        linearized = Linearized(self.engine, self.matrix, self.selection, self.likelihood)
        with torch.no_grad():
            _, (variance,) = linearized.variances(
                inputs, [self.covariance], centred=isinstance(self.likelihood, Categorical)
            )
        return float(variance.double().sum())


def fit_gaussian(
    structure: str, model: nn.Module, selection: Selection, source: Source, likelihood: Likelihood, prior: float
) -> LocalGaussian:
    """Fit a Gaussian around the trained weights, by summing the curvature over the data.

    Args:
        structure: ``"full"`` or ``"kron"``.
        model: The trained network.
        selection: The weights.
        source: The training data.
        likelihood: The likelihood; the noise of a Gaussian one is a number.
        prior: The prior precision.
    """
    work = CurvaturePass(structure, model, selection, likelihood)
    sums = work.zeros(source)
    for batch in source.replay():
        work.add(sums, batch)
    distributed.sum_(list(io.tensors(sums)))
    one = torch.tensor(prior, dtype=torch.float64, device=next(model.parameters()).device)
    return LocalGaussian(work.engine, selection, likelihood, work.accumulator.matrix(sums), one)
