"""The units of decisions about numbers: from standardised targets to original ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dubito.core.arrays import to_tensor
from dubito.core.errors import InputError

# The location and the scale of the targets, a number or one per output each.
TargetScale = tuple[Tensor, Tensor]


def read_scale(given: Any) -> TargetScale | None:
    """Return location and scale as tensors; raise unless they are two, and the scale is positive.

    >>> read_scale((2.0, 0.5))
    (tensor(2., dtype=torch.float64), tensor(0.5000, dtype=torch.float64))
    """
    if given is None:
        return None
    try:
        loc, scale = (to_tensor(part, "target_scale").double() for part in given)
    except (TypeError, ValueError) as error:
        raise InputError(f"`target_scale` must be a pair (location, scale), got {given!r}.") from error
    if not bool((scale > 0).all()) or not bool(loc.isfinite().all() and scale.isfinite().all()):
        raise InputError(f"`target_scale` must hold finite numbers, and a positive scale, got {given!r}.")
    return loc, scale


def scale_targets(targets: Tensor, scale: TargetScale | None) -> Tensor:
    """Return standardised targets ``[B]`` or ``[B, O]`` in original units, in float64 ``[B, O]``."""
    if scale is None:
        return targets
    rows = targets.double() if targets.ndim == 2 else targets.double().unsqueeze(-1)
    return torch.as_tensor(scale[0]).to(rows) + scale[1].to(rows) * rows
