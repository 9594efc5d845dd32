"""`History`: the diagnosis and the traces of a fit, for reports."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

Numbers = tuple[float, ...]


@dataclass(frozen=True)
class Trace:
    """The values of one quantity at the samples of every chain.

    Attributes:
        name: The name of the quantity.
        samples: The numbers of the samples, starting at 1.
        values: The values at these samples, one row per chain.
        autocorrelation: The autocorrelation of each chain at lags 0, 1, 2 and so on, one row per chain.
    """

    name: str
    samples: Numbers
    values: tuple[Numbers, ...]
    autocorrelation: tuple[Numbers, ...]

    @classmethod
    def of(cls, name: str, values: Tensor, autocorrelation: Tensor) -> Trace:
        """Return the trace of values ``[K, S]`` with autocorrelations ``[K, L]``."""
        samples = tuple(map(float, range(1, values.shape[1] + 1)))
        return cls(name, samples, *(tuple(map(tuple, part.double().tolist())) for part in (values, autocorrelation)))

    def thinned(self, max_points: int) -> Trace:
        """Return the trace at no more than `max_points` samples."""
        shown = evenly_spaced(len(self.samples), max_points).tolist()
        samples, *values = (tuple(row[index] for index in shown) for row in (self.samples, *self.values))
        return replace(self, samples=samples, values=tuple(values))


@dataclass(frozen=True)
class History:
    """The diagnosis and the traces of a fit."""

    words: tuple[str, ...]  # the diagnosis, one line each
    traces: tuple[Trace, ...]  # some quantities along the chains; none if there are too few samples


def evenly_spaced(size: int, max_points: int) -> Tensor:
    """Return at most `max_points` evenly spaced positions below `size`, including the first and the last."""
    return torch.linspace(0, size - 1, min(size, max_points), dtype=torch.float64).round().long()
