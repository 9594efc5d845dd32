"""The calls that the engine records in a forward pass, and the gradients of their parameters as rows of two factors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from dubito.core import batches
from dubito.curvature import per_example
from dubito.curvature.products import Workspace, fits, is_shared
from dubito.networks.layers.base import LayerRule
from dubito.networks.layers.rows import (
    DenseRows,
    ElementwiseRows,
    GroupedRows,
    IndexRows,
    Rows,
    per_sample_gradient,
    rows_as,
    summed_gradient,
)


@dataclass
class CallGradient:
    """The gradient of one parameter through one call of its layer."""

    rule: LayerRule[Any]
    layer: nn.Module
    rows: Rows | None  # the layer's input as rows; None for a bias
    grad: Tensor  # [V, *output]
    later: Tensor | None = None  # [O, O], a basis to which the matrices are rotated after the sum over positions

    @property
    def fills(self) -> bool:
        """Whether the rows give the gradient of every entry of the parameter."""
        return True

    @property
    def kind(self) -> Any:
        """What calls must have in common to share Kronecker factors; None where they have none."""
        if isinstance(self.rows, ElementwiseRows) or self.rule.normalizes:
            return None
        if isinstance(self.rows, DenseRows | GroupedRows):
            return type(self.rule), *self.rows.shape[2:]
        return type(self.rule), type(self.rows)

    def take(self, rows: slice, columns: slice = slice(None)) -> CallGradient:
        """Return the gradient of some examples and columns."""
        inputs: Rows | None = None
        if isinstance(self.rows, IndexRows):
            inputs = self.rows._replace(ids=self.rows.ids[rows])
        elif self.rows is not None:
            inputs = self.rows.of(self.rows.a[rows])
        return replace(self, rows=inputs, grad=self.grad[columns, rows])

    def grads_as_rows(self) -> Tensor:
        """Return the output gradients as rows, ``[V, B, T, O]``, grouped ``[V, B, T, Gr, O]``."""
        return self.rule.grads_as_rows(self.layer, self.grad)

    def bias_grads(self) -> Tensor:
        """Return the gradients of the bias, ``[V, B, O]``."""
        return self.rule.bias_grads(self.layer, self.grad)

    def bias_rows(self) -> Tensor:
        """Return the gradients of the bias at each position, ``[V, B, T, O]``."""
        axis = self.rule.channel_axis(self.layer, self.grad.ndim - 1) + 1
        return self.grad.movedim(axis, -1).flatten(2, -2) if self.grad.ndim > 3 else self.bias_grads()[:, :, None]

    def is_its_matrix(self, shape: tuple[int, ...]) -> bool:
        """Return whether the parameter is stored as the matrix ``[O, I]`` that multiplies the rows."""
        weight = self.layer.get_parameter("weight")
        return len(shape) == 2 and self.rule.to_matrix(self.layer, weight).stride() == weight.stride()

    def to_matrix(self, weight: Tensor) -> Tensor:
        """Flatten values in the shape of the parameter to the order of the matrix ``[O, I]``."""
        stored = weight.reshape(self.layer.get_parameter("weight").shape)
        return self.rule.to_matrix(self.layer, stored).flatten()

    def matrices(self, weights: Tensor) -> Tensor:
        """Return `to_matrix` of several weights ``[G, *shape]``, as ``[G, size]``."""
        return torch.stack([self.to_matrix(weight) for weight in weights])

    def from_matrix(self, flat: Tensor) -> Tensor:
        """Undo `to_matrix`: return the values flat in the order of the parameter."""
        matrix = self.rule.to_matrix(self.layer, self.layer.get_parameter("weight"))
        return self.rule.from_matrix(self.layer, flat.reshape(matrix.shape)).flatten()

    def in_matrix(self, positions: Tensor) -> Tensor:
        """Map flat positions of the stored weight to flat positions of the matrix ``[O, I]``."""
        weight = self.layer.get_parameter("weight")
        if self.rule.to_matrix(self.layer, weight).is_contiguous():
            return positions
        order = torch.arange(weight.numel(), device=positions.device).reshape(weight.shape)
        return self.rule.to_matrix(self.layer, order).flatten().argsort()[positions]

    def per_sample(self, shape: tuple[int, ...]) -> Tensor:
        """Return the explicit gradient, ``[V, B, *shape]``."""
        if self.rows is None:
            total = self.bias_grads()
        else:
            total = self.rule.from_matrix(self.layer, per_sample_gradient(self.rows, self.grads_as_rows()))
        return total.reshape(*total.shape[:2], *shape)

    def summed(self, shape: tuple[int, ...]) -> Tensor:
        """Return the sum over examples, ``[V, *shape]``, without forming per-example gradients."""
        if self.rows is None:
            return self.bias_grads().sum(1).reshape(-1, *shape)
        total = self.rule.from_matrix(self.layer, summed_gradient(self.rows, self.grads_as_rows()))
        return total.reshape(-1, *shape)

    def rotated(self, left: Tensor | None, right: Tensor | None, workspace: Workspace | None = None) -> RotatedGradient:
        """Return ``leftᵀ M right``.

        If a layer has more positions than inputs, its few matrices are rotated `later`, not its many gradients.
        """
        if self.rows is None:
            grads = self.bias_grads()[:, :, None]
            return RotatedGradient(self.rule, self.layer, None, _times(grads, left, workspace))
        rows: Rows = self.rows
        if right is not None:
            assert isinstance(rows, DenseRows | GroupedRows)
            found = rows.times(right)
            rows = rows.of(_times(rows.a, right, workspace) if found is None else found)
        grads = self.grads_as_rows()
        if isinstance(rows, DenseRows) and rows.a.shape[1] > rows.a.shape[2] and fits(grads, rows.a):
            return RotatedGradient(self.rule, self.layer, rows, grads, later=left)
        return RotatedGradient(self.rule, self.layer, rows, _times(grads, left, workspace))


@dataclass
class RotatedGradient(CallGradient):
    """A gradient whose `grad` is already in rows, in another basis or with another input, in the matrix's order."""

    def is_its_matrix(self, shape: tuple[int, ...]) -> bool:
        """Return whether there is one matrix, not one per group."""
        return isinstance(self.rows, DenseRows)

    def to_matrix(self, weight: Tensor) -> Tensor:
        """Return the values unchanged: they are in the order of the matrix."""
        return weight.flatten()

    def matrices(self, weights: Tensor) -> Tensor:
        """Return the values unchanged, without a copy."""
        return weights.flatten(1)

    def from_matrix(self, flat: Tensor) -> Tensor:
        """Return the values unchanged."""
        return flat

    def grads_as_rows(self) -> Tensor:
        """Return the rows unchanged."""
        return self.grad

    def bias_grads(self) -> Tensor:
        """Return the gradients of a bias, which have been summed over positions."""
        return self.grad[:, :, 0]

    def per_sample(self, shape: tuple[int, ...]) -> Tensor:
        """Return ``[V, B, size]`` in the order of the matrix, not of the stored weight."""
        if self.rows is None:
            return self.bias_grads()
        found = per_sample_gradient(self.rows, self.grad)
        return (found if self.later is None else self.later.mT @ found).flatten(2)


def _times(rows: Tensor, basis: Tensor | None, workspace: Workspace | None = None) -> Tensor:
    if basis is None:
        return rows
    if is_shared(rows):
        return _times(rows[:, :1], basis).expand(-1, rows.shape[1], *[-1] * (rows.ndim - 2))
    if basis.ndim == 2:
        return rows @ basis if workspace is None else workspace.times(rows, basis)
    return torch.einsum("...gi,gij->...gj", rows, basis)


@dataclass
class LayerCall:
    """One call of a layer with a rule: its input, and the gradient edge of its output."""

    layer: nn.Module
    rule: LayerRule[Any]
    roles: Mapping[str, str]
    inputs: Tensor
    version: int
    edge: GradientEdge
    output_size: int
    _rows: Rows | None = None

    @property
    def names(self) -> list[str]:
        """The parameters."""
        return list(self.roles.values())

    @property
    def is_stale(self) -> bool:
        """Whether the input was overwritten after the call."""
        return self.inputs._version != self.version

    @property
    def rows(self) -> Rows:
        """The input as rows."""
        if self._rows is None:
            self._rows = self.rule.inputs_as_rows(self.layer, self.inputs)
        return self._rows

    def gradients(self, grad: Tensor) -> list[tuple[str, CallGradient]]:
        """Return the gradient of each parameter for gradients ``[V, *output]``."""
        return [
            (name, CallGradient(self.rule, self.layer, rows_as(self.rows, grad) if role == "weight" else None, grad))
            for role, name in self.roles.items()
        ]


@dataclass
class ModuleCall:
    """One call of a module whose parameters have neither a rule nor an operation that is understood.

    Only this module is differentiated example by example; what follows it is pulled back for all examples at once.
    """

    module: nn.Module
    local: Mapping[str, str]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: list[int]
    edge: GradientEdge
    output_size: int

    @property
    def names(self) -> list[str]:
        """The parameters, by the names that the network has for them; `local` has those of the module."""
        return list(self.local)

    @property
    def is_stale(self) -> bool:
        """Whether an argument was overwritten after the call."""
        return self.versions != [leaf._version for leaf in batches.leaves((self.args, self.kwargs))]

    @property
    def rows(self) -> None:
        """None: nothing is known of the module."""
        return

    def explicit(self, grad: Tensor, pull: per_example.Pull) -> dict[str, Tensor]:
        """Return ``[V, B, *shape]`` for gradients ``[V, *output]``."""
        dtype = self.edge.node._input_metadata[self.edge.output_nr].dtype
        found = pull(self.module, list(self.local.values()), (self.args, self.kwargs), grad.to(dtype), _call)
        return {name: found[local].to(grad.dtype) for name, local in self.local.items()}


def _call(module: nn.Module, inputs: Any) -> Tensor:
    args, kwargs = inputs
    found = module(*args, **kwargs)
    return found if isinstance(found, Tensor) else found[0]
