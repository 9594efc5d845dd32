r"""Leave-one-out residuals of a regression network, in closed form.

Residuals of the training data are smaller than those of new data, because the network was fitted to them;
leave-one-out residuals are not. If the last layer alone were trained again without example n, with the features of the
layers before kept, its residual would be

$$r_{-n} = \frac{r_n}{1 - h_n}, \qquad h_n = a_n^\top (A^\top A + \rho I)^{-1} a_n,$$

with features $a_n$ and the ratio ρ of noise variance to prior variance that maximizes the evidence of the last layer
(Allen 1974; Hoaglin & Welsch 1978). Where the layers before are overfitted too, these are still too small. So if there
are no validation data, they are scaled to the mean square of those of the linearized network, of which all weights are
trained again (see `linearized_variance`), if that is larger.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Gaussian
from dubito.core import batches, distributed, io, limits, params
from dubito.core.batches import Source
from dubito.core.limits import numbers
from dubito.curvature.curvature_pass import CurvaturePass
from dubito.curvature.engine import Engine
from dubito.curvature.evidence import Evidence, maximize
from dubito.curvature.linearized import Linearized
from dubito.curvature.matrices.base import eigh
from dubito.curvature.roles import find_roles
from dubito.curvature.structures import jacobian as jacobian_of
from dubito.curvature.structures import matrix_from_sums
from dubito.networks.output_layer import output_layer
from dubito.networks.selection import Selection

# Last layers up to this many weights get their exact curvature, larger ones Kronecker factors.
MOST_EXACT = 2000
# Rows whose residuals are looked at, and the number of validation residuals that these count for.
MOST_ROWS, LEFT_OUT_WEIGHT = 1000, 5.0
# The whole network is linearized at this many examples, if they are at least half of the data, and at most so many
# outputs of each; and the ratios ρ that are tried, over the mean of the kernel's diagonal.
MOST_LINEARIZED, MOST_OUTPUTS = 1000, 8
RATIOS = torch.logspace(-6, 2, 33, dtype=torch.float64)
# Leverages above this are cut: the residual of an example that determines its own prediction is not defined.
LARGEST_LEVERAGE = 0.95
# The smallest ρ, over the rounding error of the largest entry of the matrix.
SMALLEST_RATIO = 10.0


class LeaveOneOut:
    """The factors by which leave-one-out residuals exceed those of the training data.

    Args:
        model: The trained network.
        source: The training data.
        whole: Whether to scale the factors, if these are too small for the whole network; at some cost.
        with_rule: Whether to leave out a last layer without a layer rule, whose gradients would take long.
    """

    def __init__(self, model: nn.Module, source: Source, *, whole: bool = False, with_rule: bool = False) -> None:
        self.model, self.scale = model, 1.0
        self._prepare(source, with_rule)
        if whole and (variance := linearized_variance(model, source)) is not None:
            self.scale = max(1.0, math.sqrt(variance / max(left_out_variance(self, source), 1e-30)))

    def _prepare(self, source: Source, with_rule: bool) -> None:
        model, likelihood = self.model, Gaussian(noise=1.0)
        example = batches.take(source.first().inputs, slice(0, 4))
        names = output_layer(model, example)
        self.has_layer = bool(names) and not (with_rule and find_roles(model, names)[1])
        if not self.has_layer:
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
        """Return $1 / (1 - h_n)$ for every output, times the scale; that alone if the network has no last layer."""
        if not self.has_layer:
            return self.scale
        _, (leverage,) = self.linearized.variances(inputs, [self.covariance], centred=False)
        return self.scale / (1 - leverage.double().clamp(0.0, LARGEST_LEVERAGE))


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


def linearized_variance(model: nn.Module, source: Source) -> float | None:
    r"""Return the mean square of leave-one-out residuals of the linearized network, of which all weights are trained.

    With the Jacobian J at the trained weights ŵ, the linearized network is a ridge regression on the targets
    $\tilde y = y - f + J \hat w$. Its residuals without example n are

    $$\frac{(\tilde y - H \tilde y)_n}{1 - H_{nn}}, \qquad H = K (K + \rho I)^{-1}, \quad K = J J^\top,$$

    at the ratio ρ with the smallest mean square (Allen 1974). Unlike those of the last layer, they do not vanish if the
    network fits all targets exactly. It is None if there are too many examples, outputs or weights, or weights without
    layer rules.
    """
    selection, size = Selection.all_of(model), min(source.num_data, MOST_LINEARIZED)
    if 2 * size < source.num_data or size * selection.num_weights > numbers(limits.current().kept_gradients):
        return None
    rows = list(source.spread(MOST_LINEARIZED))
    targets = torch.cat([batch.targets.reshape(batch.num_rows, -1) for batch in rows])
    if targets.shape[1] > MOST_OUTPUTS:
        return None
    engine = Engine(model, list(selection.names))
    if engine.unruled or engine.along is not None:
        return None
    weights = selection.ravel(dict(model.named_parameters())).detach()
    variances = []
    for output in range(targets.shape[1]):
        parts = [_jacobian(engine, selection, batch.inputs, output) for batch in rows]
        jacobian = distributed.rows_of_all(torch.cat([part[0] for part in parts]))
        residuals = targets[:, output].double() - torch.cat([part[1] for part in parts]).double()
        kernel = (jacobian @ jacobian.mT).double()
        pseudo = distributed.rows_of_all(residuals) + (jacobian @ weights.to(jacobian.dtype)).double()
        variances.append(smallest_left_out(kernel, pseudo))
    return sum(variances) / len(variances)


def smallest_left_out(kernel: Tensor, targets: Tensor) -> float:
    """Return the mean square of leave-one-out residuals of a kernel ridge regression, the smallest of all ratios ρ."""
    values, vectors = eigh(kernel)
    along, squares, best = vectors.mT @ targets, vectors.square(), math.inf
    for ratio in RATIOS * max(float(kernel.diagonal().mean()), 1e-30):
        left = ratio / (values + ratio)  # the eigenvalues of I - H, without cancellation
        best = min(best, float(((vectors @ (left * along)) / (squares @ left)).square().mean()))
    return best


def _jacobian(engine: Engine, selection: Selection, inputs: Any, output: int) -> tuple[Tensor, Tensor]:
    """Return the gradients ``[B, D]`` of one output of all examples, and the output ``[B]``."""
    gradients, outputs = [], []
    for _, tape in engine.chunks(inputs, 1, selection.num_weights):
        column = torch.zeros_like(tape.outputs.detach()).reshape(len(tape.outputs), -1)
        column[:, output] = 1.0
        factors = tape.pull(column.reshape(1, *tape.outputs.shape))
        gradients.append(jacobian_of(factors, selection)[0])
        outputs.append(tape.outputs.detach().reshape(len(column), -1)[:, output])
    return torch.cat(gradients), torch.cat(outputs)


@torch.no_grad()
def predictive_noise(model: nn.Module, source: Source, validation: Source | None, *, with_rule: bool = False) -> float:
    """Return the root mean square residual that a trained network is to be expected to have on new data.

    It comes from validation data, beside which leave-one-out residuals of the training data count for a few.
    """
    model.eval()
    left_out = LeaveOneOut(model, source, whole=validation is None, with_rule=with_rule)
    sums = torch.tensor([left_out_variance(left_out, source), 1.0], dtype=torch.float64)
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
