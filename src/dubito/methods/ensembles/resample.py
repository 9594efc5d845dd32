"""Bootstrap samples: as many examples as the data has, drawn with replacement."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dubito.core.errors import UnsupportedError
from dubito.core.subsets import num_examples, subset


def drawn_rows(num_rows: int, seed: int) -> Tensor:
    """Return the row numbers of one bootstrap sample."""
    return torch.randint(num_rows, (num_rows,), generator=torch.Generator().manual_seed(seed))


def resampled(data: Any, seed: int) -> Any:
    """Return a bootstrap sample of the data, in the same form.

    >>> x = torch.arange(4.0)
    >>> inputs, targets = resampled((x, 2 * x), seed=1)
    >>> len(inputs), torch.equal(targets, 2 * inputs)
    (4, True)
    """
    size = num_examples(data)
    if size is None:
        raise UnsupportedError(
            "bootstrap=True needs single examples: pass a Dataset, an (inputs, targets) pair, or a DataLoader "
            "of a Dataset without a sampler of its own."
        )
    return subset(data, drawn_rows(size, seed))
