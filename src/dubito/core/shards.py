"""Find out whether several processes hold the same data or each a shard of it, by digests of the content.

Data in memory is compared as a whole, a loader by its counts and its first batch, which every process draws from the
same seed. A loader with a `DistributedSampler` says by itself that it gives a shard.
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


class Evidence(NamedTuple):
    """What one process knows of its data.

    Args:
        inputs: A digest of the inputs.
        targets: A digest of the targets.
        varied: Whether the targets differ among themselves; equal digests of constant ones say nothing.
        examples: The number of examples, 0 where it is not known.
        batches: The number of batches, or None.
        declared: Whether a sampler says that this is one shard of the data.
    """

    inputs: str
    targets: str
    varied: bool
    examples: int
    batches: int | None
    declared: bool


def evidence(inputs: list[Tensor], targets: list[Tensor], count: int, batches: int | None, declared: bool) -> Evidence:
    """Describe the data that one process holds, or its first batch."""
    varied = any(len(value) > 1 and bool((value != value[:1]).any()) for value in targets if value.ndim)
    return Evidence(_digest(inputs), _digest(targets), varied, count, batches, declared)


def are_shards(own: Evidence, again: Callable[[], Evidence]) -> tuple[bool, list[Evidence]]:
    """Return whether each process holds a shard of the data, the same answer in all, and what each knows.

    Args:
        own: What this process knows.
        again: Looks at the data once more; a loader that differs then has randomness of its own.
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
            "The loaders of the processes give different batches, and different ones each time: draw their randomness "
            "from the global generators of torch, numpy or random, or use a DistributedSampler if each gives a shard."
        )
    if different < len(everyone):
        raise InputError(
            f"Of {len(everyone)} processes some hold the same data and some do not: give every process the same data, "
            "or each a shard of its own."
        )
    return True, everyone


class Trail:
    """A digest of the first pass over a loader whose first batch is the same in all processes.

    It sees the targets of every batch and one row of its inputs, unless these are random.

    Args:
        everyone: What each process knows of its data.
    """

    def __init__(self, everyone: list[Evidence]) -> None:
        self._with_inputs = len({each.inputs for each in everyone}) == 1
        self._total = hashlib.sha256()

    def see(self, inputs: list[Tensor], targets: list[Tensor]) -> None:
        """Add one batch."""
        rows = [value[:1] for value in inputs if value.ndim] if self._with_inputs else []
        self._total.update(_digest([*rows, *targets]).encode())

    def compare(self) -> None:
        """Raise unless all processes saw the same."""
        if len(set(distributed.texts(self._total.hexdigest()))) > 1:
            raise InputError(
                "The loaders of the processes give the same first batch, but different ones later: give every process "
                "the same data, or use a DistributedSampler if each gives a shard."
            )


def say(shards: bool, num_data: int) -> None:
    """Let the first process say which of the two was assumed."""
    if distributed.rank() > 0:
        return
    processes = distributed.world_size()
    if shards:
        warnings.warn(
            f"Each of the {processes} processes holds different data, which is treated as its shard of one data set of "
            f"{num_data:,} examples: if it should be divided instead, give every process the same data.",
            ShardsWarning, stacklevel=2,
        )  # fmt: skip
    else:
        _log.info("All %d processes hold the same data; each works on every %dth row.", processes, processes)


def declared_sampler(loader: Any) -> DistributedSampler[Any] | None:
    """The sampler by which a loader gives each process a shard of the data, or None."""
    if not isinstance(loader, DataLoader) or not distributed.is_active():
        return None
    sampler: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas == distributed.world_size():
        return sampler
    return None


@contextmanager
def in_new_order(sampler: DistributedSampler[Any] | None) -> Iterator[None]:
    """Let a sampler start in an order drawn from the active stream; left to itself it has the same in every epoch."""
    if sampler is None:
        yield
        return
    before = sampler.epoch
    sampler.set_epoch(int(torch.randint(2**31, ())))
    try:
        yield
    finally:
        sampler.set_epoch(before)


def _everyone(own: Evidence) -> list[Evidence]:
    return [Evidence(*json.loads(text)) for text in distributed.texts(json.dumps(own))]


def _digest(tensors: list[Tensor]) -> str:
    return hashlib.sha256(" ".join(digest(tensor) for tensor in tensors).encode()).hexdigest()[:16]
