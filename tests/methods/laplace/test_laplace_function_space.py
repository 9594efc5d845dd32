"""`priors.FunctionSpace` against exact Gaussian-process regression, in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from dubito.errors import InputError, UnsupportedError
from torch import Tensor, nn

import dubito
from dubito import MAP, Laplace, Training, kernels, likelihoods, priors, select

NOISE = 0.3
JITTER = 1e-2
X = torch.linspace(-2, 2, 9, dtype=torch.float64).unsqueeze(1)
Y = (2 * X).sin()
CONTEXT = torch.linspace(-4, 4, 25, dtype=torch.float64).unsqueeze(1)
NEW = torch.tensor([[-3.3], [0.1], [2.7]], dtype=torch.float64)
GAUSSIAN = likelihoods.Gaussian(noise=NOISE)


def features(count: int = 8) -> nn.Module:
    """Return a network of fixed features and one linear layer."""
    torch.manual_seed(0)
    body = nn.Linear(1, count).requires_grad_(False)
    body.weight.copy_(torch.full_like(body.weight, 2.0))
    body.bias.copy_(torch.linspace(-5, 5, count))
    return nn.Sequential(body, nn.Tanh(), nn.Linear(count, 1, bias=False)).double()


def prior_matrix(prior: priors.FunctionSpace, points: Tensor) -> Tensor:
    """Return K of the context points."""
    matrix = prior.kernel.resolve(points).matrix(points, points)
    return matrix + JITTER * matrix.diagonal().mean() * torch.eye(len(points), dtype=torch.float64)


def exact_weights(model: nn.Module, prior: priors.FunctionSpace, y: Tensor = Y) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and covariance of the last layer's weights given the data, and their prior precision."""
    phi, at_context = model[:2](X), model[:2](CONTEXT)  # type: ignore[index]
    precision = at_context.mT @ torch.linalg.solve(prior_matrix(prior, CONTEXT), at_context)
    covariance = torch.linalg.inv(phi.mT @ phi / NOISE**2 + precision)
    return covariance @ phi.mT @ y / NOISE**2, covariance, precision


def set_weights(model: nn.Module, weights: Tensor) -> nn.Module:
    with torch.no_grad():
        model[2].weight.copy_(weights.mT)  # type: ignore[index,union-attr,operator]
    return model


KERNEL = kernels.Matern(1.5, scale=0.8, smoothness=1.5)


@pytest.mark.slow
def test_a_linear_model_has_the_exact_posterior_and_evidence() -> None:
    model, prior = features(), priors.FunctionSpace(KERNEL, CONTEXT)
    mean, covariance, precision = exact_weights(model, prior)
    recipe = Laplace(prior=prior, weights=select.last_layer())
    posterior = recipe.fit(set_weights(model, mean), (X, Y), likelihood=GAUSSIAN, progress=False)
    phi = model[:2](NEW)  # type: ignore[index]
    predicted = posterior.predict(NEW)
    assert torch.allclose(predicted.mean, phi @ mean, rtol=1e-9)
    drawn = posterior.functions(4000)(NEW).var(0)
    assert torch.allclose(drawn, predicted.epistemic, rtol=0.15)  # six standard errors
    assert torch.allclose(predicted.epistemic.flatten(), ((phi @ covariance) * phi).sum(1), rtol=1e-6)
    rows = model[:2](X)  # type: ignore[index]
    marginal = rows @ torch.linalg.solve(precision, rows.mT) + NOISE**2 * torch.eye(len(X), dtype=torch.float64)
    exact = torch.distributions.MultivariateNormal(torch.zeros(len(X)).double(), marginal).log_prob(Y.flatten())
    assert float(posterior.log_evidence()) == pytest.approx(float(exact), abs=1e-5)


def test_training_finds_the_exact_mean() -> None:
    model, prior = features(3), priors.FunctionSpace(KERNEL, CONTEXT)
    mean, _, _ = exact_weights(model, prior)
    training = Training(epochs=400, batch_size=9, lr=0.1, optimizer="adam")
    found = MAP(prior=prior).fit(model, (X, Y), likelihood=GAUSSIAN, training=training, progress=False)
    assert torch.allclose(found.predict(NEW).mean, model[:2](NEW) @ mean, atol=1e-4)  # type: ignore[index]
    with pytest.raises(UnsupportedError, match="prior over functions"):
        found.prior()


def wide() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(1, 60), nn.Tanh(), nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 1)).double()
    with torch.no_grad():  # so that it can follow functions which change quickly
        model[0].weight *= 3.0
        model[0].bias *= 9.0
        model[4].weight.zero_()
    return model


@pytest.mark.parametrize(
    "kernel",
    [kernels.RBF(0.7) + kernels.Matern(scale=0.5), kernels.RBF(5.0) * kernels.Periodic(2.0)],
    ids=("sum", "product"),
)
def test_a_wide_network_has_the_variance_of_a_gaussian_process_at_the_context_points(kernel: kernels.Kernel) -> None:
    points = torch.cat([X, NEW])
    prior = priors.FunctionSpace(kernel, points)
    posterior = Laplace(prior=prior).fit(wide(), (X, Y), likelihood=GAUSSIAN, progress=False)
    matrix = prior_matrix(prior, points)
    seen, between = matrix[:9, :9] + NOISE**2 * torch.eye(9, dtype=torch.float64), matrix[:9]
    exact = matrix - between.mT @ torch.linalg.solve(seen, between)
    assert torch.allclose(posterior.predict(points).epistemic.flatten(), exact.diagonal(), rtol=1e-4)


def test_a_periodic_prior_makes_the_variance_periodic_far_from_the_data() -> None:
    cycle = torch.arange(0, 2, 0.25, dtype=torch.float64).unsqueeze(1)
    far = torch.cat([cycle + 2 * turn for turn in range(4)])  # the data are in the first period
    prior = priors.FunctionSpace(kernels.Periodic(2.0), far, jitter=1e-4)
    posterior = Laplace(prior=prior).fit(wide(), (cycle[:3], cycle[:3].cos()), likelihood=GAUSSIAN, progress=False)
    variance = posterior.predict(far).epistemic.reshape(4, -1)
    assert torch.allclose(variance, variance[0].expand(4, -1), rtol=1e-2)
    assert float(variance[:, :3].max()) < 0.5 * float(variance[:, 5:].min())


def test_two_outputs_are_independent() -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 2)).double()
    points = torch.cat([X[::2], NEW])
    prior = priors.FunctionSpace(KERNEL, points)
    data = (X[::2], torch.cat([Y, -Y], 1)[::2])
    posterior = Laplace(prior=prior).fit(model, data, likelihood=GAUSSIAN, progress=False)
    variance = posterior.predict(points).epistemic
    assert torch.allclose(variance[:, 0], variance[:, 1], rtol=1e-4)


def test_it_is_saved_updated_diagnosed_and_sampled(tmp_path: Any) -> None:
    model = features().float()
    prior = priors.FunctionSpace(kernels.RBF(3.0), X.float(), jitter=0.1)
    recipe = Laplace(prior=prior, prior_precision="evidence")
    data = (X.float(), Y.float())
    posterior = recipe.fit(model, data, likelihood="gaussian", progress=False)
    posterior.save(tmp_path / "p.safetensors")
    again = dubito.load(tmp_path / "p.safetensors", features().float())
    assert again.recipe == recipe
    assert torch.equal(again.predict(NEW.float()).stddev, posterior.predict(NEW.float()).stddev)
    assert posterior.diagnose().verdict in ("yes", "with care", "no")
    typed = Laplace(prior=priors.FunctionSpace(KERNEL + kernels.Periodic(2.0)))
    assert dubito.parse(repr(typed)) == typed
    more = posterior.update((NEW.float(), NEW.float().sin()), progress=False)
    assert (more.predict(NEW.float()).epistemic < posterior.predict(NEW.float()).epistemic).all()
    assert posterior.sample(3)["2.weight"].shape == (3, 1, 8)


def test_the_default_context_covers_the_widened_box() -> None:
    from dubito.core.batches import Source

    prior = priors.FunctionSpace(num_context=64).at_context(Source((X, Y)))
    assert prior.points.shape == (64, 1)
    assert float(prior.points.min()) < -3.5
    assert float(prior.points.max()) > 3.5
    assert math.isclose(float(prior.energy(torch.zeros(len(prior.points), 1))), 0.0)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: priors.FunctionSpace(context=torch.zeros(3)), "one per row"),
        (lambda: priors.FunctionSpace(kernel="rbf"), "dubito.kernels"),
        (lambda: Laplace(prior=priors.FunctionSpace(), prior_mean=1.0), "prior_mean"),
        (lambda: Laplace(prior=priors.FunctionSpace(), weights=select.subspace(3)), "drop one"),
        (lambda: MAP(prior=priors.FunctionSpace(), prior_precision=1.0), "not both"),
        (lambda: dubito.Variational(prior=priors.FunctionSpace()), "prior"),
        (lambda: kernels.RBF(lengthscale=-1.0), "lengthscale"),
    ],
)
def test_settings_that_do_not_fit_are_refused(make: Any, match: str) -> None:
    with pytest.raises(InputError, match=match):
        make()


@pytest.mark.parametrize(
    ("prior", "match"),
    [
        (priors.FunctionSpace(context=torch.zeros(3, 2)), "but the inputs have shape"),
        (priors.FunctionSpace(kernels.RBF(columns=(1,))), "1 features"),
        (priors.FunctionSpace(kernels.RBF(torch.ones(2))), "one value for each"),
        (priors.FunctionSpace(context=torch.ones(3, 1)), "All inputs are the same"),
    ],
)
def test_a_prior_that_does_not_fit_the_inputs_is_refused(prior: priors.FunctionSpace, match: str) -> None:
    with pytest.raises(InputError, match=match):
        Laplace(prior=prior).fit(features(), (X, Y), likelihood=GAUSSIAN, progress=False)
