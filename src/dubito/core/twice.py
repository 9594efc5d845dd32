"""Run a network so that torch can differentiate it twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode


@contextmanager
def differentiable_twice() -> Iterator[None]:
    """Compute attention by its plain implementation, and a hard sigmoid as a clamp: others have one derivative only."""
    with sdpa_kernel(SDPBackend.MATH), _Plain():
        yield


class _Plain(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return (_hardsigmoid if func is F.hardsigmoid else func)(*args, **(kwargs or {}))


def _hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    return F.relu6(input + 3) / 6
