"""Numerical helpers that several methods share."""

from __future__ import annotations

import math
from collections.abc import Callable


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
