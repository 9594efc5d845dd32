"""Numbers that steer a chain: floats on the CPU, tensors without axes on an accelerator.

Reading a number from an accelerator waits until it has finished all work before. So energies and acceptance
probabilities stay there, and a transition does not branch on them: it computes both results, and picks one.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import torch
from torch import Tensor

Number = float | Tensor
Flag = bool | Tensor
T = TypeVar("T")


def number(value: Tensor) -> Number:
    """Return a float if the value is on the CPU, and else the value itself, which is not read."""
    return float(value) if value.device.type == "cpu" else value


def known(flag: Flag) -> bool:
    """Return whether a condition is known to hold: on an accelerator nothing is known until it is read."""
    return flag is True


def pick(flag: Flag, yes: T, no: T) -> T:
    """Return one of two numbers, tensors or tuples of them.

    >>> pick(True, 1.0, 2.0), float(pick(torch.tensor(False), torch.tensor(1.0), torch.tensor(2.0)))
    (1.0, 2.0)
    """
    if isinstance(flag, bool):
        return yes if flag else no
    if isinstance(yes, tuple):
        parts: Any = [pick(flag, *pair) for pair in zip(yes, no, strict=True)]  # type: ignore[call-overload]
        return type(yes)(*parts)
    if isinstance(yes, float):
        yes = torch.full_like(flag, yes, dtype=torch.float64)  # type: ignore[assignment] # two floats would be float32
    return torch.where(flag, yes, no)  # type: ignore[call-overload]


def finite_or_infinity(value: Number) -> Number:
    """Return a number, or infinity if it is not finite."""
    if isinstance(value, Tensor):
        return torch.where(value.isfinite(), value, math.inf)
    return value if math.isfinite(value) else math.inf


def exp_at_most_one(value: Number) -> Number:
    """Return min(1, exp(value)), a probability."""
    return value.clamp_max(0.0).exp() if isinstance(value, Tensor) else math.exp(min(0.0, value))


def exp(value: Number) -> Number:
    """Return the exponential."""
    return value.exp() if isinstance(value, Tensor) else math.exp(value)


def log(value: Number, least: float) -> Number:
    """Return the logarithm of a number, or of `least` if that is larger."""
    return value.clamp_min(least).log() if isinstance(value, Tensor) else math.log(max(value, least))


def log_add(a: Number, b: Number) -> Number:
    """Return log(exp(a) + exp(b)).

    >>> round(log_add(0.0, 0.0), 6), log_add(-math.inf, -math.inf)
    (0.693147, -inf)
    """
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        like: Any = a if isinstance(a, Tensor) else b
        return torch.logaddexp(*(each if isinstance(each, Tensor) else torch.full_like(like, each) for each in (a, b)))
    high = max(a, b)
    return high if high == -math.inf else high + math.log(math.exp(a - high) + math.exp(b - high))
