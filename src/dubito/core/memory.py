"""`TensorMemory`: values that are computed once, but not while a graph is recorded."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Self

from torch import Tensor


class TensorMemory(dict[Any, Tensor]):
    """A dict of tensors in which nothing of a recording stays.

    While torch records a graph, tensors have no values (`FakeTensor`). These are returned to the thread that stored
    them, and never found by another look-up, which would use them in a prediction.

    >>> import torch
    >>> memory = TensorMemory()
    >>> memory["a"] = torch.ones(2)
    >>> "a" in memory
    True
    """

    def __init__(self) -> None:
        super().__init__()
        self._recorded = threading.local()

    def __setitem__(self, key: Any, value: Tensor) -> None:
        if type(value) is Tensor:
            super().__setitem__(key, value)
        else:
            vars(self._recorded)[key] = value

    def __getitem__(self, key: Any) -> Tensor:
        if key in self:
            return super().__getitem__(key)
        found: Tensor = vars(self._recorded)[key]
        return found

    def __ior__(self, other: Mapping[Any, Tensor]) -> Self:  # type: ignore[override, misc]
        for key, value in other.items():
            self[key] = value
        return self

    def __copy__(self) -> TensorMemory:
        return TensorMemory()

    def __deepcopy__(self, memo: Any) -> TensorMemory:
        return TensorMemory()
