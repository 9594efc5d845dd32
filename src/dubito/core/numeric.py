"""Numerical helpers that several methods share, and a counter of floating-point operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


def normal_log_density(z: Tensor, log_scale: Tensor) -> Tensor:
    """Return the log-density of a normal distribution at `z` standard deviations from its mean."""
    return -0.5 * z.square() - log_scale - 0.5 * math.log(2 * math.pi)


def log_gamma_ratio(x: Tensor, shift: Tensor | float) -> Tensor:
    r"""Return $\log\Gamma(x + s) - \log\Gamma(x)$ for positive `x` and a shift `s` of at least 0.

    The difference of two log-gammas loses the digits of large `x`; from 64 on, that of Stirling's series is exact to
    rounding.

    >>> log_gamma_ratio(torch.tensor([3.0, 1e8], dtype=torch.float64), 1.0).exp().round(decimals=4).tolist()  # x
    [3.0, 100000000.0]
    """
    large, small = x.clamp_min(64.0), x.clamp_max(64.0)
    stirling = (large - 0.5) * torch.log1p(shift / large) + shift * (large + shift).log() - shift
    found = stirling + _stirling_rest(large + shift) - _stirling_rest(large)
    return torch.where(x < 64, torch.lgamma(small + shift) - torch.lgamma(small), found)


def _stirling_rest(x: Tensor) -> Tensor:
    inverse, square = 1 / x, 1 / x.square()
    return inverse * (1 / 12 - square * (1 / 360 - square / 1260))


def sum_scalars(terms: list[Tensor]) -> Tensor:
    """Return the sum of scalars."""
    return terms[0] if len(terms) == 1 else torch.stack(terms).sum()


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether floating tensors are free of NaN and infinities; an accelerator is read once for all of them."""
    far: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if not tensor.is_floating_point():
            continue
        if tensor.device.type != "cpu":
            far.setdefault(tensor.device, []).append(tensor)
        # Of the sum first, as a number: every prediction asks, and `Tensor.isfinite` takes several times as long. A
        # finite sum has finite terms; one that is not may just be an overflow.
        elif not (math.isfinite(tensor.sum().item()) or bool(tensor.isfinite().all())):
            return False
    return all(
        bool(torch.stack([each.sum().isfinite() for each in group]).all())
        or bool(torch.stack([each.isfinite().all() for each in group]).all())
        for group in far.values()
    )


def minimize_scalar(function: Callable[[float], float], low: float, high: float, tolerance: float = 1e-6) -> float:
    """Return the minimizer of a unimodal function on an interval, by golden section.

    Unlike `scipy.optimize`, it gives the same result to the last bit in every version.

    >>> round(minimize_scalar(lambda x: (x - 0.3) ** 2, -1.0, 1.0), 4)
    0.3
    """
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = function(left), function(right)
    while high - low > tolerance:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = function(right)
    return (low + high) / 2


def digamma(x: Tensor) -> Tensor:
    r"""Return $\psi(x)$ for $x \ge 1$ with elementary operations, for file formats without the function.

    $$\psi(x) = \psi(x + 8) - \sum_{k=0}^{7} \frac1{x + k}, \qquad
      \psi(y) \approx \log y - \frac1{2y} - \frac1{12 y^2} + \frac1{120 y^4} - \frac1{252 y^6} + \frac1{240 y^8}$$

    The terms that are left out are below 1e-12 in float64.

    >>> import torch
    >>> round(float(digamma(torch.tensor(1.0, dtype=torch.float64))), 12)  # minus Euler's constant
    -0.577215664902
    """
    shifted, total = x + 8, 1 / x
    for k in range(1, 8):
        total = total + 1 / (x + k)
    inverse = 1 / (shifted * shifted)
    series = inverse * (1 / 12 - inverse * (1 / 120 - inverse * (1 / 252 - inverse * (1 / 240 - inverse / 132))))
    return shifted.log() - 0.5 / shifted - series - total


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
