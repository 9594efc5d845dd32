"""Rules that compute dense layers of sequences on a matrix of rows, where a product and its bias are one operation."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from dubito.uses.export.constants import Constants, Rule

aten = torch.ops.aten
# Operations that give the same numbers another shape, by the shape of their result alone.
_SHAPE = (aten.reshape.default, aten.view.default, aten.unflatten.int, aten.flatten.using_ints)
# Functions of single numbers.
_POINTWISE = (aten.gelu.default, aten.relu.default, aten.silu.default, aten.tanh.default, aten.sigmoid.default)


def _layer(graph: fx.Graph, node: fx.Node, constants: Constants) -> fx.Node | None:
    """Compute a dense layer with a bias on the rows of a sequence: ``Gemm``, not ``MatMul`` and ``Add``."""
    if node.target != aten.linear.default or node.kwargs or len(node.args) < 3:
        return None
    given, weight, bias = node.args[0], constants.get(node.args[1]), constants.get(node.args[2])
    value = given.meta.get("val") if isinstance(given, fx.Node) else None
    if value is None or weight is None or bias is None or value.ndim < 3 or not _is_known(value.shape[1:]):
        return None
    rows = graph.call_function(aten.reshape.default, (given, [-1, weight.shape[1]]))
    rows.meta["val"] = value.flatten(0, -2)
    product = graph.call_function(aten.linear.default, (rows, *node.args[1:]))
    product.meta["val"] = value.new_empty((*rows.meta["val"].shape[:1], len(weight)))
    return graph.call_function(aten.reshape.default, (product, [-1, *value.shape[1:-1], len(weight)]))


def _function(graph: fx.Graph, node: fx.Node, constants: Constants) -> fx.Node | None:
    """Apply a function of single numbers before they get another shape."""
    inner = node.args[0] if node.target in _POINTWISE else None
    if not isinstance(inner, fx.Node) or inner.target != aten.reshape.default or len(inner.users) > 1:
        return None
    assert isinstance(inner.args[0], fx.Node)
    function: Any = node.target
    active = graph.call_function(function, (inner.args[0], *node.args[1:]), node.kwargs)
    active.meta["val"] = inner.args[0].meta.get("val")
    return graph.call_function(aten.reshape.default, (active, inner.args[1]))


def _shape(graph: fx.Graph, node: fx.Node, constants: Constants) -> fx.Node | None:
    """Give numbers the last of two shapes at once, or none if they have it already."""
    inner, value = node.args[0] if node.target in _SHAPE else None, node.meta.get("val")
    if not isinstance(inner, fx.Node) or inner.target not in _SHAPE or value is None or not _is_known(value.shape[1:]):
        return None
    assert isinstance(inner.args[0], fx.Node)
    before = inner.args[0].meta.get("val")
    if before is not None and before.shape[1:] == value.shape[1:]:
        return inner.args[0]
    return graph.call_function(aten.reshape.default, (inner.args[0], [-1, *value.shape[1:]]))


def _is_known(shape: torch.Size) -> bool:
    """Return whether sizes are known when the file is written, and none is zero."""
    return all(isinstance(size, int) and size > 0 for size in shape)


ROWS: tuple[Rule, ...] = (_layer, _function, _shape)
