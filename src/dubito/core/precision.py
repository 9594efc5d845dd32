"""Half precision: networks may compute in it, what is computed from their outputs does not.

The outputs of every network are float32 or better (`params.call`). A caller's `torch.autocast` holds for the calls of
networks, and not for likelihoods, products of gradients and sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

HALF = frozenset({torch.float16, torch.bfloat16})

# What autocast the networks run under: pairs of a kind of device and a dtype.
Casts = tuple[tuple[str, torch.dtype], ...]
_casts: ContextVar[Casts] = ContextVar("casts", default=())


def at_least_single(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for a half-precision dtype, and every other dtype as it is.

    >>> at_least_single(torch.bfloat16), at_least_single(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float32 if dtype in HALF else dtype


def widened(values: Tensor) -> Tensor:
    """Return half-precision values as float32, and others as they are."""
    return values.float() if values.dtype in HALF else values


def computes_in(dtype: torch.dtype) -> torch.dtype:
    """Return the coarsest dtype that a network with weights of `dtype` computes in."""
    return min((dtype, *(cast for _, cast in _casts.get())), key=lambda each: -torch.finfo(each).eps)


@contextmanager
def in_networks_only() -> Iterator[None]:
    """Let the caller's autocast hold only for networks inside the block."""
    ambient = _ambient()
    if not ambient:
        yield
        return
    with ExitStack() as stack:
        for device, dtype in ambient:
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=False))
        with casting(*ambient):
            yield


@contextmanager
def casting(*casts: tuple[str, torch.dtype]) -> Iterator[None]:
    """Let networks inside the block run under autocast: pairs of a kind of device and a dtype."""
    token = _casts.set(casts)
    try:
        yield
    finally:
        _casts.reset(token)


@contextmanager
def in_a_network() -> Iterator[None]:
    """Run the block, a call of a network, under the autocast that was asked for."""
    with ExitStack() as stack:
        for device, dtype in _casts.get():
            stack.enter_context(torch.autocast(device, dtype=dtype))
        yield


def is_casting() -> bool:
    """Return whether networks run under autocast."""
    return bool(_casts.get())


def _ambient() -> Casts:
    """Return the autocast that is on around the caller."""
    kinds = ["cpu"]
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None:
        kinds.append(accelerator.type)
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind))
