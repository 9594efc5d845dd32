"""Check the arguments of public functions against their annotations, and explain a wrong type in one sentence.

For an argument annotated as a tensor, numbers, lists and arrays are converted with `torch.as_tensor`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import types
from collections.abc import Callable
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from dubito.core.arrays import to_tensor
from dubito.core.constraints import check
from dubito.core.errors import InputError

F = TypeVar("F", bound=Callable[..., Any])

# Types that are checked; an argument with any other annotation is passed on as it is.
_CHECKED = (int, float, str, bool, nn.Module, torch.Generator, types.NoneType)


def checked_arguments(function: F) -> F:
    """Check each argument whose annotation is a plain type, a `Literal`, a tensor, a path or one of our classes."""
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
        return function(*bound.args, **bound.kwargs)

    return call  # type: ignore[return-value]


def _checked(name: str, kind: Any, value: Any) -> Any:
    options = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    if Tensor in options and set(options) <= {Tensor, types.NoneType}:
        return value if value is None and len(options) > 1 else to_tensor(value, name)
    if all(_is_checked(option) for option in options):
        check(name, kind, value)
    return value


def _is_checked(kind: Any) -> bool:
    ours = isinstance(kind, type) and kind.__module__.startswith(__name__.partition(".")[0])
    return kind in _CHECKED or ours or get_origin(kind) is Literal or get_origin(kind) is os.PathLike


@functools.cache
def _kind(function: Callable[..., Any], annotation: Any) -> Any:
    """Evaluate an annotation; return `inspect.Parameter.empty` if it uses names that are unknown at run time."""
    if not isinstance(annotation, str):
        return annotation
    package = importlib.import_module(__name__.partition(".")[0])
    ours = {name: getattr(package, name) for name in package.__all__ if name[0].isupper() and name in annotation}
    names = {"torch": torch, "nn": nn, "os": os, "Tensor": Tensor, **ours, **function.__globals__}
    try:
        return get_type_hints(types.SimpleNamespace(__annotations__={"it": annotation}), names)["it"]
    except (NameError, AttributeError, TypeError, SyntaxError):
        return inspect.Parameter.empty
