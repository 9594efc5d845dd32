"""Decide which units are removed, from the relevances of their weights."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from dubito.core.errors import UnsupportedError
from dubito.core.params import Params
from dubito.networks.layers import weight_axis
from dubito.uses.compression.plan import Plan
from dubito.uses.compression.rules import Masks, Rule
from dubito.uses.compression.units_by_fx import LayerChannels, UnitGroup


def unit_relevance(model: nn.Module, groups: list[UnitGroup], relevance: Params, rule: Rule) -> Params:
    """Return one relevance per unit, by the name of its group.

    A unit is needed only if both its inputs and its outputs are: its relevance is the smaller one of the reduced
    relevance of its incoming weights and that of its outgoing weights.
    """
    found: Params = {}
    values = dict(model.named_parameters())
    relevance = {  # NaN marks weights that an earlier compression removed
        name: of.masked_fill((values[name] == 0) & (of == math.inf), math.nan) for name, of in relevance.items()
    }
    for group in groups:
        rows = [_by_unit(by_output(model, p.layer, relevance[weight(p.layer)]), p, group) for p in group.producers]
        columns = [_by_unit(by_input(model, p.layer, relevance[weight(p.layer)]), p, group) for p in group.consumers]
        sides = [_together(rule, torch.cat(side, 1)) for side in (rows, columns)]
        found[group.name] = torch.stack(sides).amin(0)
    return found


def require_units(relevance: Params) -> None:
    """Raise if no unit can go."""
    if all(bool((value == math.inf).all()) for value in relevance.values()):  # also where there is no group
        raise UnsupportedError(
            "No layer of this network can lose units: none with random weights of its own feeds another directly. "
            'Use structure="weights".'
        )


def _together(rule: Rule, rows: Tensor) -> Tensor:
    """Reduce relevances ``[units, weights]``; weights removed before (NaN) do not count, a unit of only such goes."""
    gone = rows.isnan()
    if not bool(gone.any()):
        return rule.reduced(rows)
    reduced = [
        rule.reduced(row[~here][None]) if not bool(here.all()) else None for row, here in zip(rows, gone, strict=True)
    ]
    return torch.cat([rows.new_full((1,), -math.inf) if one is None else one for one in reduced])


def incoming(model: nn.Module, groups: list[UnitGroup], kept: Masks) -> Masks:
    """Return masks over the incoming weights of units: false where the unit is removed."""
    masks: Masks = {}
    for group in (group for group in groups if group.name in kept):
        for part in group.producers:
            shape = model.get_parameter(weight(part.layer)).shape
            mask = masks.setdefault(weight(part.layer), torch.ones(shape, dtype=torch.bool))
            by_output(model, part.layer, mask)[gone_of(part, kept[group.name])] = False
    return masks


def removable(model: nn.Module, groups: list[UnitGroup]) -> list[UnitGroup]:
    """Return the groups none of whose layers shares its weight with another layer."""
    owners: dict[int, int] = {}
    named = dict(model.named_parameters(remove_duplicate=False))
    for value in named.values():
        owners[id(value)] = owners.get(id(value), 0) + 1
    alone = [all(owners[id(named[weight(p.layer)])] == 1 for p in (*g.producers, *g.consumers)) for g in groups]
    return [group for group, yes in zip(groups, alone, strict=True) if yes]


def unit_plan(model: nn.Module, groups: list[UnitGroup], kept: Masks, rule: Rule, names: list[str]) -> Plan:
    """Return the plan that keeps these units of each group, with masks over all their weights."""
    parameters = dict(model.named_parameters())
    keep = {name: torch.ones(parameters[name].shape, dtype=torch.bool) for name in names}
    units: Masks = {}
    for group in groups:
        stays = kept.get(group.name, torch.ones(group.size, dtype=torch.bool)).cpu()
        if bool(stays.all()):
            continue
        for part in group.producers:
            rows = by_output(model, part.layer, keep[weight(part.layer)])
            units.setdefault(part.layer, torch.ones(len(rows), dtype=torch.bool))[gone_of(part, stays)] = False
            rows[gone_of(part, stays)] = False
        for part in group.consumers:
            by_input(model, part.layer, keep[weight(part.layer)])[gone_of(part, stays)] = False
    return Plan(keep, units, None, rule)


def feature_plan(plan: Plan, columns: Params, relevance: Params, rule: Rule) -> Plan:
    """Return a plan of units that also removes the input features below the rule's threshold.

    The relevance of a feature is that of its weights to the units that stay, reduced. A rule with a target removes
    only units.

    Args:
        plan: The plan of units.
        columns: The relevance of the weights of the first matrix, by its name; empty where inputs are no features.
        relevance: Of the units, by the name of their group.
        rule: The rule.
    """
    if rule.target is not None or not columns:
        return plan
    ((name, weights),) = columns.items()
    layer = name.rpartition(".")[0]
    stays = plan.units.get(layer, torch.ones(len(weights), dtype=torch.bool)).to(weights.device)
    # under the name of the layer, so that an amount for it holds for its features too
    needed = rule.keep({**relevance, layer: rule.reduced(weights[stays].mT)})[layer].cpu()
    return replace(plan, keep={**plan.keep, name: plan.keep[name] & needed}, inputs=needed)


def weight(layer: str) -> str:
    """Return the name of a layer's weight."""
    return f"{layer}.weight" if layer else "weight"


def by_output(model: nn.Module, layer: str, tensor: Tensor) -> Tensor:
    """Return a tensor in the shape of a layer's weight as ``[outputs, ...]``; a view."""
    return tensor.movedim(weight_axis(model.get_submodule(layer), "output") or 0, 0)


def by_input(model: nn.Module, layer: str, tensor: Tensor) -> Tensor:
    """Return a tensor in the shape of a layer's weight as ``[inputs, ...]``; a view."""
    return tensor.movedim(weight_axis(model.get_submodule(layer), "input") or 0, 0)


def gone_of(part: LayerChannels, stays: Tensor) -> Tensor:
    """Return the channels of a layer that belong to removed units."""
    return part.index[~stays[part.unit]]


def _by_unit(channels: Tensor, part: LayerChannels, group: UnitGroup) -> Tensor:
    """Return a tensor ``[channels, ...]`` as ``[units, ...]``; every unit has equally many channels."""
    order = part.index[torch.argsort(part.unit, stable=True)]
    return channels[order.to(channels.device)].reshape(group.size, -1)
