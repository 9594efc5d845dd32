r"""The linearized network under a prior over functions: a few coordinates with a standard normal prior.

With the whitened Jacobian $A = W J_C = V S U^\top$ at the context points (`ContextPrior`), the prior's precision of the
weights is $J_C^\top K^{-1} J_C = A^\top A$. Its range is spanned by $B = U S^{-1} = A^\top V S^{-2}$, and

$$w = \hat w + B z: \qquad W (f_{\text{lin}}(C) - m) = h + V z, \qquad z \sim \mathcal N(-V^\top h, I)$$

with $h = W (f(C, \hat w) - m)$. So the posterior is that of any other subspace, with the exact Gauss-Newton matrix of
the coordinates; no matrix over pairs of weights is formed. Where the network can follow every function at the context
points, the linearized prior there is the Gaussian process itself, and otherwise its projection. Weights outside of the
range have no influence on the outputs at the context points and stay at their trained values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dubito.beliefs.priors.function_space import ContextPrior
from dubito.core.errors import InputError
from dubito.core.limits import current, numbers
from dubito.core.once import warn_once
from dubito.core.params import of
from dubito.curvature.accumulator import back_along
from dubito.curvature.engine import Engine
from dubito.curvature.matrices.base import eigh
from dubito.fitting.inference import Problem
from dubito.networks.subspace import Subspace
from dubito.networks.twin import twin

# The smallest S² that are kept, relative to the largest: rounding of the network's gradients spoils smaller ones.
TOLERANCE = {False: 1e-7, True: 1e-12}
# A warning is given if the network can follow less than this share of the prior's variance at the context points.
FOLLOWED = 0.5


def function_coordinates(prior: ContextPrior, problem: Problem) -> tuple[Subspace, Tensor]:
    """Return the subspace ``ŵ + B z`` and the prior mean of z ``[r]``."""
    model, weights = problem.model, problem.selection
    assert weights is not None
    network = twin(model).eval()
    with torch.no_grad():
        start = prior.whiten(network(prior.points).double())
    rows = _whitened_jacobian(prior, Engine(network, weights.names), problem, start.shape[1])
    values, vectors = eigh(_gram(rows))
    kept = values > TOLERANCE[rows.dtype == torch.float64] * values.max()
    if not bool(kept.any()):
        raise InputError("No random weight has an influence on the outputs at the context points.")
    values, vectors = values[kept], vectors[:, kept]
    _warn_if_stiff(prior, vectors)
    basis = rows.mT @ (vectors / values).to(rows)
    return Subspace(weights, weights.ravel(of(model)), basis), -(vectors.mT @ start.mT.flatten())


@torch.no_grad()
def _whitened_jacobian(prior: ContextPrior, engine: Engine, problem: Problem, outputs: int) -> Tensor:
    """Return ``A = W J`` ``[O·M, D]``, all rows of the first output first."""
    weights, points = problem.selection, prior.points
    assert weights is not None
    size, count = weights.num_weights, outputs * len(points)
    if count * size * points.element_size() > current().context_jacobian:
        raise InputError(
            f"{len(points):,} context points of {outputs:,} outputs and {size:,} random weights need "
            f"{count * size * points.element_size() / 2**30:,.1f} GB: take fewer context points, or fewer weights."
        )
    rows = points.new_zeros(outputs, len(points), size)
    for some, tape in engine.chunks(points, 1):
        mixed = prior.whitener[:, some].mT.to(points)  # [b, M]
        for output in range(outputs):
            column = torch.zeros_like(tape.outputs).flatten(1)
            column[:, output] = 1.0
            with tape.lend() as memory:
                factors = tape.pull(column.reshape(1, *tape.outputs.shape), memory)
                rows[output] += back_along(factors, weights, mixed[None])
    return rows.flatten(0, 1)


def _gram(rows: Tensor) -> Tensor:
    """Return ``A Aᵀ`` in float64, some columns of A at a time."""
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    for some in rows.split(numbers(current().chunk) // len(rows) + 1, dim=1):
        total += some.double() @ some.double().mT
    return total


def _warn_if_stiff(prior: ContextPrior, vectors: Tensor) -> None:
    """Warn if the outputs of the linearized network cannot follow the prior at the context points."""
    root = torch.linalg.inv(prior.whitener)
    followed = torch.einsum("ij,ojk->oik", root, vectors.reshape(-1, len(root), vectors.shape[1])).square().sum()
    outputs = len(vectors) // len(root)
    share = float(followed) / (prior.trace * outputs)
    if share < FOLLOWED:
        warn_once(
            f"The network can follow only {share:.0%} of the prior's variance at the context points, so its "
            "uncertainty will be smaller than the prior says: use a larger network, or a smoother kernel."
        )
