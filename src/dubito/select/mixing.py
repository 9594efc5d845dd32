r"""From one set of output directions to another after a vector-Jacobian product: products are linear.

A product starts from orthonormal directions of the outputs. The columns of the Hessian root are mixtures of
these directions, so their gradients are the same mixtures of what the product gave, and need no product of their own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dubito.curvature import Factor
from dubito.curvature.products import CACHED, slices
from dubito.likelihoods import Categorical, Likelihood


def directions(likelihood: Likelihood, outputs: Tensor) -> Tensor:
    """Orthonormal directions ``[V, *positions, C]`` of one example's outputs that can change a prediction.

    All of them, except that the logits of a softmax lose the direction in which they shift together.
    """
    *positions, width = likelihood.canonical(outputs).shape[1:]
    basis = _basis(likelihood, outputs)
    everywhere = torch.kron(torch.eye(math.prod(positions)).to(basis), basis)
    return everywhere.reshape(-1, *positions, width)


def direction_seeds(likelihood: Likelihood, outputs: Tensor, targets: Tensor | None = None) -> Tensor:
    """The directions as seeds ``[V, *outputs]``, zero at positions without a target."""
    each = directions(likelihood, outputs).unsqueeze(1)
    kept = None if targets is None else likelihood.observed(targets)
    if kept is not None and not bool(kept.all()):
        each = each * kept.unsqueeze(-1)
    return likelihood.restore(each.expand(-1, len(outputs), *each.shape[2:]), outputs)


@dataclass(frozen=True)
class Mix:
    """The columns of the Hessian's root as mixtures of the directions, ``[B, T, R, K]`` at each of T positions."""

    weights: Tensor

    @classmethod
    def of(cls, likelihood: Likelihood, outputs: Tensor, targets: Tensor | None) -> Mix:
        """Along each direction; the root has no part outside of their span."""
        root = likelihood.hessian_root(outputs, targets)
        apart = root.reshape(*root.shape[:2], -1, root.shape[-1])  # [R, B, T, C]
        return cls((apart @ _basis(likelihood, outputs).mT).permute(1, 2, 0, 3).contiguous())

    def __call__(self, grads: Tensor, examples: Any = slice(None)) -> Tensor:
        """Mix gradients ``[B, V, X]`` of the directions into those of the root, ``[B, T·R, X]``."""
        weights = self.weights[examples]
        apart = grads.unflatten(1, (weights.shape[1], -1))
        return torch.bmm(weights.flatten(0, 1), apart.flatten(0, 1)).reshape(len(grads), -1, grads.shape[-1])


def both_squares(factor: Factor, mix: Mix) -> Tensor:
    """The squares of the gradients summed over columns and examples, before and after mixing: ``[2, size]``."""
    if (outer := factor.outer) is not None:
        grads, inputs = outer
        return (_both(grads.transpose(0, 1), mix).mT @ inputs.square()).flatten(1)
    if factor.is_bias:
        return _both(factor.parts[0].bias_grads().transpose(0, 1), mix).sum(1)
    if (tokens := factor.tokens) is not None:
        each = _both(tokens.grads.transpose(0, 1), mix, tokens.example)
        return factor.like.new_zeros(2, *factor.shape).index_add(1, tokens.token, each).flatten(1)
    total = factor.like.new_zeros(2, math.prod(factor.shape))  # mixed, and as they are
    for examples, entries, each in factor.products() if factor.is_convolution else _explicit(factor):
        for sums, grads in zip(total[:, entries], (mix(each, examples), each), strict=True):
            rows = grads.flatten(0, 1).square_()
            sums += rows.new_ones(len(rows)) @ rows
    if factor.is_convolution:
        return torch.stack([factor.parts[0].from_matrix(values, factor.shape) for values in total.flip(0)])
    return total.flip(0)


def _explicit(factor: Factor) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield the explicit gradients ``[b, V, size]`` of some examples, and which; the caller may change them."""
    for examples in slices(factor.size, CACHED // max(factor.columns * math.prod(factor.shape), 1)):
        yield examples, slice(None), factor.per_sample(examples).flatten(2).transpose(0, 1).clone()


def _both(grads: Tensor, mix: Mix, examples: Any = slice(None)) -> Tensor:
    """The squares of gradients ``[B, V, X]`` summed over columns, before and after mixing: ``[2, B, X]``."""
    return torch.stack([grads.square().sum(1), mix(grads, examples).square_().sum(1)])


def _basis(likelihood: Likelihood, outputs: Tensor) -> Tensor:
    """The directions at one position, ``[K, C]``."""
    width = likelihood.num_outputs(outputs)
    basis = _contrasts(width) if isinstance(likelihood, Categorical) else torch.eye(width, dtype=torch.float64)
    return basis.to(outputs)


@functools.lru_cache(maxsize=8)
def _contrasts(size: int) -> Tensor:
    """The orthonormal rows of Helmert's matrix, ``[C − 1, C]``: all directions but (1, …, 1).

    >>> rows = _contrasts(4)
    >>> torch.allclose(rows.mT @ rows, torch.eye(4, dtype=rows.dtype) - 0.25)
    True
    """
    count = torch.arange(1, size, dtype=torch.float64)
    rows = torch.ones(size - 1, size, dtype=torch.float64).tril()
    rows[torch.arange(size - 1), torch.arange(1, size)] = -count
    return rows / (count * (count + 1)).sqrt()[:, None]
