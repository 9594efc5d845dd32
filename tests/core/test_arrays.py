"""Arrays and tensors that a network cannot be given are refused in one sentence; lists become tensors where asked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from dubito.errors import InputError, NonFiniteError
from torch import nn

import dubito
from dubito.core import arrays
from dubito.core.batches import as_tensors


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.array([1, "x", None], dtype=object), "holds no numbers"),
        (np.array(["a"]), "holds no numbers"),
        (np.zeros(2, dtype="datetime64[D]"), "holds no numbers"),
        (np.ma.masked_array(np.ones(2), mask=[1, 0]), "missing values"),
        (torch.eye(3).to_sparse(), "to_dense"),
        (torch.ones(3, device="meta"), "no values"),
    ],
)
def test_what_has_no_rows_of_numbers_is_refused(value: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        as_tensors((value,))


def test_another_byte_order_is_converted() -> None:
    (found,) = as_tensors((np.arange(3, dtype=">f8"),))
    assert found.tolist() == [0.0, 1.0, 2.0]


def test_what_torch_takes_becomes_a_tensor() -> None:
    assert arrays.to_tensor([[1.0, 2.0]], "x").shape == (1, 2)
    assert arrays.to_tensor(np.ones(3), "x").dtype == torch.float64
    with pytest.raises(InputError, match="x must be a tensor, or numbers that can become one, not a str"):
        arrays.to_tensor("text", "x")


def test_a_message_is_one_line_and_not_endless() -> None:
    text = str(InputError(f"This is wrong: {torch.zeros(50, 50)!r}: do that."))
    assert "\n" not in text
    assert len(text) < 700
    assert text.startswith("This is wrong")
    assert text.endswith("do that.")


@pytest.mark.parametrize("recipe", [dubito.MAP(), dubito.Variational()])
def test_an_overflow_is_no_prediction(recipe: Any) -> None:
    x, y = torch.randn(8, 3), torch.randn(8, 1)
    options = {"likelihood": "gaussian", "training": dubito.Training(epochs=1), "progress": False}
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    nn.init.constant_(model[0].weight, 10.0)
    found = recipe.fit(model, (x, y), **options)
    with pytest.raises(NonFiniteError, match="NaN or infinite although the inputs are finite"):
        found.predict(torch.full((2, 3), 3e38))


def test_a_fit_that_fails_leaves_the_global_generators() -> None:
    model, before = nn.Linear(3, 1), torch.get_rng_state()
    x = torch.full((8, 3), 1e30)
    with pytest.raises(NonFiniteError):
        dubito.Variational().fit(model, (x, x[:, :1]), likelihood="gaussian", progress=False)
    assert torch.equal(torch.get_rng_state(), before)
