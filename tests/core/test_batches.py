"""Every kind of data becomes the same batches: counted, placed, repeatable."""

from __future__ import annotations

import random
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from dubito.errors import InputError
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from dubito.core import batches
from dubito.core.batches import Source
from dubito.core.randomness import Stream

X = torch.arange(20.0).reshape(10, 2)
Y = torch.arange(10)
PAIRS = TensorDataset(X, Y)


class Examples(Dataset[Any]):
    """A map-style dataset, one example at a time."""

    def __init__(self, size: int = 10, draw: bool = False) -> None:
        self.size, self.draw = size, draw

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = random.random() + float(np.random.rand()) + torch.rand(()) if self.draw else 0.0  # noqa: NPY002
        return X[index] + noise, Y[index]


class Streamed(IterableDataset[Any]):
    def __init__(self, size: int = 10) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        return iter([(X[i % 10], Y[i % 10]) for i in range(self.size)])


class OwnLoader:
    """Not a DataLoader, but it can be iterated over again and again."""

    def __iter__(self) -> Iterator[Any]:
        yield X[:6], Y[:6]
        yield X[6:], Y[6:]


def targets_of(source: Source, **kwargs: Any) -> list[list[int]]:
    return [batch.targets.tolist() for batch in source.epoch(**kwargs)]


KINDS: dict[str, tuple[Any, int | None]] = {
    "pair": ((X, Y), None),
    "arrays": ((X.numpy(), Y.numpy()), None),
    "list of two tensors": ([X, Y], None),
    "dict": ({"x": X, "labels": Y}, None),
    "tensor dataset": (PAIRS, None),
    "dataset": (Examples(), None),
    "subset": (Subset(PAIRS, range(10)), None),
    "loader": (DataLoader(PAIRS, batch_size=4), None),
    "list of batches": ([(X[:4], Y[:4]), (X[4:8], Y[4:8]), (X[8:], Y[8:])], None),
    "list of array batches": ([(X[:4].numpy(), Y[:4].numpy()), (X[4:8], Y[4:8]), (X[8:], Y[8:])], None),
    "iterable dataset": (Streamed(), 10),
    "loader of an iterable dataset": (DataLoader(Streamed(), batch_size=4), 10),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_the_same_batches(kind: str) -> None:
    data, num_data = KINDS[kind]
    source = Source(data, batch_size=4, num_data=num_data)
    assert source.num_data == 10
    for _ in range(2):  # any number of times
        parts = list(source.epoch())
        assert [part.size for part in parts] == [part.num_rows for part in parts] == [4, 4, 2]
        inputs = [part.inputs["x"] if kind == "dict" else part.inputs for part in parts]
        assert torch.equal(torch.cat(inputs), X)
        assert torch.equal(torch.cat([part.targets for part in parts]), Y)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "iterable" not in kind])
def test_the_number_of_batches(kind: str) -> None:
    assert Source(KINDS[kind][0], batch_size=4).num_batches == 3


class TestCounting:
    @pytest.mark.parametrize(
        ("loader", "num_data", "num_batches"),
        [
            (DataLoader(PAIRS, batch_size=4, drop_last=True), 8, 2),
            (DataLoader(PAIRS, batch_size=4, shuffle=True), 10, 3),
            (DataLoader(PAIRS, batch_size=3, sampler=SubsetRandomSampler(range(7))), 7, 3),
            (DataLoader(PAIRS, batch_size=3, sampler=WeightedRandomSampler([1.0] * 10, 5)), 5, 2),
            (DataLoader(PAIRS, batch_sampler=BatchSampler(SubsetRandomSampler(range(7)), 2, drop_last=True)), 6, 3),
            (DataLoader(PAIRS, batch_sampler=[[0, 1, 2], [3, 4, 5, 6, 7, 8, 9]]), 10, 2),
        ],
    )
    def test_loaders(self, loader: Any, num_data: int, num_batches: int) -> None:
        source = Source(loader)
        assert source.num_data == num_data == sum(batch.size for batch in source.epoch())
        assert source.num_batches == num_batches

    @pytest.mark.parametrize(
        "data", [Streamed(), DataLoader(Streamed()), OwnLoader(), DataLoader([(X, Y)], batch_size=None)]
    )
    def test_what_cannot_be_counted_must_be_said(self, data: Any) -> None:
        with pytest.raises(InputError, match="pass it as `num_data=`"):
            Source(data)
        assert Source(data, num_data=10).num_data == 10
        assert Source(data, must_count=False).num_data == 0
        assert sum(batch.size for batch in Source(data, must_count=False, batch_size=3).epoch()) == 10

    def test_a_number_that_is_said_wins(self) -> None:
        assert Source((X, Y), num_data=1000).num_data == 1000

    @pytest.mark.parametrize(
        "data",
        [(X[:0], Y[:0]), [], Examples(0), DataLoader(Examples(0)), DataLoader(Examples(3), 4, drop_last=True)],
    )
    def test_empty(self, data: Any) -> None:
        with pytest.raises(InputError, match="The data is empty"):
            Source(data)

    def test_an_endless_promise_that_is_empty(self) -> None:
        source = Source(Streamed(0), num_data=5)
        with pytest.raises(InputError, match="The data is empty"):
            source.first()


class TestRefused:
    @pytest.mark.parametrize(
        ("data", "message"),
        [
            ((X, Y, Y), r"must be \(inputs, targets\), not 3 items"),
            ((X, Y[:5]), "There are 10 inputs but 5 targets"),
            (((X, X[:4]), Y), r"differ in their number of rows: \[4, 10\]"),
            ((1, 2), "holds no tensor"),
            ({"x": X}, "inputs but no targets"),
            (3, "not a int"),
            ("text", "not a str"),
            ((x for x in [(X, Y)]), "not a generator"),
        ],
    )
    def test_one_sentence(self, data: Any, message: str) -> None:
        with pytest.raises(InputError, match=message):
            Source(data)

    def test_examples_of_different_length(self) -> None:
        class Ragged:  # as a Dataset of Hugging Face, which is none of torch
            def __len__(self) -> int:
                return len(X)

            def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
                return X[index].repeat(1 + index % 2), Y[index]

        with pytest.raises(InputError, match="pad the examples, or pass a DataLoader whose collate_fn does"):
            list(Source(Ragged(), batch_size=4).replay())


class TestSplit:
    def test_targets_come_last(self) -> None:
        assert batches.split((1, 2)) == (1, 2)
        assert batches.split([1, 2]) == (1, 2)
        assert batches.split((1, 2, 3)) == ((1, 2), 3)
        assert batches.split([1]) == (1, None)
        assert batches.split(5) == (5, None)

    @pytest.mark.parametrize("name", batches.TARGET_NAMES)
    def test_or_by_name(self, name: str) -> None:
        assert batches.split({"a": 1, name: 2, "b": 3}) == ({"a": 1, "b": 3}, 2)
        assert batches.split(UserDict({"a": 1, name: 2})) == ({"a": 1}, 2)

    def test_or_there_are_none(self) -> None:
        assert batches.split({"a": 1}) == ({"a": 1}, None)

    def test_three_tensors_are_two_inputs(self) -> None:
        (first, *_) = Source(TensorDataset(X, X + 1, Y), batch_size=4).epoch()
        assert torch.equal(first.inputs[1], X[:4] + 1)
        assert first.targets.tolist() == [0, 1, 2, 3]


class TestNests:
    nest = {"a": X, "b": (Y, [X + 1, "text"]), "c": None}  # noqa: RUF012

    def test_indexing_keeps_the_structure(self) -> None:
        taken = batches.take(self.nest, slice(2, 4))
        assert torch.equal(taken["a"], X[2:4])
        assert taken["b"][0].tolist() == [2, 3]
        assert torch.equal(taken["b"][1][0], X[2:4] + 1)
        assert taken["b"][1][1] == "text"
        assert taken["c"] is None

    def test_concatenation_undoes_it(self) -> None:
        again = batches.concatenate([batches.take(self.nest, slice(0, 3)), batches.take(self.nest, slice(3, 10))])
        assert all(map(torch.equal, batches.leaves(again), batches.leaves(self.nest)))

    def test_nested_inputs_reach_every_batch(self) -> None:
        source = Source(({"a": X, "more": [X + 1, (X + 2,)]}, Y), batch_size=4)
        last = list(source.epoch())[-1]
        assert torch.equal(last.inputs["more"][1][0], X[8:] + 2)

    def test_dict_batches(self) -> None:
        loader = DataLoader([{"input_ids": X[i], "labels": Y[i]} for i in range(10)], batch_size=4)
        parts = list(Source(loader).epoch())
        assert torch.equal(parts[2].inputs["input_ids"], X[8:])
        assert parts[2].targets.tolist() == [8, 9]

    def test_rows(self) -> None:
        assert batches.num_rows(self.nest) == 10
        with pytest.raises(InputError, match="without axes has no rows"):
            batches.num_rows(torch.tensor(3.0))

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    def test_finite(self, value: float) -> None:
        assert batches.is_finite(self.nest)
        assert batches.is_finite({"a": torch.full((4,), 3e38)})  # though the sum is not
        assert not batches.is_finite({"a": X, "b": [torch.tensor([1.0, value, -value])]})


class TestPlacing:
    def test_floating_tensors_follow_the_model_and_others_stay(self) -> None:
        source = Source(((X, Y), Y.float()), batch_size=4, dtype=torch.float64, device=torch.device("cpu"))
        batch = next(source.epoch())
        assert batch.inputs[0].dtype == batch.targets.dtype == torch.float64
        assert batch.inputs[1].dtype == torch.int64

    def test_device(self) -> None:
        batch = next(Source((X, Y), device=torch.device("meta")).epoch())
        assert batch.inputs.device.type == batch.targets.device.type == "meta"

    def test_arrays_that_torch_cannot_share(self) -> None:
        array = X.numpy().copy()
        array.flags.writeable = False
        for given in (array, array[::-1]):
            (batch,) = Source((given, Y.numpy()), batch_size=10).epoch()
            assert torch.equal(batch.inputs, torch.tensor(given.copy()))

    def test_the_data_is_not_changed(self) -> None:
        before = X.clone(), Y.clone()
        for batch in Source((X, Y), batch_size=4, shuffle=True).epoch():
            assert batch.inputs.sum() >= 0
        assert torch.equal(X, before[0])
        assert torch.equal(Y, before[1])


class TestOrder:
    @pytest.mark.parametrize("data", [(X, Y), Examples()])
    def test_shuffling_is_a_permutation_that_the_stream_decides(self, data: Any) -> None:
        source = Source(data, batch_size=4, shuffle=True)
        first = targets_of(source, stream=Stream(1))
        assert sorted(target for part in first for target in part) == list(range(10))
        assert first != targets_of(source, stream=Stream(2))
        assert first == targets_of(source, stream=Stream(1))

    def test_the_global_generator_is_neither_used_nor_moved(self) -> None:
        source = Source(DataLoader(PAIRS, batch_size=4, shuffle=True))
        torch.manual_seed(1)
        before = torch.get_rng_state()
        first = targets_of(source)
        assert torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(2)
        assert targets_of(source) == first

    @pytest.mark.parametrize("data", [(X, Y), Examples(draw=True), DataLoader(Examples(draw=True), 4, shuffle=True)])
    @pytest.mark.parametrize("skip", [0, 1, 2, 3])
    def test_skipping_is_exact_also_where_examples_draw(self, data: Any, skip: int) -> None:
        source = Source(data, batch_size=4, shuffle=True)
        whole = list(source.epoch(source.stream(3)))
        rest = list(source.epoch(source.stream(3), skip=skip))
        assert len(rest) == len(whole) - skip
        for a, b in zip(whole[skip:], rest, strict=True):
            assert torch.equal(a.inputs, b.inputs)
            assert torch.equal(a.targets, b.targets)

    def test_generators_of_the_loader(self) -> None:
        ours, other = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
        loader = DataLoader(PAIRS, batch_size=4, shuffle=True, generator=ours)
        assert Source(loader).generators == [ours]
        sampler = RandomSampler(PAIRS, generator=other)
        loader = DataLoader(PAIRS, batch_sampler=BatchSampler(sampler, 4, drop_last=False), generator=ours)
        assert Source(loader).generators == [ours, other]

    def test_a_replayed_pass_and_a_first_look_do_not_move_them(self) -> None:
        generator = torch.Generator().manual_seed(1)
        source = Source(DataLoader(PAIRS, batch_size=4, shuffle=True, generator=generator))
        state = generator.get_state()
        first = source.first()
        replayed = [batch.targets.tolist() for batch in source.replay()]
        assert torch.equal(generator.get_state(), state)
        assert replayed == [batch.targets.tolist() for batch in source.replay()]
        assert first.targets.tolist() == replayed[0] == targets_of(source)[0]
        assert not torch.equal(generator.get_state(), state)
        source.set_generator_states([state])
        assert targets_of(source) == replayed

    def test_worker_processes_give_the_same(self) -> None:
        source = Source(DataLoader(Examples(draw=True), 4, shuffle=True, num_workers=1))
        parts = [list(source.epoch(source.stream(3))) for _ in range(2)]
        for a, b in zip(*parts, strict=True):
            assert torch.equal(a.inputs, b.inputs)


class TestFull:
    @pytest.mark.parametrize("kind", KINDS)
    def test_all_the_data_is_one_batch(self, kind: str) -> None:
        data, num_data = KINDS[kind]
        whole = Source(data, batch_size=4, num_data=num_data).full()
        assert whole.size == 10
        assert torch.equal(whole.targets, Y)

    def test_without_targets(self) -> None:
        assert Source(TensorDataset(X), batch_size=4).full().targets is None

    def test_what_is_in_memory(self) -> None:
        assert Source((X, Y)).in_memory == [(X, Y)]
        assert len(Source([(X, Y), (X, Y)]).in_memory or []) == 2
        assert Source(DataLoader(PAIRS)).in_memory is None


@pytest.mark.parametrize("num_data", [3.5, float("nan"), True, "10", 0, -1, None, 10.0])
def test_num_data_is_a_whole_number_of_at_least_1(num_data: Any) -> None:
    x, y = torch.randn(6, 2), torch.zeros(6)
    if num_data is None:
        assert Source((x, y), num_data=None).num_data == 6
        return
    with pytest.raises(InputError, match="`num_data` must be a whole number of at least 1, got "):
        Source((x, y), num_data=num_data)
    assert type(Source((x, y), num_data=np.int64(7)).num_data) is int
