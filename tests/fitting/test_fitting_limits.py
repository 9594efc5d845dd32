"""Numbers and shapes that no fit can serve are refused in one sentence, before memory is asked for."""

from __future__ import annotations

import pytest
import torch
from dubito.errors import InputError

import dubito
from dubito import MAP, Ensemble, Laplace, Training, models
from dubito.core import nests
from dubito.core.constraints import Count, LargeCount, check
from fitting.valid_networks import mlp


@pytest.mark.parametrize("make", [
    lambda: Ensemble(members=10**12), lambda: Training(epochs=10**9), lambda: dubito.HMC(num_samples=10**30),
    lambda: check("n", Count | None, 10**8 + 1), lambda: Training(batch_size=10**30),
])  # fmt: skip
def test_huge_counts(make) -> None:
    with pytest.raises(InputError, match=r"^`\w+` must be at most [\d,]+, got 10"):
        make()


def test_large_batches_are_all_rows() -> None:
    check("batch_size", LargeCount, 10**12)
    assert Training(batch_size=10**12).batch_size == 10**12


def test_too_many_samples_of_a_prediction() -> None:
    x = torch.randn(6, 5)
    posterior = Laplace().fit(mlp(2), (x, torch.arange(6) % 2), training=Training(epochs=1), progress=False)
    with pytest.raises(InputError, match="`num_samples` must be at most 100,000,000"):
        posterior.predict(x, num_samples=10**30)


def test_seeds() -> None:
    x, y = torch.randn(6, 5), torch.arange(6) % 2
    with pytest.raises(InputError, match="`seeds` must be at most 100,000, got 1000000000000"):
        dubito.compare(mlp(2), (x, y), {"MAP": MAP()}, test=(x, y), seeds=10**12)


@pytest.mark.parametrize("make", [
    lambda: models.mlp(10**6, 2, hidden=10**6), lambda: models.lstm(10**6, 2, embedding=10**6),
    lambda: models.transformer(10, 2, width=10**6), lambda: models.resnet20(width=10**6),
    lambda: models.build("mlp(hidden=[10000000])", (10**6,), 2),
])  # fmt: skip
def test_networks_that_fit_no_memory(make) -> None:
    with pytest.raises(InputError, match=r"A network of [\d,]+ weights is too large"):
        make()


@pytest.mark.parametrize("recipe", [MAP(), dubito.Variational(), dubito.Rank1()])
def test_a_later_batch_of_another_width(recipe) -> None:
    batches = [(torch.randn(4, width), torch.arange(4) % 2) for width in (5, 5, 6)]
    with pytest.raises(InputError, match=r"batch \d have rows of shape \[\((5|6),\)\], those of batch 0 of"):
        recipe.fit(mlp(2), batches, training=Training(epochs=1), progress=False)


def test_batches_that_cannot_be_joined() -> None:
    with pytest.raises(InputError, match=r"rows have different shapes: \[\(5,\), \(6,\)\]"):
        nests.concatenate([torch.ones(2, 5), torch.ones(2, 6)])
