r"""Leave-one-out residuals of a regression network, in closed form, by retraining its last layer only.

If the last layer alone were trained again without example n, with the features of the layers before kept, its residual
would be

$$r_{-n} = \frac{r_n}{1 - h_n}, \qquad h_n = a_n^\top (A^\top A + \rho I)^{-1} a_n,$$

with features $a_n$ and the ratio ρ of noise variance to prior variance that maximizes the evidence of the last layer
(Allen 1974; Hoaglin & Welsch 1978). Residuals of the training data are smaller than those of new data, because the
network was fitted to them; these are not.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Gaussian
from dubito.core import batches, distributed, io, params
from dubito.core.batches import Source
from dubito.curvature.curvature_pass import CurvaturePass
from dubito.curvature.evidence import Evidence, maximize
from dubito.curvature.linearized import Linearized
from dubito.curvature.structures import matrix_from_sums
from dubito.networks.output_layer import output_layer
from dubito.networks.selection import Selection

# Last layers up to this many weights get their exact curvature, larger ones Kronecker factors.
MOST_EXACT = 2000
# Rows whose residuals are looked at, and the number of validation residuals that these count for.
MOST_ROWS, LEFT_OUT_WEIGHT = 1000, 5.0
# Leverages above this are cut: the residual of an example that determines its own prediction is not defined.
LARGEST_LEVERAGE = 0.95
# The smallest ρ, over the rounding error of the largest entry of the matrix.
SMALLEST_RATIO = 10.0


class LeaveOneOut:
    """The factors by which leave-one-out residuals exceed those of the training data.

    Args:
        model: The trained network.
        source: The training data.
    """

    def __init__(self, model: nn.Module, source: Source) -> None:
        self.model, likelihood = model, Gaussian(noise=1.0)
        example = batches.take(source.first().inputs, slice(0, 4))
        names = output_layer(model, example)
        self.has_layer = bool(names)
        if not names:
            return
        selection = Selection.all_of(model, names)
        structure = "full" if selection.num_weights <= MOST_EXACT else "kron"
        collected = CurvaturePass(structure, model, selection, likelihood)
        sums, fit = collected.zeros(source), collected.no_fit()
        for batch in source.replay():
            fit += collected.add(sums, batch)
        distributed.sum_([*io.tensors(sums), fit])
        matrix = matrix_from_sums(structure, sums, selection, model)
        evidence = Evidence(matrix, _squares(model, selection), collected.data_fit(fit), 1.0)
        prior, noise = maximize(evidence, selection, "all", evidence.fit.residual_noise, True)
        # data that are fitted exactly have no noise, and the matrix of features that repeat is singular up to rounding
        rounding = SMALLEST_RATIO * torch.finfo(next(model.parameters()).dtype).eps
        self.ratio = (prior * noise.square()).clamp_min(rounding * float(matrix.diagonal().max()))
        self.covariance = matrix.covariance(self.ratio, torch.ones((), dtype=torch.float64))
        self.linearized = Linearized(collected.engine, matrix, selection, likelihood)

    def factors(self, inputs: Any) -> Tensor | float:
        """Return $1 / (1 - h_n)$ for every output; 1 if the network has no last layer."""
        if not self.has_layer:
            return 1.0
        _, (leverage,) = self.linearized.variances(inputs, [self.covariance], centred=False)
        return 1 / (1 - leverage.double().clamp(0.0, LARGEST_LEVERAGE))


@torch.no_grad()
def left_out_variance(left_out: LeaveOneOut, source: Source, most: int = MOST_ROWS) -> float:
    """Return the mean square of leave-one-out residuals over at most about `most` rows."""
    sums = torch.zeros(2, dtype=torch.float64)
    for batch in source.spread(most):
        factors = left_out.factors(batch.inputs)
        outputs = params.call(left_out.model, batch.inputs).double()
        outputs = outputs.reshape(factors.shape) if isinstance(factors, Tensor) else outputs
        residuals = (outputs - batch.targets.reshape(outputs.shape)) * factors
        sums += torch.tensor([float(residuals.square().sum()), float(residuals.numel())], dtype=torch.float64)
    distributed.sum_([sums])
    return float(sums[0] / sums[1].clamp_min(1.0))


@torch.no_grad()
def predictive_noise(model: nn.Module, source: Source, validation: Source | None) -> float:
    """Return the root mean square residual that a trained network is to be expected to have on new data.

    It comes from validation data, beside which leave-one-out residuals of the training data count for a few.
    """
    model.eval()
    sums = torch.tensor([left_out_variance(LeaveOneOut(model, source), source), 1.0], dtype=torch.float64)
    sums *= LEFT_OUT_WEIGHT
    for batch in validation.replay() if validation is not None else ():
        if batch.num_rows:
            outputs = params.call(model, batch.inputs).double()
            squares = (outputs - batch.targets.reshape(outputs.shape)).square()
            own = torch.tensor([float(squares.sum()), float(squares.numel())], dtype=torch.float64)
            distributed.sum_([own])
            sums += own
    return math.sqrt(max(float(sums[0] / sums[1]), 1e-12))


def _squares(model: nn.Module, selection: Selection) -> Tensor:
    return selection.ravel(dict(model.named_parameters())).detach().double().square()
