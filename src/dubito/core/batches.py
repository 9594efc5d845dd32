"""`Source`: repeatable batches from a DataLoader, a Dataset, an `(inputs, targets)` pair or a list of batches."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dubito.core import distributed, limits, shards
from dubito.core.constraints import LargeCount, check
from dubito.core.data_forms import TARGET_NAMES as TARGET_NAMES  # users of batches find these helpers here, too
from dubito.core.data_forms import as_loader, as_pair, generators_of, length_of, pair_batches
from dubito.core.data_forms import bare_inputs as bare_inputs
from dubito.core.data_forms import is_dataset as is_dataset
from dubito.core.data_forms import is_empty as is_empty
from dubito.core.data_forms import split as split
from dubito.core.errors import InputError, UnsupportedError
from dubito.core.nests import as_tensors as as_tensors
from dubito.core.nests import concatenate as concatenate
from dubito.core.nests import is_finite as is_finite
from dubito.core.nests import join_single_rows
from dubito.core.nests import leaves as leaves
from dubito.core.nests import map_leaves as map_leaves
from dubito.core.nests import num_rows as num_rows
from dubito.core.nests import place as place
from dubito.core.nests import take as take
from dubito.core.once import WarnOnce
from dubito.core.precision import at_least_single
from dubito.core.randomness import Stream

Seen = Callable[[Any], None]  # called with each batch of a loader before it is used
Data = DataLoader[Any] | Dataset[Any] | tuple[Any, Any] | Iterable[Any]

_END: Any = object()  # marks the end of an iterator


class Batch(NamedTuple):
    """One batch: the rows of this process, and the size of the whole batch over all processes."""

    inputs: Any
    targets: Any
    size: int

    @property
    def num_rows(self) -> int:
        """The number of rows of this process; it may be 0."""
        return num_rows(self.inputs)


class Source:
    """A data set that can be iterated any number of times, in an order that can be repeated exactly.

    Args:
        data: A DataLoader, a Dataset, an `(inputs, targets)` pair of tensors or arrays (or a dict that holds both), or
            a list of batches.
        batch_size: For data that is not batched yet.
        shuffle: For data that is not batched yet.
        num_data: The number of examples, for data that cannot be counted (an `IterableDataset`).
        must_count: Raise an error if the number of examples is unknown; predicting does not need it.
        shard: With several processes, give each its own rows of every batch. Processes that hold different data keep
            all of their rows (`agree`).
        device: The model's device; tensors are moved to it.
        dtype: The model's dtype; floating tensors are cast to it.

    Attributes:
        num_data: The number of examples in one pass, 0 if unknown; after `agree`, over all processes.
        num_batches: The number of batches in one pass, or None if unknown.
        is_shard: Whether this process holds one shard of the data; None before `agree`.
        in_memory: The batches of data that is in memory (a pair is one batch), or None for a loader.
        dataset: The dataset of the loader, or None.
        joins_single_rows: Whether a batch of one row is joined to a neighbouring batch; see `join_single_rows`.
    """

    joins_single_rows = False

    def __init__(
        self,
        data: Data,
        *,
        batch_size: int = 128,
        shuffle: bool = False,
        num_data: int | None = None,
        must_count: bool = True,
        shard: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.device, self.dtype, self.shard, self._warn_once = device, dtype, shard, WarnOnce()
        check("batch_size", LargeCount, batch_size)
        self.pair = as_pair(data)
        self._is_the_users = isinstance(data, DataLoader | Dataset)  # whose errors are passed on unchanged
        self.in_memory = [self.pair] if self.pair is not None else data if isinstance(data, list) else None
        self.generators: list[torch.Generator] = []
        self.dataset: Any = None
        self.batch_size: int | None = batch_size
        self.is_shard: bool | None = None
        self._kept_rows: dict[int, list[Batch]] = {}  # of a loader, by their number; see `spread`
        self._first_pass: shards.FirstPass | None = None  # of a loader that is the same in all processes
        self._sampler = shards.declared_sampler(data) if shard else None
        if self.pair is not None:
            rows: int | None = num_rows(self.pair)
            self._start: Callable[[Any], Iterator[Any]] = lambda pair: pair_batches(pair, batch_size, shuffle)
            self.num_batches: int | None = math.ceil(num_rows(self.pair) / batch_size)
        else:
            loader, rows = as_loader(data, batch_size, shuffle)
            self._start = lambda _: iter(loader)
            self.num_batches = length_of(loader)
            self.generators, self.dataset = generators_of(loader), getattr(loader, "dataset", None)
            self.batch_size = getattr(loader, "batch_size", None)
        if num_data is not None:
            check("num_data", LargeCount, num_data)
        if rows is None and num_data is None and must_count:
            raise InputError("The number of examples cannot be counted from this data: pass it as `num_data=`.")
        self.num_data = (rows or 0) if num_data is None else int(num_data)
        if self.num_data <= 0 and (must_count or rows is not None):
            raise InputError("The data is empty.")

    def agree(self) -> None:
        """Determine whether all processes hold the same data or each holds a shard, and count all examples.

        The first pass over the data calls this as well; call it earlier if `num_data` is needed before.
        """
        if self.is_shard is not None or not (self.shard and distributed.is_active()):
            return
        for generator in self.generators:
            distributed.share_generator(generator, self.device)
        self.is_shard, everyone = shards.are_shards(self._summary(), self._summary)
        self._first_pass = shards.FirstPass(everyone) if self.in_memory is None and not self.is_shard else None
        if self.is_shard:
            self.num_data = sum(each.examples for each in everyone)
            known = [each.batches for each in everyone if each.batches is not None]
            self.num_batches = max(known) if len(known) == len(everyone) else None
        shards.announce(self.is_shard, self.num_data)

    def kept_whole(self, who: str) -> Source:
        """Return the same data, with all rows of all batches in every process."""
        self.refuse_shards(who)
        return self.changed(shard=False)

    def changed(self, **attributes: Any) -> Source:
        """Return a copy with some attributes replaced."""
        other = copy.copy(self)
        other.__dict__.update(attributes)
        return other

    def refuse_shards(self, who: str) -> None:
        """Raise an error if each process holds only a shard of the data."""
        if self.is_shard:
            raise UnsupportedError(
                f"{who} needs all the data in every process, but each process holds only a shard: give every process "
                "the same data."
            )

    def generator_states(self) -> list[Tensor]:
        """Return the states of the generators that the user's own loader draws from."""
        return [generator.get_state() for generator in self.generators]

    def set_generator_states(self, states: list[Tensor]) -> None:
        """Restore earlier states of the generators of the user's loader."""
        for generator, state in zip(self.generators, states, strict=True):
            generator.set_state(state)

    def stream(self, seed: int) -> Stream:
        """Return the random stream of one pass; for a loader it includes the generators of numpy and `random`."""
        return Stream(seed, libraries=self.in_memory is None)

    def epoch(self, stream: Stream | None = None, skip: int = 0, seen: Seen | None = None) -> Iterator[Batch]:
        """Yield the batches of one pass after the first `skip`; the loader draws its random numbers from `stream`."""
        self.agree()
        if self.is_shard and self.shard:
            yield from self._joint(self.pieces(stream, seen), skip)
            return
        first_pass, self._first_pass = self._first_pass, None
        for index, raw in enumerate(self.pieces(stream, seen)):
            if first_pass is not None:
                first_pass.add(*(list(leaves(part)) for part in as_tensors(split(raw))))
            if index >= skip:
                yield self._batch(raw, self.shard and distributed.is_active())
        if first_pass is not None:
            first_pass.compare()

    def pieces(self, stream: Stream | None = None, seen: Seen | None = None) -> Iterator[Any]:
        """Yield the batches of one pass as the loader gives them; `seen` is called with each of them first."""
        raws = self._raw(stream)
        for raw in join_single_rows(raws, split, self._warn_joined) if self.joins_single_rows else raws:
            if seen is not None:
                seen(raw)
            yield raw

    def join_single_rows(self) -> None:
        """Join batches of one row to the batch before from now on, for networks that cannot train on one row."""
        known = not self.is_shard and self._leaves_one_row()  # with shards, the longest one decides
        shorter = known and not self.joins_single_rows
        if shorter and self.num_batches is not None:
            self.num_batches -= 1
        self.joins_single_rows = True

    def _leaves_one_row(self) -> bool:
        """Return whether there are several batches and the last one is known to have a single row."""
        if self.pair is None and self.in_memory:
            return len(self.in_memory) > 1 and num_rows(as_tensors(split(self.in_memory[-1])[0])) == 1
        size = self.batch_size or 1
        return size > 1 and self.num_data % size == 1 and self.num_batches == self.num_data // size + 1 > 1

    def _warn_joined(self) -> None:
        self._warn_once(
            "A batch of one row is joined to the batch before it: batch normalization needs two rows to train."
        )

    def replay(self) -> Iterator[Batch]:
        """Yield the batches of a pass that is the same each time; the loader's generators are restored afterwards."""
        states = self.generator_states()
        try:
            yield from self.epoch()
        finally:
            self.set_generator_states(states)

    def spread(self, most: int) -> Iterator[Batch]:
        """Yield at most about `most` rows, evenly spread over the data, in the same way each time.

        The rows of a loader are kept, if they are not too large, so that they are read only once.
        """
        if most in self._kept_rows:
            yield from self._kept_rows[most]
            return
        kept: list[Batch] = []
        size = 0
        for batch in self._spread(most):
            size += sum(leaf.nbytes for leaf in leaves((batch.inputs, batch.targets)))
            kept = [*kept, batch] if size <= limits.current().kept_examples else []
            yield batch
        if self.in_memory is None and kept:
            self._kept_rows[most] = kept

    def _spread(self, most: int) -> Iterator[Batch]:
        every, seen = max(self.num_data / most, 1.0), 0
        for batch in self.replay():
            numbers = torch.arange(seen, seen + batch.num_rows, dtype=torch.float64)
            seen += batch.num_rows
            rows = (((numbers + 1) / every).floor() > (numbers / every).floor()).nonzero().squeeze(1)
            if len(rows):
                inputs, targets = take((batch.inputs, batch.targets), rows.to(self.device))
                yield Batch(inputs, targets, len(rows))

    def full(self, stream: Stream | None = None, seen: Seen | None = None) -> Batch:
        """Return all the data as one batch."""
        parts = list(self.epoch(stream, seen=seen))
        inputs = concatenate([part.inputs for part in parts])
        targets = None if parts[0].targets is None else concatenate([part.targets for part in parts])
        return Batch(inputs, targets, sum(part.size for part in parts))

    def first(self) -> Batch:
        """Return the whole first batch, the same in all processes, without advancing any generator."""
        batch = self._first()
        if not (self.is_shard and self.shard):
            return batch
        values = iter(distributed.tensors_from_first(list(leaves((batch.inputs, batch.targets)))))
        inputs, targets = map_leaves(lambda _: next(values), (batch.inputs, batch.targets))
        return Batch(inputs, targets, num_rows(inputs))

    def _first(self) -> Batch:
        states = self.generator_states()
        raw = next(self._raw(), None)
        self.set_generator_states(states)
        if raw is None:
            raise InputError("The data is empty.")
        return self._batch(raw, shard=False)

    def _summary(self) -> shards.DataSummary:
        """Return what the other processes need to know about the data of this one."""
        if self.in_memory is None:
            first = self._first()
            inputs, targets = list(leaves(first.inputs)), list(leaves(first.targets))
        else:
            parts = [as_tensors(split(raw)) for raw in self.in_memory]
            inputs, targets = ([leaf for part in parts for leaf in leaves(part[i])] for i in range(2))
        return shards.summarize(inputs, targets, self.num_data, self.num_batches, self._sampler is not None)

    def place(self, tree: Any) -> Any:
        """Move a nest of tensors to the model's device, floating ones to its dtype."""
        return place(tree, self.device, self.dtype)

    def _raw(self, stream: Stream | None = None) -> Iterator[Any]:
        stream = stream or self.stream(0)
        with stream.active(), shards.in_new_order(self._sampler):
            iterator = self._start(self.pair)
            raw = self._next(iterator)
        while raw is not _END:
            yield raw
            if self.pair is not None:  # whose order is known by now
                raw = self._next(iterator)
                continue
            with stream.active():
                raw = self._next(iterator)

    def _next(self, iterator: Iterator[Any]) -> Any:
        """Return the next batch, or `_END`; explain errors of loaders that we made."""
        try:
            return next(iterator, _END)
        except (TypeError, ValueError, RuntimeError, LookupError) as error:
            if self._is_the_users:
                raise
            ragged = "equal size" in str(error)
            advice = ": pad the examples, or pass a DataLoader whose collate_fn does." if ragged else ""
            raise InputError(f"The data cannot be cut into batches: {error}{advice}") from error

    def _joint(self, own: Iterator[Any], skip: int) -> Iterator[Batch]:
        """Yield joint batches, one from the shard of each process; an exhausted shard adds no rows."""
        batch = None
        for index in itertools.count():
            raw = next(own, _END)
            batch = batch if raw is _END else self._batch(raw, shard=False)
            if index < skip:
                continue
            if batch is None:
                raise InputError("The data is empty.")
            counts = torch.tensor([0.0, 0.0] if raw is _END else [batch.size, 1.0], dtype=torch.float64)
            distributed.sum_([counts])
            size, going_on = counts.tolist()
            if not going_on:
                return
            rows = slice(0, None if raw is not _END else 0)
            yield Batch(take(batch.inputs, rows), take(batch.targets, rows), int(size))

    def _batch(self, raw: Any, shard: bool) -> Batch:
        inputs, targets = as_tensors(split(raw)) if self.pair is None else raw  # a pair has been checked
        size = num_rows(inputs)
        if shard:
            mine = distributed.rows(size)
            inputs, targets = take(inputs, mine), take(targets, mine)
        dtype = None if self.dtype is None else at_least_single(self.dtype)
        return Batch(self.place(inputs), place(targets, self.device, dtype), size)
