"""Affine subspaces: directions through trained weights, on which every method runs as it is."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from dubito.errors import InputError
from torch import Tensor, nn

import dubito
from dubito import HMC, SGMCMC, SVGD, Laplace, Training, Variational, likelihoods, priors, select
from dubito.core import params
from dubito.core.randomness import Stream
from dubito.curvature.engine import FallbackWarning
from dubito.select.subspace import Subspace

pytestmark = pytest.mark.slow


def problem() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=generator, dtype=torch.float64)
    with Stream(1).active():
        model = nn.Linear(3, 2).double()
    y = x @ torch.randn(3, 2, generator=generator, dtype=torch.float64)
    return model, (x, y + 0.3 * torch.randn(60, 2, generator=generator, dtype=torch.float64))


def oracle(model: nn.Module, data: tuple[Tensor, Tensor], subspace: Subspace, scale: float) -> tuple[Tensor, Tensor]:
    """Mean and covariance of z: linear regression of the residuals on the rows of J P."""
    x, y = data
    base = params.of(model)
    flat = subspace.weights.ravel(base)
    outputs = lambda w: params.functional_call(model, subspace.weights.merge(base, w), x).flatten()  # noqa: E731
    rows = torch.autograd.functional.jacobian(outputs, flat) @ subspace.basis
    precision = rows.mT @ rows / 0.3**2 + torch.eye(subspace.num_weights, dtype=torch.float64) / scale**2
    residuals = y.flatten() - outputs(flat).detach()
    return torch.linalg.solve(precision, rows.mT @ residuals / 0.3**2), torch.linalg.inv(precision)


class TestSelection:
    def test_coordinates_and_weights(self) -> None:
        model, _ = problem()
        chosen = select.subspace(3, "random").resolve(model)
        torch.testing.assert_close(chosen.basis.mT @ chosen.basis, torch.eye(3, dtype=torch.float64))
        z = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        merged = chosen.merge(params.of(model), z)
        assert merged["weight"].shape == (5, 2, 3)
        torch.testing.assert_close(chosen.ravel(merged), z)
        torch.testing.assert_close(chosen.ravel(params.of(model)), torch.zeros(3, dtype=torch.float64))
        again = Subspace.from_state(chosen.to_state(), model)
        assert torch.equal(again.lift(z), chosen.lift(z))
        assert repr(chosen) == "Subspace of 3 directions through 8 weights"

    def test_principal_directions(self) -> None:
        model, data = problem()
        rule = select.subspace(2, epochs=20, lr=0.02)
        chosen = rule.resolve(model, data, likelihoods.Gaussian(0.3))
        torch.testing.assert_close(chosen.basis.mT @ chosen.basis, torch.eye(2, dtype=torch.float64))

        def reached(space: Subspace, z: Tensor) -> float:
            outputs = params.functional_call(model, space.merge(params.of(model), z), data[0])
            return float(likelihoods.Gaussian(0.3).log_prob(outputs, data[1]).sum())

        drawn = select.subspace(2, "random").resolve(model)
        before, other = reached(chosen, torch.zeros(2).double()), reached(drawn, oracle(model, data, drawn, 10.0)[0])
        # the way that descent took leads further down than a random one
        assert before < other < reached(chosen, oracle(model, data, chosen, 10.0)[0])

    def test_no_sets(self) -> None:
        rule = select.subspace(2)
        every = select.all()
        for combine in (lambda: rule | every, lambda: every & rule, lambda: ~rule, lambda: every | rule):
            with pytest.raises(InputError, match="cannot be combined"):
                combine()
        model, _ = problem()
        with pytest.raises(InputError, match="no masks"):
            select.subspace(2, "random").resolve(model).masks()

    @pytest.mark.parametrize(("rule", "words"), [
        (lambda: select.subspace(0), "whole number"), (lambda: select.subspace(2, epochs=0.5), "whole number"),
        (lambda: select.subspace(2, lr=0.0), "positive number"),
        (lambda: select.subspace(2, "pca"), "`directions` must be 'trajectory' or 'random'"),
        (lambda: select.subspace(2).resolve(problem()[0]), "needs training data"),
        (lambda: select.subspace(9, "random").resolve(problem()[0]), "must be at most the number of weights, 8"),
        (lambda: select.subspace(3, lr=1e9, epochs=50).resolve(*problem(), likelihoods.Gaussian(0.3)), "diverges"),
    ])  # fmt: skip
    def test_bad_input(self, rule: Any, words: str) -> None:
        with pytest.raises(InputError, match=words):
            rule()


RULE = select.subspace(2, "random")
RECIPES = {
    "hmc": HMC(weights=RULE, prior=priors.Normal(0.0, 2.0), burn_in=80, num_samples=200),
    "sghmc": SGMCMC(
        weights=RULE, prior=priors.Normal(0.0, 2.0), friction=0.3, burn_in=200, thinning=4, num_samples=250
    ),
    "svgd": SVGD(20, weights=RULE, prior=priors.Normal(0.0, 2.0)),
    "laplace": Laplace(structure="full", weights=RULE, prior_precision=0.25),
    "variational": Variational(weights=RULE, prior=priors.Normal(0.0, 2.0), estimator="weight", temperature=1.0),
}
TRAINING = {
    "sghmc": Training(batch_size=60),
    "svgd": Training(epochs=250, lr=0.1, batch_size=60),
    "variational": Training(epochs=800, lr=0.02, batch_size=60),
}


@pytest.mark.filterwarnings(f"ignore::{FallbackWarning.__module__}.FallbackWarning")
@pytest.mark.parametrize("name", list(RECIPES))
def test_every_method_finds_the_posterior_of_the_coordinates(name: str, tmp_path: Path) -> None:
    model, data = problem()
    likelihood = likelihoods.Gaussian(0.3)
    if name == "laplace":  # it takes the network as trained: go to the best point of the subspace first
        chosen = RULE.resolve(model, generator=torch.Generator().manual_seed(1))
        model = params.load_(model, chosen.merge(params.of(model), oracle(model, data, chosen, 2.0)[0]))
    generator = torch.Generator().manual_seed(1)
    options: dict[str, Any] = {"likelihood": likelihood, "training": TRAINING.get(name), "generator": generator}
    posterior: Any = RECIPES[name].fit(model, data, **options)
    mean, covariance = oracle(model, data, posterior.selection, 2.0)
    if name == "laplace":
        torch.testing.assert_close(posterior.covariance(), covariance, rtol=1e-8, atol=1e-12)
        mean = torch.zeros(2, dtype=torch.float64)
    spread = covariance.diag().sqrt()
    found = posterior.selection.ravel(posterior.mean())
    assert ((found - mean).abs() < 0.35 * spread).all()
    variance = (1 / torch.linalg.inv(covariance).diag()) if name == "variational" else covariance.diag()
    ratio = posterior.covariance().diag() / variance
    assert ((ratio > 0.65) & (ratio < 1.4)).all()
    assert set(posterior.sample(3)) == {"weight", "bias"}
    basis = posterior.selection.basis
    expected = posterior.selection.weights.merge(params.of(model), (basis @ posterior.covariance() * basis).sum(1))
    torch.testing.assert_close(posterior.marginals()[1]["weight"], expected["weight"], rtol=1e-6, atol=1e-10)
    prior = posterior.prior()[1]["bias"]
    torch.testing.assert_close(prior, 4.0 * basis[6:].square().sum(1), rtol=1e-6, atol=1e-12)
    posterior.save(tmp_path / "posterior")
    again = dubito.load(tmp_path / "posterior", problem()[0])
    assert again.digest() == posterior.digest()
    torch.testing.assert_close(again.predict(data[0]).mean, posterior.predict(data[0]).mean, rtol=0.0, atol=0.0)


@pytest.mark.filterwarnings(f"ignore::{FallbackWarning.__module__}.FallbackWarning")
@pytest.mark.parametrize("structure", ["full", "kron", "low-rank", "diag"])
def test_laplace_of_coordinates_is_that_of_a_brute_force_jacobian(structure: Any, tmp_path: Path) -> None:
    """For classes; the Kronecker factors of a single row of weights are no approximation."""
    x = torch.randn(50, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 1)
    with Stream(1).active():
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    recipe = Laplace(structure=structure, weights=RULE.replace(rank=4), prior_precision=2.0)
    posterior: Any = recipe.fit(model, (x, y))
    base, space = params.of(model), posterior.selection
    outputs = lambda z: params.functional_call(model, space.merge(base, z), x)  # noqa: E731
    jacobian = torch.autograd.functional.jacobian(outputs, torch.zeros(4, dtype=torch.float64))
    hessian = likelihoods.Categorical().hessian(model(x).detach())
    precision = torch.einsum("bcr,bcd,bds->rs", jacobian, hessian, jacobian) + 2 * torch.eye(4)
    expected = precision if structure != "diag" else torch.diag(precision.diag())
    torch.testing.assert_close(posterior.covariance(), torch.linalg.inv(expected), rtol=1e-9, atol=1e-12)
    log_joint = likelihoods.Categorical().log_prob(model(x), y).sum() + 2 * math.log(2.0)
    evidence = log_joint.detach() - 0.5 * torch.logdet(expected)
    torch.testing.assert_close(posterior.log_evidence(), evidence, rtol=1e-9, atol=0.0)
    _, spread = posterior.inner.functional(x)
    by_hand = torch.einsum("bcr,rs,bds->bcd", jacobian, torch.linalg.inv(expected), jacobian)
    torch.testing.assert_close(spread, by_hand, rtol=1e-8, atol=1e-12)
    posterior.save(tmp_path / "posterior")
    assert dubito.load(tmp_path / "posterior", model).recipe == recipe


@pytest.mark.filterwarnings(f"ignore::{FallbackWarning.__module__}.FallbackWarning")
@pytest.mark.parametrize(
    "recipe",
    [
        Laplace(structure="full", weights=select.subspace(3), prior_precision=1.0),
        HMC(weights=select.subspace(3), burn_in=30, num_samples=10, chains=1),
    ],
    ids=repr,
)
def test_a_network_with_trajectory_directions(recipe: Any) -> None:
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    data = (x, (x[:, 0] > 0).long())
    with Stream(1).active():
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    posterior = recipe.fit(model, data)
    assert posterior.predict(x).probs.shape == (60, 2)
    assert dubito.parse(repr(recipe)) == recipe
    updated = posterior.update(data, training=Training(epochs=2, batch_size=60))
    assert type(updated) is type(posterior)
    assert updated.num_data == 120
    with pytest.raises(InputError, match="start='model'"):
        HMC(weights=select.subspace(3), start="fresh").fit(model, data)
