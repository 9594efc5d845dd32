"""The base of all pruning rules: a score for each weight, and how much is removed."""

from __future__ import annotations

import fnmatch
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from dubito.core.arguments import checked_arguments
from dubito.core.constraints import Probability
from dubito.core.errors import InputError, UnsupportedError
from dubito.core.params import Params
from dubito.core.settings import Setting, setting

Threshold = Annotated[float | Mapping[str, float], "a number or a dict of them"]
Target = Annotated[Probability | Mapping[str, Probability], "a fraction from 0 to 1 or a dict of them"]
Reduction = Literal["max", "mean", "sum", "norm"]
Masks = dict[str, Tensor]

REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "max": torch.amax, "mean": torch.mean, "sum": torch.sum, "norm": torch.linalg.vector_norm,
}  # fmt: skip


@dataclass(frozen=True)
class WeightStatistics:
    """Hold what a rule may use to score weights, in the shapes of the prunable parameters.

    Args:
        mean: The means μ.
        variance: The variances σ², 0 where a weight is not random.
        precision: The diagonal of the posterior's precision; 1/σ² where weights are independent.
        prior: Mean and variance before the data, or None where there are none.
        no_prior: Why there is no prior, as a sentence.
        groups: What a posterior under a prior of groups says of them (`posterior.groups()`); else nothing.
    """

    mean: Params
    variance: Params
    precision: Params
    prior: tuple[Params, Params] | None = None
    no_prior: str = "This posterior has no prior."
    groups: tuple[Any, ...] = ()

    def map(self, function: Callable[..., Tensor], *columns: Params) -> Params:
        """Apply a function name by name, in float64."""
        return {name: function(*(column[name].double() for column in columns)) for name in self.mean}


@setting
class Rule(Setting, ABC):
    """The base of all rules: a score for each weight, and how much is removed.

    Args:
        threshold: Where to cut: a number, or one per layer as a dict by layer or parameter name, or by a pattern
            (``{"fc1": 3, "conv*": 1}``); layers that no name fits stay whole.
        target: Instead: the fraction of weights to remove, or one per layer.
        max_drop: Instead: the accuracy that may be lost on held-out data (for regression: the relative rise of the
            root mean squared error).
        scope: Whether a single target holds over all layers together, or in each.
        reduce: How the weights of a unit speak together; each rule has its own default.
    """

    removes: ClassVar[Literal["above", "below"]] = "below"
    """Whether weights above or below the threshold are removed; at the threshold, those of an "above" rule are."""
    needs_variance: ClassVar[bool] = True
    default_threshold: ClassVar[float | None] = None
    default_reduction: ClassVar[Reduction] = "max"
    needs_precision: ClassVar[bool] = False

    threshold: Threshold | None = field(default=None, kw_only=True)
    target: Target | None = field(default=None, kw_only=True)
    max_drop: Annotated[Probability, "a fraction from 0 to 1"] | None = field(default=None, kw_only=True)
    scope: Literal["global", "layer"] = field(default="global", kw_only=True)
    reduce: Reduction | None = field(default=None, kw_only=True)

    @property
    def adapts(self) -> bool:
        """Whether the weights that stay move to their mean given that the removed ones are zero."""
        return False

    @property
    def eliminates(self) -> bool:
        """Whether units go one after the other, while the layers that read them adapt (`elimination`)."""
        return False

    @abstractmethod
    def scores(self, statistics: WeightStatistics, *, generator: torch.Generator | None = None) -> Params:
        """Return the score of each weight."""

    def relevance(self, statistics: WeightStatistics, *, generator: torch.Generator | None = None) -> Params:
        """Return the scores, signed so that low ones go first, and +∞ where a weight is not random."""
        if self.needs_variance and not any(bool((v > 0).any()) for v in statistics.variance.values()):
            raise UnsupportedError(
                f"{self!r} needs a posterior with variances above 0, but all are 0: fit Laplace(...) or "
                "Variational(...), or use rules.Magnitude(target)."
            )
        scores, sign = self.scores(statistics, generator=generator), -1.0 if self.removes == "above" else 1.0
        if not self.needs_variance:
            return {name: sign * score for name, score in scores.items()}
        return {n: torch.where(statistics.variance[n] > 0, sign * score, math.inf) for n, score in scores.items()}

    def reduced(self, rows: Tensor) -> Tensor:
        """Reduce relevances ``[units, weights]`` to one per unit."""
        return REDUCTIONS[self.reduce or self.default_reduction](rows, dim=1)

    def keep(self, relevance: Params) -> Masks:
        """Return one mask per tensor of relevances, true where a weight or unit is kept."""
        if self.max_drop is not None:
            raise InputError(f"{self!r} decides by held-out data: give `data=` to dubito.compress.")
        if self.target is not None:
            return self._by_target(relevance, self.target)
        if (level := self.default_threshold if self.threshold is None else self.threshold) is None:
            raise InputError(f"{self!r} does not say how much to remove: give target=, threshold= or max_drop=.")
        masks = {name: torch.ones_like(value, dtype=torch.bool) for name, value in relevance.items()}
        return masks | {n: self._stays(relevance[n], at) for n, at in _by_name(level, relevance, repr(self)).items()}

    def require_no_amount(self, where: str) -> Self:
        """Return the rule if it does not say how much to remove; `where` begins the error."""
        if (self.max_drop, self.target, self.threshold) != (None,) * 3:
            raise InputError(f"{where} a rule only ranks: leave its amount out of {self!r}.")
        return self

    def _stays(self, relevance: Tensor, threshold: float) -> Tensor:
        return relevance > -threshold if self.removes == "above" else relevance >= threshold

    def _by_target(self, relevance: Params, target: Target) -> Masks:
        if self.scope == "global" and not isinstance(target, Mapping):
            return lowest_removed(relevance, target)
        masks = {name: torch.ones_like(value, dtype=torch.bool) for name, value in relevance.items()}
        for name, fraction in _by_name(target, relevance, repr(self)).items():
            masks |= lowest_removed({name: relevance[name]}, fraction)
        return masks

    def __post_init__(self) -> None:
        given = [name for name in ("threshold", "target", "max_drop") if getattr(self, name) is not None]
        if len(given) > 1:
            raise InputError(f"{self.setting_name} takes one of threshold, target and max_drop, got {given}.")
        kinds = [kind for kind in REDUCTIONS if kind != "norm" or self.removes == "below"]  # a norm has no sign
        if self.reduce is not None and self.reduce not in kinds:
            raise InputError(f"`reduce` of {self.setting_name} must be one of {', '.join(kinds)}, got {self.reduce!r}.")


@checked_arguments
def lowest_removed(relevance: Params, fraction: Probability) -> Masks:
    """Keep all but a fraction of the finite relevances; of equal ones the earlier is removed, so the count is exact.

    >>> lowest_removed({"a": torch.tensor([3.0, 1.0]), "b": torch.tensor([2.0, math.inf])}, 2 / 3)
    {'a': tensor([ True, False]), 'b': tensor([False,  True])}
    """
    if not relevance:
        return {}
    flat = torch.cat([value.reshape(-1) for value in relevance.values()])
    count = round(fraction * int((flat != math.inf).sum()))
    keep = torch.ones(len(flat), dtype=torch.bool, device=flat.device)
    keep[torch.argsort(flat, stable=True)[:count]] = False
    parts = keep.split([value.numel() for value in relevance.values()])
    return {name: part.reshape(relevance[name].shape) for name, part in zip(relevance, parts, strict=True)}


def _by_name(amount: Threshold, relevance: Params, rule: str) -> dict[str, float]:
    if not isinstance(amount, Mapping):
        return dict.fromkeys(relevance, amount)
    found: dict[str, float] = {}
    for key, number in amount.items():
        fitting = [n for n in relevance if fnmatch.fnmatchcase(n, key) or n == key or n.startswith(f"{key}.")]
        if not fitting:
            raise InputError(f"{rule} names '{key}', which cannot be pruned: use one of {', '.join(relevance)}.")
        found |= dict.fromkeys(fitting, number)
    return found
