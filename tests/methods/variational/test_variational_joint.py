"""Low-rank and full posteriors against dense normal distributions and the exact posterior of linear regression."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from dubito.errors import InputError
from test_variational_fit import LIKELIHOOD, NOISE, PRECISION, PRIOR, classes, flat_mean
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, kl_divergence
from variational_cases import NETWORKS, mlp

import dubito
from dubito import Training, Variational, objectives, priors, select
from dubito.core import limits, params
from dubito.methods.variational import convert
from dubito.methods.variational.joint import Correlations, JointModule
from oracles import LinearRegression, fixed_normal, regression_data, seeded

pytestmark = pytest.mark.slow

FAMILIES = ("full", "low-rank")
LONG = Training(epochs=400, lr=0.05, batch_size=1000)
SHORT = Training(epochs=2, lr=1e-2, batch_size=16)


def dense(own: Correlations) -> Tensor:
    """The matrix R Rᵀ."""
    identity = torch.eye(len(own.factor), dtype=own.factor.dtype)
    if own.family == "low-rank":
        return identity + own.factor @ own.factor.mT
    return (identity + own.factor.tril(-1)) @ (identity + own.factor.tril(-1)).mT


def some(family: str, size: int = 5, seed: int = 0) -> Correlations:
    return Correlations(family, 0.7 * fixed_normal(size, size if family == "full" else 2, seed=seed))


@pytest.mark.parametrize("family", FAMILIES)
class TestCorrelations:
    def test_the_matrix(self, family: str) -> None:
        own = some(family)
        matrix, columns = dense(own), fixed_normal(5, 3, seed=1)
        torch.testing.assert_close(own.spread().square(), matrix.diagonal(), rtol=1e-12, atol=0)
        torch.testing.assert_close(own.log_det(), torch.logdet(matrix), rtol=1e-10, atol=1e-12)
        expected = (columns * torch.linalg.solve(matrix, columns)).sum()
        torch.testing.assert_close(own.square(columns), expected, rtol=1e-10, atol=0)

    def test_the_trace(self, family: str) -> None:
        own, other, ratio = some(family), some(family, seed=3), fixed_normal(5, seed=4).exp()
        expected = torch.linalg.solve(dense(own), ratio[:, None] * dense(other) * ratio).diagonal().sum()
        torch.testing.assert_close(own.trace(other, ratio), expected, rtol=1e-10, atol=0)

    def test_draws(self, family: str, generator: torch.Generator) -> None:
        own = some(family)
        noise = torch.randn(200_000, 5, generator=generator, dtype=torch.float64)
        found = torch.cov(own.apply(noise, generator).mT)
        torch.testing.assert_close(found, dense(own), rtol=0.02, atol=0.03)


def joint(family: Any, **options: Any) -> JointModule:
    """A module with correlations that are not those of the start."""
    module = convert(seeded(mlp), family=family, rank=3, initial_scale=0.4, biases="random", **options)
    assert isinstance(module, JointModule)
    module.factor.data.copy_(0.5 * fixed_normal(*module.factor.shape, seed=2))
    return module


def as_dense(module: JointModule) -> MultivariateNormal:
    scale = torch.cat([part.scale.flatten() for _, part in module.parts()])
    covariance = scale[:, None] * dense(module.correlations) * scale
    return MultivariateNormal(module.selection.ravel(dict(module.network.named_parameters())), covariance)


@pytest.mark.parametrize("family", FAMILIES)
class TestModule:
    def test_the_divergence(self, family: str) -> None:
        module = joint(family, prior=priors.Normal(0.2, 1.5))
        size = module.selection.num_weights
        prior = MultivariateNormal(torch.full((size,), 0.2).double(), 1.5**2 * torch.eye(size).double())
        torch.testing.assert_close(module.kl(), kl_divergence(as_dense(module), prior), rtol=1e-9, atol=0)

    def test_the_divergence_from_itself(self, family: str) -> None:
        module = joint(family)
        before = as_dense(module)
        module.continue_from(module.factor.detach().clone())
        torch.testing.assert_close(module.kl(), torch.zeros_like(module.kl()), rtol=0, atol=1e-9)
        for seed, value in enumerate(module.parameters()):
            value.data += 0.1 * fixed_normal(*value.shape, seed=seed)
        torch.testing.assert_close(module.kl(), kl_divergence(as_dense(module), before), rtol=1e-9, atol=0)

    @pytest.mark.parametrize("continued", [False, True])
    def test_the_log_ratio(self, family: str, continued: bool) -> None:
        module = joint(family)
        size = module.selection.num_weights
        prior = MultivariateNormal(torch.zeros(size).double(), torch.eye(size).double())
        if continued:
            prior = as_dense(module)
            module.continue_from(module.factor.detach().clone())
            module.factor.data += 0.1
        drawn = module.sample_weights()
        flat = module.selection.ravel(drawn)
        expected = prior.log_prob(flat) - as_dense(module).log_prob(flat)
        torch.testing.assert_close(module.log_ratio(drawn), expected, rtol=1e-9, atol=1e-9)

    def test_marginal_scales(self, family: str) -> None:
        module = joint(family)
        torch.testing.assert_close(module.scales(), as_dense(module).stddev.detach(), rtol=1e-10, atol=0)

    def test_a_prior_of_any_kind(self, family: str) -> None:
        """Monte Carlo against the closed form of the marginals plus what the correlations add."""
        module = joint(family, prior=priors.Laplace(0.0, 0.5))
        q = as_dense(module)
        draws = q.sample((100_000,))
        expected = (q.log_prob(draws) - priors.Laplace(0.0, 0.5).log_prob(draws).sum(1)).mean()
        torch.testing.assert_close(module.kl(), expected, rtol=0.01, atol=0)

    @pytest.mark.parametrize("name", NETWORKS)
    def test_any_network_is_itself_without_noise(self, family: str, name: str) -> None:
        make, x = NETWORKS[name]
        model = seeded(make).eval()
        module = convert(model, family=family, initial_scale=1e-12)  # type: ignore[arg-type]
        torch.testing.assert_close(params.call(module, x), params.call(model, x), rtol=1e-6, atol=1e-6)
        spread = convert(model, family=family, initial_scale=0.3)  # type: ignore[arg-type]
        assert not torch.equal(params.call(spread, x), params.call(spread, x))
        spread.kl().backward()
        random = [dict(spread.network.named_parameters())[n] for n in spread.selection.names]
        scales = [part.log_scale for _, part in spread.parts()]
        assert all(value.grad is not None for value in (*random, *scales, spread.factor))  # type: ignore[has-type]

    def test_copies_and_states(self, family: str) -> None:
        module = joint(family)
        other = joint(family)
        other.load_state_dict(module.state_dict())
        for each in (other, copy.deepcopy(module)):
            torch.testing.assert_close(each.kl(), module.kl(), rtol=0, atol=0)
        first, second = (each.freeze(torch.Generator().manual_seed(1)) for each in (module, other))
        assert type(first) is nn.Sequential
        assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


class TestFit:
    @pytest.mark.parametrize(("family", "rank"), [("full", 1), ("low-rank", 3)])
    def test_it_finds_the_exact_posterior(self, family: Any, rank: int) -> None:
        x, y = regression_data(20)
        x[:, 1] += 1.5 * x[:, 0]  # correlated inputs
        oracle = LinearRegression(x, y, noise=NOISE, prior_precision=PRECISION)
        posterior: Any = Variational(
            prior=PRIOR, biases="random", family=family, rank=rank, objective=objectives.ELBO(4)
        ).fit(seeded(lambda: nn.Linear(3, 1)), (x, y), likelihood=LIKELIHOOD, training=LONG)
        scale = oracle.covariance.diagonal().sqrt()
        assert float(((flat_mean(posterior) - oracle.mean) / scale).abs().max()) < 0.2
        torch.testing.assert_close(posterior.scale, scale, rtol=0.15, atol=0)
        drawn = posterior.selection.ravel(posterior.sample(20_000))
        torch.testing.assert_close(torch.corrcoef(drawn.mT), correlation(oracle.covariance), rtol=0, atol=0.12)
        error = posterior.record.log_likelihood_error
        assert float(posterior.log_evidence()) == pytest.approx(oracle.log_evidence, abs=0.05 + 5 * error)

    def test_updating_is_learning_from_all(self) -> None:
        x, y = regression_data(30)
        x[:, 1] += 1.5 * x[:, 0]
        both = LinearRegression(x, y, noise=NOISE, prior_precision=PRECISION)
        recipe = Variational(prior=PRIOR, biases="random", family="full", objective=objectives.ELBO(4))
        halves = [(x[:15], y[:15]), (x[15:], y[15:])]
        start = LinearRegression(*halves[0], noise=NOISE, prior_precision=PRECISION).model()
        first: Any = recipe.fit(start, halves[0], likelihood=LIKELIHOOD, training=LONG)
        second: Any = first.update(halves[1], training=LONG.replace(epochs=300))
        scale = both.covariance.diagonal().sqrt()
        assert float(((flat_mean(second) - both.mean) / scale).abs().max()) < 0.3
        torch.testing.assert_close(second.scale, scale, rtol=0.15, atol=0)
        drawn = second.selection.ravel(second.sample(20_000))
        torch.testing.assert_close(torch.corrcoef(drawn.mT), correlation(both.covariance), rtol=0, atol=0.12)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_files(self, family: Any, tmp_path: Path) -> None:
        posterior = Variational(family=family, rank=2).fit(seeded(mlp), classes(), training=SHORT)
        posterior.save(tmp_path / "posterior")
        again: Any = dubito.load(tmp_path / "posterior", seeded(mlp))
        assert again.digest() == posterior.digest()
        x, _ = classes()
        assert torch.equal(again.predict(x).probs, posterior.predict(x).probs)
        updated = [each.update(classes(), training=SHORT) for each in (again, posterior)]
        assert updated[0].digest() == updated[1].digest()

    def test_a_renyi_bound_needs_no_other_estimator(self) -> None:
        posterior: Any = Variational(family="full", objective=objectives.Renyi(0.5, num_samples=2)).fit(
            seeded(mlp), classes(), training=SHORT
        )
        assert bool(torch.isfinite(posterior.scale).all())

    def test_some_weights(self) -> None:
        start = seeded(mlp)
        found: Any = Variational(family="full", weights=select.random(8), biases="random").fit(
            start, classes(), training=SHORT
        )
        assert found.factor.shape == (found.selection.num_weights,) * 2
        _, variance = found.marginals()
        for name, before in params.of(start).items():
            assert torch.equal(found.mean()[name] != before, variance[name] > 0)


def correlation(covariance: Tensor) -> Tensor:
    scale = covariance.diagonal().sqrt()
    return covariance / scale / scale[:, None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"family": "dense"}, "`family` must be 'mean-field', 'low-rank' or 'full'"),
        ({"family": "low-rank", "rank": 0}, "`rank` must be a whole number"),
        ({"family": "full", "optimizer": "natural"}, "family='mean-field'"),
    ],
)
def test_bad_settings_are_one_sentence(options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        Variational(**options)
    assert str(caught.value).endswith(".")


@pytest.mark.parametrize(("family", "most"), [("full", 20**2), ("low-rank", 20)])
def test_a_large_selection_is_refused(family: Any, most: int) -> None:
    few = Variational(family=family, rank=1, weights=select.last_layer())
    with limits.using(covariance_factor=4 * most):
        with pytest.raises(InputError, match=f"at most {20:,}.*select fewer") as caught:
            Variational(family=family).fit(seeded(mlp), classes(), training=SHORT)
        assert str(caught.value).endswith(".")
        assert few.fit(seeded(mlp), classes(), training=SHORT)
