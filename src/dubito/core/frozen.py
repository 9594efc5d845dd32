"""Weights of a frozen base, in memory that the user's network owns: they are shared, never written to, never saved."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn


class Frozen(nn.Parameter):
    """A parameter whose memory belongs to another network.

    A deep copy of it is an ordinary parameter with memory of its own, which may be written to.

    >>> import copy
    >>> base = nn.Parameter(torch.ones(2), requires_grad=False)
    >>> shared = Frozen.of(base)
    >>> shared.data_ptr() == base.data_ptr(), type(copy.deepcopy(shared)).__name__
    (True, 'Parameter')
    """

    @classmethod
    def of(cls, value: Tensor) -> Self:
        """Return a frozen parameter in the memory of a tensor."""
        return cls(value.detach(), requires_grad=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), requires_grad=self.requires_grad)
        found: nn.Parameter = memo[id(self)]
        return found

    def load_(self, value: Tensor) -> None:
        """Refer to other values; the present ones stay as they are, because others may use them."""
        if value.data_ptr() != self.data_ptr() and not torch.equal(value.to(self), self.detach()):
            self.data = value.detach().to(self).clone()


def frozen_names(model: nn.Module) -> list[str]:
    """Return the names of the frozen parameters of a private network."""
    return [name for name, value in model.named_parameters() if isinstance(value, Frozen)]
