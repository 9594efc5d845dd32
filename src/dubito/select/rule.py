"""`SelectionRule`, the base class of rules that choose the random weights, and their operators ``|``, ``&``, ``~``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from dubito.core.arguments import checked_arguments
from dubito.core.errors import InputError
from dubito.core.settings import Setting, setting
from dubito.networks.selection import Selection
from dubito.select.given import for_users

if TYPE_CHECKING:
    import torch
    from torch import nn

    from dubito.beliefs.likelihoods import Likelihood
    from dubito.core.batches import Data, Source
    from dubito.select.report import SubnetworkReport


@setting
class SelectionRule(Setting, ABC):
    """Base class of selection rules: frozen settings that become a `Selection` once there is a model and data."""

    described = "one of dubito.select"
    is_set: ClassVar[bool] = True
    """Whether the rule chooses single weights, so that it can be combined with others, and not directions."""

    selects_all: ClassVar[bool] = False
    """Whether all trainable weights are chosen, without looking at the data."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in {"resolve", "rank"} & set(cls.__dict__):
            setattr(cls, name, for_users(getattr(cls, name)))

    @abstractmethod
    def resolve(
        self,
        model: nn.Module,
        data: Data | Source | None = None,
        likelihood: Likelihood | None = None,
        prior_precision: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Selection:
        """Choose the random weights. Rules that use only names ignore all arguments but `model`."""

    @checked_arguments
    def report(self, model: nn.Module, data: Data, **options: Any) -> SubnetworkReport:
        """Measure how much of the posterior over all weights these ones keep; see `dubito.select.report.report`."""
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
    """The union of two rules, ``a | b``."""

    setting_name = "select.either"
    first: SelectionRule
    second: SelectionRule

    def resolve(self, model: nn.Module, *args: Any, **kwargs: Any) -> Selection:
        """Return the union of the two selections."""
        return self.first.resolve(model, *args, **kwargs) | self.second.resolve(model, *args, **kwargs)

    def __repr__(self) -> str:
        return f"{self.first!r} | {_bracketed(self.second, Either)}"


@setting
class Both(SelectionRule):
    """The intersection of two rules, ``a & b``."""

    setting_name = "select.both"
    first: SelectionRule
    second: SelectionRule

    def resolve(self, model: nn.Module, *args: Any, **kwargs: Any) -> Selection:
        """Return the intersection of the two selections."""
        return self.first.resolve(model, *args, **kwargs) & self.second.resolve(model, *args, **kwargs)

    def __repr__(self) -> str:
        return f"{_bracketed(self.first, Either)} & {_bracketed(self.second, Either, Both)}"


@setting
class Not(SelectionRule):
    """All trainable weights that a rule does not choose, ``~a``."""

    setting_name = "select.complement"
    rule: SelectionRule

    def resolve(self, model: nn.Module, *args: Any, **kwargs: Any) -> Selection:
        """Return the complement of the selection among the trainable weights."""
        return Selection.all_of(model) & ~self.rule.resolve(model, *args, **kwargs)

    def __repr__(self) -> str:
        return f"~{_bracketed(self.rule, Either, Both)}"


def _as_set(rule: SelectionRule) -> SelectionRule:
    if not isinstance(rule, SelectionRule):
        raise InputError(f"{rule!r} is not a selection rule: combine only rules of dubito.select with |, & or ~.")
    if not rule.is_set:
        raise InputError(f"{rule!r} chooses directions, not weights: it cannot be combined with |, & or ~.")
    return rule


def _bracketed(rule: SelectionRule, *looser: type[SelectionRule]) -> str:
    return f"({rule!r})" if isinstance(rule, looser) else repr(rule)
