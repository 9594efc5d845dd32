"""Give each call its own random numbers, so that calls from several threads do not influence each other.

torch has one global generator for all threads, and a network that draws random numbers itself (`F.dropout` in
evaluation mode, say) uses it. Here such draws are redirected to a generator that belongs to the call. Draws from numpy
and `random` cannot be redirected; calls of networks that use them take turns, each with its own states of these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
        seed: Returns the seed of that generator, which is made only if it is needed.
        device: The device of the network.
        network_draws: Whether the network is known to draw random numbers from torch.
        uses_libraries: Whether the network is known to draw random numbers from numpy or `random`.
        others: Further generators that the call uses, which are restored before it is repeated.
    """

    def __init__(
        self,
        seed: Callable[[], int],
        device: torch.device,
        *,
        network_draws: bool = False,
        uses_libraries: bool = False,
        others: tuple[torch.Generator, ...] = (),
    ) -> None:
        self.network_draws, self._seed, self._device, self._others = network_draws, seed, device, others
        self.uses_libraries = uses_libraries
        self._made: torch.Generator | None = None

    def _generator(self) -> torch.Generator:
        if self._made is None:
            self._made = torch.Generator(self._device).manual_seed(self._seed())
        return self._made

    def run(self, function: Callable[[], T]) -> T:
        """Call a function with the random numbers of this call, and return its result."""
        if not self.uses_libraries:
            return self._run(function)
        with self._libraries.active():
            found = self._run(function)
        self.uses_libraries = self._libraries.has_used_libraries()
        return found

    @cached_property
    def _libraries(self) -> Stream:
        return Stream(derive_seed(self._seed(), "libraries"), libraries=True)

    def _run(self, function: Callable[[], T]) -> T:
        if self.network_draws:
            return self._redirected(function)
        made, before = self._made, user_state()
        starts = [(generator, generator.get_state()) for generator in (made, *self._others) if generator is not None]
        with drawing_from(self._generator):
            found = function()
        if torch.equal(before, user_state()):
            return found
        self._made = made
        for generator, state in starts:
            generator.set_state(state)
        found = self._redirected(function)
        if self.network_draws:  # otherwise another thread has used the global generator
            torch.set_rng_state(before)
        return found

    @cached_property
    def _mode(self) -> _Redirected:
        return _Redirected(
            self._seed(), self._generator()
        )  # only for networks that draw: it takes longer than small ones

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
        seeded = torch.Tag.nondeterministic_seeded in func.tags and given.get("generator") is None
        if not seeded or _drops_nothing(func, args, given):
            return func(*args, **given)
        self.drew = True
        takes_one = any(argument.name == "generator" for argument in func._schema.arguments)
        if takes_one and (not args or getattr(args[0], "device", self.generator.device) == self.generator.device):
            return func(*args, **{**given, "generator": self.generator})
        with self.rest.active():
            return func(*args, **given)


def _drops_nothing(func: Any, args: Any, given: Mapping[str, Any]) -> bool:
    """Return whether an operation draws for dropout alone, and its rate is 0, as that of attention in evaluation."""
    arguments = func._schema.arguments
    rate = next((place for place, argument in enumerate(arguments) if argument.name == "dropout_p"), None)
    if rate is None:
        return False
    found = args[rate] if rate < len(args) else given.get("dropout_p", arguments[rate].default_value)
    return bool(found == 0)
