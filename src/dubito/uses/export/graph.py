"""Record a function as a graph: equal tensors are stored once, and what is computed twice is computed once.

So posterior samples that share their first layers run those once, whatever the network looks like.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from dubito.core.settings import digest
from dubito.core.tracing import export_any_batch, recording, returned, without_changes
from dubito.uses.export.members import join_members
from dubito.uses.export.simplify import simplify

_HALF = (torch.float16, torch.bfloat16)
# Results of operations on constants are stored up to this many numbers even if that takes more memory.
_SMALL = 1024
# Operations that make constants from nothing.
_CREATE = tuple(getattr(torch.ops.aten, name).default for name in ("full", "eye", "ones", "arange"))


def record(
    module: nn.Module,
    inputs: tuple[Tensor, ...],
    dtype: torch.dtype | None = None,
    *,
    share: bool = False,
    keep_filters: bool = False,
) -> ExportedProgram:
    """Record a module that takes tensors with a batch axis and returns a tuple of tensors; the batch size stays free.

    Args:
        module: The module.
        inputs: At least two rows of each input.
        dtype: Compute in this type where the module computes in float16 or bfloat16.
        share: Keep products of large constants as operations, so that weights of members are stored once; dense layers
            of members that share a weight are joined.
        keep_filters: Leave the weights of convolutions as they are, so that they can be found in the graph.
    """
    with recording(), torch.no_grad():
        found = export_any_batch(module, inputs)
        if any(_is_in_place(node) for node in found.graph.nodes):
            found = without_changes(found)
        tidy = _tidied(found, _Graph(dtype, share, keep_filters))
        placed = inputs if dtype is None else tuple(_retyped(each, dtype) for each in inputs)
        return export_any_batch(tidy, placed)


def _is_in_place(node: fx.Node) -> bool:
    """Return whether an operation changes one of its arguments."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _tidied(program: ExportedProgram, made: _Graph) -> fx.GraphModule:
    """Return a graph in which equal constants and equal operations occur once, built in an empty one."""
    held = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs if spec.target is not None}
    tensors, place = {**program.state_dict, **program.constants}, dict[fx.Node, fx.Node]()
    for node in program.graph.nodes:
        if node.op == "placeholder":
            name = held.get(node.name)
            place[node] = made.graph.placeholder(node.name) if name is None else made.constant(tensors[name])
        elif node.op == "output":
            found = tuple(place[each] for each in returned(program, node))
            made.graph.output(found[0] if program.call_spec.out_spec.is_leaf() else found)
        elif "assert" not in str(node.target):
            arguments = fx.node.map_arg((node.args, node.kwargs), lambda each: place[each])
            place[node] = made.operation(node.target, *_with_type(arguments, made.dtype))
        if node in place:
            place[node].meta.setdefault("val", node.meta.get("val"))
    return made.finished()


class _Graph:
    """A graph that is built node by node; what is there already is not added again."""

    def __init__(self, dtype: torch.dtype | None, share: bool, keep_filters: bool) -> None:
        self.graph, self.dtype, self.share, self.keep_filters = fx.Graph(), dtype, share, keep_filters
        self.known: dict[Any, fx.Node] = {}
        self.values: dict[fx.Node, Any] = {}  # of constants
        self.products: dict[fx.Node, Tensor] = {}  # values of operations on constants that are kept

    def constant(self, value: Tensor) -> fx.Node:
        """Return the node of a constant."""
        value = value.detach() if self.dtype is None else _retyped(value.detach(), self.dtype)
        key = ("constant", digest(value))
        if key not in self.known:
            self.known[key] = node = self.graph.get_attr(f"constant_{len(self.values)}")
            self.values[node] = value.contiguous()
        return self.known[key]

    def operation(self, target: Any, args: Any, kwargs: Any) -> fx.Node:
        """Return the node of an operation; one on constants is computed now, unless its result takes more memory."""
        key = (target, _key(args), _key(kwargs))
        if key not in self.known:
            inputs: list[fx.Node] = []
            fx.node.map_arg((args, kwargs), inputs.append)
            held = [each in self.values or each in self.products for each in inputs]
            known = all(held) if held else target in _CREATE
            result = target(*self._valued(args), **self._valued(kwargs)) if known else None
            kept = isinstance(result, Tensor) and self._is_product(target, inputs, result)
            if isinstance(result, Tensor) and not kept and result.numel() <= max(_SMALL, sum(map(self._size, inputs))):
                self.known[key] = self.constant(result)
            else:
                self.known[key] = self.graph.call_function(target, args, kwargs)
                if isinstance(result, Tensor) and kept:
                    self.products[self.known[key]] = result
                if isinstance(result, list | tuple):  # the parts of a constant, which are then read one by one
                    self.values[self.known[key]] = result
        return self.known[key]

    def _is_product(self, target: Any, inputs: list[fx.Node], result: Tensor) -> bool:
        """Return whether a result is a large constant that is not stored, because it is made of a shared one."""
        made = target == torch.ops.aten.mul.Tensor or any(each in self.products for each in inputs)
        return self.share and made and result.numel() > _SMALL

    def _value(self, node: fx.Node) -> Any:
        return self.values[node] if node in self.values else self.products[node]

    def _valued(self, arguments: Any) -> Any:
        return fx.node.map_arg(arguments, self._value)

    def _size(self, node: fx.Node) -> int:
        value = self._value(node)
        return value.numel() if isinstance(value, Tensor) else sum(each.numel() for each in value)

    def finished(self) -> fx.GraphModule:
        """Return the module of the graph, with the constants that are used."""
        if self.share:
            join_members(self.graph, self.values)
        simplify(self.graph, self.values, self.keep_filters)
        self.graph.eliminate_dead_code()
        root = nn.Module()
        for node in self.graph.nodes:
            if node.op == "get_attr":
                root.register_buffer(node.target, self.values[node])
        return fx.GraphModule(root, self.graph)


def _key(value: Any) -> Any:
    """Return arguments of an operation as something that can be compared."""
    if isinstance(value, tuple | list):
        return tuple(_key(each) for each in value)
    if isinstance(value, dict):
        return tuple((name, _key(each)) for name, each in sorted(value.items()))
    if isinstance(value, float | int | bool):  # 1, 1.0 and True are equal in Python
        return (type(value).__name__, repr(value))
    return value


def _with_type(value: Any, dtype: torch.dtype | None) -> Any:
    """Replace half precision among the arguments of an operation."""
    if isinstance(value, tuple | list):
        return type(value)(_with_type(each, dtype) for each in value)
    if isinstance(value, dict):
        return {name: _with_type(each, dtype) for name, each in value.items()}
    return dtype if dtype is not None and isinstance(value, torch.dtype) and value in _HALF else value


def _retyped(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.dtype in _HALF else value
