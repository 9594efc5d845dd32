"""The variance of the outputs in closed form where only the last layer is random, against the Jacobian in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dubito import Laplace, Posterior, select
from dubito.curvature import last_layer
from dubito.curvature.last_layer import LastLayer
from oracles import seeded

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(40) % 4
LAST = select.last_layer()
TWO = select.mask({"2.weight": torch.arange(20).reshape(4, 5) % 10 == 3, "2.bias": torch.zeros(4, dtype=torch.bool)})
CASES: dict[str, Any] = {
    "kron": Laplace(weights=LAST),
    "diag": Laplace(structure="diag", weights=LAST),
    "full": Laplace(structure="full", weights=LAST),
    "low-rank": Laplace(structure="low-rank", rank=5, weights=LAST),
    "the weight alone": Laplace(structure="full", weights=select.layers("2.weight")),
    "the bias alone": Laplace(structure="diag", weights=select.layers("2.bias")),
    "two weights": Laplace(structure="full", weights=TWO),
    "kron, some weights": Laplace(weights=LAST & select.largest_magnitude(9)),
}


def posterior_of(recipe: Any) -> Posterior:
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))).double()
    return recipe.replace(prior_precision=0.5).fit(model, (X, Y))


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_the_closed_form_is_the_variance_of_the_jacobian(name: str, centred: bool) -> None:
    posterior: Any = posterior_of(CASES[name])
    columns = torch.eye(4, dtype=torch.float64) - (0.25 if centred else 0.0)
    names = posterior.selection.names
    bias = "2.bias" if "2.bias" in names else None
    form = LastLayer(posterior.covariance, posterior.selection, bias, (4, 5), columns)
    features = posterior.model[:2](X[:6])
    _, covariance = posterior.functional(X[:6])  # brute force in tests/curvature/test_curvature_functional.py
    wanted = torch.einsum("vo,bop,vp->bv", columns, covariance, columns)
    torch.testing.assert_close(form(features), wanted, rtol=1e-9, atol=1e-12)


def test_few_inputs_are_gathered_first() -> None:
    posterior: Any = posterior_of(CASES["two weights"])
    form = LastLayer(posterior.covariance, posterior.selection, None, (4, 5), torch.eye(4, dtype=torch.float64))
    assert form.terms[0].used is not None
    assert form.terms[0].basis is not None
    assert len(form.terms[0].basis) == len(form.terms[0].used) <= 2


@pytest.mark.parametrize("tolerance", [1e-6, 1e-3, 0.5])
def test_directions_with_the_variance_of_the_prior_are_joined(tolerance: float, monkeypatch: Any) -> None:
    """The error is at most the stated share, also for inputs that are unlike all the data, and never negative."""
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 30), nn.ReLU(), nn.Linear(30, 4))).double()
    posterior: Any = Laplace(weights=LAST, prior_precision=30.0).fit(model, (X, Y))
    columns = torch.eye(4, dtype=torch.float64) - 0.25
    arguments = (posterior.covariance, posterior.selection, "2.bias", (4, 30), columns)
    monkeypatch.setattr(last_layer, "WORTH_JOINING", 1)
    exact, joined = LastLayer(*arguments), LastLayer(*arguments, tolerance=tolerance)
    assert (exact.is_joined, joined.is_joined) == (False, True)
    features = torch.cat([model[:2](X), torch.randn(200, 30, generator=torch.Generator().manual_seed(1)).double()])
    ratios = (joined(features) / exact(features)).detach()
    assert float(ratios.min()) > 1 - 1e-10
    assert float(ratios.max()) < 1 + tolerance + 1e-10
    widths = [term.basis.shape[1] for term in joined.terms if term.basis is not None]
    assert sum(widths) < (30 if tolerance < 0.5 else 10)


def test_very_different_variances_are_not_joined(monkeypatch: Any) -> None:
    monkeypatch.setattr(last_layer, "WORTH_JOINING", 1)
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 30), nn.ReLU(), nn.Linear(30, 4))).double()
    posterior: Any = Laplace(weights=LAST, prior_precision=1e-6).fit(model, (X, Y))
    form = LastLayer(posterior.covariance, posterior.selection, "2.bias", (4, 30), torch.eye(4).double() - 0.25, 1e-4)
    assert [term.basis is not None for term in form.terms] == [True]
