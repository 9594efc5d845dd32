"""`SelectionRule`, the base class of rules that choose the random weights, and their operators ``|``, ``&``, ``~``."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from dubito.beliefs import likelihoods
from dubito.core import distributed, params
from dubito.core.arguments import checked_arguments
from dubito.core.batches import Source
from dubito.core.errors import InputError
from dubito.core.randomness import restoring_generators
from dubito.core.settings import Setting, setting
from dubito.fitting.checks import check_source, explaining_shapes
from dubito.fitting.working_copies import check_model, shared_copy
from dubito.networks.selection import Selection

if TYPE_CHECKING:
    import torch

    from dubito.beliefs.likelihoods import Likelihood
    from dubito.core.batches import Data
    from dubito.select.report import SubnetworkReport


# The batch size for data that is not batched yet.
BATCH_SIZE = 512


@contextmanager
def given(model: nn.Module, data: Any, likelihood: Any) -> Iterator[tuple[nn.Module, Source]]:
    """Yield a private copy of the model and the data as a `Source` for it, both checked.

    Errors of the network inside the block are explained if the batches have different shapes.
    """
    with restoring_generators(), distributed.together():
        private = shared_copy(model)
        weight = next(private.parameters())
        source = Source(data, batch_size=BATCH_SIZE, must_count=False, device=weight.device, dtype=weight.dtype)
        source.agree()
        known = likelihoods.resolve("categorical" if likelihood is None else likelihood)
        check_source(private, known, source)
        with explaining_shapes(source):
            yield private, source


def for_users(resolve: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rule's `resolve` that takes data in any form and checks it; a fit gives a `Source`, checked already."""

    @functools.wraps(resolve)
    def checked(
        self: Any, model: nn.Module, data: Any = None, likelihood: Any = None, *args: Any, **options: Any
    ) -> Any:
        if data is None or isinstance(data, Source):
            check_model(model)
            return resolve(self, params.unwrapped(model), data, likelihood, *args, **options)
        with given(model, data, likelihood) as (private, source):
            return resolve(self, private, source, likelihood, *args, **options)

    return checked


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
