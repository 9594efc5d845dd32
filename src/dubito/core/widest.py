"""Devices without float64, such as Apple's `mps`: the widest float of a device stands for float64 there.

All code asks for float64 where it sums. On a device that has none, `computing_on` makes such requests give float32, and
runs decompositions and solves of matrices in float64 on the CPU, as float32 is not enough for them; the curvature of
many batches is added by `compensated_sum`. On any other device it does nothing. Fits, the methods of posteriors, and
public functions (`core/arguments`) run in such a block.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

P = ParamSpec("P")
R = TypeVar("R")
# Functions of matrices that are computed in float64 on the CPU, by their names in torch.
ON_THE_CPU = frozenset({
    "cholesky_inverse", "cholesky_solve", "linalg_cholesky", "linalg_cholesky_ex", "linalg_eigh", "linalg_eigvalsh",
    "linalg_inv", "linalg_lstsq", "linalg_qr", "linalg_slogdet", "linalg_solve", "linalg_solve_triangular",
    "linalg_svd", "linalg_svdvals", "logdet",
})  # fmt: skip
_NOTHING = nullcontext()


class _OnInThread(threading.local):
    is_on: bool = False


_own = _OnInThread()


@cache
def has_double(device: torch.device) -> bool:
    """Return whether a device computes in float64; Apple's does not."""
    try:
        torch.zeros((), dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return False
    return True


def widest(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on a device that has no float64.

    >>> widest(torch.device("cpu"))
    torch.float64
    """
    return torch.float64 if device.type == "cpu" or has_double(device) else torch.float32


def wide(values: Tensor) -> Tensor:
    """Return values in the widest float of their device."""
    return values.to(widest(values.device))


def compensated_sum(total: Tensor, value: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
    """Return a sum and what rounding left out of it, which is added the next time (Kahan 1965, Neumaier 1974).

    However many numbers are added, the sum is about as accurate as its float.

    Args:
        total: The sum so far.
        value: What is added.
        carry: What is missing in `total`, zeros at first.

    >>> total, carry = torch.ones(()), torch.zeros(())
    >>> for _ in range(1000):
    ...     total, carry = compensated_sum(total, torch.tensor(1e-8), carry)
    >>> f"{float(total):.6f}"
    '1.000010'
    """
    added = value + carry
    found = total + added
    rest = torch.where(total.abs() >= added.abs(), (total - found) + added, (added - found) + total)
    return found, rest


def computing_on(device: torch.device) -> AbstractContextManager[None]:
    """Let float32 stand for float64 inside the block, in this thread, on a device that has no float64."""
    if device.type == "cpu" or _own.is_on or has_double(device):
        return _NOTHING
    return _narrowly()


def computing_among(values: Iterable[Any]) -> AbstractContextManager[None]:
    """Return `computing_on` the device of the first tensor, network or posterior that is not on the CPU.

    What holds a posterior or a network under that name counts too.
    """
    for value in values:
        held = getattr(value, "__dict__", {})
        device = _place(value) or _place(held.get("posterior")) or _place(held.get("model"))
        if device is not None and device.type != "cpu":
            return computing_on(device)
    return _NOTHING


def _place(value: Any) -> torch.device | None:
    """Return the device of a tensor, a network or a posterior."""
    if isinstance(value, nn.Module):
        is_made = "_parameters" in vars(value)  # else this is a call of its `__init__`
        return next((each.device for each in value.parameters()), None) if is_made else None
    device = getattr(value, "device", None)
    return device if isinstance(device, torch.device) else None


def carried(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that another thread may call in the block of this one."""
    if not _own.is_on:
        return function

    @wraps(function)
    def call(*args: Any) -> Any:
        with _Narrow():
            return function(*args)

    return call


def at_home(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that runs in a block of `computing_among` its arguments."""

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        with computing_among((*args, *options.values())):
            return function(*args, **options)

    return call


@contextmanager
def _narrowly() -> Iterator[None]:
    _own.is_on = True
    try:
        with _Narrow():
            yield
    finally:
        _own.is_on = False


class _Narrow(TorchFunctionMode):
    """Give float32 where float64 is asked for on a device that has none."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        name, far = getattr(func, "__name__", ""), _far(args)
        if far is not None:  # a number of the CPU would make a number of the device float64
            args = tuple(each.float() if _is_wide_number(each) else each for each in args)
        if name in ON_THE_CPU and far is not None:
            found = func(*(_near(each) for each in args), **{key: _near(each) for key, each in given.items()})
            return _back(found, far)
        if name == "double" and args and _is_far(args[0]):
            return args[0].float()
        if func is Tensor.to:
            return _moved(*args, **given)
        if name == "as_tensor" and isinstance(args[0], Tensor):
            return _moved(args[0], **given)
        if given.get("dtype") is torch.float64 and _lies_far(given.get("device"), args):
            given["dtype"] = torch.float32
        return func(*args, **given)


def _moved(values: Tensor, *args: Any, **given: Any) -> Tensor:
    """Do what `Tensor.to` does, in float32 where it would be float64 on a device that has none."""
    device, dtype, rest = given.pop("device", None), given.pop("dtype", None), dict(given)
    other = rest.pop("other", None)
    for each in args:
        if isinstance(each, Tensor):
            other = each
        elif isinstance(each, torch.dtype):
            dtype = each
        elif isinstance(each, str | torch.device | int) and not isinstance(each, bool) and device is None:
            device = each
        elif isinstance(each, bool):
            rest["copy" if "non_blocking" in rest else "non_blocking"] = each
    if other is not None:
        device, dtype = other.device, other.dtype
    target = values.device if device is None else torch.device(device)
    kind = values.dtype if dtype is None else dtype
    if kind is torch.float64 and not has_double(target):
        kind = torch.float32
        if values.dtype is torch.float64:
            values = values.float()
    return values.to(target, kind, **rest)


def _is_far(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu" and not has_double(value.device)


def _is_wide_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 0 and value.dtype is torch.float64 and value.device.type == "cpu"


def _far(args: Any) -> torch.device | None:
    """Return the device without float64 on which an argument lies."""
    return next((each.device for each in args if _is_far(each)), None)


def _lies_far(device: Any, args: Any) -> bool:
    if device is not None:
        return not has_double(torch.device(device))
    return _far(args) is not None


def _near(value: Any) -> Any:
    return value.cpu().double() if _is_far(value) and value.is_floating_point() else value


def _back(found: Any, device: torch.device) -> Any:
    if isinstance(found, Tensor):
        return found.to(device, torch.float32 if found.dtype is torch.float64 else found.dtype)
    if isinstance(found, tuple):
        parts = [_back(each, device) for each in found]
        return type(found)(parts) if not hasattr(found, "_make") else found._make(parts)
    return found
