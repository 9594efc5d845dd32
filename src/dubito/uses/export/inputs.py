"""The inputs of an exported file: named tensors, from which the arguments of the network are put together."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from dubito.core import batches
from dubito.core.errors import InputError
from dubito.core.tracing import rows_to_record


@runtime_checkable
class Encoder(Protocol):
    """An object that turns raw inputs into those of the network, such as the encoder of a table."""

    def to_module(self) -> nn.Module:
        """Return the encoder as a module from raw tensors (numbers, codes of categories) to the network's inputs."""


@dataclass(frozen=True)
class Inputs:
    """Named tensors with one row per example.

    Attributes:
        names: The names of the inputs in the file.
        tensors: The tensors.
        keys: The keys of a mapping; None for one tensor or a tuple.
        alone: Whether there is one tensor and no tuple.
    """

    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    keys: tuple[str, ...] | None
    alone: bool

    @property
    def num_rows(self) -> int:
        """The number of examples."""
        return batches.num_rows(self.tensors)

    def rebuilt(self, tensors: tuple[Tensor, ...]) -> Any:
        """Return tensors in the form in which the network takes them."""
        if self.keys is not None:
            return dict(zip(self.keys, tensors, strict=True))
        return tensors[0] if self.alone else tensors

    def copies(self, rows: int | None = None) -> tuple[Tensor, ...]:
        """Return copies of the first rows, which a network may overwrite; by default of all."""
        return tuple(tensor[:rows].clone() for tensor in self.tensors)

    def traced_rows(self) -> tuple[Tensor, ...]:
        """Return the rows to record with."""
        rows: tuple[Tensor, ...] = rows_to_record(self.tensors)
        return rows


def as_inputs(example: Any, model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> Inputs:
    """Return an example as named tensors.

    Args:
        example: A tensor or array, a tuple or mapping of them, or a Dataset or DataLoader, whose first batch is used.
        model: The network, or the preprocessing in front of it; its argument names are the names of the inputs.
        device: Where the tensors go.
        dtype: The type of floating tensors; None to keep theirs.
    """
    if example is None:
        raise InputError("An export needs a batch of inputs to compare the file with `predict`: give `example=`.")
    if isinstance(example, DataLoader | Dataset):
        example = batches.Source(example, must_count=False, shard=False).first().inputs
    tree = batches.place(batches.as_tensors(example), device, dtype)
    parts = list(tree.values()) if isinstance(tree, Mapping) else list(tree) if isinstance(tree, tuple) else [tree]
    if not parts or not all(isinstance(part, Tensor) and part.ndim > 0 for part in parts):
        raise InputError("An exported network takes tensors with one row per example, or one tuple or dict of them.")
    if batches.num_rows(tree) == 0:
        raise InputError("The example is empty: give at least one row.")
    if isinstance(tree, Mapping):
        return Inputs(tuple(map(str, tree)), tuple(parts), tuple(tree), False)
    names = _argument_names(model, len(parts))
    return Inputs(names, tuple(parts), None, isinstance(tree, Tensor))


def _argument_names(model: nn.Module, count: int) -> tuple[str, ...]:
    """Return the names of the first arguments of a module: "input" for one, its own for several."""
    if count == 1:
        return ("input",)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    own = [name for name, each in inspect.signature(model.forward).parameters.items() if each.kind in kinds]
    return tuple(own[:count]) if len(own) >= count else tuple(f"input_{k}" for k in range(count))


def as_module(preprocess: Any) -> nn.Module | None:
    """Return the preprocessing as a private module in evaluation mode; None without any."""
    if preprocess is None:
        return None
    found = (
        preprocess
        if isinstance(preprocess, nn.Module) or not isinstance(preprocess, Encoder)
        else preprocess.to_module()
    )
    if not isinstance(found, nn.Module):
        raise InputError(
            f"`preprocess` must be a torch.nn.Module or have a method `to_module()`, got a {type(preprocess).__name__}."
        )
    return copy.deepcopy(found).eval()
