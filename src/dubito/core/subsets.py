"""Choose single examples of data in any form: the bootstrap and held-out parts need it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset

from dubito.core.data_forms import as_pair, split
from dubito.core.errors import UnsupportedError
from dubito.core.nests import as_tensors, concatenate, leaves, num_rows, take


def num_examples(data: Any) -> int | None:
    """Return the number of examples that `subset` can choose from; None where it cannot choose."""
    pair = _as_one_pair(data)
    if pair is not None:
        return num_rows(pair)
    dataset = data.dataset if isinstance(data, DataLoader) and _is_plain(data) else data
    if isinstance(dataset, list | IterableDataset | DataLoader) or not hasattr(dataset, "__getitem__"):
        return None
    return len(dataset) if hasattr(dataset, "__len__") else None


def subset(data: Any, rows: Tensor, *, shuffle: bool | None = None) -> Any:
    """Return some examples of the data in the same form; a list of batches becomes one pair.

    Args:
        data: The data; `num_examples` must not be None.
        rows: The numbers of the examples, which may repeat.
        shuffle: Whether a DataLoader shuffles; by default as the given one.

    >>> import torch
    >>> x = torch.arange(4.0)
    >>> subset((x, 2 * x), torch.tensor([1, 3]))
    (tensor([1., 3.]), tensor([2., 6.]))
    """
    pair = _as_one_pair(data)
    if pair is not None:
        chosen: Any = take(pair, rows)
        return chosen
    if num_examples(data) is None:
        raise UnsupportedError(
            "Single examples of this data cannot be chosen: give a Dataset, an (inputs, targets) pair, or a DataLoader "
            "of a Dataset without a sampler of its own."
        )
    if not isinstance(data, DataLoader):
        return Subset(data, rows.tolist())
    dataset: Any = data.dataset
    is_shuffled = isinstance(data.sampler, RandomSampler)
    return DataLoader(
        Subset(dataset, rows.tolist()), batch_size=data.batch_size,
        shuffle=is_shuffled if shuffle is None else shuffle, drop_last=data.drop_last and shuffle is not False,
        num_workers=data.num_workers, collate_fn=data.collate_fn, pin_memory=data.pin_memory,
        worker_init_fn=data.worker_init_fn, generator=data.generator,
    )  # fmt: skip


def fold_numbers(data: Any, order: Tensor, folds: int) -> Tensor:
    """Return the fold of each row of `order`: 0, 1, 2 and so on in turn; copies of the same inputs share one.

    A copy in another fold would not be held out. Where nine of ten rows are copies, as of a few discrete features, they
    are not kept together: no value of the inputs would be left to learn from.

    >>> import torch
    >>> x = torch.arange(20.0)[:, None]
    >>> fold_numbers((x.repeat_interleave(2, 0), torch.zeros(40)), torch.arange(40), 3)[:8].tolist()
    [0, 0, 1, 1, 2, 2, 0, 0]
    """
    positions, pair = torch.arange(len(order)), _as_one_pair(data)
    inputs = None if pair is None else as_tensors(pair[0])
    if not isinstance(inputs, Tensor) or inputs.is_complex():
        return positions % folds
    flat = inputs.reshape(len(inputs), -1)
    weights = torch.randn(flat.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    keys = torch.cat([(rows.cpu().double() * weights).sum(1) for rows in flat.split(1024)])
    groups, same = keys[order].unique(return_inverse=True)
    if len(groups) < max(5 * folds, len(order) / 10):
        return positions % folds
    first = torch.full((len(groups),), len(order)).scatter_reduce(0, same, positions, "amin")[same]
    return ((first == positions).cumsum(0) - 1)[first] % folds


def _is_plain(loader: DataLoader[Any]) -> bool:
    """Return whether a loader draws single examples of a Dataset in torch's own ways."""
    plain = isinstance(loader.sampler, RandomSampler | SequentialSampler)
    return plain and type(loader.batch_sampler) is BatchSampler and not isinstance(loader.dataset, IterableDataset)


def _as_one_pair(data: Any) -> Any:
    """Return data in memory as one pair of inputs and targets, or None."""
    pair = as_pair(data)
    if pair is not None or not isinstance(data, list) or not data:
        return pair
    inputs, targets = zip(*(as_tensors(split(raw)) for raw in data), strict=True)
    rows = zip(inputs, targets, strict=True)
    shapes = {tuple((tuple(leaf.shape[1:]), leaf.dtype) for leaf in leaves(each)) for each in rows}
    if len(shapes) > 1 or any(each is None for each in targets):
        return None
    return concatenate(list(inputs)), concatenate(list(targets))


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
