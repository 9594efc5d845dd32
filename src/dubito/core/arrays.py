"""Convert arrays to tensors, and explain in one sentence why an array or a tensor cannot be used."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dubito.core.errors import InputError

# Types of whole numbers for which torch lacks most operations.
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def as_tensor(array: np.ndarray[Any, Any]) -> Tensor:
    """Convert an array to a tensor, sharing its memory if possible."""
    if array.dtype.kind not in "biufc":
        raise InputError(f"An array of type {array.dtype} holds no numbers: convert it with .astype(float) first.")
    if isinstance(array, np.ma.MaskedArray):
        raise InputError("A masked array has missing values: fill them first, as with .filled(0).")
    native = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    shareable = native.flags.writeable and min(native.strides, default=0) >= 0  # else torch warns or refuses
    try:
        return checked(torch.as_tensor(native if shareable else native.copy()))
    except TypeError as error:  # a type that torch lacks, such as longdouble
        raise InputError(f"An array of type {array.dtype} cannot become a tensor: convert it first.") from error


def checked(tensor: Tensor) -> Tensor:
    """Return the tensor if it is dense and has values; raise otherwise. Large unsigned numbers become signed ones."""
    if tensor.layout != torch.strided:
        raise InputError(f"A tensor of layout {tensor.layout} has no rows in memory: call .to_dense() on it.")
    if tensor.device.type == "meta":
        raise InputError("A tensor on the device 'meta' has a shape but no values: give one with values.")
    return _signed(tensor) if tensor.dtype in _UNSIGNED else tensor


def _signed(tensor: Tensor) -> Tensor:
    signed = tensor.to(torch.int64)
    if bool((signed < 0).any()):
        raise InputError("A tensor of type uint64 holds numbers of 2^63 and more: convert it to floating point first.")
    return signed


def to_tensor(value: Any, name: str, dtype: torch.dtype | None = None) -> Tensor:
    """Convert a number, a list or an array to a tensor; a tensor is only checked."""
    if isinstance(value, Tensor):
        return checked(value)
    if isinstance(value, np.ndarray):
        return as_tensor(value)
    try:
        return torch.as_tensor(value, dtype=dtype)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        kind = type(value).__name__
        raise InputError(f"{name} must be a tensor, or numbers that can become one, not a {kind}.") from error
