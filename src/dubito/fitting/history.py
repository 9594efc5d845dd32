"""What a report shows of the way a posterior was found."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

Numbers = tuple[float, ...]


@dataclass(frozen=True)
class Trace:
    """One quantity along the samples of every chain.

    Attributes:
        name: What it is.
        samples: The numbers of the samples, from 1.
        values: Its values there, one row per chain.
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
        """Return the trace at `max_points` or fewer samples."""
        shown = evenly_spaced(len(self.samples), max_points).tolist()
        samples, *values = (tuple(row[index] for index in shown) for row in (self.samples, *self.values))
        return replace(self, samples=samples, values=tuple(values))


@dataclass(frozen=True)
class History:
    """How a posterior was found.

    Attributes:
        words: The diagnosis, one line each.
        traces: Some quantities along the chains; none if there are too few samples.
    """

    words: tuple[str, ...]
    traces: tuple[Trace, ...]


def evenly_spaced(size: int, max_points: int) -> Tensor:
    """Return at most `max_points` evenly spaced positions below `size`, the first and the last among them."""
    return torch.linspace(0, size - 1, min(size, max_points), dtype=torch.float64).round().long()
