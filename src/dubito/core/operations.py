"""Count the floating-point operations of matrix products and convolutions."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class OperationCounter(TorchDispatchMode):
    """Count the floating-point operations inside of a ``with`` block, as torch's `FlopCounterMode` does.

    Attributes:
        total: The number of operations so far; a multiplication and an addition are two.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first call imports torch's compiler, which takes seconds

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        count = flop_registry.get(getattr(func, "_overloadpacket", None))
        if count is None and hasattr(func, "decompose"):
            with self:
                found = func.decompose(*args, **given)
            if found is not NotImplemented:
                return found
        found = func(*args, **given)
        if count is not None:
            self.total += int(count(*args, **given, out_val=found))
        return found
