"""The gradient of one parameter at one operation of autograd's graph, as rows of inputs and of output gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from dubito.core.errors import UnsupportedError
from dubito.curvature.call_gradients import CallGradient
from dubito.networks.layers.base import LayerRule
from dubito.networks.layers.rows import DenseRows, ElementwiseRows, GroupedRows, per_sample_gradient, summed_gradient


class _Unruled(LayerRule[Any]):
    """Stands where a call of a layer has a rule: an operation of the graph has none."""

    def apply(self, layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Raise: the operation is described by its own gradient alone."""
        raise UnsupportedError("An operation of autograd's graph has no layer rule.")


UNRULED = _Unruled()


@dataclass
class GraphGradient(CallGradient):
    """A gradient whose `grad` is in rows already.

    Args:
        order: The flat position in the parameter of each entry of the matrix that meets the rows; None if they agree.
        shape: The shape of the parameter.
    """

    order: Tensor | None = None
    shape: tuple[int, ...] = ()

    @property
    def fills(self) -> bool:
        """Whether every entry is reached, and those of a bias in their order."""
        whole = self.order is None or len(self.order) == math.prod(self.shape)
        return whole and (self.order is None or isinstance(self.rows, DenseRows))

    @property
    def kind(self) -> Any:
        """What calls must have in common to share Kronecker factors; None where there are none.

        A matrix that is stored in another order has none, and neither have free parameters with several axes, which may
        have too many entries for a matrix over their pairs.
        """
        if self.order is not None or isinstance(self.rows, ElementwiseRows):
            return None
        if self.rows is None:
            return "bias" if len(self.shape) == 1 else None
        if isinstance(self.rows, DenseRows | GroupedRows):
            return type(self.rows), *self.rows.shape[2:]
        return type(self.rows)

    def grads_as_rows(self) -> Tensor:
        """Return the rows."""
        return self.grad

    def bias_grads(self) -> Tensor:
        """Return the gradients of an added parameter, ``[V, B, O]``."""
        return self.grad.sum(2)

    def bias_rows(self) -> Tensor:
        """Return the gradients of an added parameter at each position."""
        return self.grad

    def is_its_matrix(self, shape: tuple[int, ...]) -> bool:
        """Return whether the parameter is the matrix ``[O, I]`` that multiplies the rows."""
        return len(shape) == 2 and self.order is None and isinstance(self.rows, DenseRows)

    def to_matrix(self, weight: Tensor) -> Tensor:
        """Put values in the shape of the parameter into the order of the matrix, flat."""
        return weight.flatten() if self.order is None else weight.flatten()[self.order]

    def from_matrix(self, flat: Tensor) -> Tensor:
        """Undo `to_matrix`."""
        return self._placed(flat)

    def in_matrix(self, positions: Tensor) -> Tensor:
        """Map flat positions of the parameter to those of the matrix."""
        return positions if self.order is None else self.order.argsort()[positions]

    def per_sample(self, shape: tuple[int, ...]) -> Tensor:
        """Return the explicit gradient, ``[V, B, *shape]``."""
        found = self.bias_grads() if self.rows is None else per_sample_gradient(self.rows, self.grad).flatten(2)
        return self._placed(found).reshape(*found.shape[:2], *shape)

    def summed(self, shape: tuple[int, ...]) -> Tensor:
        """Return the sum over examples, ``[V, *shape]``."""
        rows = self.rows
        found = self.bias_grads().sum(1) if rows is None else summed_gradient(rows, self.grad).flatten(1)
        return self._placed(found).reshape(-1, *shape)

    def _placed(self, values: Tensor) -> Tensor:
        """Put values ``[..., n]`` in the order of the matrix to their places in the parameter, flat."""
        if self.order is None:
            return values
        size = math.prod(self.shape)
        found = values.new_zeros(*values.shape[:-1], size)
        return found.index_copy_(-1, self.order, values)


@dataclass
class ChainedGradient(CallGradient):
    """The gradient of a parameter from which the operation's argument is computed, example by example."""

    fills = False  # there are only explicit gradients

    inner: CallGradient = field(kw_only=True)  # the gradient of the argument
    top: GradientEdge = field(kw_only=True)  # the gradient edge of the argument
    leaf: Tensor = field(kw_only=True)  # the parameter

    @property
    def kind(self) -> None:
        """None: there are no Kronecker factors."""
        return

    def take(self, rows: slice, columns: slice = slice(None)) -> CallGradient:
        """Return the gradient of some examples and columns."""
        return replace(self, grad=self.grad[columns, rows], inner=self.inner.take(rows, columns))

    def per_sample(self, shape: tuple[int, ...]) -> Tensor:
        """Return the explicit gradient, ``[V, B, *shape]``."""
        found = self.inner.per_sample(self._argument_shape)
        return self._pull(found.flatten(0, 1)).reshape(*found.shape[:2], *shape)

    def summed(self, shape: tuple[int, ...]) -> Tensor:
        """Return the sum over examples, ``[V, *shape]``."""
        return self._pull(self.inner.summed(self._argument_shape)).reshape(-1, *shape)

    @property
    def _argument_shape(self) -> tuple[int, ...]:
        return tuple(self.top.node._input_metadata[self.top.output_nr].shape)

    @torch.inference_mode(False)
    def _pull(self, grads: Tensor) -> Tensor:
        """Pull gradients ``[N, *argument]`` back to the parameter."""
        own = grads.to(self.top.node._input_metadata[self.top.output_nr].dtype).contiguous()
        with torch.enable_grad():
            (found,) = torch.autograd.grad(self.top, self.leaf, own, retain_graph=True, is_grads_batched=True)
        return found.detach().to(grads.dtype)
