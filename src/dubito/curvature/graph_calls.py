"""Gradients of parameters at the operations that use them, for parameters without a layer rule.

A use (`networks/parameter_uses`) is an operation at which a function of a parameter meets the examples. What happens
there is read from the operation itself (`curvature/operations`). The function before it is a rearrangement of the
parameter's entries, a lookup that is the same for all examples (positions), or anything else, through which explicit
gradients are pulled back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from dubito.curvature.call_gradients import CallGradient
from dubito.curvature.graph_gradients import UNRULED, ChainedGradient, GraphGradient
from dubito.curvature.operations import Convolution, Elementwise, Lookup, MatrixProduct, Operation, read, result_shape
from dubito.networks.layers.rows import DenseRows, ElementwiseRows, GroupedRows, IndexRows, Rows, rows_as
from dubito.networks.parameter_uses import LEAF, Node, Uses

# The order of entries of a parameter in what an operation is given: None if it is the same, a tensor of positions in
# the parameter, or a word if entries are not merely rearranged.
Order = Tensor | None | str
GENERAL = "general"
EMBEDDING = "EmbeddingBackward0"


@dataclass
class GraphUse:
    """One use of one parameter, as the engine remembers it from batch to batch.

    Args:
        name: The parameter's name.
        leaf: The parameter.
        operation: The name of the operation.
        position: Its number in `nodes_below`.
        argument: Which of its arguments is a function of the parameter.
        axis: The axis of the operation's result along which the batch lies.
        inner: Whether, where that axis also has positions, the batch is the inner part of it.
        orders: What `entry_order` found, by the shape of the argument.
    """

    name: str
    leaf: Tensor
    operation: str
    position: int
    argument: int
    axis: int
    inner: bool = False
    orders: dict[tuple[int, ...], Order] = field(default_factory=dict)

    def call(self, nodes: Sequence[Node], size: int) -> GraphCall:
        """Return this use in the graph of a batch of `size` examples, given its `nodes_below`."""
        if self.position >= len(nodes) or nodes[self.position].name() != self.operation:
            raise LookupError(f"the graph of the network has changed around '{self.name}'")
        return GraphCall(self, nodes[self.position], size)


@dataclass
class GraphCall:
    """One use of a parameter in one forward pass."""

    is_stale = False  # autograd itself sees where what it saved was overwritten

    known: GraphUse
    node: Node
    size: int

    @property
    def names(self) -> list[str]:
        """The parameter."""
        return [self.known.name]

    @property
    def edge(self) -> GradientEdge:
        """Where the gradients of the operation's result arrive."""
        return GradientEdge(self.node, 0)

    @property
    def output_size(self) -> int:
        """The number of entries of the result."""
        return math.prod(result_shape(self.node))

    @cached_property
    def argument(self) -> tuple[Node, int]:
        """The node and the number of the result that the parameter enters by."""
        return self.node.next_functions[self.known.argument]

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the argument."""
        below, number = self.argument
        return tuple(below._input_metadata[number].shape)

    @cached_property
    def lookup(self) -> Node | None:
        """The lookup between the parameter and the operation that is the same for all examples, if there is one."""
        below = self.argument[0]
        while below.name() not in (LEAF, EMBEDDING):
            following = [node for node, _ in below.next_functions if node is not None]
            if len(following) != 1:
                return None
            below = following[0]
        return below if below.name() == EMBEDDING and below.next_functions[0][0].name() == LEAF else None

    @property
    def leaf(self) -> Tensor:
        """The parameter."""
        return self.known.leaf

    @cached_property
    def order(self) -> Order:
        """How the entries of the argument lie in the parameter, or in what was looked up in it."""
        if self.argument[0].name() == LEAF:
            return None
        if self.shape not in self.known.orders:
            below = self.leaf if self.lookup is None else GradientEdge(self.lookup, 0)
            self.known.orders[self.shape] = entry_order(*self.argument, below)
        return self.known.orders[self.shape]

    @cached_property
    @torch.no_grad()
    def operation(self) -> Operation | None:
        """What the operation does with its argument; None where that is not known."""
        found = read(self.node, self.known.argument, self.shape)
        if isinstance(found, Elementwise) and found.shape[self.known.axis] != 1:
            return None
        if isinstance(found, MatrixProduct) and self.known.axis != len(result_shape(self.node)) - 2:
            return None
        if isinstance(found, Convolution) and self.known.axis != 0:
            return None
        if isinstance(found, Lookup) and (self.argument[0].name() != LEAF or self.known.axis == found.ids.ndim):
            return None
        return found

    @cached_property
    @torch.no_grad()
    def rows(self) -> Rows | None:
        """The rows that the argument meets; None where it is added."""
        match self.operation:
            case Elementwise(factor=Tensor() as factor):
                spread = factor.expand(result_shape(self.node))
                return ElementwiseRows(self._arranged(spread[None])[0])
            case MatrixProduct(rows):
                return DenseRows(self._split(rows.reshape(1, -1, rows.shape[-1]), 0)[0])
            case Convolution() as found:
                windows = found.rows
                joined = self._split(windows.a[None], 0)[0].flatten(1, 2)
                return DenseRows(joined) if isinstance(windows, DenseRows) else GroupedRows(joined)
            case Lookup(ids, count, padding):
                return IndexRows(self._split(ids[None], self.known.axis)[0].flatten(1), count, padding)
        return None

    def gradients(self, grad: Tensor) -> list[tuple[str, CallGradient]]:
        """Return the gradient of the parameter for gradients ``[V, *result]`` at the operation."""
        return [(self.known.name, self._gradient(grad))]

    def _gradient(self, grad: Tensor) -> CallGradient:
        rows, grads = self.rows, self._grad_rows(grad)
        rows = None if rows is None else rows_as(rows, grads)
        if isinstance(self.order, str):
            inner = GraphGradient(
                UNRULED, self.node, rows, grads, order=self._matrix_order(None, self.shape), shape=self.shape
            )
            edge = GradientEdge(*self.argument)
            return ChainedGradient(UNRULED, self.node, None, grads, inner=inner, top=edge, leaf=self.leaf)
        shape = tuple(self.leaf.shape)
        if self.lookup is not None:
            return self._looked_up(rows, grads, self.lookup)
        return GraphGradient(UNRULED, self.node, rows, grads, order=self._matrix_order(self.order, shape), shape=shape)

    def _looked_up(self, rows: Rows | None, grads: Tensor, lookup: Node) -> GraphGradient:
        """Return the gradient of an embedding whose rows are the same for all examples, such as positions."""
        summed = GraphGradient(UNRULED, self.node, rows, grads, shape=self.shape).per_sample(self.shape).flatten(2)
        if isinstance(self.order, Tensor):
            summed = torch.empty_like(summed).index_copy_(2, self.order, summed)
        found = read(lookup, 0, tuple(self.leaf.shape))
        assert isinstance(found, Lookup)
        ids = found.ids.flatten().expand(self.size, -1)
        grads = summed.unflatten(2, (ids.shape[1], -1))
        index = IndexRows(ids, found.num_embeddings, found.padding_idx)
        return GraphGradient(UNRULED, self.node, index, grads, shape=tuple(self.leaf.shape))

    def _matrix_order(self, order: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
        """Return the order of the matrix that meets the rows, which is the transpose of the argument of a product.

        Args:
            order: The order of the argument in a tensor.
            shape: The shape of that tensor.
        """
        if not isinstance(self.operation, MatrixProduct):
            return order
        size = math.prod(self.shape)
        entries = torch.arange(size, device=self.leaf.device) if order is None else order
        turned = entries.view(self.shape[-2:]).mT.flatten()
        plain = size == math.prod(shape) and torch.equal(turned, torch.arange(size, device=turned.device))
        return None if plain else turned

    def _grad_rows(self, grad: Tensor) -> Tensor:
        """Return the gradients as rows, ``[V, B, T, ...]``."""
        match self.operation:
            case Elementwise(factor=factor):
                rows = self._arranged(grad)
                return rows if isinstance(factor, Tensor) or factor == 1 else rows * factor
            case MatrixProduct():
                return self._split(grad.flatten(1, -2), 0)
            case Convolution() as found:
                rows = found.rule.grads_as_rows(found.layer, grad)
                return self._split(rows, 0).flatten(2, 3)
            case Lookup():
                return self._split(grad, self.known.axis).flatten(2, -2)
        raise LookupError(f"nothing is known of {self.node.name()}")

    def _split(self, values: Tensor, axis: int) -> Tensor:
        """Move the batch of values ``[V, ...]`` to the front and positions that share its axis behind it."""
        moved = values.movedim(axis + 1, 1)
        if self.known.inner:
            return moved.unflatten(1, (-1, self.size)).transpose(1, 2)
        return moved.unflatten(1, (self.size, -1))

    def _arranged(self, values: Tensor) -> Tensor:
        """Values ``[V, *result]`` as ``[V, B, T, C]``, where C are the axes along which the argument has entries."""
        assert isinstance(self.operation, Elementwise)
        shape = [size for axis, size in enumerate(self.operation.shape) if axis != self.known.axis]
        entries = [axis for axis, size in enumerate(shape, start=3) if size != 1]
        others = [axis for axis, size in enumerate(shape, start=3) if size == 1]
        split = self._split(values, self.known.axis)
        moved = split.permute(0, 1, 2, *others, *entries)
        return moved.reshape(*split.shape[:2], -1, math.prod(split.shape[axis] for axis in entries))


def graph_uses(uses: Uses, name: str, leaf: Tensor) -> list[GraphUse] | None:
    """Return how to follow a parameter through all of its uses; None where one of them is not understood."""
    found = []
    for use in uses.found[name]:
        if len(uses.axes[use.node]) != 1:
            return None
        where = use.position, use.argument, uses.axes[use.node][0]
        one = GraphUse(name, leaf, use.node.name(), *where, inner=uses.is_inner(use.node))
        try:
            if GraphCall(one, use.node, 1).operation is None:
                return None
        except RuntimeError:  # what was saved has been overwritten
            return None
        found.append(one)
    return found


def entry_order(node: Node, number: int, below: Any) -> Order:
    """Find how a function of a tensor arranges its entries; `GENERAL` if it does more than that.

    The function is linear if it only rearranges, so pulling numbers back tells from where each entry came. They are
    pulled digit by digit, because half precision holds only small ones.

    Args:
        node: The function's last operation.
        number: Which of its results is the function.
        below: The tensor, or the gradient edge of a result.
    """
    top, about = GradientEdge(node, number), node._input_metadata[number]
    size = math.prod(about.shape)

    def pull(values: Tensor) -> Tensor:
        values = values.to(dtype=about.dtype).reshape(tuple(about.shape))
        (found,) = torch.autograd.grad(top, below, values, retain_graph=True)
        return found.detach().flatten()

    used = pull(torch.ones(size, device=about.device))
    if not bool(((used == 0) | (used == 1)).all()) or int(used.sum(dtype=torch.float64)) != size:
        return GENERAL
    positions, base = used.nonzero().flatten(), int(1 / torch.finfo(about.dtype).eps)
    numbers, place = torch.arange(size, device=about.device), 1
    came = torch.zeros_like(positions)
    while place < size:
        digits = pull(numbers // place % base)[positions]
        came += digits.round().long() * place
        place *= base
    if not torch.equal(came.sort().values, numbers):
        return GENERAL
    order = torch.empty_like(positions).index_copy_(0, came, positions)
    return None if torch.equal(order, numbers) and size == used.numel() else order
