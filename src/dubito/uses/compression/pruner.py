"""Make the smaller network of any amount: the parts of a compression that do not depend on how much is removed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dubito.core import batches, params
from dubito.core.errors import UnsupportedError
from dubito.core.params import Params
from dubito.fitting.posterior import Posterior
from dubito.networks.adapters import has_adapters, low_rank_pairs, record_ranks_
from dubito.networks.layers import rule_for
from dubito.networks.twin import copied
from dubito.uses.compression.costs import Cost, LayerCosts, Timer, per_cost
from dubito.uses.compression.elimination import Elimination
from dubito.uses.compression.plan import Plan, both
from dubito.uses.compression.reconstruction import reconstruct_
from dubito.uses.compression.report import num_macs
from dubito.uses.compression.rules import Masks, Rule
from dubito.uses.compression.shrink import require_same, shrink, silenced, varied
from dubito.uses.compression.units import feature_plan, removable, require_units, unit_plan, unit_relevance
from dubito.uses.compression.units_by_fx import LayerChannels, UnitGroup, trace
from dubito.uses.compression.units_by_probing import probe
from dubito.uses.compression.units_by_torch_pruning import depend
from dubito.uses.compression.weight_statistics import data_precision, prunable, statistics_of

# Rows from which on the layers of the small network are fitted to the outputs of the large one.
FEWEST_ROWS = 256


class Multiples(NamedTuple):
    """In which multiples layers keep units.

    >>> relevance = torch.tensor([3.0, 4.0, 5.0, 1.0, 2.0])
    >>> Multiples(2, 2).filled(torch.tensor([True, True, True, False, False]), relevance).tolist()
    [True, True, True, False, True]
    """

    multiple: int = 1
    fewest: int = 1  # a layer that keeps less than these may keep any number

    def filled(self, stays: Tensor, relevance: Tensor) -> Tensor:
        """Return a mask with the most relevant units besides those that stay, up to a multiple."""
        count = int(stays.sum())
        if count < self.fewest:
            return stays
        count = min(len(stays), -(-count // self.multiple) * self.multiple)
        return torch.zeros_like(stays).index_fill(0, relevance.topk(count).indices, True)


ANY_NUMBER = Multiples()


@dataclass(frozen=True)
class Room:
    """The operations that a budget leaves unused after layers were cut to multiples of units.

    Args:
        groups: The groups of units.
        costs: The operations of their layers.
        most: How many they may have.
    """

    groups: list[UnitGroup]
    costs: LayerCosts
    most: float

    @classmethod
    def of(cls, model: nn.Module, groups: list[UnitGroup], costs: LayerCosts, example: Any, share: float) -> Room:
        """Return the room of a budget that leaves a share of all operations; those of other layers stay."""
        whole = num_macs(model, batches.take(example, slice(0, 1)))
        return cls(groups, costs, share * whole - (whole - sum(costs.costs.values())))

    def used(self, kept: Masks, relevance: Params, blocks: Multiples) -> Masks:
        """Return masks to which blocks of units came back, those that went last first, as long as there is room.

        The half of the units that went first stays away: they take bytes, and the network hardly misses them.
        """
        gone = [relevance[group.name].cpu()[~kept[group.name]] for group in self.groups]
        late = float(torch.cat(gone).median()) if sum(map(len, gone)) else math.inf
        while True:
            found: dict[float, Masks] = {}
            for group in (each for each in self.groups if not each.has_blocks):
                stays, ranks = kept[group.name], relevance[group.name].cpu()
                if not bool(stays.all()):
                    rank, unit = ranks.masked_fill(stays, -math.inf).max(0)
                    back = blocks.filled(stays.index_fill(0, unit, True), ranks)
                    found[float(rank)] = {**kept, group.name: back}
            found = {rank: each for rank, each in found.items() if rank >= late}
            small = [rank for rank, each in found.items() if self.costs.left_after(self.groups, each) <= self.most]
            if not small:
                return kept
            kept = found[max(small)]


@dataclass(frozen=True)
class Pruner:
    """The parts of a compression that do not depend on how much is removed.

    Args:
        posterior: The posterior.
        center: The network at the posterior's mean.
        rule: The rule.
        relevance: The relevance of every weight, or of every unit if units are removed.
        groups: The groups of units; empty if single weights are removed.
        columns: If units are removed and inputs are plain features, the relevance of the weights of the first matrix.
        example: A batch of inputs, or None.
        allow_empty: Whether a layer may lose all of its weights.
        elimination: Adapts the layers that read removed units, if the rule does so.
        blocks: In which multiples layers keep units.
        rows: Batches of inputs on which its layers are then fitted to the outputs of the large network.
    """

    posterior: Posterior
    center: nn.Module
    rule: Rule
    relevance: Params
    groups: list[UnitGroup]
    columns: Params
    example: Any
    allow_empty: bool
    elimination: Elimination | None = None
    rows: tuple[Any, ...] = ()
    blocks: Multiples = ANY_NUMBER
    room: Room | None = None

    @classmethod
    def of(
        cls,
        posterior: Posterior,
        rule: Rule,
        structure: str,
        example: Any,
        allow_empty: bool,
        generator: torch.Generator | None,
        cost: Cost | None = None,
        inputs: Iterable[Any] = (),
        blocks: Multiples = ANY_NUMBER,
        timer: Timer | None = None,
        macs: float | None = None,
    ) -> Pruner:
        """Compute the relevances and, for units, the groups; with a cost, relevances are per cost.

        Activations are measured on `inputs`, and time by `timer`.
        """
        relevance = rule.relevance(statistics_of(posterior, rule), generator=generator)
        mean, variance = posterior.marginals()
        center = params.load_(copied(posterior.model).eval(), mean)
        if structure == "weights":  # those that were removed before stay so, and count as removed
            gone = {name: (mean[name] == 0) & (variance[name] == 0) for name in relevance}
            relevance = {name: value.masked_fill(gone[name], -math.inf) for name, value in relevance.items()}
        groups: list[UnitGroup] = []
        columns: Params = {}
        elimination, rows, room = None, (), None
        if structure != "weights":
            example = varied(example)
            first = first_matrix(center, example) if structure == "units" else None
            columns = {first: relevance[first]} if first in relevance else {}
            groups = _groups(center, example, structure)
            costs = None if cost is None else LayerCosts(center, groups, cost, example, timer)
            if rule.eliminates:
                rows = tuple(inputs)
                elimination = Elimination(center, groups, rows, data_precision(posterior), costs)
                relevance = elimination.relevance
            else:
                relevance = unit_relevance(center, groups, relevance, rule)
                relevance = relevance if costs is None else per_cost(groups, relevance, costs)
            require_units(relevance)
            if macs is not None and blocks.multiple > 1:
                room = Room.of(center, groups, LayerCosts(center, groups, "macs", example), example, macs)
        return cls(
            posterior, center, rule, relevance, groups, columns, example, allow_empty, elimination, rows, blocks, room
        )

    def at(self, rule: Rule, *, rough: bool = False) -> tuple[Plan, nn.Module]:
        """Return the plan and the network of `rule`, which may differ from ours only in how much it removes.

        A rough one has the shapes of the network, but its layers are not fitted to the outputs of the large one.
        """
        kept = {name: mask.cpu() for name, mask in rule.keep(self.relevance).items()}
        for group in self.groups if self.blocks.multiple > 1 else ():
            if not group.has_blocks:
                kept[group.name] = self.blocks.filled(kept[group.name], self.relevance[group.name].cpu())
        if self.room is not None:
            kept = self.room.used(kept, self.relevance, self.blocks)
        model = copied(self.center)
        if not self.groups:
            plan = Plan(kept, {}, None, rule).check(self.allow_empty, model)
            masked = plan.masked(self._adapted(model, kept))
            return replace(plan.check_lengths(masked), inputs=live_features(masked, self.example)), masked
        plan = unit_plan(model, self.groups, kept, rule, prunable(model)).check()
        plan = feature_plan(plan, self.columns, self.relevance, rule).check()
        changed: Masks = {name: mask for name, mask in kept.items() if not bool(mask.all())}
        columns = live_columns(plan, model, self.example)
        _, silent = silenced(model, self.groups, changed, self.example)
        # removed units have no input; their outgoing weights stay, for the constant that such a unit becomes
        silent = both(silent, columns)
        adapted = self._adapted(model, silent) if self.elimination is None else self.elimination.adapted(model, kept)
        quiet, _ = silenced(Plan(columns).masked(adapted), self.groups, changed, self.example)
        small = record_ranks_(shrink(quiet, self.groups, changed, self.example).eval())
        require_same(quiet, small, self.example)
        enough = sum(map(batches.num_rows, self.rows)) >= FEWEST_ROWS
        if changed and enough and not rough and not has_adapters(small):
            reconstruct_(small, self.center, plan.units, self.rows)
        counts: dict[str, dict[str, int]] = {}
        for name, attribute, _ in (each for group in self.groups if group.name in changed for each in group.counts):
            counts.setdefault(name, {})[attribute] = getattr(small.get_submodule(name), attribute)
        return replace(plan, inputs=live_features(small, self.example), silent=silent, counts=counts), small

    def _adapted(self, model: nn.Module, keep: Masks) -> nn.Module:
        """Move the kept weights to their conditional mean, if the rule does so and the posterior has one."""
        if not self.rule.adapts:
            return model
        try:
            return params.load_(model, self.posterior.conditional_mean(keep))
        except UnsupportedError:
            return model  # independent weights: the others do not move


def _groups(model: nn.Module, example: Any, structure: str) -> list[UnitGroup]:
    """Return the groups of units that can be removed: of adapters their ranks, for heads those of several outputs."""
    found = adapter_ranks(model) if has_adapters(model) else None
    if found is None and isinstance(example, torch.Tensor):
        found = trace(model, example)
    if found is None:
        found = probe(model, example)
        known = {(part.layer, side) for group in found for part, side in _sides(group)}
        try:
            others = depend(model, example)
        except UnsupportedError:
            if not found:
                raise
            others = []
        found += [g for g in others if not any((part.layer, side) in known for part, side in _sides(g))]
    found = removable(model, found)
    if structure == "units":
        return found
    heads = [group for group in found if group.has_blocks]
    if not heads:
        raise UnsupportedError('No attention heads were found in this network: use structure="units" or "weights".')
    return heads


def _sides(group: UnitGroup) -> list[tuple[LayerChannels, str]]:
    return [(part, "output") for part in group.producers] + [(part, "input") for part in group.consumers]


def live_columns(plan: Plan, model: nn.Module, example: Any) -> Masks:
    """Return a mask over the first matrix of a network, false in the columns of removed input features."""
    first = first_matrix(model, example)
    if first is None or plan.inputs is None:
        return {}
    return {first: plan.inputs.expand(model.get_parameter(first).shape)}


def adapter_ranks(model: nn.Module) -> list[UnitGroup]:
    """Return one group of units for every LoRA product; the frozen network beside them keeps its units."""
    groups = []
    for first, second in low_rank_pairs(model):
        if all(rule_for(model.get_submodule(name)) is not None for name in (first, second)):
            ranks = torch.arange(len(model.get_parameter(f"{first}.weight")))
            parts = (LayerChannels.whole(name, ranks) for name in (first, second))
            producer, consumer = parts
            groups.append(UnitGroup(len(ranks), (producer,), (), (consumer,), biases=False))
    return groups


def first_matrix(model: nn.Module, example: Any) -> str | None:
    """Return the name of the weight matrix that sees the input features, where inputs are plain features."""
    if not isinstance(example, Tensor) or example.ndim != 2 or not example.is_floating_point():
        return None
    name, value = next((name, value) for name, value in model.named_parameters() if value.ndim > 1)
    return name if value.shape[1:] == example.shape[1:] else None


def live_features(model: nn.Module, example: Any) -> Tensor | None:
    """Return a mask over the input features, false where the network does not use one; None if inputs are no features.

    The column of an unused feature in the first matrix is zero. Inputs may reach the outputs on another path too, so
    the gradient of the outputs with respect to the feature must be zero as well.
    """
    first = first_matrix(model, example)
    if first is None:
        return None
    inputs = example.detach().clone().requires_grad_()
    used = (model.get_parameter(first) != 0).any(0).cpu()
    try:
        outputs = params.call(model, inputs)
    except (RuntimeError, ValueError):  # it only runs without gradients
        return used
    if not outputs.requires_grad:  # the network disables gradients, or does not use its inputs
        return used
    weights = torch.rand(outputs.shape, generator=torch.Generator().manual_seed(0)).to(outputs)  # so that none cancel
    (gradients,) = torch.autograd.grad(outputs, inputs, weights, allow_unused=True)
    return used if gradients is None else used | (gradients != 0).any(0).cpu()
