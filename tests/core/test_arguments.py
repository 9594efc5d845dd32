"""Arguments are checked against their annotations: types, ranges, sequences, and numbers that torch cannot hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from dubito.errors import InputError
from torch import Tensor

from dubito.core.arguments import checked_arguments
from dubito.core.constraints import Count, Positive


@checked_arguments
def function(
    rate: Positive = 1.0,
    number: int | None = None,
    sizes: Sequence[Count] = (),
    names: Mapping[str, float] | None = None,
    values: Tensor | None = None,
    anything: Any = None,
) -> tuple[Any, ...]:
    return rate, number, sizes, names, values, anything


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("rate", torch.ones(3), r"`rate` must be a positive number, got a tensor of shape \(3,\)"),
        ("rate", 10**400, "got a number of 1329 bits"),
        ("rate", True, "got True"),
        ("number", 10**30, "at most 9,223,372,036,854,775,807"),
        ("number", -(10**30), "must be a whole number or None"),
        ("sizes", "12", "`sizes` must be a sequence, each entry a whole number of at least 1, got '12'"),
        ("sizes", [1, 0], r"got \[1, 0\]"),
        ("names", {"a": "b"}, "`names` must be a dict, each value a number or None"),
        ("values", "a", "must be a tensor, or numbers that can become one"),
    ],
)
def test_a_wrong_argument_is_one_sentence(argument: str, value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        function(**{argument: value})


def test_right_arguments_are_passed_on() -> None:
    rate, number, sizes, names, values, anything = function(10**30, -(2**62), [1, 2], {"a": 1}, [1.0], "x")
    assert (rate, type(rate), number, sizes, names, anything) == (1e30, float, -(2**62), [1, 2], {"a": 1}, "x")
    assert torch.equal(values, torch.tensor([1.0]))


def test_unsigned_numbers_become_signed_ones() -> None:
    given = torch.tensor([1, 60000], dtype=torch.int32).to(torch.uint16)
    assert function(values=given)[4].tolist() == [1, 60000]
    assert function(values=given.numpy())[4].dtype == torch.int64
    with pytest.raises(InputError, match="uint64 holds numbers of 2"):
        function(values=torch.tensor([-1]).to(torch.uint64))
