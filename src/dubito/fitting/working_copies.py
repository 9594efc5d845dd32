"""Working copies of a posterior, in which one call may swap weights, flags and hooks of the network.

Changes to a working copy do not affect the posterior or other calls, so that many threads can use one posterior at
once. A copy shares the memory of all weights and is reused by later calls: there are as many copies as there were
simultaneous calls.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Generic, Self, TypeVar, overload

from torch import nn

from dubito.core import distributed, params
from dubito.core.errors import InputError, UnsupportedError
from dubito.core.locks import ProcessLock
from dubito.core.params import Frozen
from dubito.networks.adapters import copied_beside_base
from dubito.networks.swapping import uncompile_parts
from dubito.networks.twin import BufferVersions, twin

T = TypeVar("T")
# Attributes that belong to one object and are not copied with it.
_IDLE, _ORIGIN, _BUFFERS = "_idle", "_origin", "_buffers_seen"

_computing = ProcessLock()


class HasWorkingCopies:
    """Base class of objects with networks, which give each call a private copy of themselves."""

    @contextmanager
    def working_copy(self) -> Iterator[Self]:
        """Provide a copy of this object that no other call uses; its networks may be changed inside the block.

        The copy is reused only if the block raised no error and changed no buffer of the networks.
        """
        idle: deque[Self] = vars(self).setdefault(_IDLE, deque())  # an atomic step, as are pop and append
        try:
            own = idle.pop()
        except IndexError:
            own = self._copy({})
            vars(own)[_BUFFERS] = BufferVersions(list(_networks(own)))
        yield own
        if vars(own)[_BUFFERS].unchanged():
            idle.append(own)

    @property
    def origin(self) -> Self:
        """The object of which this one is a working copy, or this object itself."""
        found: Self = vars(self).get(_ORIGIN, self)
        return found

    def _copy(self, memo: dict[int, Any]) -> Self:
        """Return a copy with twins of the networks, and without the cached properties of this object."""
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
    """A property that is computed once for an object and all of its working copies; it must not change later.

    A `functools.cached_property`, in contrast, is computed once for each working copy.
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
            with _computing:  # so that two threads do not both use memory for it
                if self.name not in vars(origin):
                    vars(origin)[self.name] = self.compute(origin)
        found: T = vars(origin)[self.name]
        vars(instance)[self.name] = found
        return found


def _private(value: Any, memo: dict[int, Any]) -> Any:
    """Return the value of an attribute for a working copy."""
    if isinstance(value, nn.Module):
        return twin(value, memo)
    if isinstance(value, HasWorkingCopies):
        return value._copy(memo)
    if type(value) in (list, tuple) and any(isinstance(each, nn.Module | HasWorkingCopies) for each in value):
        return type(value)(_private(each, memo) for each in value)
    return value


def _networks(holder: HasWorkingCopies) -> Iterator[nn.Module]:
    for value in vars(holder).values():
        for each in value if type(value) in (list, tuple) else (value,):
            if isinstance(each, nn.Module):
                yield each
            elif isinstance(each, HasWorkingCopies) and each is not vars(holder).get(_ORIGIN):
                yield from _networks(each)


def check_model(model: nn.Module) -> None:
    """Raise an error if the user's network cannot be used."""
    if not isinstance(model, nn.Module):
        raise InputError(f"The model must be a torch.nn.Module, not {type(model).__name__}.")
    if distributed.is_sharded(model.parameters()):
        raise UnsupportedError(
            "The parameters of the model are sharded over processes (FSDP, DTensor), but Dubito needs whole ones: load "
            "its full state dict (torch.distributed.checkpoint.state_dict, full_state_dict=True) into a plain copy of "
            "the network, and choose weights that fit one process, such as weights=select.last_layer()."
        )
    if any(isinstance(p, nn.UninitializedParameter) for p in model.parameters()):
        raise InputError("The model has lazy layers: call it once on a batch to initialize their parameters.")
    if next(model.parameters(), None) is None:
        raise InputError("The model has no parameters: give a network with weights.")


def private_copy(model: nn.Module) -> nn.Module:
    """Return a copy of the user's network; raise an error if it cannot be used."""
    check_model(model)
    model = params.unwrapped(model)
    try:
        private = uncompile_parts(copied_beside_base(model))
    except (RuntimeError, TypeError) as error:
        raise InputError(f"The model cannot be copied with copy.deepcopy: {error}") from error
    for value in private.parameters():
        value.grad = None
    for module in private.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = False  # KL divergences and penalties have a gradient at every entry
    return private


def shared_copy(model: nn.Module) -> nn.Module:
    """Return a copy of the user's network with the weights and buffers of the first process in every process."""
    private = private_copy(model)
    own = [value for value in private.parameters() if not isinstance(value, Frozen)]
    distributed.share_([*own, *private.buffers()])
    return private
