"""Regression scores against scipy and numerical quadrature."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import kstest, norm
from torch import Tensor

from dubito import metrics
from dubito.beliefs.prediction import gaussian_mixture


def draw_mixture(components: int, num: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    means = 2 * torch.randn(components, num, generator=generator, dtype=torch.float64)
    stddevs = 0.2 + torch.rand(components, num, generator=generator, dtype=torch.float64)
    weights = torch.rand(components, generator=generator, dtype=torch.float64)
    targets = 2 * torch.randn(num, generator=generator, dtype=torch.float64)
    return means, stddevs, targets, weights / weights.sum()


def mixture_cdf(t: float, mean: np.ndarray, stddev: np.ndarray, weights: np.ndarray) -> float:
    return float((weights * norm.cdf((t - mean) / stddev)).sum())


def crps_by_quadrature(y: float, mean: np.ndarray, stddev: np.ndarray, weights: np.ndarray) -> float:
    low, high = min(y, (mean - 12 * stddev).min()), max(y, (mean + 12 * stddev).max())
    kinks = sorted({y, *mean.tolist()})

    def integrand(t: float) -> float:
        return (mixture_cdf(t, mean, stddev, weights) - (t >= y)) ** 2

    cuts = [low, *[kink for kink in kinks if low < kink < high], high]
    return sum(quad(integrand, a, b, epsabs=1e-11)[0] for a, b in pairwise(cuts))


@pytest.mark.parametrize("components", [1, 2, 5])
def test_crps_equals_quadrature(components: int) -> None:
    means, stddevs, targets, weights = draw_mixture(components, 6)
    expected = [
        crps_by_quadrature(float(y), means[:, n].numpy(), stddevs[:, n].numpy(), weights.numpy())
        for n, y in enumerate(targets)
    ]
    per_datum = gaussian_mixture.crps(means, stddevs, weights[:, None], targets)
    np.testing.assert_allclose(per_datum, expected, atol=1e-9)
    mean_score = metrics.crps(means, stddevs, targets, weights=weights)
    assert float(mean_score) == pytest.approx(np.mean(expected), abs=1e-9)


def test_crps_of_one_gaussian_is_the_textbook_formula() -> None:
    means, stddevs, targets, _ = draw_mixture(1, 100)
    z = ((targets - means[0]) / stddevs[0]).numpy()
    expected = stddevs[0].numpy() * (z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / math.sqrt(math.pi))
    assert float(metrics.crps(means[0], stddevs[0], targets)) == pytest.approx(expected.mean(), abs=1e-13)


def test_crps_of_points_is_the_energy_form() -> None:
    means, stddevs, targets, _ = draw_mixture(4, 20)
    absolute = (means - targets).abs().mean(0)
    spread = (means[:, None] - means[None]).abs().mean((0, 1))
    assert float(metrics.crps(means, 0 * stddevs, targets)) == pytest.approx(float((absolute - spread / 2).mean()))
    assert float(metrics.crps(targets, 0 * targets, targets)) == 0


def test_equal_components_are_one_gaussian() -> None:
    means, stddevs, targets, _ = draw_mixture(1, 50)
    weights = torch.tensor([0.2, 0.5, 0.3]).double()
    for metric in (metrics.crps, metrics.gaussian_nll, metrics.pit):
        single = metric(means[0], stddevs[0], targets)
        torch.testing.assert_close(
            metric(means.expand(3, -1), stddevs.expand(3, -1), targets, weights=weights), single, atol=1e-13, rtol=0
        )


def test_nll_and_pit_equal_scipy() -> None:
    means, stddevs, targets, weights = draw_mixture(3, 40)
    density = (weights[:, None].numpy() * norm.pdf(targets, means, stddevs)).sum(0)
    below = (weights[:, None].numpy() * norm.cdf(targets, means, stddevs)).sum(0)
    nll = float(metrics.gaussian_nll(means, stddevs, targets, weights=weights))
    assert nll == pytest.approx(-np.log(density).mean(), abs=1e-12)
    per_datum_weights = weights[:, None].expand_as(means)
    assert float(metrics.gaussian_nll(means, stddevs, targets, weights=per_datum_weights)) == nll
    np.testing.assert_allclose(metrics.pit(means, stddevs, targets, weights=weights), below, atol=1e-14)
    equal = metrics.pit(means, stddevs, targets)
    np.testing.assert_allclose(equal, norm.cdf(targets, means, stddevs).mean(0), atol=1e-14)


@pytest.mark.parametrize("level", [0.001, 0.025, 0.5, 0.95])
def test_mixture_quantile_equals_a_root_finder(level: float) -> None:
    means, stddevs, _, weights = draw_mixture(4, 20)
    stddevs[:, :5] *= 1e-3  # well separated modes: the distribution function is flat between them
    got = gaussian_mixture.quantile(means, stddevs, weights[:, None], level)
    for n in range(20):
        parts = (means[:, n].numpy(), stddevs[:, n].numpy(), weights.numpy())
        root = brentq(lambda t, parts=parts: mixture_cdf(t, *parts) - level, -30, 30, xtol=1e-14)
        assert float(got[n]) == pytest.approx(root, abs=1e-11)


def test_gaussian_quantile_is_exact() -> None:
    mean, stddev = torch.tensor([[1.0, -2.0]]).double(), torch.tensor([[0.5, 3.0]]).double()
    got = gaussian_mixture.quantile(mean, stddev, torch.ones(1, 1).double(), 0.975)
    np.testing.assert_allclose(got, norm.ppf(0.975, mean[0], stddev[0]), rtol=1e-14)


def test_pit_stays_a_probability_where_weights_round_above_one() -> None:
    far = torch.full((1,), 1e6, dtype=torch.float64)
    rounded_up = 0
    for seed in range(30):
        means, stddevs, _, weights = draw_mixture(7, 1, seed)
        rounded_up += int((weights / weights.sum()).sum() > 1)
        assert 1 - 1e-14 < float(metrics.pit(means, stddevs, far, weights=weights)) <= 1
    assert rounded_up > 0


def test_far_targets_stay_finite() -> None:
    means, stddevs, targets, _ = draw_mixture(3, 10)
    far = targets + 1e6
    assert float(metrics.gaussian_nll(means, stddevs, far)) < math.inf
    expected = (far - means).mean(0) - 0.5 * _mean_pair_distance(means, stddevs)
    torch.testing.assert_close(metrics.crps(means, stddevs, far), expected.mean(), rtol=1e-12, atol=0)


def _mean_pair_distance(means: Tensor, stddevs: Tensor) -> Tensor:
    difference, scale = means[:, None] - means[None], (stddevs[:, None] ** 2 + stddevs[None] ** 2).sqrt()
    z = (difference / scale).numpy()
    return torch.from_numpy(2 * scale.numpy() * norm.pdf(z) + difference.numpy() * (2 * norm.cdf(z) - 1)).mean((0, 1))


def test_rmse_intervals_and_several_outputs() -> None:
    mean, targets = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 4.0], [3.0, 0.0]])
    assert float(metrics.rmse(mean, targets)) == pytest.approx(math.sqrt(20 / 4), abs=1e-15)
    lower, upper = torch.tensor([0.0, 0.0, -math.inf, 2.0]), torch.tensor([1.0, 1.0, 0.0, 2.5])
    inside = torch.tensor([1.0, 1.5, -9.0, 2.0])  # bounds belong to the interval
    assert float(metrics.interval_coverage(lower, upper, inside)) == 0.75
    assert float(metrics.interval_width(lower[[0, 3]], upper[[0, 3]])) == pytest.approx(0.75, abs=1e-15)


def test_quantile_calibration_counts_at_or_below() -> None:
    pit = torch.tensor([0.0, 0.1, 0.1, 0.4, 1.0], dtype=torch.float64)
    curve = metrics.quantile_calibration(pit, levels=[0.0, 0.1, 0.3, 0.4, 1.0])
    assert curve.observed.tolist() == [0.2, 0.6, 0.6, 0.8, 1.0]
    error = metrics.quantile_calibration_error(pit, levels=[0.0, 0.1, 0.3, 0.4, 1.0])
    assert float(error) == pytest.approx((0.2 + 0.5 + 0.3 + 0.4 + 0.0) / 5, abs=1e-15)


def test_quantiles_of_a_true_model_are_calibrated_and_of_a_proud_one_not() -> None:
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(20_000, generator=generator)
    targets = mean + 0.5 * torch.randn(20_000, generator=generator)
    honest = metrics.pit(mean, torch.full_like(mean, 0.5), targets)
    assert kstest(honest, "uniform").pvalue > 0.01
    curve = metrics.quantile_calibration(honest)
    torch.testing.assert_close(curve.levels, torch.linspace(0.05, 0.95, 19, dtype=torch.float64))
    assert float(metrics.quantile_calibration_error(honest)) < 0.01
    proud = metrics.pit(mean, torch.full_like(mean, 0.25), targets)
    exact = np.abs(norm.cdf(norm.ppf(curve.levels) / 2) - curve.levels.numpy()).mean()
    assert float(metrics.quantile_calibration_error(proud)) == pytest.approx(exact, abs=0.01)
