"""Copies of a network that share the memory of its weights: each may be called, hooked and lent weights by itself."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


@torch.inference_mode(False)
def twin(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Return a copy of a network whose parameters lie in the same memory; all else, buffers too, is its own.

    A call with other weights, a hook, a flag or a written buffer on one of the two is not seen by the other. Gradients
    and `requires_grad` are apart as well. What nobody does to a twin is to write into its parameters.

    Args:
        model: The network.
        memo: What was copied before, as `copy.deepcopy` has it, where several modules have parts in common.

    >>> one = nn.Linear(2, 2)
    >>> other = twin(one)
    >>> other is one, other.weight is one.weight, other.weight.data_ptr() == one.weight.data_ptr()
    (False, False, True)
    """
    memo = {} if memo is None else memo
    for value in model.parameters():
        if type(value) is nn.Parameter and id(value) not in memo:  # other kinds know themselves how to be copied
            memo[id(value)] = nn.Parameter(value.detach(), requires_grad=value.requires_grad)
    with torch.no_grad():  # else the weights of a `torch.jit.ScriptModule` would be functions of the ones copied
        copied = copy.deepcopy(model, memo)
    own = dict(model.named_parameters(remove_duplicate=False))
    for name, value in copied.named_parameters():
        if value.requires_grad != own[name].requires_grad:
            value.requires_grad_(own[name].requires_grad)
    return copied


class BufferVersions:
    """The buffers of some networks, as they are now; `unchanged` says whether anything has written to them since."""

    def __init__(self, models: list[nn.Module]) -> None:
        modules = {id(module): module for model in models for module in model.modules()}.values()
        self._seen = [
            (module._buffers, name, value, _version(value))
            for module in modules for name, value in module._buffers.items() if value is not None
        ]  # fmt: skip

    def unchanged(self) -> bool:
        """Whether every buffer is the tensor it was, and nothing has written into it."""
        return all(now.get(name) is value and _version(value) == then for now, name, value, then in self._seen)


def _version(value: Tensor) -> int:
    return -1 if value.is_inference() else value._version
