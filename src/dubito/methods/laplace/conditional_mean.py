"""Condition a Gaussian on some weights being zero."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dubito.core.errors import InputError
from dubito.core.params import Params

if TYPE_CHECKING:
    from dubito.methods.laplace.posterior import LaplacePosterior

# The residual at which conjugate gradients stop, relative to the right-hand side.
TOLERANCE, MAX_STEPS = 1e-6, 200


def conditional_mean(posterior: LaplacePosterior, keep: Mapping[str, Tensor]) -> Params:
    r"""Return the mean of the weights in `keep`, given that the others are zero.

    For the Gaussian $\mathcal N(\mu, P^{-1})$ this solves $P_{SS}\,w_S = (P\mu)_S$ by conjugate gradients: the weight
    update of optimal brain surgeon for all removed weights at once.
    """
    selection, mean = posterior.selection, posterior.mean()
    _check_masks(keep, mean)
    masks = {n: keep[n].to(v.device) if n in keep else torch.ones_like(v, dtype=torch.bool) for n, v in mean.items()}
    stays = selection.ravel(masks).double()
    center = selection.ravel(mean).double()

    def matmul(vector: Tensor) -> Tensor:
        return stays * posterior.precision_matmul(stays * vector)

    def precondition(vector: Tensor) -> Tensor:
        return stays * posterior.covariance.solve(stays * vector)

    solution = conjugate_gradients(matmul, precondition, stays * posterior.precision_matmul(center), stays * center)
    return selection.merge(mean, solution.to(posterior.dtype))


def _check_masks(keep: Mapping[str, Tensor], mean: Params) -> None:
    if not isinstance(keep, Mapping):
        raise InputError(f"`keep` must map parameter names to boolean masks, got a {type(keep).__name__}.")
    for name, mask in keep.items():
        if name not in mean:
            raise InputError(f"`keep` has a mask of {name!r}, but the posterior has no parameter of that name.")
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != mean[name].shape:
            raise InputError(f"The mask of {name} must be a boolean tensor of shape {tuple(mean[name].shape)}.")


def conjugate_gradients(
    matmul: Callable[[Tensor], Tensor], precondition: Callable[[Tensor], Tensor], right: Tensor, start: Tensor
) -> Tensor:
    """Solve ``A x = right`` for a positive semi-definite A; `precondition` approximates its inverse."""
    solution = start
    residual = right - matmul(solution)
    direction = precondition(residual)
    inner, goal = residual.dot(direction), TOLERANCE * right.norm()
    for _ in range(MAX_STEPS):
        if residual.norm() <= goal:
            break
        product = matmul(direction)
        step = inner / direction.dot(product)
        solution, residual = solution + step * direction, residual - step * product
        turned = precondition(residual)
        inner, before = residual.dot(turned), inner
        direction = turned + inner / before * direction
    return solution
