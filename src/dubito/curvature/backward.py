r"""Vector-Jacobian products of many columns in one traversal of autograd's graph.

Autograd can batch columns, but computes convolutions and poolings one column after the other, and needs four arrays of
the size of `x` per column of ``max_pool(relu(x))``. Here each node pulls all columns ``[V, *output]`` back at once,
from the values that it saved (the private ``_saved_*`` fields of autograd's nodes, tested with torch 2.6 to 2.15). A
graph with a node that has no rule here is left to autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge

from dubito.core.tracing import is_tracing
from dubito.curvature.products import Workspace

Node = Any  # a torch.autograd.graph.Node; its type does not declare the saved values
# Maps a node and the columns at its output to the columns at its inputs, by index; an omitted input has no rule.
NodeRule = Callable[[Node, Tensor], dict[int, Tensor]]

RELU, MAX_POOL = "ReluBackward0", "MaxPool2DWithIndicesBackward0"


@torch.no_grad()
def pull(
    outputs: Tensor, edges: list[GradientEdge], columns: Tensor, workspace: Workspace | None = None
) -> list[Tensor | None] | None:
    """Pull `columns` ``[V, *outputs]`` back to `edges`; None where something on the way has no rule.

    The results may be in the memory of `workspace`.

    >>> x = torch.tensor([1.0, -1.0], requires_grad=True)
    >>> top = x.view(1, 2).relu()
    >>> pull(top, [torch.autograd.graph.get_gradient_edge(x)], torch.eye(2).view(2, 1, 2))[0].tolist()
    [[1.0, 0.0], [0.0, 0.0]]
    """
    wanted = {edge.node for edge in edges}
    workspace = workspace or Workspace()
    rules = RULES | {name: partial(rule, workspace) for name, rule in RULES_WITH_MEMORY.items()}
    order = _order(outputs.grad_fn, wanted)
    if any(node.name() not in rules for node in order) or any(edge.output_nr for edge in edges):
        return None
    needed = wanted.union(order)
    users: dict[Node, set[str]] = {}
    for node in order:
        for below, _ in node.next_functions:
            users.setdefault(below, set()).add(node.name())
    found: dict[Node, Tensor] = {outputs.grad_fn: columns}
    for node in order:
        grad = found[node] if node in wanted else found.pop(node)
        masked = node.name() == RELU and users.get(node) == {MAX_POOL}  # the rule of MAX_POOL has applied it
        pulled = {0: grad} if masked else rules[node.name()](node, grad)
        for number, (below, output) in enumerate(node.next_functions):
            if below not in needed:
                continue
            if number not in pulled or output:
                return None
            found[below] = found[below] + pulled[number] if below in found else pulled[number]
    return [found.get(edge.node) for edge in edges]


def _order(top: Node, wanted: set[Node]) -> list[Node]:
    """Return the nodes between `top` and the wanted ones, each after all nodes that use it."""
    leads: dict[Node, bool] = {}  # whether a path leads to a wanted node
    order, stack = [], [(top, False)]
    while stack:
        node, seen = stack.pop()
        below = [each for each, _ in node.next_functions if each is not None]
        if seen:
            leads[node] = any(each in wanted or leads[each] for each in below)
            if leads[node]:
                order.append(node)
        elif node not in leads:
            leads[node] = False
            stack += [(node, True), *((each, False) for each in below if each not in leads)]
    return order[::-1]


def _relu(workspace: Workspace, node: Node, grad: Tensor) -> dict[int, Tensor]:
    if grad.ndim != 3 or is_tracing():
        return {0: torch.ops.aten.threshold_backward(grad, node._saved_result, 0)}
    pulled = workspace.aligned(grad, *grad.shape)
    torch.ops.aten.threshold_backward.grad_input(grad, node._saved_result, 0, grad_input=pulled)
    return {0: pulled}


def _max_pool(workspace: Workspace, node: Node, grad: Tensor) -> dict[int, Tensor]:
    """Scatter each gradient to its maximum; if a ReLU is below, apply its mask first, to fewer numbers.

    The layout is channels last, which is fast for convolutions and is the layout of rows of gradients.
    """
    below, inputs = node.next_functions[0][0], node._saved_self
    if inputs.ndim != 4:
        return {}
    where, columns, num_channels = node._saved_result1.flatten(2), grad.flatten(3).mT, inputs.shape[1]
    if below is not None and below.name() == RELU:
        passes = below._saved_result.flatten(2).gather(2, where).mT.contiguous()
        columns = torch.ops.aten.threshold_backward(columns, passes, 0)
    where = (where.mT * num_channels + torch.arange(num_channels, device=where.device)).flatten(1)
    columns = columns.flatten(2)
    total = workspace.empty(columns, *columns.shape[:2], inputs[0].numel()).zero_()
    total.scatter_add_(2, where.expand_as(columns), columns)
    return {0: total.unflatten(2, (*inputs.shape[2:], num_channels)).movedim(-1, 2)}


def _convolution(node: Node, grad: Tensor) -> dict[int, Tensor]:
    """Pull all columns back as one batch; only the shape of the inputs is needed."""
    size, weight, batch = node._saved_input.shape, node._saved_weight, grad.flatten(0, 1)
    if weight.ndim == 4:  # channels last are a third faster
        batch, weight = (each.contiguous(memory_format=torch.channels_last) for each in (batch, weight))
    if is_tracing():
        return {0: _transposed(node, batch).unflatten(0, (len(grad), size[0]))}
    inputs = grad.new_empty(()).expand(len(batch), *size[1:])
    pulled, *_ = torch.ops.aten.convolution_backward(
        batch, inputs, weight, None, node._saved_stride, node._saved_padding,
        node._saved_dilation, node._saved_transposed, node._saved_output_padding, node._saved_groups,
        [True, False, False],
    )  # fmt: skip
    return {0: pulled.unflatten(0, (len(grad), size[0]))}


def _transposed(node: Node, grad: Tensor) -> Tensor:
    """Pull back by a transposed convolution (or, through a transposed one, by a plain one), which file formats have."""
    weight, stride, padding, dilation = (
        getattr(node, f"_saved_{name}") for name in ("weight", "stride", "padding", "dilation")
    )
    wanted, kernel = node._saved_input.shape[2:], weight.shape[2:]
    reached = [
        (have - 1) * step - 2 * pad + gap * (size - 1) + 1
        for have, step, pad, gap, size in zip(grad.shape[2:], stride, padding, dilation, kernel, strict=True)
    ]
    rest = [0] * len(wanted) if node._saved_transposed else [a - b for a, b in zip(wanted, reached, strict=True)]
    settings = (stride, padding, dilation, not node._saved_transposed, rest, node._saved_groups)
    return torch.ops.aten.convolution(grad, weight, None, *settings)


def _addmm(workspace: Workspace, node: Node, grad: Tensor) -> dict[int, Tensor]:
    """Return the gradient of `x` in ``b + x W``."""
    return {1: workspace.times(grad, node._saved_mat2.mT)} if node._saved_alpha == 1 else {}


def _view(node: Node, grad: Tensor) -> dict[int, Tensor]:
    return {0: grad.reshape(len(grad), *node._saved_self_sym_sizes)}


def _add(node: Node, grad: Tensor) -> dict[int, Tensor]:
    """Return the gradients of ``x + y`` without broadcasting."""
    pulled = {}
    for number, (below, output) in enumerate(node.next_functions):
        if below is not None and tuple(below._input_metadata[output].shape) == grad.shape[1:]:
            pulled[number] = grad
    return pulled if node._saved_alpha == 1 else {}


def _batch_norm(node: Node, grad: Tensor) -> dict[int, Tensor]:
    """Scale each channel, as batch normalization with running statistics does."""
    if node._saved_training or node._saved_running_var is None:
        return {}
    scale = (node._saved_running_var + node._saved_eps).rsqrt()
    if node._saved_weight is not None:
        scale = scale * node._saved_weight
    return {0: grad * scale.view(-1, *[1] * (grad.ndim - 3))}


def _mean(node: Node, grad: Tensor) -> dict[int, Tensor]:
    """Return the gradient of a mean over axes that are kept."""
    size = node._saved_self_sym_sizes
    if not node._saved_keepdim:
        return {}
    count = math.prod(size[1:]) / math.prod(grad.shape[2:])  # examples are never averaged
    return {0: (grad / count).expand(len(grad), *size)}


def _cast(node: Node, grad: Tensor) -> dict[int, Tensor]:
    """Return the gradient of a change of dtype."""
    below, output = node.next_functions[0]
    return {} if below is None else {0: grad.to(below._input_metadata[output].dtype)}


def _slice(node: Node, grad: Tensor) -> dict[int, Tensor]:
    size, axis = (len(grad), *node._saved_self_sym_sizes), node._saved_dim % (grad.ndim - 1) + 1
    where = node._saved_start, min(node._saved_end, size[axis]), node._saved_step
    return {0: torch.ops.aten.slice_backward(grad, size, axis, *where)}


RULES_WITH_MEMORY = {RELU: _relu, MAX_POOL: _max_pool, "AddmmBackward0": _addmm}
RULES: dict[str, NodeRule] = {
    "ConvolutionBackward0": _convolution,
    "ViewBackward0": _view,
    "UnsafeViewBackward0": _view,
    "ReshapeAliasBackward0": _view,
    "CloneBackward0": lambda node, grad: {0: grad},
    "ToCopyBackward0": _cast,
    "AddBackward0": _add,
    "ConstantPadNdBackward0": lambda node, grad: {0: F.pad(grad, [-size for size in node._saved_pad])},
    "SliceBackward0": _slice,
    "NativeBatchNormBackward0": _batch_norm,
    "MeanBackward1": _mean,
    "TanhBackward0": lambda node, grad: {0: torch.ops.aten.tanh_backward(grad, node._saved_result)},
    "SigmoidBackward0": lambda node, grad: {0: torch.ops.aten.sigmoid_backward(grad, node._saved_result)},
}
