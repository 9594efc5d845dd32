"""Check values against type annotations with ranges and choices; the error message is made from the annotation.

>>> from typing import Literal
>>> check("start", Literal["model", "fresh"], "model")
>>> check("components", Count, 0)
Traceback (most recent call last):
dubito.core.errors.InputError: `components` must be a whole number of at least 1, got 0.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import math
import os
import reprlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

from dubito.core.errors import InputError


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`; `above` and `below` exclude the ends, `infinite` allows infinity."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False
    infinite: bool = False

    def holds(self, value: Any) -> bool:
        """Return whether a number, or every entry of a tensor, lies in the range; other values always do."""
        if isinstance(value, Tensor):
            low = value > self.low if self.above else value >= self.low
            high = value < self.high if self.below else value <= self.high
            return bool((value.isfinite() & low & high).all())
        if not isinstance(value, Real):
            return True
        number = float(value)
        low_holds = number > self.low if self.above else number >= self.low
        high_holds = number < self.high if self.below else number <= self.high
        return low_holds and high_holds and (self.infinite or math.isfinite(number))

    def describe(self, noun: str) -> str:
        """Return words such as "a whole number of at least 1" for the noun "whole number"."""
        if self.low == -math.inf and self.high == math.inf:
            return f"a finite {noun}"
        if self.high == math.inf:
            return f"a positive {noun}" if self.above and self.low == 0 else f"a {noun} {self._least()}"
        if not self.above and not self.below:
            return f"a {noun} from {self.low:g} to {self.high:g}"
        return f"a {noun} {self._least()} and {'below' if self.below else 'at most'} {self.high:g}"

    def _least(self) -> str:
        return f"{'above' if self.above else 'of at least'} {self.low:g}"


@dataclasses.dataclass(frozen=True)
class Or:
    """Another accepted type, which the setting converts itself."""

    kind: type[Any]


@dataclasses.dataclass(frozen=True)
class OrWord:
    """A word that is accepted in place of a number, and replaced by one before anything reads the number."""

    word: str


@dataclasses.dataclass(frozen=True)
class AtMost:
    """The largest number that is accepted, far beyond what anybody waits for or has memory for."""

    limit: int

    def holds(self, value: Any) -> bool:
        """Return whether a whole number is small enough; other values always are."""
        return not isinstance(value, Integral) or value <= self.limit


LARGEST = 2**63 - 1  # of the whole numbers that a tensor can hold

# Types for the fields of settings and the arguments of functions. A plain `float` may be infinite, but not NaN.
Finite = Annotated[float, Range()]
Positive = Annotated[float, Range(0, above=True)]
NonNegative = Annotated[float, Range(0)]
Probability = Annotated[float, Range(0, 1)]
Share = Annotated[float, Range(0, 1, below=True)]
OpenProbability = Annotated[float, Range(0, 1, above=True, below=True)]
Count = Annotated[int, Range(1), AtMost(10**8)]
CountOrZero = Annotated[int, Range(0), AtMost(10**8)]
LargeCount = Annotated[int, Range(1), AtMost(2**62)]  # of rows, where more than there are stands for all
Natural = Annotated[int, Range(0)]
FiniteValue = Annotated[float | Tensor, Range()]
PositiveValue = Annotated[float | Tensor, Range(0, above=True)]
FilePath = Annotated[str, Or(os.PathLike)]
Start = Literal["model", "fresh", "head"]

_NOUNS = {float: "number", int: "whole number", Tensor: "tensor"}
_WORDS = {str: "text", type(None): "None", torch.nn.Module: "a torch.nn.Module", torch.Generator: "a torch.Generator"}


def check(name: str, kind: Any, value: Any) -> None:
    """Raise an `InputError` unless the annotation `kind` allows `value`.

    Args:
        name: The argument's name, for the error.
        kind: A type, a union, a `Literal`, or one of these `Annotated` with a `Range`, and with text that describes it.
        value: What was given.
    """
    if accepts(kind, value):
        return
    entries = value if isinstance(value, list | tuple) else [value]
    if (limit := _limit(kind)) is not None and not all(map(AtMost(limit).holds, entries)):
        raise InputError(f"`{name}` must be at most {limit:,}, got {_show(value)}.")
    raise InputError(f"`{name}` must be {describe(kind)}, got {_show(value)}.{_suggestion(kind, value)}")


@functools.cache
def _limit(kind: Any) -> int | None:
    """Return the largest whole number that an annotation or one option of a union allows, or None if it allows none."""
    if kind is int:
        return LARGEST
    origin = get_origin(kind)
    if isinstance(origin, type) and issubclass(origin, Sequence):  # of its entries
        return _limit(get_args(kind)[0])
    options = get_args(kind) if origin in (Union, types.UnionType, Annotated) else ()
    limits = [option.limit if isinstance(option, AtMost) else _limit(option) for option in options]
    choose = min if get_origin(kind) is Annotated else max
    return choose((limit for limit in limits if limit is not None), default=None)


def accepts(kind: Any, value: Any) -> bool:
    """Return whether the annotation `kind` allows `value`; NaN is never allowed, and a bool is not a number."""
    return _test_of(kind)(value)


@functools.cache  # every prediction checks a few numbers
def _test_of(kind: Any) -> Callable[[Any], bool]:
    """Return the function that tells whether an annotation allows a value."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda value: True
    if origin is Annotated:
        also, test = tuple(rule.kind for rule in inner[1:] if isinstance(rule, Or)), _test_of(inner[0])
        words = [rule.word for rule in inner[1:] if isinstance(rule, OrWord)]
        ranges = [rule.holds for rule in inner[1:] if isinstance(rule, Range | AtMost)]
        return lambda value: (
            isinstance(value, also)
            or (isinstance(value, str) and value in words)
            or (test(value) and all(holds(value) for holds in ranges))
        )
    if origin in (Union, types.UnionType):
        tests = [_test_of(one) for one in inner]
        return lambda value: any(test(value) for test in tests)
    if origin is Literal:
        return lambda value: any(isinstance(value, type(one)) and value == one for one in inner)
    if origin is tuple:
        return lambda value: isinstance(value, tuple) and _accepts_each(inner, value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        key, item = map(_test_of, inner)
        return lambda value: isinstance(value, Mapping) and all(key(k) and item(v) for k, v in value.items())
    if isinstance(origin, type) and issubclass(origin, Sequence):
        each = _test_of(inner[0])
        return lambda value: isinstance(value, origin) and not isinstance(value, str | bytes) and all(map(each, value))
    return _TESTS.get(kind) or (lambda value: isinstance(value, type(None) if kind is None else origin or kind))


_TESTS: dict[Any, Callable[[Any], bool]] = {
    float: lambda value: isinstance(value, Real) and not isinstance(value, bool) and _as_float(value) is not None,
    int: lambda value: isinstance(value, Integral) and not isinstance(value, bool) and abs(int(value)) <= LARGEST,
    bool: lambda value: isinstance(value, bool | np.bool_),
}


def _as_float(value: Real) -> float | None:
    """Return a number in floating point, or None for NaN and for one that is too large, such as 10**400."""
    try:
        number = float(value)
    except OverflowError:
        return None
    return None if math.isnan(number) else number


def _accepts_each(kinds: tuple[Any, ...], values: tuple[Any, ...]) -> bool:
    if kinds[-1] is Ellipsis:
        return all(accepts(kinds[0], one) for one in values)
    return len(kinds) == len(values) and all(map(accepts, kinds, values))


def describe(kind: Any) -> str:
    """Describe in words what an annotation allows.

    >>> describe(Positive | Literal["auto"])
    "a positive number or 'auto'"
    """
    *most, last = dict.fromkeys(_options(kind, None))
    return f"{', '.join(most)} or {last}" if most else last


def _options(kind: Any, within: Range | None) -> Iterator[str]:
    origin, inner = get_origin(kind), get_args(kind)
    words = [note for note in inner[1:] if origin is Annotated and isinstance(note, str)]
    if words:
        yield words[0]
    elif origin is Annotated:
        yield from _options(inner[0], next((rule for rule in inner[1:] if isinstance(rule, Range)), None))
        yield from (repr(rule.word) for rule in inner[1:] if isinstance(rule, OrWord))
    elif origin in (Union, types.UnionType):
        for one in inner:
            yield from _options(one, within)
    elif origin is Literal or kind is bool:
        yield from map(repr, inner or (True, False))
    elif origin is tuple:
        each = describe(inner[0])
        yield f"a tuple, each entry {each}" if inner[-1] is Ellipsis else f"a tuple of {len(inner)}, each {each}"
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        yield "a dict" if inner[1] is Any else f"a dict, each value {describe(inner[1])}"
    elif isinstance(origin, type) and issubclass(origin, Sequence):
        yield f"a {origin.__name__.lower()}, each entry {describe(inner[0])}"
    elif within is not None and kind in _NOUNS:
        yield within.describe(_NOUNS[kind])
    else:
        own = origin or kind
        yield _WORDS.get(own) or getattr(own, "described", "") or f"a {_NOUNS.get(own, getattr(own, '__name__', own))}"


def _show(value: Any) -> str:
    if isinstance(value, Tensor):
        shown = value.numel() and not value.is_complex() and value.layout == torch.strided and not value.is_meta
        ends = f", values from {value.min().item():g} to {value.max().item():g}" if shown else ""
        return f"a tensor of shape {tuple(value.shape)}{ends}"
    if isinstance(value, int) and abs(value) > 10**100:
        return f"a number of {value.bit_length()} bits"
    return repr(value) if isinstance(value, str | Real | np.generic) else reprlib.repr(value)


def _suggestion(kind: Any, value: Any) -> str:
    if not isinstance(value, str):
        return ""
    known = [option.strip("'") for option in _options(kind, None) if option.startswith("'")]
    near = difflib.get_close_matches(value.lower(), known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


@functools.cache
def kinds_of(cls: type[Any]) -> dict[str, Any]:
    """Return the evaluated annotations of a dataclass's fields; `Any` for names that only type checkers know."""
    return {field.name: _evaluate(cls, field.name) for field in dataclasses.fields(cls)}


def _evaluate(cls: type[Any], name: str) -> Any:
    home = next(base for base in cls.__mro__ if name in inspect.get_annotations(base))
    alone = types.SimpleNamespace(__annotations__={name: inspect.get_annotations(home)[name]})
    try:
        return get_type_hints(alone, vars(sys.modules[home.__module__]), include_extras=True)[name]
    except (NameError, AttributeError):
        return Any
