"""From the Gaussian over weights to predictions: links, positions, weight samples, gradients in the inputs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from dubito.errors import InputError
from dubito.likelihoods import Bernoulli, Categorical, Gaussian
from laplace_cases import STRUCTURES, case, dense
from torch import Tensor, nn

from dubito import MAP, Laplace, Training
from dubito.core import params
from oracles import Case, jacobian

pytestmark = pytest.mark.slow

CLOSE = {"rtol": 1e-9, "atol": 1e-10}


def moments(problem: Case, posterior, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Brute force: canonical outputs and their covariance at each position."""
    rows = jacobian(problem, inputs, posterior.selection)
    mean = problem.likelihood.canonical(problem.model(inputs).detach())
    return mean, rows @ dense(posterior) @ rows.mT


def expected_sigmoid(mean: Tensor, variance: Tensor) -> Tensor:
    """By Gauss-Hermite quadrature."""
    nodes, weights = (torch.tensor(v) for v in np.polynomial.hermite_e.hermegauss(80))
    return (torch.sigmoid(mean[..., None] + variance.sqrt()[..., None] * nodes) * weights).sum(-1) / math.sqrt(
        2 * math.pi
    )


@pytest.mark.parametrize("name", ["categorical", "sequence", "image"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_probit_centred_and_not(name: str, structure: str) -> None:
    problem = case(name)
    posterior = problem.fit(structure=structure, prior_precision=0.3)
    mean, covariance = moments(problem, posterior, problem.inputs)
    classes = mean.shape[-1]
    center = torch.eye(classes, dtype=torch.float64) - 1 / classes
    against_others = classes / (classes - 1) * center  # a logit minus the mean of the others
    for centred, spread in ((True, against_others @ covariance @ against_others.mT), (False, covariance)):
        logits = mean / torch.sqrt(1 + math.pi / 8 * spread.diagonal(dim1=-2, dim2=-1))
        prediction = posterior.predict(problem.inputs, centred=centred)
        torch.testing.assert_close(prediction.log_probs, logits.log_softmax(-1), **CLOSE)


def test_bernoulli_probit_is_close_to_the_exact_integral() -> None:
    for name in ("bernoulli", "labels"):
        problem = case(name)
        posterior = problem.fit(structure="full", prior_precision=0.5)
        mean, covariance = moments(problem, posterior, problem.inputs)
        variance = covariance.diagonal(dim1=-2, dim2=-1)
        yes = posterior.predict(problem.inputs).probs[..., 1].reshape(mean.shape)
        torch.testing.assert_close(yes, torch.sigmoid(mean / torch.sqrt(1 + math.pi / 8 * variance)), **CLOSE)
        torch.testing.assert_close(yes, expected_sigmoid(mean, variance), rtol=0, atol=0.02)


def test_monte_carlo_link_is_the_expectation() -> None:
    """Two classes are one logistic integral over the difference of the logits; many draws come close."""
    problem = case("image")
    posterior = problem.fit(structure="full", prior_precision=0.3)
    mean, covariance = moments(problem, posterior, problem.inputs)
    along = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    exact = expected_sigmoid(mean @ along, torch.einsum("i,...ij,j->...", along, covariance, along))
    drawn = posterior.predict(problem.inputs, link="mc", num_samples=20_000).probs[..., 1]
    torch.testing.assert_close(drawn, exact, rtol=0, atol=0.015)


def bridge(mean: Tensor, covariance: Tensor, normalize: bool) -> Tensor:
    """Eq. (9) of Hobbhahn et al. for one example, on logits conditioned to sum to zero, entry by entry."""
    classes, total = len(mean), covariance.sum()
    logits = [mean[i] - covariance[i].sum() * mean.sum() / total for i in range(classes)]
    variance = [covariance[i, i] - covariance[i].sum() ** 2 / total for i in range(classes)]
    if normalize:
        scale = sum(variance) / classes / math.sqrt(classes / 2)
        logits, variance = [f / scale.sqrt() for f in logits], [v / scale for v in variance]
    inverse = sum(torch.exp(-f) for f in logits)
    alpha = [(1 - 2 / classes + torch.exp(f) / classes**2 * inverse) / v for f, v in zip(logits, variance, strict=True)]
    return torch.stack(alpha) / sum(alpha)


@pytest.mark.parametrize("link", ["bridge", "bridge-norm"])
@pytest.mark.parametrize("name", ["categorical", "sequence", "image"])
def test_bridge_links(name: str, link: str) -> None:
    problem = case(name)
    posterior = problem.fit(structure="kron", prior_precision=0.3)
    mean, covariance = moments(problem, posterior, problem.inputs)
    flat = zip(mean.flatten(0, -2), covariance.flatten(0, -3), strict=True)
    expected = torch.stack([bridge(f, c, link == "bridge-norm") for f, c in flat]).reshape(mean.shape)
    torch.testing.assert_close(posterior.predict(problem.inputs, link=link).probs, expected, **CLOSE)


@pytest.mark.parametrize("link", ["probit", "mc", "bridge", "bridge-norm"])
@pytest.mark.parametrize("name", ["categorical", "sequence", "image", "norm"])
def test_class_predictions_are_whole(name: str, link: str) -> None:
    problem = case(name)
    prediction = problem.fit(prior_precision=1.0).predict(problem.inputs, link=link)
    torch.testing.assert_close(prediction.probs.sum(-1), torch.ones_like(prediction.entropy))
    torch.testing.assert_close(prediction.entropy, prediction.aleatoric + prediction.epistemic)
    assert prediction.probs.shape[:-1] == problem.targets.shape
    assert (prediction.epistemic > 0).all()


def test_regression_parts() -> None:
    problem = case("heteroscedastic")
    posterior = problem.fit(structure="full", prior_precision=1.0)
    mean, covariance = moments(problem, posterior, problem.inputs)
    prediction = posterior.predict(problem.inputs)
    torch.testing.assert_close(prediction.mean, mean[:, :2], **CLOSE)
    torch.testing.assert_close(prediction.aleatoric, mean[:, 2:].exp(), **CLOSE)
    torch.testing.assert_close(prediction.epistemic, covariance.diagonal(dim1=-2, dim2=-1)[:, :2], **CLOSE)


# ---------------------------------------------------------------------- samples


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("name", ["gaussian", "categorical"])
def test_functional_samples_have_the_moments(name: str, joint: bool) -> None:
    problem = case(name)
    posterior = problem.fit(structure="kron", prior_precision=2.0)
    inputs = problem.inputs[:3]
    mean, covariance = posterior.functional(inputs, joint=joint)
    with pytest.raises(InputError, match="`num_samples` must be"):
        posterior.functional_samples(inputs, 0, joint=joint)
    draws = posterior.functional_samples(inputs, 30_000, joint=joint, generator=torch.Generator().manual_seed(1))
    assert draws.shape == (30_000, *mean.shape)
    vectors = draws.flatten(1)[:, None] if joint else draws  # [S, groups, size]
    spreads = covariance[None] if joint else covariance
    for group, spread in enumerate(spreads):
        scale = spread.diagonal().sqrt()
        error = vectors[:, group].mean(0) - (mean.flatten() if joint else mean[group])
        assert (error.abs() < 5 * scale / math.sqrt(30_000)).all()
        found = torch.cov(vectors[:, group].mT)
        assert ((found - spread).abs() < 0.06 * scale[:, None] * scale).all()


def noisy_net() -> Case:
    """A network with BatchNorm and dropout, given in training mode."""
    torch.manual_seed(0)
    layers = (nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3))
    model = nn.Sequential(*layers).double()
    x = torch.randn(40, 3).double()
    for _ in range(5):
        model(x)
    return Case(model.train(), x, torch.randint(3, (40,)), Categorical())


@pytest.mark.parametrize("structure", STRUCTURES)
def test_weight_samples_run_in_evaluation_mode(structure: str) -> None:
    problem = noisy_net()
    before = {name: value.clone() for name, value in problem.model.state_dict().items()}
    posterior = problem.fit(structure=structure, prior_precision=5.0)
    prediction = posterior.predict(problem.inputs, method="weights", num_samples=7)
    draws = posterior.sample(7)  # the same generator: the same weights
    plain = problem.model.eval()
    probs = [params.functional_call(plain, draw, problem.inputs).softmax(-1) for draw in params.unstack(draws)]
    problem.model.train()
    torch.testing.assert_close(prediction.probs, torch.stack(probs).mean(0).detach(), **CLOSE)
    again = posterior.predict(problem.inputs, method="weights", num_samples=7)
    assert torch.equal(again.log_probs, prediction.log_probs)
    assert all(torch.equal(value, before[name]) for name, value in problem.model.state_dict().items())
    assert problem.model.training


def test_weight_samples_agree_with_the_linearization_where_it_is_exact() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    problem = Case(model, torch.randn(30, 3).double(), torch.randn(30, 2).double(), Gaussian(noise=0.5))
    posterior = problem.fit(structure="full", prior_precision=1.0)
    closed = posterior.predict(problem.inputs)
    sampled = posterior.predict(problem.inputs, method="weights", num_samples=4000)
    torch.testing.assert_close(sampled.epistemic, closed.epistemic, rtol=0.15, atol=0)
    assert ((sampled.mean - closed.mean).abs() < 5 * closed.epistemic.sqrt() / math.sqrt(4000)).all()


# ---------------------------------------------------------------------- gradients in the inputs


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", ["gaussian", "gaussian [B]", "heteroscedastic", "categorical", "bernoulli", "norm"])
def test_differentiable_predictions(name: str, structure: str) -> None:
    problem = case(name)
    posterior = problem.fit(structure=structure, prior_precision=0.5)
    fields = ("log_probs",) if isinstance(problem.likelihood, Categorical | Bernoulli) else ("mean", "stddev")
    inputs = problem.inputs[:2].clone().requires_grad_()

    def outputs(x: Tensor) -> tuple[Tensor, ...]:
        prediction = posterior.predict(x, differentiable=True)
        return tuple(getattr(prediction, field) for field in fields)

    plain = posterior.predict(inputs)
    for field, value in zip(fields, outputs(inputs), strict=True):
        torch.testing.assert_close(value, getattr(plain, field), **CLOSE)
        assert not getattr(plain, field).requires_grad
    assert torch.autograd.gradcheck(outputs, (inputs,))


def test_a_differentiable_prediction_finds_the_most_uncertain_input() -> None:
    """Gradient ascent on the standard deviation leaves the data, as exploration should."""
    problem = case("gaussian [B]")
    posterior = problem.fit(structure="full", prior_precision=1.0)
    x = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
    start = posterior.predict(x).epistemic.item()
    optimizer = torch.optim.Adam([x], lr=0.3, maximize=True)
    for _ in range(15):
        optimizer.zero_grad()
        posterior.predict(x, differentiable=True).stddev.sum().backward()
        optimizer.step()
    assert posterior.predict(x).epistemic.item() > 2 * start
    assert all(value.grad is None for value in problem.model.parameters())


# ---------------------------------------------------------------------- options


def test_unknown_options_are_named() -> None:
    problem = case("categorical")
    posterior = problem.fit(prior_precision=1.0)
    for options, message in {
        ("link", "softmax"): "`link` must be 'probit', 'mc', 'bridge' or 'bridge-norm', got 'softmax'",
        ("method", "glm"): "`method` must be 'linearized' or 'weights', got 'glm'",
        ("joint", True): "no predict option 'joint'",
    }.items():
        with pytest.raises(InputError, match=message):
            posterior.predict(problem.inputs, **dict([options]))
    with pytest.raises(InputError, match="with the probit link: drop 'link'"):
        posterior.predict(problem.inputs, differentiable=True, link="mc")
    with pytest.raises(InputError, match="NaN or infinite"):
        posterior.predict(problem.inputs * math.nan)
    with pytest.raises(InputError, match="NaN or infinite"):
        posterior.functional(problem.inputs * math.nan)


def test_bridges_need_classes() -> None:
    problem = case("bernoulli")
    with pytest.raises(InputError, match="'bridge' link is for a categorical likelihood"):
        problem.fit(prior_precision=1.0).predict(problem.inputs, link="bridge")


def test_array_inputs() -> None:
    problem = case("gaussian")
    posterior = problem.fit(prior_precision=1.0)
    array = problem.inputs.float().numpy()
    torch.testing.assert_close(posterior.functional(array)[0], posterior.predict(array).mean)


def test_outputs_of_shares_are_drawn_together() -> None:
    """Independent outputs would spread the shares by what all outputs have in common, which changes no share."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 2, generator=generator, dtype=torch.float64)
    shares = torch._sample_dirichlet((x @ x[:2, :].T.repeat(1, 2)[:, :3] + 2).exp(), generator=generator)
    options: dict[str, Any] = {"likelihood": "dirichlet", "progress": False}
    training = Training(epochs=60, lr=0.05, batch_size=40)
    network = nn.Linear(2, 3, dtype=torch.float64)
    point = MAP().fit(network, (x, shares), training=training, **options)
    posterior = Laplace(structure="full", prior_precision=1.0).fit(point.model, (x, shares), **options)
    far = 3 * x[:5]
    mean, covariance = posterior.functional(far)
    noise = torch.randn(50_000, 5, 3, generator=generator, dtype=torch.float64)
    outputs = mean + torch.einsum("bij,sbj->sbi", torch.linalg.cholesky(covariance), noise)
    expected = outputs.softmax(-1).var(0)
    found = posterior.predict(far, link="mc", num_samples=4000)
    torch.testing.assert_close(found.epistemic, expected, rtol=0.1, atol=1e-6)
    assert float(posterior.predict(far).epistemic.sum()) > 1.2 * float(expected.sum())
    alone = posterior.predict(far[2:3], link="mc", num_samples=4000)
    torch.testing.assert_close(alone.mean, found.mean[2:3])
