"""What a unit costs: the multiply-accumulates and bytes that go with it."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dubito.core import batches
from dubito.core.params import Params
from dubito.networks.watching import inputs_of
from dubito.uses.compression.report import num_macs
from dubito.uses.compression.units import by_input, by_output, weight
from dubito.uses.compression.units_by_fx import LayerChannels, UnitGroup

Cost = Literal["macs", "bytes"]
# The share of the units of every layer that always stays, at least one: a global rule must not cut a layer through.
ALWAYS_KEPT = 0.05


class LayerCosts:
    """What the layers of a network cost, and what goes with a unit: its share of those that compute and read it.

    Args:
        model: The network.
        groups: Its groups of units.
        cost: What is counted.
        example: A batch of inputs.
    """

    def __init__(self, model: nn.Module, groups: list[UnitGroup], cost: Cost, example: Any) -> None:
        sides = [(part, "output") for g in groups for part in g.producers]
        sides += [(part, "input") for g in groups for part in g.consumers]
        layers = {part.layer for part, _ in sides}
        self.costs = layer_macs(model, layers, example) if cost == "macs" else _layer_bytes(model, layers)
        self.channels = {(part.layer, side): _num_channels(model, part.layer, side) for part, side in sides}
        self.left = dict.fromkeys(self.channels, 1.0)

    def of_unit(self, group: UnitGroup) -> float:
        """Return the cost of one unit of a group at the present widths of the layers."""
        total = sum(self._of(part, "output", group) for part in group.producers)
        return max(total + sum(self._of(part, "input", group) for part in group.consumers), 1e-30)

    def remove(self, group: UnitGroup, count: int) -> None:
        """Count units of a group as removed."""
        for side, parts in (("output", group.producers), ("input", group.consumers)):
            for part in parts:
                self.left[part.layer, side] -= count * self._share(part, side, group)

    def _of(self, part: LayerChannels, side: str, group: UnitGroup) -> float:
        other = self.left.get((part.layer, "input" if side == "output" else "output"), 1.0)
        return self.costs[part.layer] * other * self._share(part, side, group)

    def _share(self, part: LayerChannels, side: str, group: UnitGroup) -> float:
        return len(part.index) / group.size / self.channels[part.layer, side]


def per_cost(model: nn.Module, groups: list[UnitGroup], relevance: Params, cost: Cost, example: Any) -> Params:
    r"""Return the relevance of each unit divided by what it costs: $d_u / c_u$.

    The most relevant units of every group always stay (infinite relevance).
    """
    costs = LayerCosts(model, groups, cost, example)
    found: Params = {}
    for group in groups:
        ratio = relevance[group.name] / costs.of_unit(group)
        found[group.name] = ratio.index_fill(0, ratio.topk(num_always_kept(group)).indices, math.inf)
    return found


def num_always_kept(group: UnitGroup) -> int:
    """Return how many units of a group always stay."""
    return max(1, math.ceil(ALWAYS_KEPT * group.size))


def layer_macs(model: nn.Module, layers: set[str], example: Any) -> dict[str, float]:
    """Return the multiply-accumulates of each layer for one input."""
    named: dict[str, nn.Module] = {name: model.get_submodule(name) for name in layers}
    with torch.no_grad():
        seen: dict[str, Tensor] = inputs_of(model, named, batches.take(example, slice(0, 1)))
    return {name: float(num_macs(layer, seen[name])) if name in seen else 0.0 for name, layer in named.items()}


def _layer_bytes(model: nn.Module, layers: set[str]) -> dict[str, float]:
    sizes = {name: model.get_parameter(weight(name)) for name in layers}
    return {name: float(value.numel() * value.element_size()) for name, value in sizes.items()}


def _num_channels(model: nn.Module, layer: str, side: str) -> int:
    own = model.get_parameter(weight(layer))
    return len(by_output(model, layer, own) if side == "output" else by_input(model, layer, own))
