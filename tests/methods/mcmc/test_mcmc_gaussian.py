"""Every sampler recovers the moments of normal targets and of Bayesian linear regression, within its stated error."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from mcmc_cases import MEAN, PRECISION
from torch import Tensor, nn

from dubito import HMC, SGMCMC, SVGD, Training, likelihoods, priors
from dubito.core.randomness import Stream
from dubito.methods.mcmc.diagnostics import ess_mean
from dubito.methods.mcmc.kernels import PSGLD, KernelStep, make_kernel
from dubito.methods.mcmc.svgd import stein_direction
from oracles import LinearRegression, design, regression_data

pytestmark = pytest.mark.slow

KERNELS = ("sgld", "psgld", "sghmc", "sgnht")
COPIES = 3000  # independent chains side by side in one vector: kernels work element by element
EPSILON = 0.2


def run(
    kernel: Any, temperature: float, gradient_noise: float = 0.0, steps: int = 700
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return positions ``[steps, COPIES, 3]`` after burn-in."""
    generator = torch.Generator().manual_seed(0)
    position = MEAN.repeat(COPIES).clone()
    state = kernel.init(position)
    kept = []
    for step in range(steps):
        away = position.reshape(COPIES, 3) - MEAN
        gradient = away @ PRECISION
        if gradient_noise:
            gradient = gradient + gradient_noise * torch.randn(COPIES, 3, generator=generator, dtype=torch.float64)
        noise = torch.randn(3 * COPIES, generator=generator, dtype=torch.float64)
        adapting = step < 200
        if step == 200 and isinstance(kernel, PSGLD):  # one preconditioner for all copies, so that theory applies
            state["square"].copy_(state["square"].reshape(COPIES, 3).mean(0).repeat(COPIES))
        kernel.move(position, state, gradient.reshape(-1), noise, KernelStep(EPSILON, temperature, adapting))
        if step >= 300 and step % 20 == 0:
            kept.append(position.reshape(COPIES, 3).clone())
    return torch.stack(kept), state


def stated_covariance(name: str, state: dict[str, Tensor]) -> Tensor:
    exact, identity = torch.linalg.inv(PRECISION), torch.eye(3, dtype=torch.float64)
    if name == "sgld":
        return exact @ torch.linalg.inv(identity - EPSILON / 2 * PRECISION)
    if name == "psgld":
        root = state["square"][:3].sqrt()
        scale = torch.diag(root.mean() / (root + 0.05 * root.mean()))
        return exact @ torch.linalg.inv(identity - EPSILON / 2 * PRECISION @ scale)
    return exact


@pytest.mark.parametrize("temperature", [1.0, 0.25])
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_has_the_moments_that_are_stated(name: str, temperature: float) -> None:
    draws, state = run(make_kernel(name, 0.3), temperature)
    flat = draws.reshape(-1, 3)
    stated = temperature * stated_covariance(name, state)
    # 20 states of 3,000 chains: at least 10,000 independent ones, so 4 standard errors are 4 % and 6 %
    assert ((flat.mean(0) - MEAN).abs() < 0.04 * stated.diag().sqrt()).all()
    scale = (stated.diag()[:, None] * stated.diag()).sqrt()
    assert ((torch.cov(flat.mT) - stated).abs() < 0.06 * scale).all()


def test_the_thermostat_takes_up_gradient_noise() -> None:
    exact = torch.linalg.inv(PRECISION).diag()
    found = {}
    for name in ("sghmc", "sgnht"):
        draws, _ = run(make_kernel(name, 0.1), 1.0, gradient_noise=1.5, steps=900)
        found[name] = draws.reshape(-1, 3).var(0) / exact
    assert (found["sghmc"] > 1.5).all()  # heated by ε·1.5² per step where friction removes 0.19
    assert ((found["sgnht"] - 1).abs() < 0.1).all()


def recipes() -> dict[str, Any]:
    standard = priors.Normal()
    long = {"burn_in": 200, "thinning": 4, "num_samples": 200, "chains": 4, "prior": standard}
    sampled: dict[str, Any] = {name: SGMCMC(name, friction=0.3, **long) for name in KERNELS}
    sampled["decay"] = SGMCMC("sgld", "decay", **{**long, "thinning": 6})
    sampled["nuts"] = HMC(burn_in=150, num_samples=200, chains=2, prior=standard)
    sampled["hmc"] = HMC("hmc", burn_in=150, num_samples=300, chains=2, num_steps=3, prior=standard)
    return sampled


class Plain(NamedTuple):
    """The normal density of `mcmc_cases` times a standard normal one: rows whose squares are its precision."""

    mean: Tensor = torch.linalg.solve(PRECISION + torch.eye(3), PRECISION @ MEAN)
    covariance: Tensor = torch.linalg.inv(PRECISION + torch.eye(3))

    def problem(self) -> tuple[nn.Module, tuple[Tensor, Tensor], dict[str, Any]]:
        x = torch.linalg.cholesky(PRECISION).mT
        with Stream(1).active():
            model = nn.Linear(3, 1, bias=False).double()
        return model, (x, (x @ MEAN)[:, None]), {"likelihood": likelihoods.Gaussian(1.0), "num_data": 3}


class Regression(NamedTuple):
    """Bayesian linear regression under a standard normal prior."""

    oracle: LinearRegression = LinearRegression(*regression_data(), noise=0.3, prior_precision=1.0)

    @property
    def mean(self) -> Tensor:
        return self.oracle.mean

    @property
    def covariance(self) -> Tensor:
        return self.oracle.covariance

    def problem(self) -> tuple[nn.Module, tuple[Tensor, Tensor], dict[str, Any]]:
        options = {"likelihood": likelihoods.Gaussian(0.3), "num_data": 40}
        return self.oracle.model(), regression_data(), options


# the kernels have normal targets in the tests above; here it is one of each kind of sampler
@pytest.mark.parametrize(
    ("name", "target"),
    [(name, Regression()) for name in recipes()] + [("nuts", Plain())],
    ids=lambda given: given if isinstance(given, str) else type(given).__name__,
)
def test_a_sampler_recovers_mean_and_covariance(name: str, target: Plain | Regression) -> None:
    recipe, (model, data, options) = recipes()[name], target.problem()
    # ten whole batches in one epoch: exact gradients, and the loop's own work is done once in ten steps
    batches = [data] * (10 if isinstance(recipe, SGMCMC) else 1)
    posterior: Any = recipe.fit(model, batches, **options)
    # in coordinates in which the mean should be 0 and the covariance 1
    white = (posterior.samples - target.mean) @ torch.linalg.inv(torch.linalg.cholesky(target.covariance)).mT
    effective, identity = ess_mean(white), torch.eye(white.shape[-1], dtype=torch.float64)
    assert float(effective.min()) > 100
    assert (white.mean((0, 1)).abs() < 4.5 / effective.sqrt()).all()
    products = white[..., :, None] * white[..., None, :]  # with variances of 1, and of 2 on the diagonal
    away, tolerance = products.mean((0, 1)) - identity, 4.5 * ((1 + identity) / ess_mean(products)).sqrt()
    # the stated error of Langevin steps: at most 0.2 of the step over 2, in the stiffest direction, and only wider
    error = 0.1 / 0.9 if name in ("sgld", "psgld", "decay") else 0.0
    assert (away.abs() < tolerance + error).all()
    assert (away.diag() > -tolerance.diag()).all()
    mean, variance = (posterior.selection.ravel(part) for part in posterior.marginals())
    torch.testing.assert_close(mean, posterior.flat.mean(0))
    torch.testing.assert_close(variance, posterior.flat.var(0, correction=0))
    names = {finding.name for finding in posterior.diagnose().findings}
    assert names == ({"no better than a constant"} if len(data[0]) == 3 else set()), str(posterior.diagnose())


def test_svgd_finds_the_moments_of_linear_regression() -> None:
    x, y = regression_data()
    oracle = LinearRegression(x, y, noise=0.3, prior_precision=1.0)
    training = Training(epochs=250, lr=0.02, batch_size=40)
    posterior: Any = SVGD(30).fit(oracle.model(), (x, y), likelihood=likelihoods.Gaussian(0.3), training=training)
    spread = oracle.covariance.diag().sqrt()
    assert ((posterior.flat.mean(0) - oracle.mean).abs() < 0.1 * spread).all()
    ratio = posterior.flat.var(0) / oracle.covariance.diag()
    assert ((ratio > 0.5) & (ratio < 1.1)).all()  # 30 particles are known to come out narrow
    assert posterior.diagnose().trustworthy


def test_stein_direction_against_autograd() -> None:
    generator = torch.Generator().manual_seed(0)
    particles, slopes = torch.randn(2, 7, 3, generator=generator, dtype=torch.float64)
    distance = (particles[:, None] - particles[None]).square().sum(-1)
    width = float(distance[~torch.eye(7, dtype=torch.bool)].median()) / math.log(8)
    expected = torch.zeros_like(particles)
    for i in range(7):
        for j in range(7):
            other = particles[j].clone().requires_grad_()
            kernel = torch.exp(-(other - particles[i]).square().sum() / width)
            expected[i] += (-kernel.detach() * slopes[j] + torch.autograd.grad(kernel, other)[0]) / 7
    torch.testing.assert_close(stein_direction(particles, slopes), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("recipe", [
    SGMCMC(friction=0.3, chains=4, burn_in=150, thinning=3, num_samples=150),
    HMC(burn_in=80, num_samples=150, temperature=0.2),
], ids=["sghmc", "nuts"])  # fmt: skip
def test_an_update_has_the_particles_as_its_prior(recipe: Any) -> None:
    x, y = regression_data(60)
    both = LinearRegression(x, y, noise=0.3, prior_precision=1.0)
    start, gaussian = LinearRegression(x[:30], y[:30], noise=0.3), likelihoods.Gaussian(0.3)
    copies = 10 if isinstance(recipe, SGMCMC) else 1
    first = recipe.fit(start.model(), [(x[:30], y[:30])] * copies, likelihood=gaussian, num_data=30)
    second = first.update((x[30:], y[30:]), training=Training(batch_size=30))
    assert second.num_data == 60
    rows, prior = design(x[30:]), torch.linalg.inv(torch.cov(first.flat.mT))
    strength = 1 / (0.3**2 * recipe.temperature)
    precision = prior + rows.mT @ rows * strength
    mean = torch.linalg.solve(precision, prior @ first.flat.mean(0) + rows.mT @ y[30:, 0] * strength)
    variance, effective = torch.linalg.inv(precision).diag(), ess_mean(second.samples)
    assert (((second.flat.mean(0) - mean) / variance.sqrt()).abs() < 4.5 / effective.sqrt()).all()
    assert ((second.flat.var(0) / variance - 1).abs() < 4.5 * (2 / effective).sqrt()).all()
    # and that is the posterior of all the data, up to how well a few hundred particles know their covariance
    assert ((second.flat.mean(0) - both.mean).abs() < 0.7 * both.covariance.diag().sqrt()).all()
    center, spread = second.prior()
    torch.testing.assert_close(center["bias"], first.marginals()[0]["bias"], rtol=1e-6, atol=1e-8)
    # a prior is told as it is at temperature 1
    torch.testing.assert_close(recipe.temperature * spread["bias"], first.marginals()[1]["bias"], rtol=0.01, atol=0.0)
    assert ((second.flat.var(0) / (recipe.temperature * both.covariance.diag())).log().abs() < 0.5).all()


def test_a_noise_level_is_sampled_too() -> None:
    x, y = regression_data(60)
    recipe = HMC(burn_in=100, num_samples=200, chains=2, prior=priors.Normal(0.0, 3.0), start="fresh")
    posterior: Any = recipe.fit(LinearRegression(x, y, noise=0.3).model(), (x, y), likelihood="gaussian")
    log_noise = posterior.flat[:, -1]
    residuals = (y - LinearRegression(x, y, noise=0.3, prior_precision=1 / 9).model()(x)).detach().flatten()
    # under a flat prior on log σ: s² · ν / χ²_ν with ν = 60 − 4
    variance = residuals.square().sum() / 56
    assert abs(float((2 * log_noise).exp().mean() / variance) - 56 / 54) < 0.08
    assert abs(float(log_noise.std()) * math.sqrt(2 * 56) - 1) < 0.2
    prediction = posterior.predict(x)
    chosen = posterior.flat[posterior.spaced(64), -1]
    torch.testing.assert_close(prediction.aleatoric.flatten()[0], (2 * chosen).exp().mean(), rtol=1e-10, atol=0.0)
    # from a fresh start, the network that stands for all is the most probable sample
    assert float((log_noise - math.log(posterior.likelihood.noise)).abs().min()) < 1e-9
