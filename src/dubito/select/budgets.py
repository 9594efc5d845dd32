"""The candidates of a selection, and how many may be chosen from each group."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dubito.core.errors import InputError
from dubito.networks.layers import is_norm
from dubito.networks.selection import Selection
from dubito.select.names import all as all_weights
from dubito.select.names import layers
from dubito.select.ranking import count_of
from dubito.select.rule import SelectionRule


def candidates_of(setting: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Selection:
    """Return the weights to choose from: all trainable ones, ``"weights"``, layers by name or type, or a rule's."""
    trainable = all_weights().resolve(model)
    if setting is None:
        return trainable
    if isinstance(setting, SelectionRule):
        chosen = setting.resolve(model, *args, **kwargs) & trainable
    elif isinstance(setting, str) and setting == "weights":
        chosen = Selection.all_of(model, _weights_only(model, trainable.names))
    else:
        chosen = layers(setting).resolve(model)
    if chosen.num_weights == 0:
        raise InputError(f"candidates={setting!r} leaves no trainable weight to choose from: choose other candidates.")
    return chosen


def _weights_only(model: nn.Module, names: list[str]) -> list[str]:
    """Return the parameters that are neither biases nor part of a normalization layer."""
    kept = []
    for name in names:
        path, _, leaf = name.rpartition(".")
        norm = is_norm(model.get_submodule(path))
        if model.get_parameter(name).ndim > 1 and "bias" not in leaf and not norm:
            kept.append(name)
    return kept


@dataclass(frozen=True)
class SelectionBudget:
    """The number of candidates to choose, in total and at most from each group.

    Args:
        count: The total number.
        group: The group of each candidate, ``[n]``; −1 for a candidate without a limit.
        limits: The limit of each group.

    >>> two_of_each = SelectionBudget(3, torch.tensor([0, 0, 0, 1]), [2, 2])
    >>> two_of_each.best(torch.tensor([5.0, 9.0, 7.0, 1.0])).tolist()
    [1, 2, 3]
    """

    count: int
    group: Tensor
    limits: list[int] = field(default_factory=list)

    def best(self, scores: Tensor) -> Tensor:
        """Return the best-scored candidates that the limits allow, the best first; ties go to the earlier one."""
        allowed = torch.ones(len(scores), dtype=torch.bool)
        for index, limit in enumerate(self.limits):
            members = (self.group == index).nonzero().squeeze(1)
            allowed[members[torch.argsort(scores[members], descending=True, stable=True)[limit:]]] = False
        where = allowed.nonzero().squeeze(1)
        left = scores[where]
        least = torch.kthvalue(left, len(left) - self.count + 1).values  # linear time, unlike sorting all of them
        ties = (left == least).nonzero().squeeze(1)[: self.count - int((left > least).sum())]
        chosen = torch.cat([(left > least).nonzero().squeeze(1), ties]).sort().values
        return where[chosen[torch.argsort(left[chosen], descending=True, stable=True)]]

    def widened(self, count: int) -> SelectionBudget:
        """Return a larger budget whose limits grow in proportion, so that this budget can be met from its choice."""
        factor = math.ceil(count / self.count)
        limits = [factor * limit for limit in self.limits]
        return SelectionBudget(min(count, _available(self.group, limits)), self.group, limits)

    def of(self, chosen: Tensor) -> SelectionBudget:
        """Return the same budget for some of the candidates."""
        return SelectionBudget(self.count, self.group[chosen], self.limits)


def make_budget(candidates: Selection, size: float, per_layer: str | Mapping[str, float] | None) -> SelectionBudget:
    """Return the budget of these candidates for `size` and `per_layer`."""
    total = candidates.num_weights
    count = count_of(size, total)
    group = torch.full((total,), -1)
    if per_layer is None:
        return SelectionBudget(count, group)
    if isinstance(per_layer, str):
        limits = _proportional(count, [span.stop - span.start for span in candidates.slices.values()])
        for index, span in enumerate(candidates.slices.values()):
            group[span] = index
        return SelectionBudget(count, group, limits)
    keys = list(per_layer)
    for name, span in candidates.slices.items():
        fitting = [key for key in keys if f".{key}." in f".{name}."]
        if fitting:
            group[span] = keys.index(max(fitting, key=len))
    limits = [_limit(key, per_layer[key], int((group == index).sum())) for index, key in enumerate(keys)]
    available = _available(group, limits)
    if available < count:
        raise InputError(f"`per_layer` allows only {available:,} weights in total, but `size` is {count:,}: raise it.")
    return SelectionBudget(count, group, limits)


def _limit(key: str, size: float, members: int) -> int:
    if members == 0:
        raise InputError(f"`per_layer` has the key '{key}', but no candidate has this name: check its spelling.")
    if size == 0:
        return 0
    return members if size >= members else count_of(size, members)


def _available(group: Tensor, limits: list[int]) -> int:
    within = sum(min(limit, int((group == index).sum())) for index, limit in enumerate(limits))
    return int((group < 0).sum()) + within


def _proportional(count: int, sizes: list[int]) -> list[int]:
    """Divide `count` in proportion to `sizes` into whole numbers; the largest remainders are rounded up.

    >>> _proportional(10, [70, 20, 10, 5])
    [7, 2, 1, 0]
    """
    exact = [count * size / sum(sizes) for size in sizes]
    shares = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda i: shares[i] - exact[i])
    for i in by_remainder[: count - sum(shares)]:
        shares[i] += 1
    return shares
