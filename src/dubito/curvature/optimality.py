r"""How far a network is from an optimum: what one more step on its weights would still gain.

A Newton step gains

$$\frac{1}{2N}\, g^\top (H + \lambda_0 I)^{-1} g, \qquad g = \nabla_w \log p(D \mid \hat w), \quad
  \lambda_0 = D / \|\hat w\|^2,$$

in nats per training example. The prior of the weights' own size, $\lambda_0$, keeps the step within the region where a
quadratic approximation makes sense. Trained networks have at most a few hundredths, untrained ones about one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Likelihood
from dubito.core import batches, distributed, limits, params
from dubito.core.batches import Source
from dubito.core.limits import numbers, slices
from dubito.core.params import differentiable_twice, frozen_names
from dubito.curvature.evidence import known_noise
from dubito.curvature.matrices import Matrix
from dubito.networks.selection import Selection
from dubito.networks.twin import light_copy
from dubito.networks.watching import watch

# Training rows that are looked at.
MOST_ROWS = 1000
# Of `torch.autograd.grad`.
OPTIONS: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}


def newton_gain(
    model: nn.Module, likelihood: Likelihood, source: Source, selection: Selection, matrix: Matrix
) -> float:
    """Return the gain, given the curvature of the data at unit noise."""
    gradient = _gradient(model, likelihood, source, selection)
    weights = selection.ravel(dict(model.named_parameters())).detach().double()
    prior = 1 / weights.square().mean().clamp_min(1e-12)
    scale = known_noise(likelihood).double().pow(-2).to(gradient.device)
    step = matrix.covariance(prior, scale).solve(gradient)
    return 0.5 * float((gradient * step.to(gradient)).sum()) / source.num_data


def steepest_gain(model: nn.Module, likelihood: Likelihood, source: Source, selection: Selection) -> float:
    r"""Return a lower bound of the gain that needs no curvature matrix: that of the best step along the gradient.

    $$\frac{1}{2N} \frac{(g^\top g)^2}{g^\top H g + \lambda_0\, g^\top g}$$

    with $H g$ by the difference of two gradients in float64. Where the network has a frozen base, of which no copy is
    made, it is the derivative of the gradient.
    """
    if frozen_names(model):
        return _steepest_gain_in_place(light_copy(model).eval(), likelihood, source, selection)
    own = copy.deepcopy(model).eval().double()
    at = selection.ravel(dict(own.named_parameters())).detach()
    gradient = _gradient(own, likelihood, source, selection)
    norm = float(gradient.norm())
    if not 0 < norm < math.inf:
        return 0.0
    reach = 1e-4 / norm
    ends = []
    for sign in (1, -1):
        moved = selection.merge(params.of(own), at + sign * reach * gradient)
        params.load_(own, moved)
        ends.append(_gradient(own, likelihood, source, selection))
        params.load_(own, selection.merge(params.of(own), at))
    bend = -float(gradient @ (ends[0] - ends[1])) / (2 * reach)
    return _gain(norm, bend, at, source.num_data)


def _steepest_gain_in_place(model: nn.Module, likelihood: Likelihood, source: Source, selection: Selection) -> float:
    for name, value in model.named_parameters():
        value.requires_grad_(name in selection.names)
    at = selection.ravel(dict(model.named_parameters())).detach()
    gradient = _gradient(model, likelihood, source, selection)
    norm = float(gradient.norm())
    if not 0 < norm < math.inf:
        return 0.0
    unit = selection.fill((gradient / norm).to(at))

    def along(score: Tensor, weights: dict[str, Tensor]) -> Tensor:
        first = torch.autograd.grad(score, list(weights.values()), create_graph=True, **OPTIONS)
        derivative = torch.stack([(g * unit[name]).sum() for name, g in zip(weights, first, strict=True)]).sum()
        if not derivative.requires_grad:  # the score is linear in the weights
            return derivative.new_zeros(1)
        second = torch.autograd.grad(derivative, list(weights.values()), **OPTIONS)
        return torch.stack([(h * unit[name]).sum() for name, h in zip(weights, second, strict=True)]).sum()[None]

    try:
        with differentiable_twice():
            bend = -float(_over_rows(model, likelihood, source, selection, 1, along)) * norm**2
    except RuntimeError as error:
        if "not implemented" not in str(error):
            raise
        return 0.0  # a layer that torch differentiates once only: nothing is known
    return _gain(norm, bend, at.double(), source.num_data)


def _gain(norm: float, bend: float, at: Tensor, num_data: int) -> float:
    """Return the gain of the best step along a gradient of this norm, given the curvature along it."""
    bend += norm**2 / max(float(at.square().mean()), 1e-12)
    return 0.5 * norm**4 / bend / num_data if 0 < bend < math.inf else 0.0


def _gradient(model: nn.Module, likelihood: Likelihood, source: Source, selection: Selection) -> Tensor:
    """Return the gradient of the log-likelihood of the data, from at most about `MOST_ROWS` rows."""

    def gradient(score: Tensor, weights: dict[str, Tensor]) -> Tensor:
        found = torch.autograd.grad(score, list(weights.values()), **OPTIONS)
        return selection.ravel(dict(zip(weights, found, strict=True)))

    return _over_rows(model, likelihood, source, selection, selection.num_weights, gradient)


def _over_rows(
    model: nn.Module,
    likelihood: Likelihood,
    source: Source,
    selection: Selection,
    size: int,
    term: Callable[[Tensor, dict[str, Tensor]], Tensor],
) -> Tensor:
    """Return the sum of a term ``[size]`` of the log-likelihood over all data, from at most about `MOST_ROWS` rows."""
    weights: dict[str, Tensor] = {n: value for n, value in model.named_parameters() if n in selection.names}
    like = next(iter(weights.values()))
    total = torch.zeros(size, dtype=torch.float64, device=like.device)
    count = torch.zeros(1, dtype=torch.float64)
    for batch in source.spread(MOST_ROWS):
        placed = batches.place(batch.inputs, like.device, like.dtype)
        for rows in slices(batch.num_rows, _rows_at_once(model, placed)):
            inputs, targets = batches.take((placed, batch.targets), rows)
            with torch.enable_grad():
                total += term(likelihood.log_prob(params.call(model, inputs), targets).sum(), weights).double()
        count += batch.size
    distributed.sum_([total, count])
    return total * (source.num_data / float(count.clamp_min(1.0)))


def _rows_at_once(model: nn.Module, inputs: object) -> int:
    """Return how many rows have outputs of the network, and of all its modules together, of limited size."""
    sizes: list[int] = []

    def count(_name: str, _module: nn.Module, _args: object, _kwargs: object, output: object) -> None:
        sizes.extend(leaf.numel() for leaf in batches.leaves(output))

    with watch(dict(model.named_modules()), after=count):
        one = params.call_on_few(model, inputs)
    limit = limits.current()
    return min(numbers(limit.outputs) // max(1, one.numel()), numbers(limit.activations) // max(1, sum(sizes)))
