"""Where randomness comes from: an explicit generator for ours, a timeline of the global ones for the user's code."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dubito.core.errors import InputError

DEFAULT_SEED = 0

# How to read and how to put back the state of one global generator.
_Door = tuple[Callable[[], Any], Callable[[Any], None]]


def default_generator(generator: torch.Generator | None) -> torch.Generator:
    """Return `generator`, or a new one with a fixed seed: the same call gives the same result."""
    if generator is None:
        return torch.Generator().manual_seed(DEFAULT_SEED)
    if not isinstance(generator, torch.Generator):
        raise InputError(f"generator must be a torch.Generator, such as torch.Generator(), not {generator!r}.")
    return generator


def draw_seed(generator: torch.Generator) -> int:
    """Draw a seed for another generator."""
    return int(torch.randint(2**62, (), generator=generator, device=generator.device))


def derive_seed(seed: int, *path: int | str) -> int:
    """Return the seed of one place in a tree of random streams: a pure function, so a resumed run need not store it.

    >>> derive_seed(7, "loader", 0) == derive_seed(7, "loader", 0) != derive_seed(7, "loader", 1)
    True
    """
    return int.from_bytes(hashlib.sha256(repr((seed, *path)).encode()).digest()[:8], "big") >> 1


def normal_like(like: Tensor) -> Tensor:
    """Return standard normal noise in the shape and the memory layout of a tensor, from the global generator.

    In the order of memory: torch fills a tensor whose channels come last element by element, six times as slowly.
    """
    if like.is_contiguous():
        return torch.randn_like(like)
    noise = torch.empty_like(like)
    noise.as_strided((noise.numel(),), (1,)).normal_()  # `empty_like` leaves no gaps
    return noise


class Stream:
    """A private timeline of the global generators, for code that draws from them (dropout, samplers, initializers).

    Inside `active` the global generators continue this timeline; outside, the user's own timeline is untouched.

    Args:
        seed: Where the timeline starts.
        device: The device of the model; the generator of a CUDA device is part of the timeline.
        libraries: Whether those of `random` and `numpy` are, too (they are slow to exchange): datasets draw from them.
    """

    def __init__(self, seed: int, device: torch.device | None = None, *, libraries: bool = False) -> None:
        self._doors: list[_Door] = [(torch.get_rng_state, torch.set_rng_state)]
        self._states: list[Any] = [torch.Generator().manual_seed(seed).get_state()]
        if device is not None and device.type == "cuda":
            cuda = torch.cuda
            self._doors.append((lambda: cuda.get_rng_state(device), lambda state: cuda.set_rng_state(state, device)))
            self._states.append(torch.Generator(device).manual_seed(seed).get_state())
        if libraries:
            self._doors += [(random.getstate, random.setstate), (np.random.get_state, np.random.set_state)]
            self._states += [random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state()]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Continue this timeline for the length of the block."""
        outside = self._exchange(self._states)
        try:
            yield
        finally:
            self._states = self._exchange(outside)

    def _exchange(self, states: list[Any]) -> list[Any]:
        before = [read() for read, _ in self._doors]
        for (_, write), state in zip(self._doors, states, strict=True):
            write(state)
        return before
