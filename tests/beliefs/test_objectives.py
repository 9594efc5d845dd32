"""Bounds on the evidence, on Bayesian linear regression where evidence and bounds are known; float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from dubito.errors import InputError
from dubito.variational import VariationalModule
from torch import Tensor, nn

from dubito import likelihoods, objectives, priors
from dubito.core import params
from dubito.methods.variational import convert
from oracles import LinearRegression, regression_data

pytestmark = pytest.mark.slow

NOISE, PRECISION = 0.3, 2.0
ORDERS = (-math.inf, -2.0, 0.0, 0.5, 1.0, 2.0, math.inf)


def hadamard() -> LinearRegression:
    """Orthogonal inputs, so that the posterior is a product over weights."""
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    x = torch.kron(torch.kron(two, two), two)[:, 1:4]
    y = x @ torch.tensor([[0.5], [-1.0], [2.0]], dtype=torch.float64) + 0.7 + 0.1 * x[:, :1] * x[:, 1:2]
    return LinearRegression(x, y, noise=NOISE, prior_precision=PRECISION)


def correlated() -> LinearRegression:
    x, y = regression_data(12, inputs=2)
    x = torch.stack([x[:, 0], 0.9 * x[:, 0] + 0.3 * x[:, 1]], 1)
    return LinearRegression(x, y, noise=NOISE, prior_precision=PRECISION)


def module_at(oracle: LinearRegression, mean: Tensor, scale: Tensor, biases: Any = "random") -> VariationalModule:
    """A converted linear layer whose posterior has these means and scales."""
    prior = priors.Normal(0.0, PRECISION**-0.5)
    module = convert(oracle.model(), estimator="weight", biases=biases, prior=prior)
    nn.utils.vector_to_parameters(mean.clone(), module.network.parameters())
    with torch.no_grad():
        for (name, part), span in zip(module.parts(), (slice(0, -1), slice(-1, None)), strict=False):
            assert name in ("weight", "bias")
            part.log_scale.copy_(scale[span].log().reshape(part.log_scale.shape))
    return module


def loss_of(objective: Any, module: VariationalModule, oracle: LinearRegression, **options: Any) -> Tensor:
    options = {"num_data": len(oracle.inputs), "likelihood": likelihoods.Gaussian(NOISE), **options}
    return objective(module, oracle.inputs, oracle.targets, **options)


def exact_bound(oracle: LinearRegression, mean: Tensor, scale: Tensor, alpha: float) -> float:
    """log Z + log ∫ p(w|D)^(1-α) q(w)^α dw / (1 - α), a Gaussian integral."""
    posterior, own = oracle.precision, torch.diag(scale**-2)
    joint = (1 - alpha) * posterior + alpha * own
    pull = (1 - alpha) * posterior @ oracle.mean + alpha * own @ mean
    square = (1 - alpha) * oracle.mean @ posterior @ oracle.mean + alpha * mean @ own @ mean
    log_dets = [torch.linalg.slogdet(matrix).logabsdet for matrix in (posterior, own, joint)]
    log_integral = 0.5 * ((1 - alpha) * log_dets[0] + alpha * log_dets[1] - log_dets[2])
    log_integral -= 0.5 * (square - pull @ torch.linalg.solve(joint, pull))
    return oracle.log_evidence + float(log_integral) / (1 - alpha)


def exact_elbo(oracle: LinearRegression, mean: Tensor, scale: Tensor) -> float:
    q = torch.distributions.MultivariateNormal(mean, torch.diag(scale**2))
    p = torch.distributions.MultivariateNormal(oracle.mean, precision_matrix=oracle.precision)
    return oracle.log_evidence - float(torch.distributions.kl_divergence(q, p))


class TestELBO:
    def test_its_expectation(self) -> None:
        oracle = correlated()
        mean, scale = oracle.mean + 0.1, torch.tensor([0.2, 0.1, 0.3], dtype=torch.float64)
        module = module_at(oracle, mean, scale)
        torch.manual_seed(0)
        with torch.no_grad():
            values = -12 * torch.stack([loss_of(objectives.ELBO(), module, oracle) for _ in range(1000)])
        error = float(values.std()) / math.sqrt(1000)
        assert float(values.mean()) == pytest.approx(exact_elbo(oracle, mean, scale), abs=5 * error)
        assert error < 0.5

    def test_it_is_the_evidence_at_the_true_posterior(self) -> None:
        oracle = hadamard()
        module = module_at(oracle, oracle.mean, oracle.precision.diagonal() ** -0.5)
        torch.manual_seed(0)
        loss = loss_of(objectives.ELBO(num_samples=2000), module, oracle).detach()
        assert -8 * float(loss) == pytest.approx(oracle.log_evidence, abs=0.2)  # standard error 0.03

    def test_a_batch_stands_for_all_the_data(self) -> None:
        """The divergence counts once for all data, however small the batch."""
        oracle = correlated()
        module = module_at(oracle, oracle.mean, torch.full((3,), 1e-9, dtype=torch.float64))
        x, y, likelihood = oracle.inputs, oracle.targets, likelihoods.Gaussian(NOISE)
        call = lambda rows, **options: objectives.ELBO()(  # noqa: E731
            module, x[rows], y[rows], num_data=1000, likelihood=likelihood, **options
        )
        plain = -likelihood.log_prob(oracle.model()(x[:3]), y[:3]).mean()
        torch.testing.assert_close(call(slice(0, 3)), plain + module.kl() / 1000, rtol=1e-6, atol=0)
        cold = call(slice(0, 3), temperature=0.1)
        torch.testing.assert_close(cold, plain + 0.1 * module.kl() / 1000, rtol=1e-6, atol=0)
        shares = call(slice(0, 4), batch_size=12) + call(slice(4, 12), batch_size=12)
        torch.testing.assert_close(shares, call(slice(0, 12)), rtol=1e-6, atol=0)

    def test_converted_parts_of_another_module(self) -> None:
        body, head = (convert(nn.Linear(3, 3), initial_scale=1e-9) for _ in range(2))
        whole = nn.Sequential(body, nn.Tanh(), head)
        x, y = torch.randn(5, 3), torch.arange(5) % 3
        plain = nn.functional.cross_entropy(nn.Sequential(body.mean_module(), nn.Tanh(), head.mean_module())(x), y)
        loss = objectives.ELBO()(whole, x, y, num_data=50)  # type: ignore[arg-type]
        torch.testing.assert_close(loss, plain + (body.kl() + head.kl()) / 50)
        with pytest.raises(InputError, match="not a module that contains it"):
            objectives.Renyi(0.5)(whole, x, y, num_data=50)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_data": 0}, "`num_data` must be the number of examples"),
        ({"num_data": "all"}, "`num_data` must be the number of examples"),
        ({"temperature": -1.0}, "`temperature` must be a number of at least 0"),
        ({"likelihood": "weibull"}, "no likelihood"),
        ({"module": nn.Linear(3, 2)}, "The module has no random weights"),
        ({"inputs": torch.zeros(0, 3), "targets": torch.zeros(0).long()}, "The batch is empty"),
        ({"targets": torch.tensor([0, 1, 2, 0])}, "The label 2 is not one of"),
        ({"targets": torch.tensor([0, 1])}, "need labels of shape"),
    ],
)
def test_bad_batches_are_one_sentence(options: Any, message: str) -> None:
    batch = {"module": convert(nn.Linear(3, 2)), "inputs": torch.zeros(4, 3), "targets": torch.zeros(4).long()}
    with pytest.raises(InputError, match=message):
        objectives.ELBO()(**{**batch, "num_data": 4, **options})


class TestRenyi:
    def test_the_bound_of_given_ratios(self) -> None:
        ratios = torch.tensor([1.0, 3.0, -2.0], dtype=torch.float64)
        values = {alpha: float(objectives.Renyi(alpha).bound(ratios)) for alpha in ORDERS}
        assert values[-math.inf] == 3.0
        assert values[math.inf] == -2.0
        assert values[1.0] == pytest.approx(2 / 3)
        assert values[0.0] == pytest.approx(math.log((math.e + math.e**3 + math.e**-2) / 3))
        assert list(values.values()) == sorted(values.values(), reverse=True)
        for near in (1 - 1e-7, 1 + 1e-7):
            assert float(objectives.Renyi(near).bound(ratios)) == pytest.approx(2 / 3, abs=1e-5)
        large = objectives.Renyi(-100.0).bound(1e4 * ratios)
        assert float(large) == pytest.approx(3e4, abs=0.1)  # no overflow

    @pytest.mark.parametrize("gap", [1e-3, 1e-5, 1e-7, 1e-9, -1e-7])
    def test_it_goes_to_the_mean_in_single_precision(self, gap: float) -> None:
        ratios = torch.tensor([-1030.0, -1000.0, -990.0, -1020.0])
        expected = -1010.0 + gap * float(ratios.double().var(correction=0)) / 2  # to first order in 1 - α
        assert float(objectives.Renyi(1 - gap).bound(ratios)) == pytest.approx(expected, abs=1e-3)

    def test_draws_that_are_impossible(self) -> None:
        ratios = torch.tensor([-math.inf, 2.0])
        assert float(objectives.Renyi(0.0).bound(ratios)) == pytest.approx(2.0 - math.log(2))
        assert float(objectives.Renyi(2.0).bound(ratios)) == -math.inf
        assert float(objectives.Renyi(0.0).bound(ratios[:1])) == -math.inf

    def test_every_order_is_the_evidence_at_the_true_posterior(self) -> None:
        """All ratios are equal there, and no noise is left in the gradient."""
        oracle = hadamard()
        module = module_at(oracle, oracle.mean, oracle.precision.diagonal() ** -0.5)
        for alpha in (-math.inf, -2.0, 0.0, 0.5, 2.0, math.inf):
            loss = loss_of(objectives.Renyi(alpha, num_samples=3), module, oracle)
            assert -8 * loss.item() == pytest.approx(oracle.log_evidence, abs=1e-9)
            for slope in torch.autograd.grad(loss, list(module.parameters())):
                assert float(slope.abs().max()) < 1e-9

    def test_the_exact_bound_falls_as_alpha_grows(self) -> None:
        """From many draws, against the Gaussian integral; α = 0 is the evidence."""
        oracle = correlated()
        mean, scale = oracle.mean, 0.6 * oracle.precision.diagonal() ** -0.5  # narrow: the integral is finite
        ratios = ratios_at(oracle, mean, scale)
        orders = (0.0, 0.5, 0.9, 1.5, 3.0)
        exact = [exact_bound(oracle, mean, scale, alpha) for alpha in orders]
        assert exact[0] == pytest.approx(oracle.log_evidence, abs=1e-9)
        assert exact == sorted(exact, reverse=True)
        assert exact[2] > exact_elbo(oracle, mean, scale) > exact[3]
        for alpha, bound in zip(orders[1:], exact[1:], strict=True):
            assert float(objectives.Renyi(alpha).bound(ratios)) == pytest.approx(bound, abs=0.06)

    def test_it_grows_with_the_number_of_draws(self) -> None:
        oracle = correlated()
        mean, scale = oracle.mean, oracle.precision.diagonal() ** -0.5
        ratios = ratios_at(oracle, mean, scale)
        for alpha in (-1.0, 0.0, 0.5):
            objective = objectives.Renyi(alpha)
            bounds = [float(objective.bound(ratios.reshape(k, -1)).mean()) for k in (1, 4, 16, 64)]
            assert bounds == sorted(bounds)
            assert bounds[0] == pytest.approx(exact_elbo(oracle, mean, scale), abs=0.1)
            assert alpha < 0 or bounds[-1] < oracle.log_evidence + 0.05

    @pytest.mark.parametrize(("alpha", "temperature"), [(0.0, 1.0), (-1.0, 1.0), (2.0, 1.0), (0.5, 0.5)])
    def test_its_gradient_is_that_of_the_bound(self, alpha: float, temperature: float) -> None:
        """Without bias against plain differentiation of the same bound, and with less noise; biases are points here."""
        oracle = correlated()
        mean, scale = oracle.mean + 0.02, 1.1 * oracle.precision.diagonal() ** -0.5
        module = module_at(oracle, mean, scale, biases="deterministic")
        weights = [value for value in module.parameters() if value.requires_grad]
        objective = objectives.Renyi(alpha, num_samples=3)
        torch.manual_seed(0)
        ours = stacked(lambda: loss_of(objective, module, oracle, temperature=temperature), weights)
        plain = stacked(lambda: plain_loss(objective, module, oracle, temperature), weights)
        error = (ours.var(0) / len(ours) + plain.var(0) / len(plain)).sqrt()
        assert float(((ours.mean(0) - plain.mean(0)).abs() / error).max()) < 4.5

    def test_its_gradient_has_less_noise_near_the_posterior(self) -> None:
        oracle = hadamard()
        module = module_at(oracle, oracle.mean + 0.01, 1.05 * oracle.precision.diagonal() ** -0.5)
        weights, objective = list(module.parameters()), objectives.Renyi(0.5, num_samples=3)
        torch.manual_seed(0)
        ours = stacked(lambda: loss_of(objective, module, oracle), weights, num=100)
        plain = stacked(lambda: plain_loss(objective, module, oracle, 1.0), weights, num=100)
        assert bool((ours.var(0) < plain.var(0) / 3).all())

    def test_order_one_is_the_elbo(self) -> None:
        oracle = correlated()
        module = module_at(oracle, oracle.mean, oracle.precision.diagonal() ** -0.5)
        losses = []
        for objective in (objectives.Renyi(1.0, num_samples=2), objectives.ELBO(num_samples=2)):
            torch.manual_seed(0)
            losses.append(loss_of(objective, module, oracle))
        torch.testing.assert_close(*losses, rtol=0, atol=0)

    @pytest.mark.parametrize("family", ["mean-field", "full"])
    def test_a_learned_mixture_has_its_hyperprior(self, family: Any) -> None:
        x, y = torch.randn(5, 3), torch.arange(5) % 2
        layer, found, slopes = nn.Linear(3, 2), {}, {}
        for pair in (None, (3.0, 0.5)):
            torch.manual_seed(0)
            mixture = priors.Mixture(2, hyperprior=pair, zero_hyperprior=None)
            module = convert(layer, prior=mixture, estimator="weight", family=family)
            part: Any = dict(module.parts())["weight"]
            with torch.no_grad():
                part.prior_log_scales.fill_(-1.0)
            torch.manual_seed(1)
            found[pair] = objectives.Renyi(0.5, 3)(module, x, y, num_data=10, temperature=0.5)
            slopes[pair] = torch.autograd.grad(found[pair], part.prior_log_scales)[0]
        penalty = part.prior.penalty()
        (slope,) = torch.autograd.grad(penalty, part.prior_log_scales)
        torch.testing.assert_close(found[3.0, 0.5] - found[None], 0.05 * penalty.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(slopes[3.0, 0.5] - slopes[None], 0.05 * slope, rtol=1e-4, atol=1e-5)
        assert float(slope.abs().max()) > 1

    def test_it_needs_joint_draws(self) -> None:
        oracle = correlated()
        module = convert(oracle.model(), estimator="local")
        with pytest.raises(InputError, match="estimator='weight'"):
            loss_of(objectives.Renyi(0.5), module, oracle)
        with pytest.raises(InputError, match="all rows of a batch"):
            loss_of(objectives.Renyi(0.5), convert(oracle.model(), estimator="weight"), oracle, batch_size=24)


@torch.no_grad()
def ratios_at(oracle: LinearRegression, mean: Tensor, scale: Tensor, num: int = 2048) -> Tensor:
    """Draws of log p(D, w) - log q(w)."""
    torch.manual_seed(0)
    module, likelihood, ratios = module_at(oracle, mean, scale), likelihoods.Gaussian(NOISE), []
    for _ in range(num):
        weights = module.sample_weights()
        outputs = params.functional_call(module.network, weights, oracle.inputs)
        ratios.append(likelihood.log_prob(outputs, oracle.targets).sum() + module.log_ratio(weights))
    return torch.stack(ratios)


def plain_loss(objective: Any, module: VariationalModule, oracle: LinearRegression, temperature: float) -> Tensor:
    """The same bound, differentiated through everything, the density of q included."""
    means, parts = dict(module.network.named_parameters()), dict(module.parts())
    ratios = []
    for _ in range(objective.num_samples):
        weights = module.sample_weights()
        outputs = params.functional_call(module.network, weights, oracle.inputs)
        explained = likelihoods.Gaussian(NOISE).log_prob(outputs, oracle.targets).sum()
        log_p = sum(priors.Normal(0.0, PRECISION**-0.5).log_prob(w).sum() for w in weights.values())
        log_q = sum(torch.distributions.Normal(means[n], parts[n].scale).log_prob(w).sum() for n, w in weights.items())
        ratios.append(explained + temperature * (log_p - log_q))
    return -objective.bound(torch.stack(ratios)) / len(oracle.inputs)


def stacked(loss: Any, weights: list[Tensor], num: int = 200) -> Tensor:
    grads = (torch.autograd.grad(loss(), weights) for _ in range(num))
    return torch.stack([torch.cat([part.flatten() for part in slopes]) for slopes in grads])


@pytest.mark.parametrize(
    "make",
    [
        lambda: objectives.ELBO(num_samples=0),
        lambda: objectives.ELBO(num_samples=1.5),
        lambda: objectives.Renyi(math.nan),
        lambda: objectives.Renyi("half"),
        lambda: objectives.Renyi(0.5, num_samples=-1),
    ],
)
def test_bad_settings_are_one_sentence(make: Any) -> None:
    with pytest.raises(InputError, match="must be a"):
        make()


@pytest.mark.parametrize("objective", [objectives.ELBO(2), objectives.Renyi(-math.inf), objectives.Renyi(0.3, 5)])
def test_settings_travel(objective: Any) -> None:
    from dubito import parse
    from dubito.core.settings import Setting

    assert parse(repr(objective)) == objective
    assert Setting.from_json(objective.to_json()) == objective
