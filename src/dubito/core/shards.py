"""Determine by digests whether all processes hold the same data or each holds a shard of it.

Data in memory is compared as a whole. Loaders are compared by their counts and their first batch, which every process
draws from the same seed. A loader with a `DistributedSampler` always gives a shard.
"""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from dubito.core import distributed
from dubito.core.errors import InputError, ShardsWarning
from dubito.core.settings import digest

if TYPE_CHECKING:
    from collections.abc import Iterator

_log = logging.getLogger("dubito")


class DataSummary(NamedTuple):
    """What the other processes need to know about the data of one process."""

    inputs: str  # a digest of the inputs
    targets: str  # a digest of the targets
    varied: bool  # whether the targets are not all equal; constant targets have equal digests in different data
    examples: int  # the number of examples, 0 if unknown
    batches: int | None  # the number of batches, or None if unknown
    declared: bool  # whether a sampler declares this data to be one shard


def summarize(
    inputs: list[Tensor], targets: list[Tensor], count: int, batches: int | None, declared: bool
) -> DataSummary:
    """Summarize the data of one process, or its first batch."""
    varied = any(len(value) > 1 and bool((value != value[:1]).any()) for value in targets if value.ndim)
    return DataSummary(_digest(inputs), _digest(targets), varied, count, batches, declared)


def are_shards(own: DataSummary, again: Callable[[], DataSummary]) -> tuple[bool, list[DataSummary]]:
    """Return whether each process holds a shard of the data, and the summaries of all processes.

    Args:
        own: The summary of this process.
        again: Makes the summary once more; if it differs, the loader has randomness that we do not control.
    """
    everyone = _everyone(own)
    if any(each.declared for each in everyone):
        return True, everyone
    different = len({each._replace(varied=True) for each in everyone})
    if different == 1:
        return False, everyone
    if len({(each.inputs, each.examples) for each in everyone}) == 1:
        raise InputError("The processes hold the same inputs with different targets: give all of them the same data.")
    repeatable = all(text == "yes" for text in distributed.texts("yes" if again() == own else "no"))
    if not repeatable:
        same_order = len({(each.targets, each.examples) for each in everyone}) == 1 and own.varied
        if same_order:  # only the inputs are random: augmentation
            return False, everyone
        raise InputError(
            "The loaders of the processes give different batches, and different ones each time: draw their random "
            "numbers from the global generators of torch, numpy or random, or use a DistributedSampler for shards."
        )
    if different < len(everyone):
        raise InputError(
            f"Of {len(everyone)} processes some hold the same data and some do not: give every process the same data, "
            "or each a shard of its own."
        )
    return True, everyone


class FirstPass:
    """A digest of the first pass over a loader whose first batch is the same in all processes.

    It covers the targets of every batch and one row of its inputs, unless the inputs are random.

    Args:
        everyone: The summaries of all processes.
    """

    def __init__(self, everyone: list[DataSummary]) -> None:
        self._with_inputs = len({each.inputs for each in everyone}) == 1
        self._total = hashlib.sha256()

    def add(self, inputs: list[Tensor], targets: list[Tensor]) -> None:
        """Add one batch."""
        rows = [value[:1] for value in inputs if value.ndim] if self._with_inputs else []
        self._total.update(_digest([*rows, *targets]).encode())

    def compare(self) -> None:
        """Raise an error unless the digest is the same in all processes."""
        if len(set(distributed.texts(self._total.hexdigest()))) > 1:
            raise InputError(
                "The loaders of the processes give the same first batch, but different ones later: give every process "
                "the same data, or use a DistributedSampler if each gives a shard."
            )


def announce(shards: bool, num_data: int) -> None:
    """Warn in the first process if the data is treated as shards; log it otherwise."""
    if distributed.rank() > 0:
        return
    processes = distributed.world_size()
    if shards:
        warnings.warn(
            f"Each of the {processes} processes holds different data, which is treated as its shard of one data set of "
            f"{num_data:,} examples: to have one data set divided among them, give every process the same data.",
            ShardsWarning, stacklevel=2,
        )  # fmt: skip
    else:
        _log.info("All %d processes hold the same data; each works on every %dth row.", processes, processes)


def declared_sampler(loader: Any) -> DistributedSampler[Any] | None:
    """Return the sampler by which a loader gives each process a shard of the data, or None."""
    if not isinstance(loader, DataLoader) or not distributed.is_active():
        return None
    sampler: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas == distributed.world_size():
        return sampler
    return None


@contextmanager
def in_new_order(sampler: DistributedSampler[Any] | None) -> Iterator[None]:
    """Shuffle by the active random stream; by itself, a `DistributedSampler` has the same order in every epoch."""
    if sampler is None:
        yield
        return
    before = sampler.epoch
    sampler.set_epoch(int(torch.randint(2**31, ())))
    try:
        yield
    finally:
        sampler.set_epoch(before)


def _everyone(own: DataSummary) -> list[DataSummary]:
    return [DataSummary(*json.loads(text)) for text in distributed.texts(json.dumps(own))]


def _digest(tensors: list[Tensor]) -> str:
    return hashlib.sha256(" ".join(digest(tensor) for tensor in tensors).encode()).hexdigest()[:16]
