"""Recognize the forms in which data is given: a DataLoader, a Dataset, a pair of tensors, a list of batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, TensorDataset

from dubito.core.errors import InputError
from dubito.core.nests import as_tensors, num_rows, take

# Keys of the targets in a dict batch, as Hugging Face and common datasets spell them.
TARGET_NAMES = ("labels", "label", "targets", "target", "y")


def split(raw: Any) -> tuple[Any, Any]:
    """Split one batch into inputs and targets.

    A pair is (inputs, targets); a longer tuple has its targets last and its inputs are passed to the model one by one;
    a mapping has its targets under one of `TARGET_NAMES`; anything else is inputs without targets.
    """
    if isinstance(raw, Mapping):
        for name in TARGET_NAMES:
            if name in raw:
                return {key: value for key, value in raw.items() if key != name}, raw[name]
        return raw, None
    if isinstance(raw, tuple | list) and len(raw) >= 2:
        return (raw[0] if len(raw) == 2 else tuple(raw[:-1])), raw[-1]
    if isinstance(raw, tuple | list) and len(raw) == 1:
        return raw[0], None
    return raw, None


def is_dataset(data: Any) -> bool:
    """Return whether data is a DataLoader or a Dataset, of torch or of Hugging Face, and not a nest of tensors.

    >>> is_dataset(TensorDataset(torch.ones(2))), is_dataset(torch.ones(2)), is_dataset({"x": torch.ones(2)})
    (True, False, False)
    """
    if isinstance(data, DataLoader | Dataset):
        return True
    known = isinstance(data, Tensor | np.ndarray | Mapping | tuple | list | str | bytes | range)
    return (
        not known and hasattr(type(data), "__getitem__") and not hasattr(data, "iloc") and length_of(data) is not None
    )


def with_tensors(data: Any) -> Any:
    """Return a dataset of Hugging Face that gives lists such that it gives tensors, and other data as it is."""
    if hasattr(data, "with_format") and getattr(data, "format", {"type": ""})["type"] is None:
        return data.with_format("torch")
    return data


def bare_inputs(data: Any, what: str) -> Tensor | None:
    """Return data that is a single tensor or array, which holds inputs without targets, or None for other data.

    Args:
        data: Data in any form.
        what: A name for it, for the errors.
    """
    if not isinstance(data, Tensor | np.ndarray):
        return None
    inputs: Tensor = as_tensors(data)
    if inputs.ndim == 0:
        raise InputError(f"{what} is a single number: give inputs, one row each.")
    if len(inputs) == 0:
        raise InputError(f"{what} is empty: give at least one input.")
    return inputs


def is_empty(data: Any) -> bool:
    """Return whether data, or the first part of a pair, is known to have no rows."""
    is_pair = isinstance(data, list | tuple) and bool(data) and isinstance(data[0], Tensor | np.ndarray)
    return length_of(data[0] if is_pair else data) == 0


def as_pair(data: Any) -> tuple[Any, Any] | None:
    """Return data in memory as `(inputs, targets)` tensors, or None if it has another form."""
    if isinstance(data, TensorDataset) and len(data.tensors) > 1:
        data = split(data.tensors)
    elif isinstance(data, Mapping):
        data = split(data)
    elif isinstance(data, list) and len(data) == 2 and all(isinstance(part, Tensor | np.ndarray) for part in data):
        data = tuple(data)
    if not isinstance(data, tuple):
        return None
    if len(data) != 2:
        raise InputError(f"Data given as a tuple must be (inputs, targets), not {len(data)} items.")
    inputs, targets = as_tensors(data)
    if targets is None:
        raise InputError("The data has inputs but no targets: give (inputs, targets).")
    if num_rows(inputs) != num_rows(targets):
        raise InputError(f"There are {num_rows(inputs)} inputs but {num_rows(targets)} targets: give one for each.")
    return inputs, targets


def pair_batches(pair: Any, batch_size: int, shuffle: bool) -> Iterator[Any]:
    """Yield slices of a pair of tensors; much faster than collating single examples."""
    size = num_rows(pair)
    order = torch.randperm(size) if shuffle else None
    for start in range(0, size, batch_size):
        stop = min(start + batch_size, size)
        yield take(pair, slice(start, stop) if order is None else order[start:stop])


def as_loader(data: Any, batch_size: int, shuffle: bool) -> tuple[Any, int | None]:
    """Return an iterable over batches, and the number of examples or None if it cannot be counted."""
    data = with_tensors(data)
    if isinstance(data, DataLoader):
        return data, _count_loader(data)
    if isinstance(data, IterableDataset):
        return DataLoader(data, batch_size=batch_size), None
    if isinstance(data, list):
        return data, sum(num_rows(as_tensors(split(raw)[0])) for raw in data)
    sized = length_of(data) if hasattr(data, "__getitem__") and not isinstance(data, str | bytes | range) else None
    if sized is not None and not hasattr(data, "iloc"):  # not a data frame
        return (DataLoader(data, batch_size=batch_size, shuffle=shuffle) if sized else []), sized
    if hasattr(data, "__iter__") and not isinstance(data, Iterator | str | bytes | range | set | Tensor | type):
        return data, None
    raise InputError(
        f"Data must be a DataLoader, a Dataset with a length, an (inputs, targets) pair or a list of batches, not a "
        f"{type(data).__name__}."
    )


def _count_loader(loader: DataLoader[Any]) -> int | None:
    """Return the number of examples in one pass, or None if the dataset makes the batches itself."""
    sampler = loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset) or sampler is None:
        return None
    if not isinstance(sampler, BatchSampler):
        return length_of(loader.dataset)
    total, length = length_of(sampler.sampler), length_of(sampler)
    return length * sampler.batch_size if sampler.drop_last and length is not None else total


def length_of(sized: Any) -> int | None:
    """Return the length, or None if there is none."""
    try:
        return len(sized)
    except TypeError:
        return None


def generators_of(loader: Any) -> list[torch.Generator]:
    """Return the explicit generators that a user's loader draws from, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = (getattr(holder, "generator", None) for holder in holders)
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())
