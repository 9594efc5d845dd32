"""Which rule describes which module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from dubito.core.errors import UnsupportedError
from dubito.networks.layers.base import LayerRule, Side, how_to_add

_RULES: dict[type[nn.Module], LayerRule[Any]] = {}
# Rules for modules of other classes, each with the question that must be answered yes.
_ASKED: dict[Callable[[nn.Module], bool], LayerRule[Any]] = {}

R = TypeVar("R", bound=type[LayerRule[Any]])


def register(*layer_types: type[nn.Module]) -> Callable[[R], R]:
    """A class decorator: this rule describes the `forward` of these layer types. The last registration holds.

    A user's own layer joins every method this way, if its learned tensors are called `weight` and `bias`:

    >>> import torch
    >>> class Scale(nn.Module):
    ...     def __init__(self, size):
    ...         super().__init__()
    ...         self.weight = nn.Parameter(torch.ones(size))
    ...     def forward(self, x):
    ...         return x * self.weight
    >>> @register(Scale)
    ... class ScaleRule(LayerRule[Scale]):
    ...     def apply(self, layer, x, weight, bias):
    ...         return x * weight
    >>> type(rule_for(Scale(3))).__name__
    'ScaleRule'
    """

    def add(rule: R) -> R:
        _RULES.update(dict.fromkeys(layer_types, rule()))
        return rule

    return add


def register_where(question: Callable[[nn.Module], bool]) -> Callable[[R], R]:
    """A class decorator: this rule describes every module of an unknown class for which the question is true."""

    def add(rule: R) -> R:
        _ASKED[question] = rule()
        return rule

    return add


def registered_types() -> tuple[type[nn.Module], ...]:
    """Return the layer types that have a rule."""
    return tuple(_RULES)


def rule_for(module: nn.Module) -> LayerRule[Any] | None:
    """The rule that describes this module, or None.

    Rules are found by the class's method resolution order, but inheriting from a known layer is not enough: a rule
    holds only where the module really computes what the rule says. So there is none for

    - a class with its own `forward` (a LoRA or weight-standardised subclass), or an instance with one;
    - a weight that is recomputed from other tensors (parametrized, weight- or spectral-normalised, pruned by mask);
    - settings that the rule does not describe (an `nn.Embedding` with `max_norm`).

    A module of an unknown class has a rule where it is seen to compute what the rule says (`register_where`).

    A rule says nothing of how a module is used. `out_proj` inside `nn.MultiheadAttention` is a linear layer and has a
    rule, although attention reads its weight and never calls it: methods that rely on calls must check that they
    happen.
    """
    rule, obstacle = _find(module)
    return None if obstacle else rule


def require_rule(module: nn.Module, purpose: str = "this method") -> LayerRule[Any]:
    """Return the rule of a module, or raise an error that says why there is none and what to do."""
    rule, obstacle = _find(module)
    if rule is not None and obstacle is None:
        return rule
    raise UnsupportedError(f"{purpose} needs a layer rule for {type(module).__name__}, but {obstacle}")


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a normalization layer, by its class."""
    rule = class_rule(module)
    return rule is not None and rule.normalizes


def channel_axis(module: nn.Module, ndim: int) -> int:
    """The axis of the channels in an activation of `ndim` axes; the last one where no rule says which.

    >>> channel_axis(nn.Conv2d(3, 8, 3), 4), channel_axis(nn.Identity(), 4)
    (1, 3)
    """
    rule = class_rule(module)
    try:
        return ndim - 1 if rule is None else rule.channel_axis(module, ndim)
    except UnsupportedError:  # a rule of the user's without it
        return ndim - 1


def weight_axis(module: nn.Module, side: Side) -> int | None:
    """`LayerRule.weight_axis` by the module's class; a class without a rule has its outputs first, then its inputs.

    >>> weight_axis(nn.Linear(3, 2), "input"), weight_axis(nn.Embedding(3, 2), "input")
    (1, 0)
    """
    rule = class_rule(module)
    return ("output", "input").index(side) if rule is None else rule.weight_axis(module, side)


def class_rule(module: nn.Module) -> LayerRule[Any] | None:
    """The rule of the module's class, also where it does not describe this module's `forward`."""
    found = next((_RULES[cls] for cls in type(module).__mro__ if cls in _RULES), None)
    return _asked(module) if found is None else found


def _asked(module: nn.Module) -> LayerRule[Any] | None:
    """The rule that a module of an unknown class follows as its answers show."""
    return next((rule for question, rule in _ASKED.items() if question(module)), None)


def _find(module: nn.Module) -> tuple[LayerRule[Any] | None, str | None]:
    """Return the nearest rule by method resolution order, and why it does not apply."""
    known = next((cls for cls in type(module).__mro__ if cls in _RULES), None)
    if known is None and (rule := _asked(module)) is not None:
        return rule, None
    if known is None:  # a module may say itself why it has none
        return None, getattr(module, "no_rule_because", f"none is registered for its class; {how_to_add(module)}")
    rule = _RULES[known]
    return rule, _changed(module, known) or rule.obstacle(module)


def _changed(module: nn.Module, known: type[nn.Module]) -> str | None:
    """Return how the module's computation differs from that of its known class; None if it does not."""
    if parametrize.is_parametrized(module):
        return "its tensors are parametrized; call torch.nn.utils.parametrize.remove_parametrizations on it first"
    if type(module).forward is not known.forward or "forward" in vars(module):
        return f"its forward is not that of {known.__name__}; {how_to_add(module)}"
    for name in ("weight", "bias"):
        if hasattr(module, name) and name not in module._parameters:
            return (
                f"its {name} is not a parameter of its own but computed from other tensors; make it one first "
                "(remove_weight_norm, remove_spectral_norm or prune.remove in torch.nn.utils)"
            )
    if any(is_lazy(p) for p in module.parameters(recurse=False)):
        return "its weights have no shape yet; run one batch through the model first"
    return None
