"""Bootstrap samples: as many examples as the data has, drawn with replacement."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset

from dubito.core import batches
from dubito.core.batches import Source
from dubito.core.errors import UnsupportedError


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
    pair = Source(data, must_count=False).pair
    if pair is not None:
        return batches.take(pair, drawn_rows(batches.num_rows(pair), seed))
    if isinstance(data, DataLoader):
        return _resampled_loader(data, seed)
    if isinstance(data, list | IterableDataset) or not hasattr(data, "__getitem__"):
        raise UnsupportedError(
            "bootstrap=True needs access to single examples: pass a Dataset, an (inputs, targets) pair or a DataLoader "
            "of a Dataset."
        )
    return Subset(data, drawn_rows(len(data), seed).tolist())


def _resampled_loader(loader: DataLoader[Any], seed: int) -> DataLoader[Any]:
    sampler = loader.batch_sampler
    plain = type(sampler) is BatchSampler and isinstance(loader.sampler, RandomSampler | SequentialSampler)
    if isinstance(loader.dataset, IterableDataset) or not plain:
        raise UnsupportedError(
            "bootstrap=True does not support a DataLoader with a custom sampler: pass the Dataset instead."
        )
    dataset: Any = loader.dataset
    return DataLoader(
        Subset(dataset, drawn_rows(len(dataset), seed).tolist()),
        batch_size=loader.batch_size, shuffle=isinstance(loader.sampler, RandomSampler), drop_last=loader.drop_last,
        num_workers=loader.num_workers, collate_fn=loader.collate_fn, pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn, generator=loader.generator,
    )  # fmt: skip
