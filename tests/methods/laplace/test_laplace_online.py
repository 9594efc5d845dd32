"""`posterior.update`: yesterday's posterior is today's prior."""

from __future__ import annotations

import copy

import pytest
import torch
from dubito.errors import UnsupportedError
from dubito.likelihoods import Gaussian
from laplace_cases import STRUCTURES, case, dense, dense_curvature
from torch import nn

import dubito
from dubito import Laplace, Training, select
from oracles import Case, LinearRegression, regression_data

pytestmark = pytest.mark.slow

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def parts(x: torch.Tensor, y: torch.Tensor, sizes: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


def online(oracle: LinearRegression, sizes: list[int], structure: str, model: nn.Module | None = None, **settings):
    """Laplace at the exact posterior mean of the first part, then one update after the other."""
    first, *rest = parts(oracle.inputs, oracle.targets, sizes)
    start = LinearRegression(*first, oracle.noise, oracle.prior_precision, oracle.prior_mean, oracle.temperature)
    recipe = Laplace(
        structure=structure, prior_precision=oracle.prior_precision, prior_mean=oracle.prior_mean,
        temperature=oracle.temperature, **settings,
    )  # fmt: skip
    posterior = recipe.fit(model or start.model(), first, likelihood=Gaussian(noise=oracle.noise))
    for part in rest:
        posterior = posterior.update(part)
    return posterior


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("prior_mean", [0.0, 0.6])
def test_full_equals_the_batch_posterior(temperature: float, prior_mean: float) -> None:
    oracle = LinearRegression(*regression_data(outputs=2), 0.3, 0.7, prior_mean, temperature)
    posterior = online(oracle, [12, 17, 11], "full")
    torch.testing.assert_close(posterior.selection.ravel(posterior.mean()), oracle.mean, **EXACT)
    torch.testing.assert_close(dense(posterior), oracle.covariance, **EXACT)
    assert posterior.log_evidence().item() == pytest.approx(oracle.log_evidence, rel=1e-10)
    assert posterior.num_data == 40


@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_precision_comes_from_stored_sums(structure: str) -> None:
    oracle = LinearRegression(*regression_data(outputs=2), 0.3, 0.7)
    whole = online(oracle, [40], structure)
    split = online(oracle, [12, 17, 11], structure)
    torch.testing.assert_close(dense(split), dense(whole), **EXACT)
    if structure == "diag":
        torch.testing.assert_close(dense(split), torch.diag(1 / oracle.precision.diagonal()), **EXACT)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_structure_is_exact_where_weights_do_not_interact(structure: str) -> None:
    """With orthogonal inputs the precision is diagonal, so mean, covariance and evidence are exact for all."""
    basis = torch.linalg.qr(torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).Q
    x = torch.cat([2.0 * basis, 3.0 * basis])  # orthogonal within each part
    y = (
        x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)
        + 0.1 * torch.sin(torch.arange(24.0)).double()[:, None]
    )

    def model_at(weight: torch.Tensor) -> nn.Linear:
        layer = nn.Linear(3, 1, bias=False, dtype=torch.float64)
        nn.utils.vector_to_parameters(weight, layer.parameters())
        return layer

    def exact(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        precision = x[rows].mT @ x[rows] / 0.09 + 0.7 * torch.eye(3, dtype=torch.float64)
        return torch.linalg.solve(precision, x[rows].mT @ y[rows] / 0.09).squeeze(1), precision

    recipe, first = Laplace(structure=structure, prior_precision=0.7), (x[:12], y[:12])
    posterior = recipe.fit(model_at(exact(slice(12))[0]), first, likelihood=Gaussian(noise=0.3)).update(
        (x[12:], y[12:])
    )
    mean, precision = exact(slice(24))
    torch.testing.assert_close(posterior.selection.ravel(posterior.mean()), mean, **EXACT)
    torch.testing.assert_close(dense(posterior), torch.linalg.inv(precision), **EXACT)
    marginal = torch.distributions.MultivariateNormal(
        torch.zeros(24, dtype=torch.float64), 0.09 * torch.eye(24, dtype=torch.float64) + x @ x.mT / 0.7
    )
    assert posterior.log_evidence().item() == pytest.approx(marginal.log_prob(y.squeeze(1)).item(), rel=1e-10)


def test_low_rank_is_as_close_as_what_it_leaves_out() -> None:
    """The error of the sum is at most the largest eigenvalue that was dropped, once per update."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.logspace(0, -3, 8, dtype=torch.float64)
    x = torch.randn(60, 8, generator=generator, dtype=torch.float64) * scales
    y = torch.randn(60, 1, generator=generator, dtype=torch.float64)
    model = nn.Linear(8, 1, bias=False, dtype=torch.float64)
    recipe = Laplace(structure="low-rank", rank=4, prior_precision=1.0)
    first, second = parts(x, y, [30, 30])
    posterior = recipe.fit(model, first, likelihood=Gaussian(noise=1.0)).update(second)
    exact = x.mT @ x
    dropped = max(torch.linalg.eigvalsh(a.mT @ a).flip(0)[4].item() for a in (x, first[0], second[0]))
    error = torch.linalg.matrix_norm(dense_curvature(posterior) - exact, 2).item()
    assert error <= 3 * dropped * 1.05
    assert error < 0.02 * torch.linalg.matrix_norm(exact, 2).item()


def test_classification_on_a_linear_model_reaches_the_optimum() -> None:
    """Without training, Gauss-Newton steps go on until the gradient of the penalized loss vanishes."""
    torch.manual_seed(0)
    x, y = torch.randn(60, 3).double(), torch.randint(3, (60,))
    model = nn.Linear(3, 3).double()
    recipe = Laplace(structure="full", prior_precision=1.0)
    old = recipe.fit(model, (x[:30], y[:30]))
    new = old.update((x[30:], y[30:]))
    flat = new.selection.ravel(new.mean()).requires_grad_()
    outputs = torch.func.functional_call(new.model, new.selection.merge(new.mean(), flat), x[30:])
    loss = nn.functional.cross_entropy(outputs, y[30:], reduction="sum")
    (slope,) = torch.autograd.grad(loss, flat)
    slope = slope + old.precision_matmul(flat.detach() - old.selection.ravel(old.mean()))
    assert slope.abs().max() < 1e-5
    torch.testing.assert_close(
        torch.linalg.inv(dense(new)), torch.linalg.inv(dense(old)) + dense_curvature(new) - dense_curvature(old)
    )


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", ["categorical", "gaussian", "bernoulli", "norm"])
def test_networks_learn_new_data_and_keep_the_old(name: str, structure: str) -> None:
    problem = case(name)
    first, second = parts(*problem.data, [7, 5])
    weights = select.random(0.8)
    old = Laplace(structure=structure, weights=weights, prior_precision=1.0).fit(
        problem.model, first, likelihood=problem.likelihood
    )
    state, before = old.digest(), copy.deepcopy(problem.model.state_dict())
    trained = old.update(second, training=Training(epochs=40, lr=0.02, batch_size=5))
    for new in (old.update(second), trained):
        assert score(new, second) > score(old, second)
        assert old.selection == new.selection
        moved = old.selection.ravel(new.mean()) - old.selection.ravel(old.mean())
        assert moved.norm() > 1e-3
        fixed = ~old.selection
        assert torch.equal(fixed.ravel(new.mean()), fixed.ravel(old.mean()))
        assert new.num_data == 12
        assert all(torch.equal(a, b) for a, b in zip(old.model.buffers(), new.model.buffers(), strict=True))
    assert old.digest() == state
    assert all(torch.equal(value, before[key]) for key, value in problem.model.state_dict().items())


def score(posterior, data) -> float:
    """The log-likelihood of the centre."""
    return posterior.likelihood.log_prob(posterior.model(data[0]), data[1]).sum().item()


def test_training_finds_the_penalized_optimum() -> None:
    """Gauss-Newton and gradient descent minimize the same objective; on a linear model it has one minimum."""
    oracle = LinearRegression(*regression_data(), 0.3, 0.7)
    first, second = parts(oracle.inputs, oracle.targets, [20, 20])
    start = LinearRegression(*first, 0.3, 0.7)
    old = Laplace(structure="full", prior_precision=0.7).fit(start.model(), first, likelihood=Gaussian(noise=0.3))
    trained = old.update(second, training=Training(epochs=400, lr=0.05, batch_size=20))
    torch.testing.assert_close(old.selection.ravel(trained.mean()), oracle.mean, rtol=0, atol=2e-5)
    assert trained.log_evidence().item() == pytest.approx(oracle.log_evidence, abs=1e-3)


def test_a_strong_posterior_hardly_moves() -> None:
    problem = case("categorical")
    recipe = Laplace(prior_precision=1e8)
    old = recipe.fit(problem.model, problem.data)
    for new in (old.update(problem.data), old.update(problem.data, training=Training(epochs=20, lr=1e-3))):
        assert (old.selection.ravel(new.mean()) - old.selection.ravel(old.mean())).abs().max() < 1e-3


@pytest.mark.parametrize("structure", STRUCTURES)
def test_an_updated_posterior_saves_loads_and_goes_on(structure: str, tmp_path) -> None:
    problem = case("categorical")
    first, second, third = parts(*problem.data, [5, 4, 3])
    posterior = Laplace(structure=structure, prior_precision=1.0).fit(problem.model, first).update(second)
    posterior.save(tmp_path / "p.safetensors")
    loaded = dubito.load(tmp_path / "p.safetensors", problem.model)
    assert loaded.log_evidence().item() == posterior.log_evidence().item()
    torch.testing.assert_close(loaded.predict(problem.inputs).log_probs, posterior.predict(problem.inputs).log_probs)
    again, straight = loaded.update(third), posterior.update(third)
    torch.testing.assert_close(dense(again), dense(straight), **EXACT)
    assert again.log_evidence().item() == pytest.approx(straight.log_evidence().item(), rel=1e-12)


def test_training_in_an_update_can_be_resumed(tmp_path) -> None:
    problem = case("categorical")
    old = Laplace(prior_precision=1.0).fit(problem.model, problem.data)
    settings = {"epochs": 6, "lr": 0.05, "batch_size": 5}
    whole = old.update(problem.data, training=Training(**settings))

    class Stop(Exception):
        pass

    class Impatient(torch.utils.data.Dataset):
        """The same data, whose third epoch never ends."""

        def __init__(self, limit: int) -> None:
            self.limit = limit

        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            self.limit -= 1
            if self.limit == 0:
                raise Stop
            return problem.inputs[index], problem.targets[index]

    plain = old.update(Impatient(10**6), training=Training(**settings))
    checkpoint = Training(**settings, checkpoint=str(tmp_path / "c.safetensors"), checkpoint_every=0.0)
    with pytest.raises(Stop):
        old.update(Impatient(40), training=checkpoint)
    resumed = old.update(Impatient(10**6), training=checkpoint)
    assert all(torch.equal(value, resumed.mean()[name]) for name, value in plain.mean().items())
    assert whole.num_data == plain.num_data


def test_evidence_of_an_update_is_known_at_its_own_settings_only() -> None:
    problem = case("categorical")
    posterior = problem.fit(prior_precision=1.0).update(problem.data)
    with pytest.raises(UnsupportedError, match="takes no arguments"):
        posterior.log_evidence(2.0)


def test_tuned_settings_stay() -> None:
    x, y = regression_data()
    model = LinearRegression(x[:20], y[:20]).model()
    old = Laplace(structure="full").fit(model, (x[:20], y[:20]), likelihood="gaussian")
    new = old.update((x[20:], y[20:]))
    assert new.likelihood.noise == old.likelihood.noise
    assert new.prior_precision.item() == old.prior_precision.item()
    assert isinstance(Case(model, x, y, new.likelihood).likelihood.noise, float)
