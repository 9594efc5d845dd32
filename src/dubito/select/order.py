"""Rank the weights of any rule in the order in which a sweep over the size of a selection adds them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Likelihood
from dubito.core.batches import Source
from dubito.core.errors import InputError
from dubito.networks.selection import Selection
from dubito.select.ranking import RankedRule, Ranking
from dubito.select.rule import Both, Either, Not, SelectionRule
from dubito.select.subnetwork import subnetwork


def rank(
    rule: SelectionRule,
    model: nn.Module,
    source: Source,
    likelihood: Likelihood,
    prior_precision: float,
    generator: torch.Generator,
) -> Ranking:
    """Resolve any rule that chooses weights, and rank its weights.

    Rules with a size rank their weights. In a union of one such rule with others, the weights of the others come first,
    without an order. All other selections have no order.
    """
    how = (source, likelihood, prior_precision, generator)
    if isinstance(rule, RankedRule):
        return rule.rank(model, *how)
    if isinstance(rule, Either):
        return _union(model, rank(rule.first, model, *how), rank(rule.second, model, *how))
    selection = rule.resolve(model, *how)
    _require_trainable(rule, model, selection)
    return Ranking(selection, torch.arange(selection.num_weights), selection.num_weights)


def resized(rule: SelectionRule, size: float) -> SelectionRule:
    """Return the rule with another size; of a union, the size of the one part that has a size is changed."""
    found = _resized(rule, size)
    if len(found) != 1:
        raise InputError(
            f"{rule!r} has {'no size' if not found else 'several sizes'}, so `largest` cannot change it: leave it out."
        )
    return found[0]


def context_of(rule: SelectionRule) -> Any:
    """Return the context inputs of a rule, if exactly one of its parts has any."""
    found = [part.context for part in _parts(rule) if isinstance(part, subnetwork) and part.context is not None]
    return found[0] if len(found) == 1 else None


def _union(model: nn.Module, first: Ranking, second: Ranking) -> Ranking:
    """Rank the weights of both rankings, those without an order first; two orders give none."""
    everything = Selection.all_of(model)
    lead, rest = (first, second) if second.is_ordered else (second, first)
    before, after = _positions(everything, lead), _positions(everything, rest)
    new = ~torch.isin(after, before)
    order = torch.cat([before, after[new]])
    together = len(order) if lead.is_ordered else len(before) + int(new[: rest.together].sum())
    covered = together == len(order) if rest.is_ordered else lead.covered or rest.covered
    return Ranking(everything, order, together, covered and not lead.is_ordered)


def _positions(everything: Selection, ranking: Ranking) -> Tensor:
    """Return the positions of the weights of a ranking among all trainable weights."""
    numbers = everything.fill(torch.arange(everything.num_weights))
    return ranking.candidates.ravel(numbers)[ranking.order]


def _resized(rule: SelectionRule, size: float) -> list[SelectionRule]:
    """Return the rule with another size, once for each part of a union that has a size."""
    if isinstance(rule, Either):
        return [
            *(rule.replace(first=part) for part in _resized(rule.first, size)),
            *(rule.replace(second=part) for part in _resized(rule.second, size)),
        ]
    return [rule.replace(size=size)] if isinstance(rule, RankedRule) else []


def _parts(rule: SelectionRule) -> list[SelectionRule]:
    if isinstance(rule, Either | Both):
        return [*_parts(rule.first), *_parts(rule.second)]
    return _parts(rule.rule) if isinstance(rule, Not) else [rule]


def _require_trainable(rule: SelectionRule, model: nn.Module, selection: Selection) -> None:
    if selection.num_weights == 0:
        raise InputError(f"{rule!r} selects no weight: choose another rule.")
    for name in selection.names:
        if not model.get_parameter(name).requires_grad:
            raise InputError(
                f"{rule!r} selects weights of '{name}', which is frozen: a report compares with all trainable weights."
            )
