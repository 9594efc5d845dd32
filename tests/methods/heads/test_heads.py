"""Random last layers against closed forms: linear regression, an exact Gaussian process, brute-force inverses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dubito.errors import InputError, UnsupportedError
from torch import Tensor, nn

import dubito
from dubito import DKL, SNGP, VBLL, Ensemble, Laplace, Training, select
from dubito.beliefs.likelihoods import (
    Bernoulli,
    BradleyTerry,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    MultivariateGaussian,
    NegativeBinomial,
    Poisson,
    StudentT,
)
from dubito.core import limits
from dubito.methods.heads.bound import expected_log_prob, expected_preference
from dubito.methods.heads.module import GaussianHead
from dubito.methods.heads.posterior import HeadPosterior
from dubito.networks.heads import InducingPoints, RandomFeatures, SpectralBound, attach
from oracles import close, normal, seeded

QUICK = Training(epochs=3, lr=1e-2, batch_size=16)


def network(outputs: int = 3) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs)))


def roots(outputs: int, size: int) -> Tensor:
    return normal(outputs, size, size).tril(-1) + torch.diag_embed(normal(outputs, size).exp())


def quadrature(value: Any, mean: Tensor, variance: Tensor) -> float:
    """The expectation of a function of outputs ``[1, C]`` under independent normals, by Gauss-Hermite products."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    grids = torch.meshgrid(*[torch.as_tensor(nodes)] * mean.shape[1], indexing="ij")
    mass = torch.meshgrid(*[torch.as_tensor(weights / math.sqrt(2 * math.pi))] * mean.shape[1], indexing="ij")
    points = mean + variance.sqrt() * torch.stack([grid.flatten() for grid in grids], 1)
    return float((value(points) * torch.stack(mass).prod(0).flatten()).sum())


def test_the_divergence_is_that_of_torch() -> None:
    model, prior = network(2), 0.7
    head = GaussianHead(model, "2", roots(2, 7))
    own = torch.distributions.MultivariateNormal(head.means(), scale_tril=head.roots.tril())
    other = torch.distributions.MultivariateNormal(torch.zeros(7).double(), prior * torch.eye(7).double())
    close(head.kl(prior), torch.distributions.kl_divergence(own, other).sum())


EXACT = (Gaussian, MultivariateGaussian, Poisson, NegativeBinomial)


@pytest.mark.parametrize(
    ("likelihood", "target"),
    [
        (Gaussian(noise=0.5), [[0.3, -1.0]]), (MultivariateGaussian(((0.4, 0.1), (0.1, 0.3))), [[0.3, -1.0]]),
        (Poisson(), [[2.0]]), (NegativeBinomial(0.7), [[2.0]]), (HeteroscedasticGaussian(), [[0.3]]),
        (StudentT(4.0), [[0.3]]), (Categorical(), [1]), (Bernoulli(), [[1, 0]]),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_the_expectation_is_exact_or_bounded_or_unbiased(likelihood: Any, target: Any) -> None:
    mean, variance = torch.tensor([[0.4, -0.2]]).double(), torch.tensor([[0.3, 0.6]]).double()
    if isinstance(likelihood, Poisson | NegativeBinomial):
        mean, variance = mean[:, :1], variance[:, :1]
    targets = torch.tensor(target, dtype=torch.int64 if isinstance(target[0], int) else torch.float64)
    targets = targets.long() if isinstance(likelihood, Bernoulli) else targets
    expected = quadrature(lambda f: likelihood.log_prob(f, targets.expand(len(f), *targets.shape[1:])), mean, variance)
    found = expected_log_prob(likelihood, mean, variance, targets)
    if isinstance(likelihood, EXACT):
        assert float(found) == pytest.approx(expected, abs=1e-10)
    elif isinstance(likelihood, Categorical | Bernoulli):
        assert expected - 0.3 < float(found) < expected
    else:
        many = [value.expand(20_000, *value.shape[1:]) for value in (mean, variance, targets)]
        draws = expected_log_prob(likelihood, *many, generator=torch.Generator().manual_seed(0))
        assert float(draws.mean()) == pytest.approx(expected, abs=4 * float(draws.std()) / math.sqrt(20_000))
    none = expected_log_prob(likelihood, mean, torch.zeros_like(variance), targets)
    close(none, likelihood.log_prob(mean, targets))


def test_scores_of_two_items_by_the_same_weights_vary_together() -> None:
    """The bound and the prediction of preferences, against random weights of the last layer."""
    model, likelihood = network(1), BradleyTerry()
    head = GaussianHead(model, "2", 0.5 * roots(1, 7)).requires_grad_(False)
    pairs, labels = torch.stack([normal(3, 4), normal(6, 4)[3:]], 1), torch.tensor([0, 1, 1])
    scores, spread = head.joint(pairs, likelihood)
    covariance = spread @ spread.mT
    noise = torch.randn(100_000, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    features = torch.cat([model[:2](pairs), torch.ones(3, 2, 1).double()], 2)  # type: ignore[index]
    drawn = scores + torch.einsum("btp,pq,sq->sbt", features, head.roots[0].tril(), noise)
    close(covariance[0], torch.cov(drawn[:, 0].T), 0.05 * float(covariance[0].max()))
    expected = drawn.log_softmax(-1)[:, torch.arange(3), labels].mean(0)
    found = expected_preference(scores, spread, labels)
    assert bool((found < expected).all())
    assert bool((found > expected_log_prob(likelihood, *head.moments(pairs), labels)).any())
    same = pairs[:, :1].expand(-1, 2, -1)  # a pair of one and the same item is decided by chance, for certain
    close(expected_preference(*head.joint(same, likelihood), labels), -math.log(2) * torch.ones(3).double())
    posterior = HeadPosterior(model, likelihood, VBLL(), 3, "2", head.roots.detach().tril(), 1.0)
    prediction: Any = posterior.predict(pairs, num_samples=20_000, generator=torch.Generator().manual_seed(1))
    close(prediction.probs, drawn.softmax(-1).mean(0), 0.02)
    assert float(posterior.predict(same).epistemic.max()) < 1e-9


def test_the_process_of_preferences_has_the_curvature_of_differences() -> None:
    pairs, labels = torch.stack([normal(12, 4), normal(24, 4)[12:]], 1), torch.arange(12) % 2
    posterior: Any = SNGP(num_features=5).fit(network(1), (pairs, labels), likelihood="bradley-terry", training=QUICK)
    head = posterior.model[2]
    mapped = head.features(posterior.model[:2](pairs))
    probs, apart = head.linear(mapped).squeeze(2).softmax(1), mapped[:, 0] - mapped[:, 1]
    precision = torch.eye(5).double() + torch.einsum("b,bi,bj->ij", probs.prod(1), apart, apart)
    close(posterior.roots[0] @ posterior.roots[0].T, torch.linalg.inv(precision), 1e-6)
    with pytest.raises(UnsupportedError, match="vary together"):
        DKL(inducing=3).fit(network(1), (pairs, labels), likelihood="bradley-terry", training=QUICK)


def test_the_jensen_bound_of_classes_is_that_of_the_paper() -> None:
    mean, variance, labels = normal(5, 3), normal(5, 3).square(), torch.tensor([0, 1, 2, 0, -100])
    found = expected_log_prob(Categorical(), mean, variance, labels)
    paper = mean[torch.arange(4), labels[:4]] - (mean + variance / 2)[:4].logsumexp(1)
    close(found, torch.cat([paper, torch.zeros(1).double()]))  # the last label is ignored


def test_the_exact_posterior_of_a_linear_model_is_the_optimum_and_its_bound_the_evidence() -> None:
    x, y, noise, prior = normal(20, 3), normal(20, 1), 0.4, 0.9
    phi = torch.cat([x, torch.ones(20, 1).double()], 1)
    covariance = torch.linalg.inv(phi.T @ phi / noise**2 + torch.eye(4).double() / prior)
    mean = covariance @ phi.T @ y / noise**2
    model = nn.Linear(3, 1).double()
    with torch.no_grad():
        model.weight.copy_(mean[:3].T)
        model.bias.copy_(mean[3])
    head = GaussianHead(model, "", torch.linalg.cholesky(covariance)[None])
    bound = expected_log_prob(Gaussian(noise=noise), *head.moments(x), y).sum() - head.kl(prior)
    marginal = noise**2 * torch.eye(20).double() + prior * phi @ phi.T
    evidence = torch.distributions.MultivariateNormal(torch.zeros(20).double(), marginal).log_prob(y[:, 0])
    close(bound, evidence, 1e-9)
    bound.backward()
    for value in head.parameters():
        assert float(value.grad.abs().max()) < 1e-9


def test_inducing_points_at_all_data_give_the_exact_process() -> None:
    x, y, new, noise = normal(12, 2), normal(12, 1), normal(7, 2), 0.3
    model = attach(nn.Linear(2, 1).double(), "", InducingPoints(x, lengthscale=1.3))
    features: Any = model.features  # type: ignore[union-attr]
    with torch.no_grad():
        phi = features(x)
        covariance = torch.linalg.inv(phi.T @ phi / noise**2 + torch.eye(12).double())
        model.linear.weight.copy_((covariance @ phi.T @ y / noise**2).T)  # type: ignore[union-attr, operator]
        mean, variance = GaussianHead(model, "", torch.linalg.cholesky(covariance)[None]).moments(new)
        k, gram = features.kernel(new, x), features.kernel(x, x) + noise**2 * torch.eye(12).double()
        close(mean, k @ torch.linalg.solve(gram, y), 1e-5)
        close(variance[:, 0], 1 - (k * torch.linalg.solve(gram, k.T).T).sum(1), 1e-5)
        far = GaussianHead(model, "", torch.linalg.cholesky(covariance)[None]).moments(new + 100)
    close(far[1], torch.ones(7, 1).double(), 1e-6)  # the prior returns


@pytest.mark.slow
def test_functions_of_a_process_vary_as_its_predictions_do_also_far_from_inducing_points() -> None:
    x, y = normal(20, 2), normal(20, 1)
    posterior: Any = DKL(inducing=4).fit(nn.Linear(2, 1).double(), (x, y), likelihood="gaussian", training=QUICK)
    new = torch.cat([x[:3], 3 * normal(3, 2), 50 + normal(1, 2)]).requires_grad_()
    drawn = posterior.functions(600, generator=torch.Generator().manual_seed(0))
    outputs, prediction = drawn(new).detach(), posterior.predict(new.detach())
    deviation = prediction.epistemic.sqrt()
    close(deviation[-1], posterior.model.features.log_scale.exp()[None], 1e-6)  # the prior's there
    close(outputs.std(0), deviation, 0.13 * float(deviation.max()))  # 4.5 standard errors
    close(outputs.mean(0), prediction.mean, 4.5 * float(deviation.max()) / math.sqrt(600))
    close(torch.cat([drawn[0](new[:2]), drawn[0](new[2:])]), outputs[0])
    (slope,) = torch.autograd.grad(drawn[0](new).sum(), new)
    step = torch.zeros_like(new)
    step[:, 0] = 1e-6
    close(slope[:, 0], ((drawn[0](new + step) - drawn[0](new - step)) / 2e-6)[:, 0], 1e-6)


def test_random_features_have_the_kernel_as_their_scalar_product() -> None:
    torch.manual_seed(0)
    features, x = RandomFeatures(3, 20_000, lengthscale=1.5), torch.randn(6, 3)
    exact = (-0.5 * (torch.cdist(x, x) / 1.5).square()).exp()
    close(features(x) @ features(x).T, exact, 0.03)  # 4 standard errors of 20,000 features


@pytest.mark.parametrize("outputs", [1, 3])
def test_the_covariance_of_sngp_is_the_inverse_of_its_precision(outputs: int) -> None:
    x, y = normal(30, 4), normal(30, 1) if outputs == 1 else torch.arange(30) % 3
    likelihood: Any = Gaussian(noise=0.5) if outputs == 1 else "categorical"
    recipe = SNGP(num_features=10, prior_precision=2.0)
    posterior: Any = recipe.fit(network(outputs), (x, y), likelihood=likelihood, training=QUICK)
    head = posterior.model[2]
    phi = head.features(posterior.model[:2](x)).detach()
    if outputs == 1:
        h = torch.full((30, 1), 4.0).double()
    else:
        h = head.linear(phi).softmax(1).detach()
        h = h * (1 - h)
    for c in range(outputs):
        precision = 2.0 * torch.eye(10).double() + phi.T @ (h[:, c, None] * phi)
        close(posterior.roots[c] @ posterior.roots[c].T, torch.linalg.inv(precision))
    if outputs == 1:  # where a linearized posterior over the same weights is the same
        weights = select.layers("2.linear") & ~select.layers("2.linear.bias")
        same = Laplace("full", weights, prior_precision=2.0).fit(posterior.model, (x, y), likelihood=likelihood)
        close(posterior.predict(x).stddev, same.predict(x).stddev, 1e-9)  # type: ignore[attr-defined]


def test_singular_values_are_bounded_in_training_and_small_ones_stay() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(64, 4), torch.randn(64, 1)
    recipe = SNGP(num_features=16, spectral_norm=0.5)
    posterior = recipe.fit(network(1).float(), (x, y), likelihood="gaussian", training=QUICK)
    assert float(torch.linalg.matrix_norm(posterior.mean()["0.weight"], 2)) < 0.505
    weight = torch.randn(5, 4)
    largest = float(torch.linalg.matrix_norm(weight, 2))
    close(SpectralBound(weight, 2 * largest)(weight), weight)
    close(SpectralBound(weight, largest / 2)(weight), weight / 2, 1e-3)


@pytest.mark.slow
def test_vbll_learns_the_posterior_of_a_linear_model() -> None:
    torch.manual_seed(0)
    x = normal(60, 2)
    y = x @ torch.tensor([[1.0], [-0.5]]).double() + 0.3 * normal(60, 1)
    training = Training(epochs=400, lr=1e-2, batch_size=60)
    likelihood: Any = Gaussian(noise=0.3)
    posterior: Any = VBLL(prior_scale=1.0).fit(
        nn.Linear(2, 1).double(), (x, y), likelihood=likelihood, training=training
    )
    phi = torch.cat([x, torch.ones(60, 1).double()], 1)
    covariance = torch.linalg.inv(phi.T @ phi / 0.09 + 3 * torch.eye(3).double())
    close(posterior.roots[0] @ posterior.roots[0].T, covariance, 1e-5)
    close(posterior.mean()["weight"], (covariance @ phi.T @ y / 0.09)[:2].T, 1e-4)


@pytest.mark.slow
def test_samples_of_the_last_layer_have_the_predicted_variance() -> None:
    data = (normal(40, 4), normal(40, 2))
    for recipe in (VBLL(), SNGP(num_features=12)):
        posterior = recipe.fit(network(2), data, likelihood="gaussian", training=QUICK)
        outputs = posterior.functions(4000)(data[0][:5])
        predicted: Any = posterior.predict(data[0][:5])
        torch.testing.assert_close(outputs.var(0).detach(), predicted.epistemic, rtol=0.12, atol=1e-6)


def test_links_agree_where_the_last_layer_is_certain() -> None:
    data = (normal(40, 4), torch.arange(40) % 3)
    posterior: Any = VBLL().fit(network(), data, training=QUICK)
    state = {**posterior.state(), "roots": 1e-6 * posterior.roots}
    posterior = type(posterior).from_state(posterior.model, posterior.likelihood, posterior.recipe, 40, state)
    close(posterior.predict(data[0], link="mc").probs, posterior.predict(data[0]).probs, 1e-5)
    with pytest.raises(InputError, match="link"):
        posterior.predict(data[0], link="bridge")


def test_an_ensemble_of_heads_is_saved_and_loaded(tmp_path: Path) -> None:
    data = (normal(40, 4).float(), torch.arange(40) % 3)
    posterior: Any = Ensemble(2, recipe=DKL(inducing=5)).fit(network().float(), data, training=QUICK)
    posterior.save(tmp_path / "file")
    again: Any = dubito.load(tmp_path / "file", network().float())
    assert torch.equal(again.predict(data[0]).probs, posterior.predict(data[0]).probs)


class Odd(nn.Module):
    """A network with one of several last layers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last, self.other, self.kind = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 3), kind
        self.conv = nn.Conv1d(1, 3, 4)

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x).tanh()
        if self.kind == "convolution":
            return self.conv(z[:, None]).squeeze(-1)
        if self.kind == "two":
            return self.last(z) + self.other(z)
        return self.last(z).log_softmax(1)


@pytest.mark.parametrize("recipe", [VBLL(), SNGP(), DKL()], ids=repr)
@pytest.mark.parametrize(
    ("kind", "words"),
    [("two", "has no features"), ("convolution", "needs nn.Linear"), ("softmax", "such as a log-softmax")],
)
def test_a_network_without_features_is_refused_in_a_sentence(recipe: Any, kind: str, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        recipe.fit(Odd(kind), (torch.randn(20, 4), torch.arange(20) % 3), training=QUICK)


def test_what_is_too_large_is_refused() -> None:
    counts = (torch.randn(20, 4), torch.ones(20, 1))
    with limits.using(covariance_factor=100), pytest.raises(InputError, match="too many for a covariance"):
        VBLL().fit(network(1).float(), counts, likelihood="gaussian", training=QUICK)
