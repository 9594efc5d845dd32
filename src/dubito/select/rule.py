"""`SelectionRule`: how to choose the random weights, and the algebra of rules (``|``, ``&``, ``~``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from dubito.core.arguments import checked_arguments
from dubito.core.errors import InputError
from dubito.core.settings import Setting, setting
from dubito.networks.selection import Selection

if TYPE_CHECKING:
    import torch
    from torch import nn

    from dubito.beliefs.likelihoods import Likelihood
    from dubito.core.batches import Data, Source
    from dubito.select.report import SubnetworkReport


@setting
class SelectionRule(Setting, ABC):
    """How to choose the random weights: a frozen setting that becomes a `Selection` once there is a model and data."""

    described = "one of dubito.select"
    is_set: ClassVar[bool] = True
    """Whether single weights are chosen, so that rules can be combined; directions of a subspace are no set."""

    @abstractmethod
    def resolve(
        self,
        model: nn.Module,
        data: Data | Source | None = None,
        likelihood: Likelihood | None = None,
        prior_precision: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Selection:
        """Decide. Rules that look only at names ignore everything but `model`."""

    @checked_arguments
    def report(self, model: nn.Module, data: Data, **options: Any) -> SubnetworkReport:
        """Say how much of the posterior over all weights these ones keep; see `dubito.select.report.report`."""
        from dubito.select.report import report

        return report(self, model, data, **options)

    def __or__(self, other: SelectionRule) -> SelectionRule:
        return Either(_as_set(self), _as_set(other))

    def __and__(self, other: SelectionRule) -> SelectionRule:
        return Both(_as_set(self), _as_set(other))

    def __invert__(self) -> SelectionRule:
        return Not(_as_set(self))


@setting
class Either(SelectionRule):
    """The union of two rules; what ``a | b`` makes."""

    setting_name = "select.either"
    first: SelectionRule
    second: SelectionRule

    def resolve(self, model: nn.Module, *args: Any, **kwargs: Any) -> Selection:
        """Union of the two selections."""
        return self.first.resolve(model, *args, **kwargs) | self.second.resolve(model, *args, **kwargs)

    def __repr__(self) -> str:
        return f"{self.first!r} | {_bracketed(self.second, Either)}"


@setting
class Both(SelectionRule):
    """The intersection of two rules; what ``a & b`` makes."""

    setting_name = "select.both"
    first: SelectionRule
    second: SelectionRule

    def resolve(self, model: nn.Module, *args: Any, **kwargs: Any) -> Selection:
        """Intersection of the two selections."""
        return self.first.resolve(model, *args, **kwargs) & self.second.resolve(model, *args, **kwargs)

    def __repr__(self) -> str:
        return f"{_bracketed(self.first, Either)} & {_bracketed(self.second, Either, Both)}"


@setting
class Not(SelectionRule):
    """All trainable weights that a rule does not choose; what ``~a`` makes."""

    setting_name = "select.complement"
    rule: SelectionRule

    def resolve(self, model: nn.Module, *args: Any, **kwargs: Any) -> Selection:
        """Complement of the selection among the trainable weights."""
        return Selection.all_of(model) & ~self.rule.resolve(model, *args, **kwargs)

    def __repr__(self) -> str:
        return f"~{_bracketed(self.rule, Either, Both)}"


def _as_set(rule: SelectionRule) -> SelectionRule:
    if not isinstance(rule, SelectionRule):
        raise InputError(f"{rule!r} is no selection: only selections can be combined with |, & or ~.")
    if not rule.is_set:
        raise InputError(f"{rule!r} chooses directions, not weights: it cannot be combined with |, & or ~.")
    return rule


def _bracketed(rule: SelectionRule, *looser: type[SelectionRule]) -> str:
    return f"({rule!r})" if isinstance(rule, looser) else repr(rule)
