"""A posterior as a model of botorch; skipped where botorch is not installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dubito.errors import InputError, UnsupportedError
from torch import nn

import dubito
from dubito import Laplace, optimization

X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(-1, 1)
Y = (3 * X).sin()


def posterior() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    return Laplace(structure="full", prior_precision=1.0).fit(model, (X, Y), likelihood="gaussian", progress=False)


def test_without_botorch_or_a_regression_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "botorch.models.ensemble", None)
    with pytest.raises(UnsupportedError, match=r"dubito\[optimization\]"):
        optimization.botorch_model(posterior())


def test_botorch_optimizes_the_drawn_functions() -> None:
    botorch = pytest.importorskip("botorch")
    from botorch.acquisition.logei import qLogExpectedImprovement
    from botorch.optim import optimize_acqf

    found = posterior()
    model = optimization.botorch_model(found, 16, loc=2.0, scale=3.0, generator=torch.Generator().manual_seed(1))
    points = torch.rand(5, 2, 1, dtype=torch.float64)  # five batches of two points
    values = model.posterior(points).values
    assert values.shape == (5, 16, 2, 1)
    drawn = found.functions(16, generator=torch.Generator().manual_seed(1))
    expected = 2 + 3 * drawn(points.reshape(-1, 1)).reshape(16, 5, 2, 1).movedim(0, 1)
    torch.testing.assert_close(values, expected.detach() if not values.requires_grad else expected)
    model = optimization.botorch_model(found, 16, loc=2.0, scale=3.0, generator=torch.Generator().manual_seed(1))
    acquisition = qLogExpectedImprovement(model, best_f=float((2 + 3 * Y).max()))
    bounds = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    with botorch.manual_seed(0):
        best, value = optimize_acqf(acquisition, bounds, q=2, num_restarts=2, raw_samples=16)
    assert best.shape == (2, 1)
    grid = torch.rand(64, 2, 1, dtype=torch.float64) * 2 - 1
    assert float(value) >= float(acquisition(grid).max()) - 0.2
    with pytest.raises(InputError, match="predicts 1 targets"):
        optimization.botorch_model(found, num_targets=2).posterior(points)
    with pytest.raises(InputError, match=r"shape \[..., n, d\]"):
        model.posterior(points[0, 0])
    with pytest.raises(InputError, match="must be a positive number, got inf"):
        optimization.botorch_model(found, scale=float("inf"))
    classifier = dubito.MAP(train=False).fit(nn.Linear(1, 2), (X.float(), torch.arange(12) % 2))
    with pytest.raises(InputError, match="regression"):
        optimization.botorch_model(classifier)
