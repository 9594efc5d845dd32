"""Make a recorded graph cheaper: equal numbers up to rounding, with fewer operations.

A runtime spends about a microsecond on every operation, whatever it computes, so for one input the number of operations
is what an output costs.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from dubito.uses.export.attention import ATTENTION
from dubito.uses.export.channels import CHANNELS
from dubito.uses.export.constants import Constants
from dubito.uses.export.rows import ROWS

aten = torch.ops.aten
# Weights of at most so many numbers are stored a second time if that saves operations.
_SMALL_WEIGHTS = 2**14
# Factors below this are not divided by.
_SMALLEST_FACTOR = 1e-3
# Biases above this stay where they are added: moved behind a product, their rounding errors would show.
_LARGEST_BIAS = 100.0


def simplify(graph: fx.Graph, values: dict[fx.Node, Any], keep_filters: bool = False) -> None:
    """Replace operations by fewer or cheaper ones.

    Args:
        graph: The graph.
        values: Its constants, to which new ones are added.
        keep_filters: Leave the weights of convolutions as they are.
    """
    constants = Constants(graph, values)
    first = (_exponential_of_logarithm, _stack, _two_factors, _scaled_product)
    own = (*first, _roots, _positive_factors, _positions)
    rules = (*own, *ATTENTION, *ROWS, *(() if keep_filters else CHANNELS))
    for rule in rules:
        graph.eliminate_dead_code()
        for node in list(graph.nodes):
            if node.op == "call_function":
                with graph.inserting_before(node):
                    found = rule(graph, node, constants)
                if found is not None:
                    found.meta.setdefault("val", node.meta.get("val"))
                    node.replace_all_uses_with(found)


def _exponential_of_logarithm(graph: fx.Graph, node: fx.Node, constants: Constants) -> fx.Node | None:
    """Undo a logarithm whose exponential is all that is wanted."""
    inner = node.args[0] if node.target == aten.exp.default else None
    if not isinstance(inner, fx.Node):
        return None
    if inner.target == aten.log.default:
        assert isinstance(inner.args[0], fx.Node)
        return inner.args[0]
    if inner.target == aten.log_softmax.int and len(inner.users) == 1:
        return graph.call_function(aten.softmax.int, inner.args, inner.kwargs)
    return None


def _stack(graph: fx.Graph, node: fx.Node, constants: Constants) -> fx.Node | None:
    """Stack outputs of several networks by one copy and a view, not by a new axis for each."""
    if node.target != aten.stack.default or (node.args[1:] and node.args[1] != 0):
        return None
    parts: Any = node.args[0]
    first = parts[0].meta.get("val")
    shape = () if first is None else first.shape
    if len(shape) < 2 or not all(isinstance(size, int) for size in shape[1:]):
        return None
    joined = graph.call_function(aten.cat.default, (list(parts),))
    return graph.call_function(aten.reshape.default, (joined, [len(parts), -1, *shape[1:]]))


def _two_factors(graph: fx.Graph, node: fx.Node, constants: Constants) -> fx.Node | None:
    """Multiply by the product of two numbers, not by one after the other."""
    inner = node.args[0] if node.target == aten.mul.Tensor else None
    if not isinstance(inner, fx.Node) or inner.target != aten.mul.Tensor or len(inner.users) > 1:
        return None
    first, second = constants.get(inner.args[1]), constants.get(node.args[1])
    if first is None or second is None or first.ndim or second.ndim:
        return None
    return graph.call_function(aten.mul.Tensor, (inner.args[0], constants.add(first * second)))


def _scaled_product(graph: fx.Graph, node: fx.Node, constants: Constants) -> fx.Node | None:
    """Scale and shift the constants of ``k (c + x W) + d`` instead of the result, where k and d are numbers."""
    scaled = node.args[0] if node.target == aten.add.Tensor and not node.kwargs else None
    if not isinstance(scaled, fx.Node) or scaled.target != aten.mul.Tensor or len(scaled.users) > 1:
        return None
    product, factor, shift = scaled.args[0], constants.get(scaled.args[1]), constants.get(node.args[1])
    if not isinstance(product, fx.Node) or product.target != aten.addmm.default or product.kwargs:
        return None
    offset, weight = constants.get(product.args[0]), constants.get(product.args[2])
    if factor is None or shift is None or offset is None or weight is None or factor.ndim or shift.ndim:
        return None
    if len(product.users) > 1 and weight.numel() > _SMALL_WEIGHTS:
        return None
    parts = (constants.add(factor * offset + shift), product.args[1], constants.add(factor * weight))
    return graph.call_function(aten.addmm.default, parts)


def _roots(graph: fx.Graph, node: fx.Node, constants: Constants) -> fx.Node | None:
    """Take the roots of two affine functions of the same rows at once: one product and one root, then two parts."""
    first = _affine_root(node, constants)
    if first is None or not node.users:
        return None
    rows, offset, weight = first
    for root in [each for product in rows.users for each in product.users if node < each]:
        second = _affine_root(root, constants)
        if second is None or second[0] is not rows or not root.users:
            continue
        offsets, weights = torch.cat([offset, second[1]]), torch.cat([weight, second[2]], 1)
        product = graph.call_function(aten.addmm.default, (constants.add(offsets), rows, constants.add(weights)))
        both = graph.call_function(aten.sqrt.default, (product,))
        parts = graph.call_function(aten.split_with_sizes.default, (both, [len(offset), len(second[1])], 1))
        own, other = (graph.call_function(operator.getitem, (parts, place)) for place in range(2))
        other.meta["val"] = root.meta.get("val")
        root.replace_all_uses_with(other)
        return own
    return None


def _affine_root(node: fx.Node, constants: Constants) -> tuple[fx.Node, Tensor, Tensor] | None:
    """Return x, b and W of ``sqrt(b + x W)`` where b and W are small constants; None for other nodes."""
    inner = node.args[0] if node.target == aten.sqrt.default else None
    if not isinstance(inner, fx.Node) or inner.target != aten.addmm.default or inner.kwargs or len(inner.users) > 1:
        return None
    offset, rows, weight = constants.get(inner.args[0]), inner.args[1], constants.get(inner.args[2])
    if offset is None or weight is None or not isinstance(rows, fx.Node) or offset.shape != weight.shape[1:]:
        return None
    return rows, offset, weight


def _positive_factors(graph: fx.Graph, node: fx.Node, constants: Constants) -> fx.Node | None:
    """Compute ``s relu(b + r y)`` as ``(r s) max(y, -b / r) + s b`` for positive r: fewer passes over the activations.

    If a product with constants follows, ``s b`` is added to the bias behind it; else it is ``(r s) relu(b / r + y)``.
    """
    found = constants.get(node.args[1]) if node.target == aten.mul.Tensor else None
    active = node.args[0]
    if found is None or not isinstance(active, fx.Node) or active.target != aten.relu.default or len(active.users) > 1:
        return None
    inner = active.args[0]
    if not isinstance(inner, fx.Node) or inner.target != aten.addcmul.default or inner.kwargs or len(inner.users) > 1:
        return None
    bias, given, factor = constants.get(inner.args[0]), inner.args[1], constants.get(inner.args[2])
    if bias is None or factor is None or not bool((factor > _SMALLEST_FACTOR).all()):
        return None
    threshold = bias / factor
    if float(threshold.abs().max()) <= _LARGEST_BIAS and _add_behind(node, found * bias, constants):
        kept = graph.call_function(aten.maximum.default, (given, constants.add(-threshold)))
    else:
        shifted = graph.call_function(aten.add.Tensor, (given, constants.add(threshold)))
        kept = graph.call_function(aten.relu.default, (shifted,))
    return graph.call_function(aten.mul.Tensor, (kept, constants.add(factor * found)))


def _add_behind(node: fx.Node, value: Tensor, constants: Constants) -> bool:
    """Add a value to a node through the bias of the one layer ``b + r (x W)`` that reads it; False if there is none."""
    product = next(iter(node.users)) if len(node.users) == 1 else None
    if product is None or product.target != aten.linear.default or len(product.users) != 1:
        return False
    layer, weight = next(iter(product.users)), constants.get(product.args[1])
    if weight is None or len(product.args) > 2 or layer.target != aten.addcmul.default or layer.kwargs:
        return False
    bias, factor = constants.get(layer.args[0]), constants.get(layer.args[2])
    if bias is None or factor is None or layer.args[1] is not product:
        return False
    shift = factor.double() * F.linear(value.double(), weight.double())
    layer.update_arg(0, constants.add((bias.double() + shift).to(bias)))
    return True


def _positions(graph: fx.Graph, node: fx.Node, constants: Constants) -> fx.Node | None:
    """Add the embeddings of the same positions in every row as a constant: they are looked up now."""
    if node.target != aten.add.Tensor or node.kwargs:
        return None
    for one, other in (node.args[:2], node.args[1::-1]):
        if not isinstance(one, fx.Node) or not isinstance(other, fx.Node) or one.target != aten.embedding.default:
            continue
        table, places = constants.get(one.args[0]), one.args[1]
        if table is None or not isinstance(places, fx.Node) or places.target != aten.expand.default:
            continue
        start: Any = places.args[0]
        known, shapes = constants.values.get(start), [each.meta["val"].shape for each in (node, other)]
        if known is not None and shapes[0] == shapes[1]:
            return graph.call_function(aten.add.Tensor, (other, constants.add(table[known])))
    return None
