"""Rules for convolutions: runtimes compute channels in blocks, and copy activations where others come between.

onnxruntime computes convolutions, pooling and sums in blocks of 16 channels (8 with AVX2). A convolution with fewer
outputs takes the time of whole blocks. But pooling, and the next convolution, need a copy in another order then.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from dubito.uses.export.constants import Constants, Rule

aten = torch.ops.aten
# The channels that runtimes compute at a time.
_BLOCK = 16
# Fewer channels than these are not filled up to one block: the next layer would compute too much.
_FEWEST = 12
# A shortcut is a convolution if it has at most so many weights.
_SHORTCUT = 2**13
_CONVOLUTIONS = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
_POOLING = (aten.max_pool2d.default, aten.avg_pool2d.default)
# Functions after which a channel that is finite is so still.
_SAFE = (*_POOLING, aten.relu.default, aten.silu.default, aten.gelu.default, aten.hardtanh.default, aten.tanh.default)


def _normalized(graph: fx.Graph, node: fx.Node, constants: Constants) -> fx.Node | None:
    """Make a BatchNorm with fixed statistics part of the convolution before it."""
    inner = node.args[0] if node.target == aten.batch_norm.default else None
    if not isinstance(inner, fx.Node) or inner.target not in _CONVOLUTIONS or len(inner.users) > 1 or inner.kwargs:
        return None
    weight, bias = inner.args[1], _argument(inner, 2)
    scale, shift, mean, variance = (constants.get(each) for each in node.args[1:5])
    offset = constants.get(0.0 if bias is None else bias)
    if not constants.makes(weight) or offset is None or mean is None or variance is None or bool(node.args[5]):
        return None
    if (scale is None) != (node.args[1] is None) or (shift is None) != (node.args[2] is None):
        return None
    epsilon: Any = node.args[7]
    factor = (variance.double() + epsilon).rsqrt() * (1.0 if scale is None else scale.double())
    moved = (offset.double() - mean.double()) * factor + (0.0 if shift is None else shift.double())
    columns = factor.reshape(-1, *[1] * (node.meta["val"].ndim - 1))
    known = constants.get(weight)
    if known is not None:
        folded = constants.add((known.double() * columns).to(known))
    else:
        folded = graph.call_function(aten.mul.Tensor, (weight, constants.add(columns.to(mean))))
        folded.meta["val"] = _value(weight, constants)
    return _convolution(graph, inner, folded, constants.add(moved.to(mean)))


def _shortcut(graph: fx.Graph, node: fx.Node, constants: Constants) -> fx.Node | None:
    """Compute a shortcut that skips pixels and adds empty channels as a convolution with zeros and ones."""
    value, pad = node.meta.get("val"), _argument(node, 1) if node.target == aten.pad.default else None
    if not isinstance(pad, list | tuple) or len(pad) != 6 or any(pad[:4]) or min(pad[4:]) < 0 or max(pad[4:]) == 0:
        return None
    if any(each not in ("constant", None, 0.0) for each in node.args[2:]) or node.kwargs or value is None:
        return None
    found = _skipped(node.args[0])
    before = None if found is None else found[0].meta.get("val")
    if found is None or before is None or before.ndim != 4 or before.dtype != torch.float32:
        return None
    if before.shape[1] * value.shape[1] > _SHORTCUT:
        return None
    ones = F.pad(torch.eye(before.shape[1]), (0, 0, *pad[4:]))[..., None, None]
    return graph.call_function(aten.conv2d.default, (found[0], constants.add(ones), None, list(found[1])))


def _skipped(node: Any) -> tuple[fx.Node, tuple[int, int]] | None:
    """Return the images of which a node has every so manieth row and column, and these two numbers; None otherwise."""
    steps = {0: 1, 1: 1, 2: 1, 3: 1}
    while isinstance(node, fx.Node) and node.target == aten.slice.Tensor:
        given: Any = node.args
        axis, start, end, step = tuple(given[1:]) + (0, 0, sys.maxsize, 1)[len(given) - 1 :]
        if start != 0 or not isinstance(end, int) or end < sys.maxsize or axis not in steps:
            return None
        steps[axis] *= step
        node = given[0]
    whole = isinstance(node, fx.Node) and steps[0] == steps[1] == 1
    return (node, (steps[2], steps[3])) if whole else None


def _filled(graph: fx.Graph, node: fx.Node, constants: Constants) -> fx.Node | None:
    """Give a convolution the channels of whole blocks; those that are new are zero and read with weights of zero."""
    if not _is_plain(node, constants):
        return None
    count, last, between = _value(node.args[1], constants).shape[0], node, list[fx.Node]()
    while len(last.users) == 1 and (following := next(iter(last.users))).target in _SAFE and following.args[0] is last:
        last = following
        between.append(last)
    more = _BLOCK * math.ceil(count / _BLOCK) - count
    if more == 0 or count < _FEWEST or len(last.users) != 1:
        return None
    reader = next(iter(last.users))
    if not _is_plain(reader, constants) or reader.args[0] is not last:
        return None
    with graph.inserting_before(reader):
        reader.update_arg(1, _widened(graph, reader.args[1], (0, 0, 0, 0, 0, more), constants))
    weight = _widened(graph, node.args[1], (0, 0, 0, 0, 0, 0, 0, more), constants)
    bias = constants.get(_argument(node, 2))
    made = _convolution(graph, node, weight, None if bias is None else constants.add(F.pad(bias, (0, more))))
    for each in (made, *between):
        value = (node if each is made else each).meta["val"]
        each.meta["val"] = value.new_empty((value.shape[0], count + more, *value.shape[2:]))
    return made


def _is_plain(node: fx.Node, constants: Constants) -> bool:
    """Return whether a node is a convolution of images with known weights, in which every channel reads all others."""
    if node.target != aten.conv2d.default or node.kwargs or _argument(node, 6) not in (None, 1):
        return False
    bias = _argument(node, 2)
    return constants.makes(node.args[1]) and (bias is None or constants.get(bias) is not None)


def _widened(graph: fx.Graph, weight: Any, zeros: tuple[int, ...], constants: Constants) -> fx.Node:
    """Return a weight with zeros as `torch.nn.functional.pad` adds them; those of one that is made are made too."""
    known = constants.get(weight)
    if known is not None:
        return constants.add(F.pad(known, zeros))
    made = graph.call_function(aten.constant_pad_nd.default, (weight, list(zeros)))
    made.meta["val"] = F.pad(weight.meta["val"], zeros)
    return made


def _value(weight: Any, constants: Constants) -> Tensor:
    """Return a weight, or if it is made of constants what a recording knows of it: its shape."""
    known = constants.get(weight)
    found: Tensor = weight.meta["val"] if known is None else known
    return found


def _argument(node: fx.Node, place: int) -> Any:
    return node.args[place] if len(node.args) > place else None


def _convolution(graph: fx.Graph, like: fx.Node, weight: fx.Node, bias: fx.Node | None) -> fx.Node:
    """Return a convolution with other weights."""
    target: Any = like.target
    return graph.call_function(target, (like.args[0], weight, bias, *like.args[3:]))


CHANNELS: tuple[Rule, ...] = (_normalized, _shortcut, _filled)
