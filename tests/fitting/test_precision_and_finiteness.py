"""Probabilities sum to 1 in every precision, and predictions are never NaN in silence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dubito.ensembles import Ensemble, MCDropout
from dubito.errors import InputError, NonFiniteError
from torch import nn

from dubito import MAP, BatchEnsemble, Laplace, Training, Variational, likelihoods

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))


def network(outputs: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, outputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("samples", [1, 7])
@pytest.mark.parametrize("classes", [2, 10, 1000])
def test_probabilities_sum_to_one(dtype: torch.dtype, samples: int, classes: int) -> None:
    generator = torch.Generator().manual_seed(1)
    outputs = (5 * torch.randn(samples, 50, classes, generator=generator)).to(dtype)
    probs = likelihoods.Categorical().predict_samples(outputs).probs
    assert probs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert float((probs.double().sum(-1) - 1).abs().max()) < 1e-6


@pytest.mark.parametrize(
    "recipe", [MAP(), Variational(), MCDropout(0.2), Ensemble(members=2), BatchEnsemble()], ids=repr
)
@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_a_bfloat16_network(recipe: Any, likelihood: Any) -> None:
    targets = torch.arange(24) % 3 if likelihood == "categorical" else X[:, :3]
    model = network(3).to(torch.bfloat16)
    posterior = recipe.fit(model, (X, targets), likelihood=likelihood, training=Training(epochs=1), progress=False)
    prediction: Any = posterior.predict(X)
    if likelihood == "categorical":
        assert prediction.probs.dtype == torch.float32
        assert float((prediction.probs.double().sum(-1) - 1).abs().max()) < 1e-6
    else:
        assert prediction.mean.dtype == torch.float32


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_weights_that_are_not_finite_are_refused_by_name(bad: float, likelihood: Any) -> None:
    targets = torch.arange(24) % 3 if likelihood == "categorical" else X[:, :3]
    broken = network(3)
    with torch.no_grad():
        broken[2].weight[0, 0] = bad  # type: ignore[union-attr, operator, index]
    for recipe in (Laplace(), Variational(), Ensemble(members=2, start="model")):
        with pytest.raises(InputError, match=r"weight '2.weight' holds NaN or infinite"):
            recipe.fit(broken, (X, targets), likelihood=likelihood, progress=False)
    posterior = MAP(train=False).fit(network(3), (X, targets), likelihood=likelihood, progress=False)
    with torch.no_grad():
        posterior.model[2].weight[0, 0] = bad  # type: ignore[union-attr, operator, index]
    with pytest.raises(InputError, match=r"weight '2.weight' holds NaN or infinite"):
        posterior.predict(X)


def test_outputs_that_overflow_are_refused() -> None:
    model = network(3)
    with torch.no_grad():
        model[2].weight.mul_(100)  # type: ignore[union-attr, operator]
    posterior = MAP(train=False).fit(model, (X, X[:, :3]), likelihood="gaussian", progress=False)
    with pytest.raises(NonFiniteError, match="although the inputs are finite"):
        posterior.predict(X.clamp(-1, 1) * 3e38)
