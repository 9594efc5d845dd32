"""Copies of a network, and twins, which share the memory of its weights but can be called and hooked on their own."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dubito.core.params import Frozen

M = TypeVar("M", bound=nn.Module)


def copied(model: M, memo: dict[int, Any] | None = None) -> M:
    """Return a deep copy of a network, also of one that keeps results of its last call, such as attention weights.

    `copy.deepcopy` refuses such results if they have gradients. The copy has them without.

    >>> model = nn.Linear(2, 2)
    >>> model.last = model(torch.ones(1, 2))
    >>> copied(model).last.requires_grad
    False
    """
    with _WithoutGraphs():
        return copy.deepcopy(model, _with_empty_containers(model, memo))


def _with_empty_containers(model: nn.Module, memo: dict[int, Any] | None) -> dict[int, Any]:
    """Return the memo with a copy of each empty container of a module, such as the dicts of its hooks.

    There are about ten in each module, and `copy.deepcopy` takes most of its time for them.
    """
    memo = {} if memo is None else memo
    for module in model.modules():
        for value in vars(module).values():
            if type(value) in (OrderedDict, set) and not value:
                memo.setdefault(id(value), type(value)())
    return memo


def light_copy(model: M, memo: Mapping[int, Any] | None = None) -> M:
    """Return a deep copy whose `Frozen` weights share the memory of the model's; they must not be written to."""
    frozen = {id(value): Frozen.of(value) for value in model.parameters() if isinstance(value, Frozen)}
    return copied(model, {**frozen, **(memo or {})})


class _WithoutGraphs(TorchFunctionMode):
    """Let `copy.deepcopy` copy the values of tensors that were computed from others."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            value, memo = args
            if id(value) not in memo:
                memo[id(value)] = value.detach().clone()
            return memo[id(value)]
        return func(*args, **(kwargs or {}))


@torch.inference_mode(False)
def twin(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Return a copy of a network whose parameters share its memory; everything else, including buffers, is copied.

    Calls with other weights, hooks, flags, changed buffers, gradients and `requires_grad` of one do not affect the
    other. The parameters of a twin must not be changed in place.

    Args:
        model: The network.
        memo: The memo of `copy.deepcopy`, if several modules share parts.

    >>> one = nn.Linear(2, 2)
    >>> other = twin(one)
    >>> other is one, other.weight is one.weight, other.weight.data_ptr() == one.weight.data_ptr()
    (False, False, True)
    """
    memo = {} if memo is None else memo
    for value in model.parameters():
        if type(value) in (nn.Parameter, Frozen) and id(value) not in memo:  # other kinds define how they are copied
            memo[id(value)] = type(value)(value.detach(), requires_grad=value.requires_grad)
    with torch.no_grad():  # else the copied weights of a `torch.jit.ScriptModule` would not be leaves
        other = copied(model, memo)
    own = dict(model.named_parameters(remove_duplicate=False))
    for name, value in other.named_parameters():
        if value.requires_grad != own[name].requires_grad:
            value.requires_grad_(own[name].requires_grad)
    return other


class BufferVersions:
    """The versions of the buffers of some networks; `unchanged` tells whether they have been written to since."""

    def __init__(self, models: list[nn.Module]) -> None:
        modules = {id(module): module for model in models for module in model.modules()}.values()
        self._seen = [
            (module._buffers, name, value, version_of(value))
            for module in modules for name, value in module._buffers.items() if value is not None
        ]  # fmt: skip

    def unchanged(self) -> bool:
        """Return whether every buffer is the same tensor and has not been written to."""
        return all(now.get(name) is value and version_of(value) == then for now, name, value, then in self._seen)


def version_of(value: Tensor) -> int:
    """Return how often a tensor has been written to."""
    return -1 if value.is_inference() else value._version
