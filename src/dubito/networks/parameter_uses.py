"""Where a network uses its parameters, read from autograd's graph and not from the classes of its modules.

The network runs on two batches that differ in their number of rows. What has the same shape in both is a function of
parameters and constants alone; a *use* of a parameter is the operation at which such a function meets the examples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dubito.core import batches, params

Node = Any  # a torch.autograd.graph.Node; its type does not declare the saved values

LEAF = "torch::autograd::AccumulateGrad"
COPY = "CloneBackward0"
VIEWS = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")
# Operations that multiply a matrix or a kernel with the examples.
LINEAR = frozenset({
    "AddmmBackward0", "MmBackward0", "BmmBackward0", "BaddbmmBackward0", "AddbmmBackward0", "LinearBackward0",
    "MvBackward0", "AddmvBackward0", "DotBackward0", "ConvolutionBackward0",
})  # fmt: skip
# The first argument of these operations is added to their result.
ADDING_FIRST = frozenset({"AddmmBackward0", "BaddbmmBackward0", "AddbmmBackward0", "AddmvBackward0"})


@dataclass(frozen=True)
class Use:
    """One operation at which a function of a parameter meets the examples.

    Args:
        name: The parameter.
        node: The operation in the graph of the first batch.
        position: Its number in `nodes_below`; the same for every batch.
        argument: Which of its arguments is the function of the parameter.
    """

    name: str
    node: Node
    position: int
    argument: int

    @property
    def adds(self) -> bool:
        """Whether the parameter is added: a bias."""
        kind = self.node.name()
        return (
            kind == "AddBackward0"
            or (kind in ADDING_FIRST and self.argument == 0)
            or (kind == "ConvolutionBackward0" and self.argument == 2)
        )

    @property
    def multiplies(self) -> bool:
        """Whether the parameter is the matrix or the kernel of a linear map."""
        return self.node.name() in LINEAR and not self.adds


@dataclass
class Uses:
    """The uses of some parameters in one network."""

    order: list[Node]  # the nodes of the graph of the first batch, in the order of `nodes_below`
    axes: dict[Node, tuple[int, ...]]  # by node, which axes of its result have rows of the batch
    found: dict[str, list[Use]]  # the uses of each parameter; a parameter may have none

    def is_inner(self, node: Node) -> bool:
        """Return whether a view of a result shows that the batch is the inner part of an axis with positions."""
        (axis,) = self.axes[node]
        for user in self.order:
            if user.name() in VIEWS and any(below is node for below, _ in user.next_functions):
                return any(place > axis for place in self.axes[user])
        return False


def nodes_below(outputs: Tensor) -> list[Node]:
    """Return every node of the graph of `outputs` once, in an order that depends on the graph alone."""
    return [node for node, _ in _pairs(outputs, outputs)]


@torch.inference_mode(False)
def find_uses(model: nn.Module, names: list[str], inputs: Any) -> Uses | None:
    """Find how `model` uses parameters, from two forward passes; None where the passes have different graphs.

    Args:
        model: A private network in evaluation mode.
        names: The parameters, which must have ``requires_grad=True``.
        inputs: Any inputs; one row is enough.
    """
    rows = batches.num_rows(inputs)
    one, two = (_outputs(model, inputs, [n % rows for n in range(size)]) for size in (3, 4))
    if one.grad_fn is None or two.grad_fn is None:
        return Uses([], {}, {name: [] for name in names})
    return uses_between(one, two, {name: model.get_parameter(name) for name in names})


def uses_between(one: Tensor, two: Tensor, parameters: Mapping[str, Tensor]) -> Uses | None:
    """Find the uses from the outputs for two batches of different size; None where their graphs differ."""
    axes: dict[Node, tuple[int, ...]] = {}
    try:
        for first, second in _pairs(one, two):
            axes[first] = _moving_axes(first, second)
    except _DifferentGraphs:
        return None
    known = {id(value): name for name, value in parameters.items()}
    found: dict[str, list[Use]] = {name: [] for name in parameters}
    for position, node in enumerate(axes):
        for argument, (below, _) in enumerate(node.next_functions if axes[node] else ()):
            if below is not None and not axes[below]:
                for name in _leaves(below, known):
                    found[name].append(Use(name, node, position, argument))
    return Uses(list(axes), axes, found)


class _DifferentGraphs(Exception):
    """Two passes of a network gave different graphs."""


def _outputs(model: nn.Module, inputs: Any, rows: list[int]) -> Tensor:
    with torch.enable_grad():
        return params.call(model, batches.map_leaves(lambda leaf: leaf[rows].clone(), inputs))


def _pairs(one: Tensor, two: Tensor) -> Iterator[tuple[Node, Node]]:
    """Go through two graphs side by side, and yield every node of the first with that of the second.

    Copies are passed over where only one graph has them: whether a view needs one may depend on the batch.
    """
    stack, seen = [(one.grad_fn, two.grad_fn)], set()
    while stack:
        first, second = stack.pop()
        if first is None or first in seen:
            continue
        while second is not None and second.name() == COPY != first.name():
            second = second.next_functions[0][0]
        seen.add(first)
        if second is None:
            raise _DifferentGraphs
        yield first, second
        if first.name() == COPY != second.name():
            stack.append((first.next_functions[0][0], second))
            continue
        if _kind(first) != _kind(second) or len(first.next_functions) != len(second.next_functions):
            raise _DifferentGraphs
        below = zip(first.next_functions, second.next_functions, strict=True)
        stack += [(a, b) for (a, _), (b, _) in below]


def _kind(node: Node) -> str:
    """Return the name of an operation; all views are of one kind."""
    return "view" if node.name() in VIEWS else node.name()


def _moving_axes(first: Node, second: Node) -> tuple[int, ...]:
    """Return the axes along which the results of one operation differ in size between two batches."""
    moving: set[int] = set()
    for one, two in zip(first._input_metadata, second._input_metadata, strict=True):
        if len(one.shape) != len(two.shape):
            raise _DifferentGraphs
        moving |= {axis for axis, sizes in enumerate(zip(one.shape, two.shape, strict=True)) if sizes[0] != sizes[1]}
    return tuple(sorted(moving))


def _leaves(top: Node, known: Mapping[int, str]) -> list[str]:
    """Return the parameters below a node."""
    found, stack, seen = [], [top], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == LEAF and id(node.variable) in known:
            found.append(known[id(node.variable)])
        stack += [below for below, _ in node.next_functions]
    return found
