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

# The share of the units of every layer that always stays, at least one: a global rule must not cut a layer through.
ALWAYS_KEPT = 0.05


def per_cost(
    model: nn.Module, groups: list[UnitGroup], relevance: Params, cost: Literal["macs", "bytes"], example: Any
) -> Params:
    r"""Return the relevance of each unit divided by what it costs: $d_u / c_u$.

    The cost of a unit is its share of the layers that compute it and of those that read it. The most relevant units of
    every group always stay (infinite relevance).

    Args:
        model: The network.
        groups: The groups of units.
        relevance: The relevance of the units by the name of their group.
        cost: What is saved.
        example: A batch of inputs.
    """
    layers = {part.layer for group in groups for part in (*group.producers, *group.consumers)}
    costs = layer_macs(model, layers, example) if cost == "macs" else _layer_bytes(model, layers)
    found: Params = {}
    for group in groups:
        own = sum(costs[part.layer] * _share(model, part, group, "output") for part in group.producers)
        own += sum(costs[part.layer] * _share(model, part, group, "input") for part in group.consumers)
        ratio = relevance[group.name] / max(own, 1e-30)
        kept = ratio.topk(max(1, math.ceil(ALWAYS_KEPT * group.size))).indices
        found[group.name] = ratio.index_fill(0, kept, math.inf)
    return found


def layer_macs(model: nn.Module, layers: set[str], example: Any) -> dict[str, float]:
    """Return the multiply-accumulates of each layer for one input."""
    named: dict[str, nn.Module] = {name: model.get_submodule(name) for name in layers}
    with torch.no_grad():
        seen: dict[str, Tensor] = inputs_of(model, named, batches.take(example, slice(0, 1)))
    return {name: float(num_macs(layer, seen[name])) if name in seen else 0.0 for name, layer in named.items()}


def _layer_bytes(model: nn.Module, layers: set[str]) -> dict[str, float]:
    sizes = {name: model.get_parameter(weight(name)) for name in layers}
    return {name: float(value.numel() * value.element_size()) for name, value in sizes.items()}


def _share(model: nn.Module, part: LayerChannels, group: UnitGroup, side: Literal["output", "input"]) -> float:
    """Return the share of a layer that goes with one unit of a group."""
    own = model.get_parameter(weight(part.layer))
    channels = by_output(model, part.layer, own) if side == "output" else by_input(model, part.layer, own)
    return len(part.index) / group.size / len(channels)
