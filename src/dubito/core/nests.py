"""Operations on nests: tuples, lists and mappings of tensors, of which batches consist."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dubito.core import arrays
from dubito.core.errors import InputError
from dubito.core.numeric import all_finite


def leaves(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of a nest of tuples, lists and mappings."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, tuple | list):
        for value in tree:
            yield from leaves(value)


def map_leaves(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Apply `function` to every tensor of a nest; other values stay as they are."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, np.ndarray):
        return function(arrays.as_tensor(tree))
    if isinstance(tree, Mapping):
        return {key: map_leaves(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return tuple(map_leaves(function, value) for value in tree)
    return tree


def as_tensors(tree: Any) -> Any:
    """Convert the arrays of a nest to tensors, sharing their memory; raise an error for sparse and meta tensors."""
    return map_leaves(arrays.checked, tree)


def num_rows(tree: Any) -> int:
    """Return the common length of the first axis of every tensor in a nest."""
    if isinstance(tree, Tensor) and tree.ndim:
        return tree.shape[0]
    tensors = list(leaves(tree))
    if not tensors:
        raise InputError("A batch holds no tensor: inputs must be tensors, arrays, or tuples and dicts of them.")
    if not all(tensor.ndim for tensor in tensors):
        raise InputError("A tensor without axes has no rows: its first axis must be the batch.")
    sizes = [tensor.shape[0] for tensor in tensors]
    if any(size != sizes[0] for size in sizes):
        raise InputError(f"The tensors of one batch differ in their number of rows: {sorted({*sizes})}.")
    return sizes[0]


def take(tree: Any, index: Any) -> Any:
    """Index every tensor of a nest along its rows."""
    try:
        return map_leaves(lambda tensor: tensor[index], tree)
    except IndexError as error:
        if all(tensor.ndim for tensor in leaves(tree)):
            raise
        raise InputError("A tensor without axes has no rows: its first axis must be the batch.") from error


def place(tree: Any, device: torch.device | None, dtype: torch.dtype | None) -> Any:
    """Move the tensors of a nest to `device`, and cast floating ones to `dtype`."""
    return map_leaves(lambda t: t.to(device=device, dtype=dtype if t.is_floating_point() else None), tree)


def concatenate(trees: list[Any]) -> Any:
    """Concatenate nests of the same structure along their rows."""
    first = trees[0]
    if isinstance(first, Tensor):
        if len(shapes := {tuple(tree.shape[1:]) for tree in trees}) > 1:
            raise InputError(f"Batches cannot be joined, because their rows have different shapes: {sorted(shapes)}.")
        return torch.cat(trees)
    if isinstance(first, Mapping):
        return {key: concatenate([tree[key] for tree in trees]) for key in first}
    if isinstance(first, tuple | list):
        return tuple(concatenate([tree[i] for tree in trees]) for i in range(len(first)))
    return first


def is_finite(tree: Any) -> bool:
    """Return whether every floating tensor of a nest is free of NaN and infinities."""
    return all_finite(leaves(tree))


def join_single_rows(pieces: Iterator[Any], split: Callable[[Any], Any], warn: Callable[[], None]) -> Iterator[Any]:
    """Yield the batches, joining two neighbours if one of them has a single row.

    Args:
        pieces: The batches.
        split: Returns the inputs and the targets of a batch.
        warn: Called when two batches are joined.
    """
    held = next(pieces, None)
    for raw in pieces:
        pair = [as_tensors(split(held)), as_tensors(split(raw))]
        if 1 in (num_rows(inputs) for inputs, _ in pair) and _width(pair[0]) == _width(pair[1]):
            warn()
            held = concatenate(pair)
        else:
            yield held
            held = raw
    if held is not None:
        yield held


def _width(tree: Any) -> list[torch.Size]:
    """Return the shape of every tensor of a batch, without the batch axis."""
    return [tensor.shape[1:] for tensor in leaves(tree)]
