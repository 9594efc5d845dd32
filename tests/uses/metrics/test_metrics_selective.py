"""Risk-coverage curves against a loop and against the average over all orders of equal uncertainties."""

from __future__ import annotations

from itertools import pairwise, permutations

import numpy as np
import pytest
import torch

from dubito import metrics


def test_risk_is_the_mean_loss_of_the_least_uncertain() -> None:
    generator = torch.Generator().manual_seed(0)
    uncertainty = torch.rand(50, generator=generator, dtype=torch.float64)
    losses = torch.rand(50, generator=generator, dtype=torch.float64)
    curve = metrics.risk_coverage(uncertainty, losses)
    order = uncertainty.argsort()
    for n in range(1, 51):
        assert float(curve.risk[n - 1]) == pytest.approx(float(losses[order[:n]].mean()), abs=1e-14)
        assert float(curve.coverage[n - 1]) == pytest.approx(n / 50, abs=1e-15)
    assert torch.equal(curve.thresholds, uncertainty[order])
    assert float(metrics.aurc(uncertainty, losses)) == pytest.approx(float(curve.risk.mean()), abs=1e-15)


def test_ties_are_the_expectation_over_their_orders() -> None:
    uncertainty = torch.tensor([0.2, 0.1, 0.2, 0.3, 0.2, 0.1])
    losses = torch.tensor([1.0, 0.0, 0.0, 1.0, 3.0, 2.0])
    curves = [
        np.cumsum(losses.numpy()[list(order)]) / np.arange(1, 7)
        for order in permutations(range(6))
        if all(uncertainty[a] <= uncertainty[b] for a, b in pairwise(order))
    ]
    assert len(curves) == 2 * 6
    curve = metrics.risk_coverage(uncertainty, losses)
    np.testing.assert_allclose(curve.risk, np.mean(curves, axis=0), atol=1e-7)
    shuffled = torch.tensor([4, 0, 5, 2, 1, 3])
    again = metrics.risk_coverage(uncertainty[shuffled], losses[shuffled])
    assert torch.equal(curve.risk, again.risk)


def test_useless_uncertainty_gives_the_mean_loss_and_a_perfect_one_the_optimum() -> None:
    errors = torch.tensor([True, False, False, True, False])
    assert float(metrics.aurc(torch.zeros(5), errors)) == pytest.approx(0.4, abs=1e-15)
    best = (1 / 4 + 2 / 5) / 5
    assert float(metrics.aurc(errors.float() + torch.arange(5) / 100, errors)) == pytest.approx(best, abs=1e-15)
