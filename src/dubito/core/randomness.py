"""Sources of randomness: an explicit generator for Dubito, private streams of the global ones for the user's code."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dubito.core.errors import InputError
from dubito.core.locks import ProcessLock

DEFAULT_SEED = 0

# The functions that get and set the state of one global generator.
_Access = tuple[Callable[[], Any], Callable[[Any], Any]]
_LIBRARIES: list[_Access] = [(random.getstate, random.setstate), (np.random.get_state, np.random.set_state)]


def default_generator(generator: torch.Generator | None) -> torch.Generator:
    """Return `generator`, or a new one with a fixed seed, so that the same call gives the same result."""
    if generator is None:
        return torch.Generator().manual_seed(DEFAULT_SEED)
    if not isinstance(generator, torch.Generator):
        raise InputError(f"generator must be a torch.Generator, such as torch.Generator(), not {generator!r}.")
    return generator


def beside(generator: torch.Generator, device: torch.device) -> torch.Generator:
    """Return a generator on an accelerator, seeded by one of the CPU: noise is drawn where it is used.

    The generator that a user gives stays on the CPU, where seeds and permutations are drawn without a read.
    """
    if generator.device.type != "cpu" or device.type == "cpu":
        return generator
    return torch.Generator(device).manual_seed(draw_seed(generator))


def draw_seed(generator: torch.Generator) -> int:
    """Draw a seed for another generator."""
    return int(torch.randint(2**62, (), generator=generator, device=generator.device))


def derive_seed(seed: int, *path: int | str) -> int:
    """Derive the seed of one place in a run; being a pure function, it need not be stored for a resumed run.

    >>> derive_seed(7, "loader", 0) == derive_seed(7, "loader", 0) != derive_seed(7, "loader", 1)
    True
    """
    return int.from_bytes(hashlib.sha256(repr((seed, *path)).encode()).digest()[:8], "big") >> 1


def normal_like(like: Tensor) -> Tensor:
    """Return standard normal noise in the shape and the memory layout of a tensor.

    It comes from the generator of `drawing_from` inside such a block, else from the global one. Memory is filled in its
    own order, because torch is six times slower on channels-last tensors.
    """
    noise = torch.empty_like(like)
    # `empty_like` leaves no gaps
    (noise if like.is_contiguous() else noise.as_strided((noise.numel(),), (1,))).normal_(generator=own_generator())
    return noise


class _PerThread(threading.local):
    generator: Callable[[], torch.Generator] | None = None
    rest: Stream | None = None


_own = _PerThread()


def own_generator() -> torch.Generator | None:
    """Return the generator of `drawing_from` in this thread, or None outside such a block (the global generator)."""
    return None if _own.generator is None else _own.generator()


@contextmanager
def drawing_from(generator: Callable[[], torch.Generator], rest: Stream | None = None) -> Iterator[None]:
    """Draw our noise from a generator inside the block, in this thread; operations that take none draw from `rest`.

    The function `generator` returns the generator when it is needed, because making one takes time.
    """
    before = _own.generator, _own.rest
    _own.generator, _own.rest = generator, rest
    try:
        yield
    finally:
        _own.generator, _own.rest = before


@contextmanager
def drawing_aside() -> Iterator[None]:
    """Restore the generators of `drawing_from` after the block, so that a trial does not change later draws."""
    generator, rest = own_generator(), _own.rest
    state, position = None if generator is None else generator.get_state(), None if rest is None else rest._states
    try:
        with restoring_generators() if _users.has_libraries else nullcontext():
            yield
    finally:
        if generator is not None and state is not None:
            generator.set_state(state)
        if rest is not None:
            rest._states = position


class Stream:
    """A private random stream for code that uses the global generators (dropout, samplers, initializers).

    Inside `active` the global generators have the states of this stream; afterwards they have the user's states again.
    All threads share the global generators, so only one stream is active at a time and other threads wait.

    Args:
        seed: The seed of the stream.
        device: The device of the model; the generator of an accelerator is part of the stream.
        libraries: Whether the generators of `random` and `numpy`, which datasets may use, are part of the stream. They
            are slow to exchange.
    """

    def __init__(self, seed: int, device: torch.device | None = None, *, libraries: bool = False) -> None:
        self._seed, self._has_libraries = seed, libraries
        self._device = device if device is not None and device.type != "cpu" else None
        self._access = _access(self._device, libraries)
        self._states: list[Any] | None = None  # until it has been active: generators are faster to seed than to set
        self._first: list[Any] = []  # the states of `random` and `numpy` at the beginning

    def has_used_libraries(self) -> bool:
        """Return whether the generators of `random` or `numpy` have been used inside `active`."""
        if not self._has_libraries or self._states is None:
            return False
        (start, begin), (own, theirs) = self._first, self._states[-2:]
        return bool(own != start or theirs[2] != begin[2] or (theirs[1] != begin[1]).any())

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let the global generators continue this stream inside the block."""
        with _exchanging:
            outside = [read() for read, _ in self._access]
            before = _users.state, _users.has_libraries
            _users.state = outside[0] if before[0] is None else before[0]
            _users.has_libraries = before[1] or self._has_libraries
            try:
                if self._states is None:
                    self._seed_generators()
                else:
                    self._write(self._states)
                yield
            finally:
                self._states = [read() for read, _ in self._access]
                self._write(outside)
                _users.state, _users.has_libraries = before

    def _seed_generators(self) -> None:
        """Give the global generators the states of the beginning of this stream."""
        torch.default_generator.manual_seed(self._seed)
        if self._device is not None:
            self._access[1][1](torch.Generator(self._device).manual_seed(self._seed).get_state())
        if self._has_libraries:
            random.seed(self._seed)
            np.random.seed(self._seed % 2**32)  # noqa: NPY002 (users' datasets draw from this one)
            self._first = [read() for read, _ in _LIBRARIES]

    def _write(self, states: list[Any]) -> None:
        for (_, write), state in zip(self._access, states, strict=True):
            write(state)


def _access(device: torch.device | None, libraries: bool) -> list[_Access]:
    """Return the functions that get and set the states of the global generators that a stream includes."""
    found: list[_Access] = [(torch.default_generator.get_state, torch.default_generator.set_state)]
    if device is not None and device.type != "cpu":
        module: Any = torch.get_device_module(device)  # torch.cuda, say
        which = () if device.type == "mps" else (device,)
        found.append((lambda: module.get_rng_state(*which), lambda state: module.set_rng_state(state, *which)))
    return found + _LIBRARIES if libraries else found


def _accelerator() -> torch.device | None:
    """Return the current accelerator, unless it is one of CUDA that nobody has used: to ask it would start it."""
    if not torch.accelerator.is_available() or (torch.cuda.is_available() and not torch.cuda.is_initialized()):
        return None
    kind = torch.accelerator.current_accelerator()
    return None if kind is None else torch.device(kind.type, torch.accelerator.current_device_index())


class _Users:
    state: Tensor | None = None  # the user's state of torch's global generator, while a stream is active
    has_libraries: bool = False  # whether the active stream includes the generators of numpy and `random`


_users, _exchanging = _Users(), ProcessLock()


def user_state() -> Tensor:
    """Return the user's state of torch's global generator, also while a stream is active."""
    state = _users.state
    return torch.get_rng_state() if state is None else state


@contextmanager
def restoring_generators() -> Iterator[None]:
    """Restore the global generators of torch, numpy and `random` after the block, also if it fails or is interrupted.

    A `Stream` restores them itself, unless Ctrl-C comes while it exchanges them. The stream of another thread is not
    touched: its end is waited for.
    """
    access = _access(_accelerator(), libraries=True)
    with _exchanging:
        states = [read() for read, _ in access]
    try:
        yield
    finally:
        with _exchanging:
            for (_, write), state in zip(access, states, strict=True):
                write(state)
