"""Give each call its own random numbers, so that calls from several threads do not influence each other.

torch has one global generator for all threads, and a network that draws random numbers itself (`F.dropout` in
evaluation mode, say) uses it. Here such draws are redirected to a generator that belongs to the call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dubito.core.randomness import Stream, derive_seed, drawing_from, user_state

T = TypeVar("T")


class PrivateDraws:
    """The random numbers of one call.

    Most networks draw no random numbers. So the call is first made as it is; if the state of the global generator has
    changed, the call is repeated with every random operation redirected to the call's own generator.

    Args:
        seed: The seed of that generator.
        device: The device of the network.
        network_draws: Whether the network is known to draw random numbers.
        others: Further generators that the call uses, which are restored before it is repeated.
    """

    def __init__(
        self, seed: int, device: torch.device, *, network_draws: bool = False, others: tuple[torch.Generator, ...] = ()
    ) -> None:
        on_device = device if device.type == "cuda" else torch.device("cpu")
        self.network_draws, self._generator = network_draws, torch.Generator(on_device).manual_seed(seed)
        self._seed, self._all = seed, (self._generator, *others)

    def run(self, function: Callable[[], T]) -> T:
        """Call a function with the random numbers of this call, and return its result."""
        if self.network_draws:
            return self._redirected(function)
        starts, before = [generator.get_state() for generator in self._all], user_state()
        with drawing_from(self._generator):
            found = function()
        if torch.equal(before, user_state()):
            return found
        for generator, state in zip(self._all, starts, strict=True):
            generator.set_state(state)
        found = self._redirected(function)
        if self.network_draws:  # otherwise another thread has used the global generator
            torch.set_rng_state(before)
        return found

    @cached_property
    def _mode(self) -> _Redirected:
        return _Redirected(self._seed, self._generator)  # only for networks that draw: it takes longer than small ones

    def _redirected(self, function: Callable[[], T]) -> T:
        with drawing_from(self._generator, self._mode.rest), self._mode:
            found = function()
        self.network_draws = self._mode.drew
        return found


class _Redirected(TorchDispatchMode):
    """A mode that redirects random operations of this thread from the global generator to another one."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first call imports torch's compiler, which takes seconds

    def __init__(self, seed: int, generator: torch.Generator) -> None:
        super().__init__()
        self.generator, self.drew = generator, False
        self.rest = Stream(derive_seed(seed, "rest"), generator.device)  # for operations that take no generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags or given.get("generator") is not None:
            return func(*args, **given)
        self.drew = True
        takes_one = any(argument.name == "generator" for argument in func._schema.arguments)
        if takes_one and (not args or getattr(args[0], "device", self.generator.device) == self.generator.device):
            return func(*args, **{**given, "generator": self.generator})
        with self.rest.active():
            return func(*args, **given)
