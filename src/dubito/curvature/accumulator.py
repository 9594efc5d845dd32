"""The interface for summing curvature over batches."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from dubito.core import io, limits
from dubito.curvature import matrices as linalg
from dubito.curvature.engine import Engine, Tape
from dubito.curvature.factor import Factor
from dubito.curvature.factors import keep_gradients
from dubito.curvature.output_columns import Kind
from dubito.networks.selection import Selection

Sums = dict[str, Any]


def most_full() -> int:
    """Return the largest number of weights with a full float64 matrix."""
    return math.isqrt(limits.current().full_matrix // 8)


class Accumulator(ABC):
    """Sums curvature of one structure over the selected weights.

    The sums are tensors only, so they can be checkpointed, summed over processes, and added to with new data.
    """

    passes = 1  # the number of passes over the data
    num_data = 0  # the number of examples, once it is known
    additive = True  # whether all sums are sums over examples; otherwise `partial` says which are

    def __init__(self, engine: Engine, selection: Selection) -> None:
        self.engine, self.selection = engine, selection

    @property
    def home(self) -> torch.device:
        """The device of the sums: that of the network, so that no batch waits for a copy."""
        return next(iter(self.engine.parameters.values())).device

    @property
    def extra(self) -> int:
        """The number of entries per example and column that `add` allocates besides the layers' gradients."""
        return 0

    def is_complete(self, sums: Sums) -> bool:
        """Return whether nothing is left to add in this pass or in a later one."""
        return False

    def first_columns(self, sums: Sums) -> Kind | None:
        """Return a cheaper kind of output columns that is enough in this pass over the data; None if there is none."""
        return None

    def every(self, sums: Sums) -> int:
        """Return that in this pass every n-th row of a batch is enough."""
        return 1

    @property
    def fit_pass(self) -> int:
        """The number of the first pass that sees all rows."""
        return 0

    @abstractmethod
    def zeros(self) -> Sums:
        """Return the sums before the first batch."""

    @abstractmethod
    def add(self, sums: Sums, tape: Tape, columns: Iterable[Tensor], targets: Tensor | None = None) -> None:
        """Add one batch to `sums`, in place; only the exact Hessian uses the targets."""

    def gathered(self, sums: Sums) -> AbstractContextManager[None]:
        """Return a block in which `add` may wait for more parts of a batch; all are added when it ends."""
        return nullcontext()

    def partial(self, sums: Sums) -> list[Tensor]:
        """Return the tensors that are sums over the examples of this pass; several processes add theirs up."""
        return list(io.tensors(sums))

    def reset(self, sums: Sums) -> None:
        """Forget all examples, in place: they only showed which sums there are."""
        for tensor in self.partial(sums):
            tensor.zero_()

    def next_pass(self, sums: Sums) -> None:  # noqa: B027 - most structures see the data once
        """Prepare `sums`, in place, for the next pass over the data, if there is one."""

    def later_form(self, sums: Sums, saved: Sums) -> Sums:
        """Return what the first sums become in a later pass, in which `saved` was written to a checkpoint."""
        return sums

    @abstractmethod
    def matrix(self, sums: Sums) -> linalg.Matrix:
        """Return the curvature; it may share memory with `sums`."""


def curvature_product(factors: dict[str, Factor], selection: Selection, directions: dict[str, Tensor]) -> Tensor:
    """Return ``Jᵀ J u`` as ``[K, D]`` for directions ``[K, *shape]`` of every parameter."""
    return back_along(factors, selection, along(factors, selection, directions))


def along(factors: dict[str, Factor], selection: Selection, directions: dict[str, Tensor]) -> Tensor:
    """Return ``J u`` as ``[V, B, K]`` for directions ``[K, *shape]`` of every parameter."""
    keep_gradients(factors.values())
    return torch.stack([factors[name].dot(directions[name]) for name in selection.names]).sum(0)


def back_along(factors: dict[str, Factor], selection: Selection, weights: Tensor) -> Tensor:
    """Return ``Jᵀ r`` as ``[K, D]`` for weights ``[V, B, K]`` of all columns and examples."""
    keep_gradients(factors.values())
    back = {name: factors[name].backward_dot(weights) for name in selection.names}
    return selection.ravel({name: value.reshape(-1, *selection.shapes[name]) for name, value in back.items()})


def add_back_along(total: Tensor, factors: dict[str, Factor], selection: Selection, weights: Tensor) -> None:
    """Add ``Jᵀ r`` to `total` ``[K, D]``, one parameter after the other, without an array of all."""
    keep_gradients(factors.values())
    for name, chosen in selection.indices.items():
        found = factors[name].backward_dot(weights)
        total[:, selection.slices[name]] += found if chosen is None else found[:, chosen.to(found.device)]
