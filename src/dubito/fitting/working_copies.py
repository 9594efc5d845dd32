"""Working copies: predicting swaps weights, flags and hooks of a network, and does so in a copy that one call owns.

Nothing that is done to a working copy is seen by the posterior or by other calls, so that many threads can ask one
posterior at once. A copy shares the memory of all weights and is kept for the next call: there are as many as there
were calls at the same time.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Generic, Self, TypeVar, overload

from torch import nn

from dubito.core.locks import ProcessLock
from dubito.networks.twin import Buffers, twin

T = TypeVar("T")
# Attributes of a posterior that belong to one object and are not copied with it.
_IDLE, _ORIGIN, _BUFFERS = "_idle", "_origin", "_buffers_seen"


class Lendable:
    """Something that holds networks and can be lent as a private copy of itself."""

    @contextmanager
    def working_copy(self) -> Iterator[Self]:
        """Lend a copy of this object that no other call works with; its networks may be changed for a while.

        It goes back into the pool only after a call that ended well and wrote to none of its networks' buffers.
        """
        idle: deque[Self] = vars(self).setdefault(_IDLE, deque())  # an atomic step, as are pop and append
        try:
            own = idle.pop()
        except IndexError:
            own = self._copy({})
            vars(own)[_BUFFERS] = Buffers(list(_networks(own)))
        yield own
        if vars(own)[_BUFFERS].unchanged():
            idle.append(own)

    @property
    def origin(self) -> Self:
        """The object that this one is a working copy of; itself where it is none."""
        found: Self = vars(self).get(_ORIGIN, self)
        return found

    def _copy(self, memo: dict[int, Any]) -> Self:
        """Return this object with twins of its networks, and without what was cached for this object alone."""
        if id(self) not in memo:
            own = memo[id(self)] = copy.copy(self)
            for name, value in list(vars(own).items()):
                if isinstance(getattr(type(self), name, None), cached_property):
                    del vars(own)[name]
                else:
                    vars(own)[name] = _private(value, memo)
            vars(own)[_ORIGIN] = self.origin
        found: Self = memo[id(self)]
        return found

    def __getstate__(self) -> dict[str, Any]:
        hidden = (_IDLE, _ORIGIN, _BUFFERS)
        return {name: value for name, value in list(vars(self).items()) if name not in hidden}


class shared_property(Generic[T]):
    """A property that is computed once, for an object and for all working copies of it; it must not change later.

    `functools.cached_property` is the counterpart: what each working copy has of its own.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self.compute, self.__doc__ = compute, compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> Self | T:
        if instance is None:
            return self
        origin = vars(instance).get(_ORIGIN, instance)
        if self.name not in vars(origin):
            with _computing:  # two threads would each need the memory for it
                if self.name not in vars(origin):
                    vars(origin)[self.name] = self.compute(origin)
        found: T = vars(origin)[self.name]
        vars(instance)[self.name] = found
        return found


def _private(value: Any, memo: dict[int, Any]) -> Any:
    """What a working copy has in the place of one attribute."""
    if isinstance(value, nn.Module):
        return twin(value, memo)
    if isinstance(value, Lendable):
        return value._copy(memo)
    if type(value) in (list, tuple) and any(isinstance(each, nn.Module | Lendable) for each in value):
        return type(value)(_private(each, memo) for each in value)
    return value


def _networks(lent: Lendable) -> Iterator[nn.Module]:
    for value in vars(lent).values():
        for each in value if type(value) in (list, tuple) else (value,):
            if isinstance(each, nn.Module):
                yield each
            elif isinstance(each, Lendable) and each is not vars(lent).get(_ORIGIN):
                yield from _networks(each)


_computing = ProcessLock()
