"""Likelihoods whose targets are not Gaussian: densities, predictives against quadrature, and every use of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dubito.errors import InputError, UnsupportedError
from dubito.likelihoods import (
    BradleyTerry,
    Dirichlet,
    Likelihood,
    MixtureDensity,
    MultivariateGaussian,
    NegativeBinomial,
    Ordinal,
    Poisson,
    Quantile,
    StudentT,
)
from scipy import integrate, stats
from torch import Tensor, nn

import dubito
from dubito import MAP, Laplace, Training
from dubito.beliefs.prediction import DistributionPrediction, gaussian_mixture
from oracles import fixed_normal

NAMES = {
    "poisson": Poisson(),
    "negative-binomial": NegativeBinomial(0.4),
    "student-t": StudentT(5.0),
    "quantile": Quantile(0.7),
}


def _oracle(likelihood: Likelihood, output: Any) -> Any:
    """The distribution of a target in scipy."""
    if isinstance(likelihood, Poisson):
        return stats.poisson(np.exp(output[0]))
    if isinstance(likelihood, NegativeBinomial):
        size = 1 / likelihood.dispersion
        return stats.nbinom(size, size / (size + np.exp(output[0])))
    if isinstance(likelihood, Quantile):  # scipy's κ is √(τ/(1 − τ)), its scale s/√(τ(1 − τ))
        tau, scale = likelihood.level, np.exp(output[1])
        return stats.laplace_asymmetric(np.sqrt(tau / (1 - tau)), output[0], scale / np.sqrt(tau * (1 - tau)))
    assert isinstance(likelihood, StudentT)
    return stats.t(likelihood.dof, output[0], np.exp(output[1]))


@pytest.mark.parametrize("name", NAMES)
def test_one_network_equals_scipy(name: str) -> None:
    likelihood = NAMES[name]
    outputs = torch.tensor([[0.8, -0.3], [2.5, 0.4]], dtype=torch.float64)[:, : likelihood.outputs_for(1)]
    prediction = likelihood.predict(outputs)
    for row in range(2):
        oracle = _oracle(likelihood, outputs[row].numpy())
        y = torch.tensor([[3.0]], dtype=torch.float64)
        one: Any = prediction[row]
        log_prob = oracle.logpmf(3) if prediction.distribution.is_count else oracle.logpdf(3)
        assert float(one.log_prob(y)) == pytest.approx(log_prob, rel=1e-10)
        assert float(one.cdf(y)) == pytest.approx(oracle.cdf(3), rel=1e-10)
        assert float(one.mean) == pytest.approx(oracle.mean(), rel=1e-12)
        assert float(one.stddev) == pytest.approx(oracle.std(), rel=1e-12)
        for level in (0.01, 0.5, 0.975):
            assert float(one.quantile(level)) == pytest.approx(oracle.ppf(level), rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_likelihoods_near_their_limit_keep_their_digits(dtype: torch.dtype) -> None:
    """The log-gammas of large numbers cancel: many degrees of freedom, little dispersion, concentrated shares."""
    outputs, y = torch.tensor([[2.0, 0.1]], dtype=dtype), torch.tensor([[3.0]], dtype=dtype)
    rate, close = np.exp(2.0), {"rel": 2e-6, "abs": 0} if dtype == torch.float32 else {"rel": 1e-12, "abs": 0}
    for small in (1e-8, 1e-10, 1e-14):  # the second order of the dispersion is below rounding
        counts: Any = NegativeBinomial(small).predict(outputs[:, :1])
        first = small * ((3 - rate) ** 2 - 3) / 2
        assert float(counts.log_prob(y)) == pytest.approx(stats.poisson.logpmf(3, rate) + first, **close)
        assert float(counts.cdf(y)) == pytest.approx(stats.poisson.cdf(3, rate), rel=max(close["rel"], 30 * small))
    for dof in (1e3, 1e5, 1e7):
        expected = stats.t.logpdf(3, dof, np.float64(outputs[0, 0]), np.exp(float(outputs[0, 1])))
        found = float(StudentT(dof).predict(outputs).log_prob(y))
        assert found == pytest.approx(expected, rel=max(close["rel"], 1e-15 * dof))  # scipy's loses digits, too
    shares, alpha = torch.tensor([[0.5, 0.25, 0.25]], dtype=dtype), torch.tensor([[5e3, 2.6e3, 2.4e3]], dtype=dtype)
    logs = alpha.log()
    expected = stats.dirichlet.logpdf(shares[0].double(), logs[0].double().exp())
    assert float(Dirichlet().log_prob(logs, shares)) == pytest.approx(expected, **close)


@pytest.mark.parametrize("scale", [1e2, 1e6, 1e8])
def test_concentrated_shares_keep_their_curvature_in_float32(scale: float) -> None:
    """Along outputs that grow together, Stirling's series leaves 1/C Σ α_c² ψ₁(α_c) − α₀² ψ₁(α₀) → (C − 1) / 2C."""
    outputs = torch.tensor([[0.0, 0.5, 1.0]]) + math.log(scale)
    root = Dirichlet().hessian_root(outputs)[:, 0].double()
    along = torch.full((3,), 3**-0.5).double()
    assert float((root @ along).square().sum()) == pytest.approx(1 / 3, rel=1 / scale + 1e-3)
    assert float((root @ along).square().sum()) < 0.34
    shares, alpha = torch.tensor([[0.5, 0.25, 0.25]]), outputs[0].double().exp()
    digamma = torch.digamma(alpha) - torch.digamma(alpha.sum()) - shares[0].double().log()
    assert torch.allclose(Dirichlet().gradient(outputs, shares)[0].double(), alpha * digamma, rtol=1e-6)


def test_the_old_name_of_the_distribution_warns() -> None:
    prediction: Any = StudentT().predict(torch.zeros(1, 2))
    with pytest.warns(DeprecationWarning, match="write `distribution`"):
        assert prediction.family is prediction.distribution


GRID = np.linspace(-12, 12, 4001)  # the trapezoidal rule is exact to rounding for such smooth functions


def _integral(function: Any, mean: float, variance: float) -> float:
    weights = stats.norm.pdf(GRID) * (GRID[1] - GRID[0])
    return float(weights @ function(mean + variance**0.5 * GRID))


@pytest.mark.parametrize("name", ["poisson", "negative-binomial"])
@pytest.mark.parametrize("variance", [0.05, 1.0])
def test_predictive_under_gaussian_outputs_equals_quadrature(name: str, variance: float) -> None:
    likelihood, mean = NAMES[name], 0.7
    prediction: Any = likelihood.predict_gaussian(
        torch.tensor([[mean]], dtype=torch.float64), torch.tensor([[variance]], dtype=torch.float64)
    )
    for y in (0, 2, 9):
        expected = _integral(lambda f, y=y: _oracle(likelihood, [f]).pmf(y), mean, variance)
        found = prediction.log_prob(torch.tensor([[float(y)]], dtype=torch.float64)).exp()
        assert float(found) == pytest.approx(expected, rel=1e-6)
    rate = _integral(np.exp, mean, variance)
    noise = _integral(lambda f: _oracle(likelihood, [f]).var(), mean, variance)
    function = _integral(lambda f: (np.exp(f) - rate) ** 2, mean, variance)
    assert float(prediction.mean) == pytest.approx(rate, rel=1e-6)
    assert float(prediction.aleatoric) == pytest.approx(noise, rel=1e-6)
    assert float(prediction.epistemic) == pytest.approx(function, rel=1e-6)
    assert torch.allclose(prediction.stddev**2, prediction.aleatoric + prediction.epistemic)


@pytest.mark.parametrize(("mean", "spread"), [(2.0, 1.0), (5.0, 0.3), (7.0, 0.3), (9.0, 0.1)])
def test_counts_that_vary_less_than_their_log_mean_are_integrated(mean: float, spread: float) -> None:
    """Each count is likely for a narrow range of log-means only, which 96 Gauss–Hermite nodes missed."""
    outputs, variances = torch.tensor([[mean]]).double(), torch.tensor([[spread**2]]).double()
    found: Any = Poisson().predict_gaussian(outputs, variances)
    for deviation in (-1.1, 0.0, 1.1, 2.2):
        y = round(float(np.exp(mean + deviation * spread)))
        at = torch.tensor([[float(y)]]).double()
        expected = _integral(lambda f, y=y: _oracle(Poisson(), [f]).pmf(y), mean, spread**2)
        assert float(found.log_prob(at).exp()) == pytest.approx(expected, rel=1e-6)
        assert float(found.cdf(at)) == pytest.approx(
            _integral(lambda f, y=y: _oracle(Poisson(), [f]).cdf(y), mean, spread**2), rel=1e-6
        )


@pytest.mark.parametrize("spread", [2.0, 4.0])
def test_a_location_that_is_less_certain_than_the_noise_is_integrated(spread: float) -> None:
    outputs, variances = torch.zeros(1, 2).double(), torch.tensor([[spread**2, 1e-12]]).double()
    found: Any = StudentT(3.0).predict_gaussian(outputs, variances)
    for y in (0.0, 0.4 * spread, 3 * spread):
        expected = _integral(lambda f, y=y: stats.t.pdf(y, 3.0, f), 0.0, spread**2)
        assert float(found.log_prob(torch.tensor([[y]]).double()).exp()) == pytest.approx(expected, rel=1e-6)


def test_student_t_predictive_equals_quadrature_over_both_outputs() -> None:
    outputs, variance = torch.tensor([[0.4, -0.2]]).double(), torch.tensor([[0.5, 0.1]]).double()
    found = StudentT(5.0).predict_gaussian(outputs, variance).log_prob(torch.tensor([[1.5]]).double()).exp()

    grid = np.linspace(-8, 8, 801)  # the trapezoidal rule is exact to rounding for such smooth functions
    weight = stats.norm.pdf(grid) * (grid[1] - grid[0])
    locations, scales = 0.4 + 0.5**0.5 * grid[:, None], np.exp(-0.2 + 0.1**0.5 * grid)
    expected = weight @ stats.t.pdf(1.5, 5.0, locations, scales) @ weight
    assert float(found) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("variance", [1e-4, 0.5, 4.0])
def test_quantile_predictive_equals_quadrature_over_both_outputs(variance: float) -> None:
    likelihood, spread = Quantile(0.7), variance**0.5
    outputs, variances = torch.tensor([[0.4, -0.2]]).double(), torch.tensor([[variance, 0.1]]).double()
    found: Any = likelihood.predict_gaussian(outputs, variances)
    grid, (nodes, own) = np.linspace(-8, 8, 161), np.polynomial.legendre.leggauss(120)
    weight, log_scales = stats.norm.pdf(grid) * (grid[1] - grid[0]), -0.2 + 0.1**0.5 * grid
    for y in (-1.5, 0.41, 3.0):
        kink = np.clip(y, 0.4 - 9 * spread, 0.4 + 9 * spread)
        ends = [(0.4 - 9 * spread, kink), (kink, 0.4 + 9 * spread)]  # the quantile on both sides of the target
        places = np.concatenate([(a + b) / 2 + (b - a) / 2 * nodes for a, b in ends])
        weights = np.concatenate([(b - a) / 2 * own for a, b in ends]) * stats.norm.pdf(places, 0.4, spread)
        oracle = _oracle(likelihood, [places[:, None], log_scales])
        at = torch.tensor([[y]]).double()
        assert float(found.log_prob(at).exp()) == pytest.approx(weights @ oracle.pdf(y) @ weight, rel=1e-6)
        assert float(found.cdf(at)) == pytest.approx(weights @ oracle.cdf(y) @ weight, rel=1e-6)
    places, weights = 0.4 + spread * grid, weight
    oracle = _oracle(likelihood, [places[:, None], log_scales])
    mean = weights @ oracle.mean() @ weight
    assert float(found.mean) == pytest.approx(mean, rel=1e-6)
    assert float(found.aleatoric) == pytest.approx(weights @ oracle.var() @ weight, rel=1e-6)
    assert float(found.epistemic) == pytest.approx(weights @ (oracle.mean() - mean) ** 2 @ weight, rel=1e-6)
    wide = found.rescale(1.0, 2.0)
    assert torch.allclose(wide.stddev**2, wide.aleatoric + wide.epistemic)
    assert torch.allclose(wide.epistemic, 4 * found.epistemic)


def test_dirichlet_predictive_of_two_shares_equals_quadrature() -> None:
    outputs, variances = torch.tensor([[0.9, 0.3]]).double(), torch.tensor([[0.3, 0.2]]).double()
    found: Any = Dirichlet().predict_gaussian(outputs, variances)
    grid = np.linspace(-8, 8, 401)
    weight = stats.norm.pdf(grid) * (grid[1] - grid[0])
    first, second = np.exp(0.9 + 0.3**0.5 * grid)[:, None], np.exp(0.3 + 0.2**0.5 * grid)
    oracle = stats.beta(first, second)
    shares = torch.tensor([[0.3, 0.7]]).double()
    assert float(found.log_prob(shares).exp()) == pytest.approx(weight @ oracle.pdf(0.3) @ weight, rel=1e-6)
    assert float(found.cdf(shares)[0, 0]) == pytest.approx(weight @ oracle.cdf(0.3) @ weight, rel=1e-6)
    mean = weight @ oracle.mean() @ weight
    assert float(found.mean[0, 0]) == pytest.approx(mean, rel=1e-6)
    assert float(found.aleatoric[0, 0]) == pytest.approx(weight @ oracle.var() @ weight, rel=1e-6)
    assert float(found.epistemic[0, 0]) == pytest.approx(weight @ (oracle.mean() - mean) ** 2 @ weight, rel=1e-6)


def test_dirichlet_draws_of_three_shares_are_near_the_integral() -> None:
    outputs, variances = torch.tensor([[0.9, 0.3, 1.2]]).double(), torch.tensor([[0.1, 0.2, 0.05]]).double()
    found: Any = Dirichlet().predict_gaussian(outputs, variances)
    many = outputs + variances.sqrt() * fixed_normal(200_000, 3)
    expected = Dirichlet().predict_samples(many.unsqueeze(1))
    shares = torch.tensor([[0.2, 0.3, 0.5]]).double()
    assert float(found.log_prob(shares)) == pytest.approx(float(expected.log_prob(shares)), abs=0.01)
    assert torch.allclose(found.epistemic, expected.epistemic, rtol=0.05)


def test_crps_equals_sums_and_quadrature() -> None:
    rates = torch.tensor([[[0.2]], [[1.7]]], dtype=torch.float64)  # two components
    prediction = DistributionPrediction.of(Poisson(), rates)
    counts = np.arange(200)
    below = np.mean([stats.poisson.cdf(counts, np.exp(rate)) for rate in (0.2, 1.7)], axis=0)
    expected = ((below - (counts >= 4)) ** 2).sum()
    assert float(prediction.crps(torch.tensor([[4.0]]))) == pytest.approx(expected, rel=1e-7)
    wide = DistributionPrediction.of(Poisson(), torch.full((1, 1, 1), 9.0, dtype=torch.float64))
    counts = np.arange(20_000)
    expected = ((stats.poisson.cdf(counts, np.exp(9.0)) - (counts >= 8600)) ** 2).sum()
    assert float(wide.crps(torch.tensor([[8600.0]]))) == pytest.approx(expected, rel=1e-3)
    oracle = stats.t(5.0, 0.3, np.exp(0.2))
    expected = integrate.quad(lambda t: oracle.cdf(t) ** 2, -np.inf, 1.1)[0]
    expected += integrate.quad(lambda t: oracle.sf(t) ** 2, 1.1, np.inf)[0]
    found = StudentT(5.0).predict(torch.tensor([[0.3, 0.2]], dtype=torch.float64)).crps(torch.tensor([[1.1]]))
    assert float(found) == pytest.approx(expected, rel=1e-6)


def test_mixture_density_is_a_mixture_of_gaussians() -> None:
    outputs = torch.tensor([[0.5, -0.5, -1.0, 2.0, 0.1, -0.3]], dtype=torch.float64)
    prediction: Any = MixtureDensity(2).predict(outputs)
    y = torch.tensor([[0.7]], dtype=torch.float64)
    mixture = (outputs[0, 2:4, None], outputs[0, 4:, None].exp(), outputs[0, :2].softmax(0)[:, None])
    assert torch.allclose(prediction.log_prob(y), gaussian_mixture.log_prob(*mixture, y[0]))
    assert torch.allclose(prediction.cdf(y)[0], gaussian_mixture.cdf(*mixture, y[0]))
    assert torch.allclose(prediction.quantile(0.2)[0], gaussian_mixture.quantile(*mixture, 0.2), atol=1e-9)
    assert torch.allclose(prediction.crps(y)[0], gaussian_mixture.crps(*mixture, y[0]), atol=1e-7)
    moved = prediction.rescale(3.0, 2.0)
    assert torch.allclose(moved.mean, 3 + 2 * prediction.mean)
    assert torch.allclose(moved.log_prob(3 + 2 * y), prediction.log_prob(y) - np.log(2))
    assert torch.allclose(moved.quantile(0.2), 3 + 2 * prediction.quantile(0.2))


def test_correlated_noise_is_joint() -> None:
    covariance = np.array([[1.0, 0.6], [0.6, 0.8]])
    likelihood = MultivariateGaussian(tuple(map(tuple, covariance)))
    mean, variance = fixed_normal(3, 2), fixed_normal(3, 2, seed=1).square()
    y = fixed_normal(3, 2, seed=2)
    prediction = likelihood.predict_gaussian(mean, variance)
    for row in range(3):
        expected = stats.multivariate_normal.logpdf(y[row], mean[row], covariance + np.diag(variance[row]))
        assert float(prediction.log_prob(y)[row]) == pytest.approx(expected, rel=1e-10)
    assert torch.allclose(prediction.stddev**2, torch.tensor([1.0, 0.8]).double() + variance)
    scaled = prediction.rescale(1.0, torch.tensor([2.0, 3.0]).double())
    assert torch.allclose(scaled.log_prob(1 + y * torch.tensor([2.0, 3.0])), prediction.log_prob(y) - np.log(6))
    residuals = fixed_normal(50, 2, seed=3)
    found = MultivariateGaussian.of_residuals(residuals)
    assert np.allclose(found.covariance, (residuals.T @ residuals / 50).numpy())


def test_linear_model_with_correlated_noise_has_the_exact_evidence() -> None:
    """Σ over outputs couples the weights; on a linear model Laplace is exact Bayesian regression."""
    noise = np.array([[0.5, 0.3], [0.3, 0.4]])
    X, Y = fixed_normal(12, 2), fixed_normal(12, 2, seed=4)
    design = np.kron(np.eye(2), X.numpy())  # targets and weights ordered by output
    full_noise = np.kron(noise, np.eye(12))
    precision = design.T @ np.linalg.solve(full_noise, design) + 2 * np.eye(4)
    weights = np.linalg.solve(precision, design.T @ np.linalg.solve(full_noise, Y.T.reshape(-1).numpy()))
    model = nn.Linear(2, 2, bias=False).double()
    model.weight.data = torch.from_numpy(weights.reshape(2, 2))
    likelihood = MultivariateGaussian(tuple(map(tuple, noise)))
    posterior = Laplace(structure="full", prior_precision=2.0).fit(model, (X, Y), likelihood=likelihood, progress=False)
    expected = stats.multivariate_normal.logpdf(Y.T.reshape(-1).numpy(), cov=full_noise + design @ design.T / 2)
    assert float(posterior.log_evidence()) == pytest.approx(expected, rel=1e-8)


X = fixed_normal(40, 3).float()
RATE = (0.5 * X[:, 0] + 1).exp()
COUNTS = torch.poisson(RATE, generator=torch.Generator().manual_seed(0))


def test_preferences_recover_the_order_of_items() -> None:
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randn(200, 2, 3, generator=generator)
    preferred = pairs[..., 0].argmax(dim=1)  # only the first feature counts
    model = nn.Sequential(nn.Linear(3, 1), nn.Flatten())
    training = Training(epochs=30, optimizer="adam", lr=0.05)
    posterior = MAP().fit(model, (pairs, preferred), likelihood="bradley-terry", training=training, progress=False)
    assert dubito.evaluate(posterior, (pairs, preferred)).scores["accuracy"] > 0.95
    scores = posterior.model(pairs)
    expected = torch.sigmoid(scores[:, 1] - scores[:, 0])
    assert torch.allclose(posterior.predict(pairs).probs[:, 1], expected, atol=1e-6)
    laplace = Laplace(structure="full").fit(
        posterior.model, (pairs, preferred), likelihood=BradleyTerry(), progress=False
    )
    assert (laplace.predict(pairs).epistemic > 0).all()


@pytest.mark.parametrize(
    ("likelihood", "outputs", "targets", "words"),
    [
        (Poisson(), torch.zeros(2, 1), torch.tensor([1.0, -3.0]), "at least 0, got -3"),
        (Poisson(), torch.zeros(2, 1), torch.tensor([1.0, 0.5]), "whole numbers of at least 0, got 0.5"),
        (NegativeBinomial(), torch.zeros(2), torch.tensor([-1, 2]), "at least 0, got -1"),
        (Ordinal(), torch.zeros(2, 3), torch.tensor([0, 4]), "class 4 is not one of 0 to 3"),
        (Ordinal(), torch.zeros(2, 3), torch.tensor([0.0, 1.0]), "whole numbers"),
        (BradleyTerry(), torch.zeros(2, 1), torch.tensor([0, 0]), "two items or more"),
        (MixtureDensity(2), torch.zeros(2, 4), torch.zeros(2), "needs outputs"),
        (StudentT(), torch.zeros(2, 3), torch.zeros(2), "a location and a log-scale"),
        (Quantile(), torch.zeros(2, 3), torch.zeros(2), "a quantile and a log-scale"),
        (Dirichlet(), torch.zeros(1, 2), torch.tensor([[0.7, 0.4]]), "sum to 1 for every datum, got a sum of 1.1"),
        (Dirichlet(), torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]), "above 0, got 0"),
        (Dirichlet(), torch.zeros(2, 1), torch.ones(2, 1), "two shares or more"),
        (MultivariateGaussian((1.0, 2.0)), torch.zeros(2, 3), torch.zeros(2, 3), "2 outputs does not fit 3"),
    ],
)
def test_what_does_not_fit_says_so(likelihood: Likelihood, outputs: Tensor, targets: Tensor, words: str) -> None:
    with pytest.raises(InputError, match=words):
        likelihood.check(outputs, targets)


def test_settings_that_cannot_be() -> None:
    for covariance in ((1.0, -1.0), ((1.0, 2.0), (2.0, 1.0)), ((1.0, 0.1), (0.2, 1.0)), ()):
        with pytest.raises(InputError, match="positive"):
            MultivariateGaussian(covariance)
    for residuals, words in (
        (torch.zeros(0, 2), r"at least one datum, got none, of shape \(0, 2\)"),
        (torch.full((3, 2), torch.nan), "`residuals` must be finite numbers .* got NaN"),
        (torch.zeros(3, 2), "residuals of 3 data with 2 outputs have no positive definite covariance"),
        (torch.ones(1, 2), "too few data"),
    ):
        with pytest.raises(InputError, match=words):
            MultivariateGaussian.of_residuals(residuals)
    with pytest.raises(InputError, match="without any error"):
        MultivariateGaussian.of_residuals(torch.zeros(3, 2), correlated=False)
    with pytest.raises(InputError, match="above 2"):
        StudentT(dof=2.0)
    with pytest.raises(InputError, match="dispersion"):
        NegativeBinomial(dispersion=0.0)
    with pytest.raises(InputError, match="not known yet"):
        NegativeBinomial().predict(torch.zeros(1, 1))
    with pytest.raises(InputError, match="level"):
        Quantile(level=1.0)
    with pytest.raises(UnsupportedError, match="no scale"):
        Poisson().temper(torch.zeros(1, 1), 2.0)


@pytest.mark.slow
def test_counts_of_a_table_and_an_estimator(tmp_path: Path) -> None:
    from dubito.sklearn import DubitoRegressor

    table = {"a": X[:, 0].tolist(), "b": X[:, 1].tolist(), "visits": COUNTS.tolist()}
    quick = {"epochs": 15, "lr": 0.05}
    options: dict[str, Any] = {"likelihood": "poisson", "training": quick, "task": "regression", "progress": False}
    run = dubito.runs.fit(table, "visits", recipe=Laplace(), seed=1, **options)
    columns = run.predict(table).columns
    assert (columns["prediction"] > 0).all()
    outside = run.predict({"a": [50.0], "b": [0.0]})  # a row that the guard reads in two ways
    assert np.isfinite(outside.columns["stddev"]).all()
    wrong = {**table, "visits": [-1.0, *COUNTS.tolist()[1:]]}
    with pytest.raises(InputError, match="'visits' holds -1"):
        dubito.runs.fit(wrong, "visits", **options)
    regressor = DubitoRegressor(Laplace(), likelihood="poisson", training=quick, held_out=0.0)
    drawn = regressor.fit(X.numpy(), COUNTS.numpy()).sample_y(X.numpy(), n_samples=3)
    assert drawn.shape == (40, 3)
    assert (drawn == drawn.round()).all()
    assert (drawn >= 0).all()


def test_targets_that_cannot_occur_have_no_score() -> None:
    counts: Any = Poisson().predict(torch.zeros(2, 1))
    for wrong in (-1.0, 0.5):
        with pytest.raises(InputError, match=f"whole numbers of at least 0, got {wrong:g}"):
            counts.log_prob(torch.tensor([[0.0], [wrong]]))
    assert float(counts.cdf(torch.tensor([[0.5], [-1.0]]))[1]) == 0  # any number has a distribution function
    counts.rescale(0.0, 3.0).log_prob(torch.tensor([[3.0], [0.3 * 10]]))
    shares: Any = Dirichlet().predict(torch.zeros(1, 2))
    with pytest.raises(InputError, match=r"must sum to 1 for every datum, got a sum of 1\.5"):
        shares.log_prob(torch.tensor([[0.5, 1.0]]))
