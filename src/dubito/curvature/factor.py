r"""`Factor`: the gradients of one parameter in any form, and the contractions from which all curvature is computed.

A `Factor` holds the gradients of `V` columns and `B` examples with respect to one parameter,
:math:`M_{vn} = \sum_{calls} \sum_t G_{vnt} a_{nt}^\top`. `Factor` itself contracts explicit gradients, a few examples
and columns at a time. The forms in `curvature/factors` override the contractions that are cheaper for them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dubito.core import limits
from dubito.core.limits import numbers, slices
from dubito.core.tracing import is_tracing
from dubito.curvature.products import closed


class QuadraticForms(Protocol):
    """Two quadratic forms of the gradients of each weight in all columns."""

    def __call__(self, grads: Tensor, examples: Any = slice(None)) -> Tensor:
        """Return the forms ``[B, 2, X]`` of gradients ``[B, V, X]`` of some examples."""

    def added_up(self, grads: Tensor, examples: slice) -> Tensor:
        """Return the sum of the forms over some examples, ``[2, X]``; the gradients may be overwritten."""


@dataclass
class Factor(ABC):
    """The gradients of `columns` columns and `size` examples with respect to one parameter of shape `shape`."""

    shape: tuple[int, ...]
    columns: int
    size: int
    like: Tensor  # a tensor of the dtype and device of the gradients

    @abstractmethod
    def per_sample(self, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """Return the explicit gradient ``[V, B, *shape]`` (of some examples and columns)."""

    @abstractmethod
    def summed(self) -> Tensor:
        """Return the gradient summed over examples, ``[V, *shape]``."""

    @property
    def num_positions(self) -> int:
        """The number of outer products whose sum is the gradient of one example."""
        return 1

    def mixed(self, weights: Tensor, rows: slice) -> Tensor:
        """Return mixtures of the columns of some examples, ``[b, p, size of shape]``, for weights ``[B, V, p]``."""
        return torch.einsum("bvp,vbs->bps", weights[rows], self.per_sample(rows).flatten(2))

    def chunks(self, all_columns: bool = False) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield slices of columns and examples, and their explicit gradients ``[v, b, size of shape]``."""
        size = max(math.prod(self.shape), 1)
        most = numbers(limits.current().chunk)
        width = self.columns if all_columns else min(self.columns, max(1, most // size))
        step = max(1, most // (width * size))
        for rows in slices(self.size, step):
            for columns in slices(self.columns, width):
                yield columns, rows, self.per_sample(rows, columns).flatten(2)

    def _map(self, function: Callable[[Tensor], Tensor], *width: int) -> Tensor:
        """Apply `function` to each chunk and return the results, ``[V, B, *width]``."""
        if is_tracing():
            return function(self.per_sample().flatten(2))
        found = self.like.new_empty(self.columns, self.size, *width)
        for columns, rows, chunk in self.chunks():
            found[columns, rows] = function(chunk)
        return found

    def square_sum(self) -> Tensor:
        r"""Return :math:`\sum_{vn} M_{vn}^2`, flat: the diagonal of a Gauss-Newton matrix."""
        total = self.like.new_zeros(math.prod(self.shape))
        for *_, chunk in self.chunks():
            total += chunk.flatten(0, 1).square().sum(0)
        return total

    def square_sum_at(self, positions: Tensor) -> Tensor:
        """Return some entries of `square_sum`; few are gathered first, which is cheaper than squaring everything."""
        if len(positions) * 16 > math.prod(self.shape):
            return self.square_sum()[positions]
        return self.gather(positions).square().sum((0, 1))

    def form_sum(self, forms: QuadraticForms) -> Tensor:
        """Return two quadratic forms of every weight, summed over examples: ``[2, size]``."""
        total, cached = self.like.new_zeros(2, math.prod(self.shape)), numbers(limits.current().cached_products)
        for examples in slices(self.size, cached // max(self.columns * math.prod(self.shape), 1)):
            total += forms.added_up(self.per_sample(examples).flatten(2).transpose(0, 1).clone(), examples)
        return total

    def gather(self, positions: Tensor | None) -> Tensor:
        """Return the columns of some entries, ``[V, B, S]``: cost and memory `V·B·S` (times positions), not `V·B·D`."""
        if positions is None:
            return self.per_sample().flatten(2)
        return self._gather(positions.to(self.like.device))

    def _gather(self, positions: Tensor) -> Tensor:
        return self._map(lambda chunk: chunk[..., positions], len(positions))

    def weighted_square(self, weight: Tensor, *, closing: bool = False) -> Tensor:
        r"""Return :math:`\sum_d w_d M_{vnd}^2` as ``[V, B]`` for weights `w` in the shape of the parameter.

        With `closing` there is one more column: minus the sum of the others, so that all columns sum to zero.
        """
        return self.weighted_squares(weight[None], closing=closing)[0]

    def weighted_squares(self, weights: Tensor, *, closing: bool = False) -> Tensor:
        """Return `weighted_square` for several weights ``[G, *shape]``, as ``[G, V, B]``; gradients are formed once."""
        flat = weights.reshape(len(weights), -1)
        if is_tracing():
            return torch.stack([closed(self.per_sample().flatten(2), closing).square() @ weight for weight in flat])
        found = self.like.new_empty(len(flat), self.columns + closing, self.size)
        for columns, rows, chunk in self.chunks(all_columns=closing):
            squares = closed(chunk, closing).square()
            for values, weight in zip(found, flat, strict=True):
                values[slice(None) if closing else columns, rows] = squares @ weight
        return found

    def weighted_gram(self, weight: Tensor) -> Tensor:
        r"""Return :math:`\sum_d w_d M_{vnd} M_{und}` as ``[B, V, V]``."""
        root = weight.flatten().sqrt()
        scaled = (chunk * root for *_, chunk in self.chunks(all_columns=True))
        return torch.cat([torch.einsum("vbd,ubd->bvu", c, c) for c in scaled])

    def dot(self, directions: Tensor) -> Tensor:
        r"""Return :math:`\langle M_{vn}, U_k\rangle` as ``[V, B, K]`` for `directions` ``[K, *shape]``."""
        flat = directions.reshape(len(directions), -1).mT
        return self._map(lambda chunk: chunk @ flat, len(directions))

    def backward_dot(self, weights: Tensor) -> Tensor:
        r"""Return :math:`\sum_{vn} R_{vnk} M_{vn}` as ``[K, size]`` for `weights` ``[V, B, K]``."""
        total = self.like.new_zeros(weights.shape[-1], math.prod(self.shape))
        for columns, rows, chunk in self.chunks():
            total += torch.einsum("vbk,vbd->kd", weights[columns, rows], chunk)
        return total


@dataclass
class ExplicitFactor(Factor):
    """Gradients ``[V, B, *shape]`` that were computed example by example, because no layer rule applies."""

    gradient: Tensor

    def per_sample(self, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """Return the gradient of some examples and columns."""
        return self.gradient[columns, rows]

    def summed(self) -> Tensor:
        """Return the gradient summed over examples."""
        return self.gradient.sum(1)
