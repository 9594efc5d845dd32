"""Check the arguments of public functions against their annotations, and explain a wrong type in one sentence.

For an argument annotated as a tensor, numbers, lists and arrays are converted with `torch.as_tensor`; for one annotated
as a `float`, whole numbers are converted, of which torch takes only those of 64 bits.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import types
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from dubito.core.arrays import to_tensor
from dubito.core.constraints import check
from dubito.core.errors import InputError
from dubito.core.widest import computing_among

F = TypeVar("F", bound=Callable[..., Any])

# Types that are checked; an argument with any other annotation is passed on as it is.
_CHECKED = (int, float, str, bool, Tensor, nn.Module, torch.Generator, types.NoneType)


def checked_arguments(function: F) -> F:
    """Check each argument whose annotation is a plain type, a `Literal`, a tensor, a path or one of our classes.

    Ranges and unions of these, and sequences and mappings of them, are checked as well (`core/constraints`).
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InputError(f"{function.__qualname__}: {error}.") from error
        for name, value in bound.arguments.items():
            parameter = signature.parameters[name]
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                bound.arguments[name] = _checked(name, _kind(function, parameter.annotation), value)
        with computing_among(bound.arguments.values()):
            return function(*bound.args, **bound.kwargs)

    return call  # type: ignore[return-value]


def _checked(name: str, kind: Any, value: Any) -> Any:
    options = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    if Tensor in options and set(options) <= {Tensor, types.NoneType}:
        return value if value is None and len(options) > 1 else to_tensor(value, name)
    if all(_is_checked(option) for option in options):
        value = tuple(value) if isinstance(value, list) and get_origin(kind) is tuple else value
        check(name, kind, value)
        plain = {_without_range(option) for option in options}
        return float(value) if float in plain and int not in plain and isinstance(value, Integral) else value
    return value


def _is_checked(kind: Any) -> bool:
    kind, origin = _without_range(kind), get_origin(kind)
    if isinstance(origin, type) and issubclass(origin, Mapping | Sequence | tuple):
        return all(option is Ellipsis or _is_checked(option) for option in get_args(kind))
    if origin in (Union, types.UnionType):
        return all(_is_checked(option) for option in get_args(kind))
    ours = isinstance(kind, type) and kind.__module__.startswith(__name__.partition(".")[0])
    return kind in _CHECKED or ours or origin is Literal or origin is os.PathLike


def _without_range(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


@functools.cache
def _kind(function: Callable[..., Any], annotation: Any) -> Any:
    """Evaluate an annotation; return `inspect.Parameter.empty` if it uses names that are unknown at run time."""
    if not isinstance(annotation, str):
        return annotation
    package = importlib.import_module(__name__.partition(".")[0])
    ours = {name: getattr(package, name) for name in package.__all__ if name[0].isupper() and name in annotation}
    names = {"torch": torch, "nn": nn, "os": os, "Tensor": Tensor, **ours, **function.__globals__}
    try:
        alone = types.SimpleNamespace(__annotations__={"it": annotation})
        return get_type_hints(alone, names, include_extras=True)["it"]
    except (NameError, AttributeError, TypeError, SyntaxError):
        return inspect.Parameter.empty
