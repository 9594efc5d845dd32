r"""Compute dense layers of several networks that share a weight together, where a recorded graph computes them apart.

The layers $y_m = x_m (W \circ r_m s_m^\top)^\top + b_m$ of members m become one product with the shared weight,

$$y_m = ((x_m \circ s_m) W^\top) \circ r_m + b_m ,$$

on an axis of members. A large weight is then read once for all of them: for few inputs that is what a layer costs.
Convolutions and layers on sequences stay apart: their weights are small, and factors would be passes over activations.
Embeddings stay shared: their rows are multiplied by the factors after they are looked up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

aten = torch.ops.aten
# Functions of one tensor that treat numbers independently.
_ELEMENTWISE = {
    aten.relu.default, aten.gelu.default, aten.tanh.default, aten.sigmoid.default, aten.silu.default, aten.elu.default,
    aten.leaky_relu.default, aten.softplus.default, aten.hardtanh.default, aten.selu.default, aten.mish.default,
}  # fmt: skip


class _Call(NamedTuple):
    """One member's dense layer."""

    node: fx.Node
    s: Tensor | None
    r: Tensor | None
    bias: Tensor | None

    @property
    def inputs(self) -> fx.Node:
        """Its inputs, which change while other layers are joined."""
        found = self.node.args[0]
        assert isinstance(found, fx.Node)
        return found


def join_members(graph: fx.Graph, values: dict[fx.Node, Any]) -> None:
    """Join dense layers of members with one shared weight, and what is computed element by element after them.

    Args:
        graph: The graph; weights of members are products of a constant with constant factors.
        values: Its constants, to which new ones are added.
    """
    _scale_after_lookup(graph, values)
    for weight, calls in _by_weight(graph, values).items():
        if len(calls) > 1 and not _depend(calls):
            outputs = _joined(graph, values, weight, calls)
            _lift(graph, outputs, [call.node for call in calls])
    _sort(graph)
    graph.eliminate_dead_code()


def _by_weight(graph: fx.Graph, values: dict[fx.Node, Any]) -> dict[fx.Node, list[_Call]]:
    """Return the dense layers on vectors by their shared weight."""
    found: dict[fx.Node, list[_Call]] = {}
    for node in graph.nodes:
        if node.target != aten.linear.default or node.args[0].meta["val"].ndim != 2:
            continue
        weight, s, r = _factors(node.args[1], values)
        bias = node.args[2] if len(node.args) > 2 else None
        if weight.op == "get_attr" and (bias is None or bias in values):
            own = None if bias is None else values[bias]
            found.setdefault(weight, []).append(_Call(node, s, r, own))
    return found


def _factors(weight: Any, values: dict[fx.Node, Any]) -> tuple[fx.Node, Tensor | None, Tensor | None]:
    """Return what a weight ``[O, I]`` is a product of: a weight, and factors of its columns and rows, or None."""
    s, r = None, None
    while weight.target == aten.mul.Tensor and isinstance(factor := values.get(weight.args[1]), Tensor):
        rows, columns = weight.meta["val"].shape[-2:]
        if factor.shape[-1] == factor.numel() == columns:
            s = factor.flatten() if s is None else s * factor.flatten()
        elif factor.shape == (rows, 1):
            r = factor.flatten() if r is None else r * factor.flatten()
        else:
            break
        weight = weight.args[0]
    return weight, s, r


def _scale_after_lookup(graph: fx.Graph, values: dict[fx.Node, Any]) -> None:
    """Look up rows of a shared embedding, and multiply these by the factors of its columns."""
    known: dict[Any, fx.Node] = {}
    for node in [node for node in graph.nodes if node.target == aten.embedding.default]:
        weight, s, r = _factors(node.args[0], values)
        if weight.op == "get_attr" and s is not None and r is None:
            arguments = (weight, *node.args[1:])
            with graph.inserting_before(node):
                rows = known.get(arguments) or graph.call_function(node.target, arguments, node.kwargs)
                own = graph.call_function(aten.mul.Tensor, (rows, _new(graph, values, s)))
            known[arguments] = rows
            rows.meta["val"] = own.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(own)


def _depend(calls: Sequence[_Call]) -> bool:
    """Return whether one of the calls needs the result of another, as in a network that uses a layer twice."""
    own, seen = {call.node for call in calls}, set[fx.Node]()
    waiting = [call.inputs for call in calls]
    while waiting:
        node = waiting.pop()
        if node in own:
            return True
        if node not in seen:
            seen.add(node)
            waiting += node.all_input_nodes
    return False


def _joined(graph: fx.Graph, values: dict[fx.Node, Any], weight: fx.Node, calls: Sequence[_Call]) -> fx.Node:
    """Return the outputs ``[M, N, O]`` of all calls."""
    with graph.inserting_before(next(iter(reversed(graph.nodes)))):
        stacked = _stacked(graph, [call.inputs for call in calls])
        s, r, bias = (
            _constant(graph, values, [getattr(call, name) for call in calls], values[weight].shape[axis], default)
            for name, axis, default in (("s", 1, 1.0), ("r", 0, 1.0), ("bias", 0, 0.0))
        )
        scaled = stacked if s is None else graph.call_function(aten.mul.Tensor, (stacked, s))
        outputs = graph.call_function(aten.linear.default, (scaled, weight))
        if r is not None and bias is not None:
            return graph.call_function(aten.addcmul.default, (bias, outputs, r))
        if r is not None:
            return graph.call_function(aten.mul.Tensor, (outputs, r))
        return outputs if bias is None else graph.call_function(aten.add.Tensor, (outputs, bias))


def _stacked(graph: fx.Graph, parts: Sequence[fx.Node]) -> fx.Node:
    """Return the inputs of all members ``[M, N, I]``, or ``[1, N, I]`` if they are the same."""
    if len(set(parts)) == 1:
        return graph.call_function(aten.unsqueeze.default, (parts[0], 0))
    base = parts[0].args[0] if parts[0].target == aten.select.int else None
    if base is not None and all(
        part.target == aten.select.int and part.args == (base, 0, m) for m, part in enumerate(parts)
    ):
        assert isinstance(base, fx.Node)
        return base
    return graph.call_function(aten.stack.default, (list(parts),))


def _constant(
    graph: fx.Graph, values: dict[fx.Node, Any], given: Sequence[Tensor | None], size: int, default: float
) -> fx.Node | None:
    """Return a constant ``[M, 1, C]`` of one vector per member; None if no member has one."""
    like = next((each for each in given if each is not None), None)
    if like is None:
        return None
    usual = like.new_full((size,), default)
    return _new(graph, values, torch.stack([usual if each is None else each for each in given]).unsqueeze(1))


def _new(graph: fx.Graph, values: dict[fx.Node, Any], value: Tensor) -> fx.Node:
    """Return the node of a new constant, before all others."""
    with graph.inserting_before(next(iter(graph.nodes))):
        node = graph.get_attr(f"joined_{len(values)}")
    values[node] = value
    return node


def _lift(graph: fx.Graph, joined: fx.Node, parts: list[fx.Node]) -> None:
    """Replace the parts of a joined result, and compute what all members do with theirs on the joined one.

    Args:
        graph: The graph.
        joined: The result of all members ``[M, ...]``.
        parts: The nodes of the members' results, which are replaced.
    """
    for first in list(parts[0].users):
        if first.target not in _ELEMENTWISE:
            continue
        same = [
            next((n for n in part.users if n.target == first.target and n.args[1:] == first.args[1:]
                  and n.kwargs == first.kwargs), None)
            for part in parts
        ]  # fmt: skip
        together = [node for node in same if node is not None]
        if len(together) == len(parts):
            with graph.inserting_after(joined):
                lifted = graph.call_function(first.target, (joined, *first.args[1:]), first.kwargs)
            _lift(graph, lifted, together)
    for whole in [node for node in parts[0].users if node.target == aten.stack.default]:
        if whole.args[0] == parts and whole.args[1:] in ((), (0,)):
            whole.replace_all_uses_with(joined)
    with graph.inserting_after(joined):
        for member, part in enumerate(parts):
            own = graph.call_function(aten.select.int, (joined, 0, member))
            own.meta["val"] = part.meta.get("val")
            part.replace_all_uses_with(own)


def _sort(graph: fx.Graph) -> None:
    """Move every node before those that use it."""
    last, placed = next(iter(reversed(graph.nodes))), set[fx.Node]()
    for start in list(graph.nodes):
        waiting = [start]
        while waiting:
            node = waiting[-1]
            missing = [each for each in node.all_input_nodes if each not in placed]
            waiting += missing
            if not missing:
                waiting.pop()
                if node not in placed and node is not last:
                    last.prepend(node)
                placed.add(node)
