"""Find the units of a chain of layers, with torch.fx.

Two tracers exist because chains, the common case, need no further package this way; skip connections and concatenation
need the graph of torch-pruning, an optional extra (`units_by_torch_pruning`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn

from dubito.networks.layers import rule_for
from dubito.networks.layers.norm import NormRule

# Modules, functions and methods that work on each channel by itself.
_POINTWISE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid,
    nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid, nn.Tanhshrink, nn.Identity,
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout,
)  # fmt: skip
_POOLS = (
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
)  # fmt: skip
_NAMES = {
    "relu", "relu_", "relu6", "leaky_relu", "elu", "selu", "gelu", "silu", "mish", "tanh", "sigmoid", "softplus",
    "hardtanh", "hardswish", "dropout", "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d",
    "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "boolean_dispatch",
    "contiguous",
}  # fmt: skip
_RESHAPES = {"flatten", "view", "reshape"}


@dataclass(frozen=True)
class LayerChannels:
    """Channels of one layer that belong to units: channel ``index[i]`` to unit ``unit[i]``."""

    layer: str
    unit: Tensor
    index: Tensor

    @classmethod
    def whole(cls, layer: str, unit: Tensor) -> LayerChannels:
        """Return all channels of a layer, in order."""
        return cls(layer, unit, torch.arange(len(unit)))


@dataclass(frozen=True)
class UnitGroup:
    """A group of layers whose units are removed together.

    Args:
        size: The number of units.
        producers: The layers whose outputs they are; the first names the group.
        passers: Norms that they pass through one by one.
        consumers: The layers that take them in.
        biases: Whether a consumer without a bias may get one, for what removed units add on average.
        counts: Integers that the network's own code reads, such as the number of heads: the name of the module, the
            attribute, and by how much it falls with every unit.
    """

    size: int
    producers: tuple[LayerChannels, ...]
    passers: tuple[LayerChannels, ...] = ()
    consumers: tuple[LayerChannels, ...] = ()
    biases: bool = True
    counts: tuple[tuple[str, str, int], ...] = ()

    @property
    def has_blocks(self) -> bool:
        """Whether a unit is several outputs of a layer, as a head of attention is."""
        return any(len(part.index) > self.size for part in self.producers)

    @property
    def name(self) -> str:
        """The name of the group, which is that of its first producer."""
        return self.producers[0].layer


@dataclass
class _OpenGroup:
    """A group of units whose producer is known, while the walk looks for its consumer."""

    producer: str
    size: int
    axis: int
    owner: Tensor | None = None  # once flattened
    passers: list[LayerChannels] = field(default_factory=list)


class _Shapes(fx.Interpreter):
    """Run a traced network once and keep the shape of every result."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.shapes: dict[fx.Node, tuple[int, ...]] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Keep the shape of a tensor."""
        result = super().run_node(n)
        if isinstance(result, Tensor):
            self.shapes[n] = tuple(result.shape)
        return result


def trace(model: nn.Module, example: Tensor) -> list[UnitGroup] | None:
    """Return the groups of units of a chain, or None where the network is no chain of known layers.

    Args:
        model: The network, in evaluation mode; it is not changed.
        example: A batch of at least one input.
    """
    try:
        traced = fx.symbolic_trace(model)
    except Exception:  # noqa: BLE001 - tracing runs the user's code on stand-ins, which may fail in any way
        return None
    shapes = _Shapes(traced)
    with torch.no_grad():
        shapes.run(example)
    nodes = [node for node in traced.graph.nodes if node in shapes.shapes and node.op != "output"]
    if nodes[0].op != "placeholder" or not _is_chain(nodes):
        return None
    return _walk(traced, nodes, shapes.shapes)


def _is_chain(nodes: list[fx.Node]) -> bool:
    """Return whether each tensor depends only on the one before it, and no layer is called twice."""
    tensors = set(nodes)
    for before, node in pairwise(nodes):
        if [n for n in node.all_input_nodes if n in tensors] != [before]:
            return False
    called = [node.target for node in nodes if node.op == "call_module"]
    return len(called) == len(set(called))


def _walk(
    traced: fx.GraphModule, nodes: list[fx.Node], shapes: dict[fx.Node, tuple[int, ...]]
) -> list[UnitGroup] | None:
    groups: list[UnitGroup] = []
    current: _OpenGroup | None = None
    for before, node in pairwise(nodes):
        module = traced.get_submodule(str(node.target)) if node.op == "call_module" else None
        rule = None if module is None else rule_for(module)
        if module is not None and rule is not None and not rule.channelwise(module):
            in_one = getattr(module, "groups", 1) == 1  # else each output sees only some inputs
            groups += _closed(current, str(node.target), rule.num_inputs(module)) if in_one else []
            current = None
            if in_one:
                axis = rule.channel_axis(module, len(shapes[node]))
                current = _OpenGroup(str(node.target), rule.num_outputs(module), axis)
        elif isinstance(rule, NormRule) and not rule.mixes_channels:
            if current is not None:
                owner = torch.arange(current.size) if current.owner is None else current.owner
                current.passers.append(LayerChannels.whole(str(node.target), owner))
        elif isinstance(rule, NormRule) or (rule is not None and current is not None):
            current = None  # its statistics run over channels, so the layer before it must keep its width
        elif _flattens(node, module, shapes[before], shapes[node]):
            if current is not None and current.owner is None:
                current.owner = _owners(current, shapes[before])
        elif not _passes(node, module):
            return None
    return groups


def _closed(current: _OpenGroup | None, layer: str, num_inputs: int) -> list[UnitGroup]:
    """Return the group that ends at a layer, if its inputs are the units or their flattened positions."""
    if current is None:
        return []
    owner = torch.arange(current.size) if current.owner is None else current.owner
    if len(owner) != num_inputs:
        return []
    producer = LayerChannels.whole(current.producer, torch.arange(current.size))
    return [UnitGroup(current.size, (producer,), tuple(current.passers), (LayerChannels.whole(layer, owner),))]


def _owners(current: _OpenGroup, shape: tuple[int, ...]) -> Tensor:
    """Return the unit of every feature after flattening an activation of this shape."""
    units = torch.arange(current.size).reshape([-1 if axis == current.axis else 1 for axis in range(1, len(shape))])
    return units.expand(shape[1:]).flatten()


def _flattens(node: fx.Node, module: nn.Module | None, before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    reshapes = isinstance(module, nn.Flatten) or (module is None and _name(node) in _RESHAPES)
    return reshapes and len(after) == 2 and before[0] == after[0]


def _passes(node: fx.Node, module: nn.Module | None) -> bool:
    if isinstance(module, nn.PReLU):
        return module.num_parameters == 1
    return isinstance(module, (*_POINTWISE, *_POOLS)) or (module is None and _name(node) in _NAMES)


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
