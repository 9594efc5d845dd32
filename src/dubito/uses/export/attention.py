"""Rules that make attention cheaper: equal numbers up to rounding, with fewer operations and passes over scores."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from dubito.uses.export.constants import Constants, Rule

aten = torch.ops.aten
# Scores are lost in rounding if a number of at most this is added to them.
_MASKED = -1e30
# Operations that divide an axis into heads.
_DIVIDE = (aten.unflatten.int, aten.view.default, aten.reshape.default)


def _product(graph: fx.Graph, node: fx.Node, constants: Constants) -> fx.Node | None:
    """Compute an einsum that is a product of matrices as one: runtimes compute it faster, and join it with others."""
    operands: Any = node.args[1] if node.target == aten.einsum.default else ()
    if len(operands) != 2:
        return None
    equation: Any = node.args[0]
    left, _, result = equation.replace(" ", "").partition("->")
    first, second = left.split(",")
    turns = _turns(first, second, result)
    if turns is None:
        return None
    factors = [
        graph.call_function(aten.transpose.int, (each, -2, -1)) if turn else each
        for each, turn in zip(operands, turns, strict=True)
    ]
    return graph.call_function(aten.matmul.default, tuple(factors))


def _turns(first: str, second: str, result: str) -> tuple[bool, bool] | None:
    """Return for ``first,second->result`` whether each factor is transposed before the product; None if it is none."""
    batch, row, column = result[:-2], result[-2:-1], result[-1:]
    inner = "".join(set(first) & set(second) - set(result))
    if len(inner) != 1 or not row or len(set(result)) < len(result):
        return None
    left = {batch + row + inner: False, batch + inner + row: True}.get(first)
    right = {batch + inner + column: False, batch + column + inner: True}.get(second)
    return None if left is None or right is None else (left, right)


def _mask(graph: fx.Graph, node: fx.Node, constants: Constants) -> fx.Node | None:
    """Add a mask that is smaller than the scores, instead of choosing between each of them and a number."""
    if node.target != aten.masked_fill.Scalar:
        return None
    scores, mask, number = node.args
    assert isinstance(scores, fx.Node)
    assert isinstance(mask, fx.Node)
    like, shape = scores.meta.get("val"), getattr(mask.meta.get("val"), "shape", ())
    if like is None or like.dtype not in (torch.float32, torch.float64) or float(number) > _MASKED:  # type: ignore[arg-type]
        return None
    if len(shape) != like.ndim or 1 not in shape[1:]:
        return None
    place = (mask, like.dtype, number)
    if place not in constants.made:
        ends = [constants.add(torch.tensor(each, dtype=like.dtype)) for each in (number, 0.0)]
        with graph.inserting_after(mask):
            constants.made[place] = graph.call_function(aten.where.self, (mask, *ends))
    return graph.call_function(aten.add.Tensor, (scores, constants.made[place]))


class _Heads(NamedTuple):
    """A dense layer of a sequence whose outputs are divided into heads ``[B, H, T, D]``."""

    weight: Tensor
    bias: Tensor | None
    result: fx.Node
    size: tuple[int, int]

    @classmethod
    def of(cls, layer: fx.Node, constants: Constants) -> _Heads | None:
        """Return what a node computes; None if it is no such layer."""
        if layer.target != aten.linear.default or layer.kwargs or len(layer.users) != 1:
            return None
        weight, bias = constants.get(layer.args[1]), constants.get(layer.args[2]) if len(layer.args) > 2 else None
        (divided,) = layer.users
        value, turned = divided.meta.get("val"), next(iter(divided.users), None)
        if weight is None or (bias is None and len(layer.args) > 2) or divided.target not in _DIVIDE:
            return None
        if value is None or value.ndim != 4 or value.shape[2] * value.shape[3] != len(weight):
            return None
        if turned is None or len(divided.users) > 1 or turned.target != aten.transpose.int or not turned.users:
            return None
        if turned.args[1:] not in ((1, 2), (2, 1)):
            return None
        heads, size = value.shape[2:]
        return cls(weight, bias, turned, (heads, size))


def _join_heads(graph: fx.Graph, node: fx.Node, constants: Constants) -> None:
    """Compute queries, keys and values by one product."""
    own = _Heads.of(node, constants)
    if own is None:
        return
    given: Any = node.args[0]
    found = [heads for layer in given.users if (heads := _Heads.of(layer, constants)) is not None]
    found = [each for each in found if each.size[1] == own.size[1] and (each.bias is None) == (own.bias is None)]
    if len(found) < 2:
        return
    counts = [each.size[0] for each in found]
    weight = constants.add(torch.cat([each.weight for each in found]))
    biases = [each.bias for each in found if each.bias is not None]
    bias = (constants.add(torch.cat(biases)),) if biases else ()
    joined = graph.call_function(aten.linear.default, (given, weight, *bias))
    divided = graph.call_function(aten.unflatten.int, (joined, -1, [sum(counts), own.size[1]]))
    turned = graph.call_function(aten.transpose.int, (divided, 1, 2))
    if (like := given.meta.get("val")) is not None:
        divided.meta["val"] = like.new_empty((*like.shape[:-1], sum(counts), own.size[1]))
    parts = graph.call_function(aten.split_with_sizes.default, (turned, counts, 1))
    for place, each in enumerate(found):
        part = graph.call_function(operator.getitem, (parts, place))
        part.meta["val"] = each.result.meta.get("val")
        each.result.replace_all_uses_with(part)


ATTENTION: tuple[Rule, ...] = (_join_heads, _product, _mask)
