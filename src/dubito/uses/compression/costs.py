"""What a unit costs: the multiply-accumulates, the bytes or the measured time that go with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dubito.core import batches
from dubito.core.params import Params
from dubito.networks.watching import inputs_of
from dubito.uses.compression.report import num_macs
from dubito.uses.compression.shrink import shrink, silenced
from dubito.uses.compression.units import by_input, by_output, weight
from dubito.uses.compression.units_by_fx import LayerChannels, UnitGroup

Cost = Literal["macs", "bytes"]
Timer = Callable[[nn.Module], float]  # the seconds of one call
# The share of the units of every layer that always stays, at least one: a global rule must not cut a layer through.
ALWAYS_KEPT = 0.05
# The time of an operation differs by at most this factor from the mean: measured differences may be noise.
MOST_DIFFERENT = 10.0


class LayerCosts:
    """What the layers of a network cost, and what goes with a unit: its share of those that compute and read it.

    Args:
        model: The network.
        groups: Its groups of units.
        cost: What is counted.
        example: A batch of inputs.
        timer: Measures the time of a network. With it, operations of each group are weighted by the time they take.
    """

    def __init__(
        self, model: nn.Module, groups: list[UnitGroup], cost: Cost, example: Any, timer: Timer | None = None
    ) -> None:
        sides = [(part, "output") for g in groups for part in g.producers]
        sides += [(part, "input") for g in groups for part in g.consumers]
        layers = {part.layer for part, _ in sides}
        self.costs = layer_macs(model, layers, example) if cost == "macs" else _layer_bytes(model, layers)
        self.channels = {(part.layer, side): _num_channels(model, part.layer, side) for part, side in sides}
        self.left = dict.fromkeys(self.channels, 1.0)
        self.rates: Mapping[str, float] = {}
        if timer is not None:
            self.rates = self._measured(model, groups, example, timer)

    def of_unit(self, group: UnitGroup) -> float:
        """Return the cost of one unit of a group at the present widths of the layers."""
        total = sum(self._of(part, "output", group) for part in group.producers)
        total += sum(self._of(part, "input", group) for part in group.consumers)
        return max(total * self.rates.get(group.name, 1.0), 1e-30)

    def remove(self, group: UnitGroup, count: int) -> None:
        """Count units of a group as removed."""
        for side, parts in (("output", group.producers), ("input", group.consumers)):
            for part in parts:
                self.left[part.layer, side] -= count * self._share(part, side, group)

    def left_after(self, groups: list[UnitGroup], kept: Mapping[str, Tensor]) -> float:
        """Return what the layers cost with the units that are kept."""
        left = dict.fromkeys(self.channels, 1.0)
        for group in groups:
            gone = int((~kept[group.name]).sum())
            for side, parts in (("output", group.producers), ("input", group.consumers)):
                for part in parts:
                    left[part.layer, side] -= gone * self._share(part, side, group)
        sides = ("output", "input")
        return sum(cost * math.prod(left.get((name, s), 1.0) for s in sides) for name, cost in self.costs.items())

    def _measured(self, model: nn.Module, groups: list[UnitGroup], example: Any, timer: Timer) -> Mapping[str, float]:
        r"""Return the time that an operation of each group takes, in units of the mean.

        The network is timed without half of the units of one group at a time: the operations of an attention head, say,
        take the time of a softmax too, and narrow layers take that of a call.
        """
        saved, removed = dict[str, float](), dict[str, float]()
        for group in groups:
            kept = {group.name: torch.arange(group.size) >= group.size // 2}
            quiet, _ = silenced(model, groups, kept, example)
            small = shrink(quiet, groups, kept, example).eval()
            saved[group.name] = max(timer(model) - timer(small), 0.0)
            removed[group.name] = group.size // 2 * self.of_unit(group)
        mean = sum(saved.values()) / max(sum(removed.values()), 1e-30)
        if mean == 0:
            return {}
        least, most = 1 / MOST_DIFFERENT, MOST_DIFFERENT
        return {name: min(max(saved[name] / max(n, 1e-30) / mean, least), most) for name, n in removed.items()}

    def _of(self, part: LayerChannels, side: str, group: UnitGroup) -> float:
        other = self.left.get((part.layer, "input" if side == "output" else "output"), 1.0)
        return self.costs[part.layer] * other * self._share(part, side, group)

    def _share(self, part: LayerChannels, side: str, group: UnitGroup) -> float:
        return len(part.index) / group.size / self.channels[part.layer, side]


def per_cost(groups: list[UnitGroup], relevance: Params, costs: LayerCosts) -> Params:
    r"""Return the relevance of each unit divided by what it costs: $d_u / c_u$.

    The most relevant units of every group always stay (infinite relevance).
    """
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
