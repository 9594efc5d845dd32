"""On a linear model with Gaussian noise Laplace is exact: posterior, evidence and predictive have closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize
import torch
from dubito.likelihoods import Gaussian
from laplace_cases import dense
from torch import nn

from dubito import Laplace, select
from oracles import LinearRegression, regression_data

pytestmark = pytest.mark.slow

EXACT = {"rtol": 1e-10, "atol": 1e-10}
PRIORS = {
    "scalar": (0.7, 0.0),
    "mean": (0.7, 0.4),
    "vectors": (torch.linspace(0.2, 3.0, 8, dtype=torch.float64), torch.linspace(-1, 1, 8, dtype=torch.float64)),
}


def problem(prior: str = "scalar", temperature: float = 1.0, outputs: int = 2) -> LinearRegression:
    precision, mean = PRIORS[prior]
    return LinearRegression(*regression_data(outputs=outputs), 0.3, precision, mean, temperature)


def fit(oracle: LinearRegression, **settings):
    recipe = Laplace(
        **{
            "structure": "full",
            "prior_precision": oracle.prior_precision,
            "prior_mean": oracle.prior_mean,
            "temperature": oracle.temperature,
            **settings,
        }
    )
    return recipe.fit(oracle.model(), (oracle.inputs, oracle.targets), likelihood=Gaussian(noise=oracle.noise))


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("temperature", [1.0, 0.25])
@pytest.mark.parametrize("weights", [select.all(), select.last_layer()])
def test_full_is_exact(prior: str, temperature: float, weights) -> None:
    oracle = problem(prior, temperature)
    posterior = fit(oracle, weights=weights)
    torch.testing.assert_close(dense(posterior), oracle.covariance, **EXACT)
    assert posterior.log_evidence().item() == pytest.approx(oracle.log_evidence, rel=1e-10)
    mean, variance = posterior.marginals()
    torch.testing.assert_close(posterior.selection.ravel(mean), oracle.mean, **EXACT)
    torch.testing.assert_close(posterior.selection.ravel(variance), oracle.covariance.diagonal(), **EXACT)
    before, spread = posterior.prior()
    torch.testing.assert_close(posterior.selection.ravel(before), oracle.prior[0], **EXACT)
    torch.testing.assert_close(posterior.selection.ravel(spread), 1 / oracle.prior[1], **EXACT)


def test_predictive_is_exact() -> None:
    oracle = problem("vectors")
    posterior, (x, _) = fit(oracle), regression_data(num=7, outputs=2, seed=5)
    mean, covariance = oracle.predict(x)
    prediction = posterior.predict(x)
    torch.testing.assert_close(prediction.mean, mean, **EXACT)
    torch.testing.assert_close(prediction.epistemic, covariance.diagonal().reshape(7, 2), **EXACT)
    torch.testing.assert_close(prediction.aleatoric, torch.full_like(mean, oracle.noise**2), **EXACT)
    torch.testing.assert_close(posterior.functional(x, joint=True), (mean, covariance), **EXACT)
    blocks = torch.stack([covariance[2 * n : 2 * n + 2, 2 * n : 2 * n + 2] for n in range(7)])
    torch.testing.assert_close(posterior.functional(x), (mean, blocks), **EXACT)


def test_last_layer_is_bayesian_regression_on_features() -> None:
    torch.manual_seed(0)
    features = nn.Sequential(nn.Linear(3, 5), nn.Tanh()).double()
    x, y = regression_data(outputs=1)
    oracle = LinearRegression(features(x).detach(), y, noise=0.4, prior_precision=2.0)
    model = nn.Sequential(features, oracle.model())
    recipe = Laplace(structure="full", weights=select.last_layer(), prior_precision=2.0)
    posterior = recipe.fit(model, (x, y), likelihood=Gaussian(noise=0.4))
    torch.testing.assert_close(dense(posterior), oracle.covariance, **EXACT)
    assert posterior.log_evidence().item() == pytest.approx(oracle.log_evidence, rel=1e-10)
    mean, covariance = oracle.predict(features(x[:6]).detach())
    torch.testing.assert_close(posterior.functional(x[:6], joint=True), (mean, covariance), **EXACT)


def test_samples_have_the_moments_of_the_posterior() -> None:
    oracle = problem("vectors")
    draws = fit(oracle).sample(40_000)
    flat = torch.cat([draws["weight"].flatten(1), draws["bias"]], dim=1)
    standard_error = oracle.covariance.diagonal().sqrt() / 200
    assert ((flat.mean(0) - oracle.mean).abs() < 4.5 * standard_error).all()
    torch.testing.assert_close(
        torch.cov(flat.mT), oracle.covariance, rtol=0.1, atol=0.03 * oracle.covariance.max().item()
    )


def test_a_subset_of_the_weights_conditions_on_the_rest() -> None:
    """Random weights given the others at their trained values have the corresponding block of the precision."""
    oracle = problem()
    chosen = torch.tensor([[True, False, True], [False, True, False]])
    posterior = fit(oracle, weights=select.mask({"weight": chosen}))
    where = chosen.flatten().nonzero().squeeze(1)
    torch.testing.assert_close(dense(posterior), torch.linalg.inv(oracle.precision[where][:, where]), **EXACT)


@pytest.mark.parametrize("structure", ["full", "low-rank", "kron"])
def test_structures_that_are_exact_here(structure: str) -> None:
    """Without a bias the curvature is one Kronecker product; low rank with all directions is the whole matrix."""
    x, y = regression_data(outputs=2)
    model = nn.Linear(3, 2, bias=False, dtype=torch.float64)
    recipe = Laplace(structure=structure, prior_precision=0.7)
    posterior = recipe.fit(model, (x, y), likelihood=Gaussian(noise=0.5))
    precision = torch.kron(torch.eye(2, dtype=torch.float64), x.mT @ x) / 0.25 + 0.7 * torch.eye(6, dtype=torch.float64)
    torch.testing.assert_close(dense(posterior), torch.linalg.inv(precision), **EXACT)


def test_diag_has_the_diagonal_of_the_precision() -> None:
    oracle = problem("vectors")
    posterior = fit(oracle, structure="diag")
    torch.testing.assert_close(dense(posterior), torch.diag(1 / oracle.precision.diagonal()), **EXACT)


# ---------------------------------------------------------------------- the prior in its forms


def test_precision_by_layer_name() -> None:
    x, y = regression_data()
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    precisions = {"0": 3.0, "2": 5.0, "2.bias": 7.0}
    for structure in ("kron", "full", "diag", "low-rank"):
        recipe = Laplace(structure=structure, prior_precision=precisions)
        posterior = recipe.fit(model, (x, y), likelihood=Gaussian(noise=0.5))
        expected = torch.tensor([3.0] * 8 + [5.0] * 2 + [7.0], dtype=torch.float64)
        torch.testing.assert_close(posterior.prior_precision, expected)
        _, variance = posterior.prior()
        torch.testing.assert_close(variance["2.bias"], torch.tensor([1 / 7], dtype=torch.float64))


def test_scaling_by_the_selected_share() -> None:
    oracle = problem()
    recipe = Laplace(structure="diag", weights=select.random(2), prior_precision=3.0, prior_scaling="S/D")
    posterior = recipe.fit(oracle.model(), (oracle.inputs, oracle.targets), likelihood=Gaussian(noise=0.3))
    assert posterior.prior_precision.item() == pytest.approx(3.0 * 2 / 8)


# ---------------------------------------------------------------------- tuning by evidence


def tuned(structure: str, groups: str, noise, outputs: int = 1):
    x, y = regression_data(num=25, outputs=outputs)
    model = LinearRegression(x, y, noise=0.3, prior_precision=0.5).model()
    recipe = Laplace(structure=structure, prior_precision="evidence", prior_groups=groups)
    return recipe.fit(model, (x, y), likelihood=Gaussian(noise=noise))


def best_by_scipy(posterior, num_groups: int, tune_noise: bool) -> float:
    """The largest evidence over log-precisions (and log-noise), from several starts."""
    sizes = torch.tensor([s.stop - s.start for s in posterior.selection.slices.values()])

    def loss(logs: np.ndarray) -> float:
        values = torch.tensor(logs, dtype=torch.float64).clamp(-13.8, 18.4).exp()
        prior = values[0] if num_groups == 1 else values[:num_groups]
        if num_groups == len(sizes) > 1:
            prior = prior.repeat_interleave(sizes)
        noise = values[-1] if tune_noise else None
        return -float(posterior.log_evidence(prior, noise))

    starts = [np.full(num_groups + tune_noise, start) for start in (-2.0, 0.0, 2.0)]
    options = {"xatol": 1e-7, "fatol": 1e-10, "maxiter": 20_000, "maxfev": 20_000}
    found = [scipy.optimize.minimize(loss, s, method="Nelder-Mead", options=options) for s in starts]
    return -min(result.fun for result in found)


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "low-rank"])
@pytest.mark.parametrize("groups", ["all", "layer"])
@pytest.mark.parametrize("noise", [0.3, "evidence", "learn"])
def test_tuning_finds_the_largest_evidence(structure: str, groups: str, noise) -> None:
    posterior = tuned(structure, groups, noise)
    best = best_by_scipy(posterior, 1 if groups == "all" else 2, isinstance(noise, str))
    assert posterior.log_evidence().item() == pytest.approx(best, abs=1e-6)
    assert isinstance(posterior.likelihood.noise, float)


@pytest.mark.parametrize("noise", [0.3, "evidence"])
def test_tuning_one_precision_per_weight(noise) -> None:
    posterior = tuned("diag", "weight", noise)
    best = best_by_scipy(posterior, 4, isinstance(noise, str))
    assert posterior.log_evidence().item() >= best - 1e-6
    prior = posterior.prior_precision.clone().requires_grad_()
    (slope,) = torch.autograd.grad(posterior.log_evidence(prior), prior)
    torch.testing.assert_close(slope * prior.detach(), torch.zeros_like(slope), atol=1e-8, rtol=0)


def test_noise_by_evidence_under_a_given_prior() -> None:
    x, y = regression_data(num=25)
    recipe = Laplace(structure="full", prior_precision=0.5)
    posterior = recipe.fit(LinearRegression(x, y, 0.3, 0.5).model(), (x, y), likelihood="gaussian")
    assert posterior.prior_precision.item() == 0.5
    grid = torch.linspace(0.9, 1.1, 201, dtype=torch.float64) * posterior.likelihood.noise
    values = torch.stack([posterior.log_evidence(noise=noise) for noise in grid])
    assert values.argmax().item() == 100


def test_noise_of_tiny_and_huge_targets() -> None:
    x, y = regression_data(num=200)
    for unit in (1e-6, 1e6):
        posterior = Laplace(structure="full").fit(LinearRegression(x, y).model(), (x, y), likelihood="gaussian")
        model = LinearRegression(x, y * unit, noise=0.3 * unit, prior_precision=unit**-2).model()
        scaled = Laplace(structure="full", prior_precision=unit**-2).fit(model, (x, y * unit), likelihood="gaussian")
        assert scaled.likelihood.noise / unit == pytest.approx(posterior.likelihood.noise, rel=0.02)


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "low-rank"])
def test_evidence_is_differentiable(structure: str) -> None:
    posterior = tuned(structure, "all", 0.3, outputs=2)
    sizes = torch.tensor([s.stop - s.start for s in posterior.selection.slices.values()])
    one, two = torch.tensor(0.6, dtype=torch.float64), torch.tensor([0.6, 1.7], dtype=torch.float64)
    noise = torch.tensor(0.45, dtype=torch.float64)

    def by_layer(precisions: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return posterior.log_evidence(precisions.repeat_interleave(sizes), noise)

    assert torch.autograd.gradcheck(posterior.log_evidence, (one.requires_grad_(), noise.requires_grad_()))
    assert torch.autograd.gradcheck(by_layer, (two.requires_grad_(), noise))


def test_evidence_at_other_settings_is_exact() -> None:
    oracle = problem()
    posterior = fit(oracle)
    # the centre stays where it was trained, so only at its own settings is Laplace exact
    assert posterior.log_evidence(0.7, 0.3).item() == pytest.approx(oracle.log_evidence, rel=1e-10)
    assert posterior.log_evidence(1.4).item() < problem_evidence(oracle, prior_precision=1.4)


def problem_evidence(oracle: LinearRegression, **changes) -> float:
    return LinearRegression(oracle.inputs, oracle.targets, oracle.noise, **changes).log_evidence
