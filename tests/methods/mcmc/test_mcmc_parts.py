"""The pieces: potentials, heads of networks, schedules, priors, diagnostics."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from dubito.errors import InputError
from mcmc_cases import classes, network, problem, whole
from torch import Tensor, nn

from dubito import SGMCMC, likelihoods, priors, select
from dubito.core import params
from dubito.methods.mcmc import diagnostics
from dubito.methods.mcmc.cached_head import cached_features, split
from dubito.methods.mcmc.prior_energy import Quadratic, from_particles, make_prior_density
from dubito.methods.mcmc.sampling import Setup
from dubito.methods.mcmc.schedule import Schedule
from dubito.networks.selection import Selection
from extras import needs

RULES = [select.all(), select.last_layer(), select.random(0.3), select.layers("2") | select.layers("4.bias")]
PRIORS = [
    priors.Normal(),
    priors.Normal(0.5, 2.0),
    priors.Normal("model", 0.1),
    priors.StudentT(3.0),
    priors.Laplace(0.0, 0.5),
    priors.ByName({"4.*": priors.Normal(0.0, 0.3), "*": priors.Cauchy(0.0, 1.0)}),
]


class TestPotential:
    @pytest.mark.parametrize("prior", PRIORS, ids=repr)
    @pytest.mark.parametrize("rule", RULES, ids=repr)
    def test_against_autograd(self, rule: Any, prior: Any) -> None:
        model, data = network(), classes()
        recipe = SGMCMC(weights=rule, prior=prior)
        setup = Setup(recipe, dataclasses.replace(problem(model, data), selection=rule.resolve(model)))
        target, selection, base = setup.target(), setup.selection, params.of(model)
        moved = setup.start + 0.1 * torch.randn(setup.start.shape, generator=torch.Generator().manual_seed(0)).double()
        flat = moved.clone().requires_grad_()
        merged = selection.merge(base, flat)
        outputs = params.functional_call(model, merged, data[0])
        expected = -likelihoods.Categorical().log_prob(outputs, data[1]).sum()
        for name in selection.names:
            part = prior.resolve(name, base[name].flatten()[selection.positions(name)])
            expected = expected - part.log_prob(flat[selection.slices[name]]).sum()
        slope = torch.autograd.grad(expected, flat)[0]
        before = base["4.weight"].clone()
        energy, gradient = target.potential(whole(data))(moved)
        torch.testing.assert_close(gradient, slope, rtol=1e-9, atol=1e-10)
        there = target.potential(whole(data))(setup.start)[0] - energy  # energies are known up to a constant
        at_start = selection.merge(base, setup.start)
        loss = -likelihoods.Categorical().log_prob(params.functional_call(model, at_start, data[0]), data[1]).sum()
        for name in selection.names:
            part = prior.resolve(name, base[name].flatten()[selection.positions(name)])
            loss = loss - part.log_prob(setup.start[selection.slices[name]]).sum()
        torch.testing.assert_close(there, (loss - expected).detach(), rtol=1e-9, atol=1e-9)
        assert torch.equal(params.of(model)["4.weight"], before)

    def test_the_head_alone_has_the_same_potential(self) -> None:
        model, data = network(), classes()
        given = dataclasses.replace(problem(model, data), selection=select.last_layer().resolve(model))
        setup = Setup(SGMCMC(weights=select.last_layer()), given)
        assert setup.head is not None
        features = setup.head.features(data[0])
        assert features.shape == (60, 5)
        alone = setup.target(setup.head).potential(whole((features, data[1])))(setup.start)
        together = setup.target().potential(whole(data))(setup.start)
        torch.testing.assert_close(alone, together, rtol=1e-12, atol=1e-12)

    def test_temperature_divides_it(self) -> None:
        model, data = network(), classes()
        setup = Setup(SGMCMC(), problem(model, data))
        cold, warm = (setup.target().potential(whole(data), t)(setup.start) for t in (0.1, 1.0))
        torch.testing.assert_close(cold[0], 10 * warm[0])
        torch.testing.assert_close(cold[1], 10 * warm[1])


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x))) + x


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.drop, self.fc = nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.drop(torch.relu(self.body(x))))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.fc(self.body(x)))


class TestTail:
    def test_of_a_chain(self) -> None:
        model = nn.Sequential(
            nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True)), nn.Flatten(), nn.Linear(8, 5),
            nn.ReLU(inplace=True), nn.Linear(5, 3),
        ).eval()  # fmt: skip
        x = torch.randn(7, 1, 4, 4)
        for names, kinds in ((["4.bias"], 1), (["2.weight", "4.bias"], 3)):
            head = split(model, names, x)
            assert head is not None
            assert len(head.chain) == kinds
            assert torch.equal(head(head.features(x)), model(x))
        assert split(model, ["0.0.weight"], x) is None  # nothing comes before

    def test_of_a_module_that_ends_with_its_head(self) -> None:
        model, x = Head().eval(), torch.randn(5, 4)
        head = split(model, ["fc.weight"], x)
        assert head is not None
        assert torch.equal(head(head.features(x)), model(x))
        assert split(model, ["body.weight"], x) is None

    def test_none_where_something_goes_around_or_comes_twice(self) -> None:
        x = torch.randn(5, 4)
        assert split(Skip().eval(), ["second.weight"], x) is None
        assert split(Twice().eval(), ["fc.weight"], x) is None

    def test_features_take_the_place_of_inputs(self) -> None:
        model, data = network(), classes()
        given = problem(model, data)
        head = split(model.eval(), ["4.weight"], data[0])
        assert head is not None
        cached = cached_features(head, given.source)
        assert cached is not None
        batches = list(cached.epoch())
        torch.testing.assert_close(batches[1].inputs, head.features(data[0])[20:40])
        assert torch.equal(batches[1].targets, data[1][20:40])
        assert data[0].shape == (60, 4)  # the user's own stays
        assert torch.equal(next(iter(given.source.epoch())).inputs, data[0][:20])  # and so does the problem
        listed = problem(model, [(data[0], data[1])])
        assert cached_features(head, listed.source) is None


class TestSchedule:
    @pytest.mark.parametrize("kind", ["constant", "decay", "cyclical"])
    @pytest.mark.parametrize("numbers", [(0, 1, 5, 2), (7, 3, 10, 4), (2, 2, 1, 3)])
    def test_every_sample_is_kept_once_in_order(self, kind: str, numbers: Any) -> None:
        schedule = Schedule(kind, *numbers)
        kept = [schedule.sample_at(step) for step in range(1, schedule.total + 1)]
        found = [index for index in kept if index is not None]
        assert found == list(range(schedule.num_samples))
        assert [schedule.count(step) for step in range(schedule.total + 1)] == [
            sum(index is not None for index in kept[:step]) for step in range(schedule.total + 1)
        ]
        assert all(schedule.is_noisy(step) for step, index in enumerate(kept) if index is not None)
        assert all(0 < schedule.factor(step) <= 1 for step in range(schedule.total))

    def test_cycles(self) -> None:
        schedule = Schedule("cyclical", 10, 2, 8, 4)
        assert schedule.cycle_length == 20
        assert schedule.factor(10) == schedule.factor(30) == 1.0
        assert schedule.factor(29) < 0.01
        assert not schedule.is_noisy(25)
        assert schedule.is_noisy(26)

    def test_decay(self) -> None:
        schedule = Schedule("decay", 100, 1, 900, 1)
        assert schedule.factor(99) == 1.0
        assert schedule.factor(200) == pytest.approx(2**-0.55)


class TestPriors:
    def test_one_number_stays_one(self) -> None:
        model = network()
        density = make_prior_density(priors.Normal(0.0, 0.5), Selection.all_of(model), params.of(model), 0)
        assert isinstance(density, Quadratic)
        assert density.precision == 4.0
        mean, variance = density.moments()
        assert mean.shape == variance.shape == (83,)
        assert float(variance[0]) == 0.25

    @pytest.mark.parametrize(("prior", "words"), [
        (priors.LogUniform(), "improper"), (priors.Normal(scale="learn"), "fixed scale"),
        (priors.LogNormal(), "positive"), ("normal", "dubito.priors"),
    ], ids=str)  # fmt: skip
    def test_what_cannot_be_sampled(self, prior: Any, words: str) -> None:
        with pytest.raises(InputError, match=words):
            SGMCMC(prior=prior)

    def test_weights_of_zero_say_nothing_of_their_scale(self) -> None:
        assert SGMCMC().default_prior(torch.zeros(3)) == priors.Normal()
        assert SGMCMC().default_prior(torch.full((3,), 2.0)).scale == 0.5

    def test_particles_as_a_normal(self) -> None:
        samples = torch.randn(500, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) @ torch.tensor(
            [[1.0, 0.5, 0.0], [0.0, 1.0, 0.3], [0.0, 0.0, 0.2]], dtype=torch.float64
        )
        dense = from_particles(samples)
        torch.testing.assert_close(torch.linalg.inv(dense.precision), torch.cov(samples.mT))
        flat = torch.randn(3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        gradient = torch.zeros(3, dtype=torch.float64)
        dense.add_gradient_(gradient, flat)
        expected = torch.distributions.MultivariateNormal(samples.mean(0), torch.cov(samples.mT)).log_prob
        leaf = flat.clone().requires_grad_()
        torch.testing.assert_close(gradient, -torch.autograd.grad(expected(leaf), leaf)[0])
        few = from_particles(samples[:20])
        torch.testing.assert_close(few.precision, 1 / samples[:20].var(0))


def chain(rho: float, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for t in range(1, shape[1]):
        x[:, t] = rho * x[:, t - 1] + (1 - rho**2) ** 0.5 * x[:, t]
    return x


class TestDiagnostics:
    @pytest.mark.parametrize("rho", [-0.5, 0.0, 0.5, 0.9])
    def test_of_an_autoregressive_chain(self, rho: float) -> None:
        draws = chain(rho, (4, 4000, 2))
        expected = 16000 * (1 - rho) / (1 + rho)
        assert ((diagnostics.ess_mean(draws) / expected - 1).abs() < 0.15).all()
        assert ((diagnostics.ess_bulk(draws) / expected - 1).abs() < 0.15).all()
        assert (diagnostics.rhat(draws) < 1.02).all()
        correlation = diagnostics.autocorrelation(draws)[..., 0].mean(0)
        expected = torch.tensor([rho**k for k in range(4)], dtype=torch.float64)
        torch.testing.assert_close(correlation[:4], expected, atol=0.05, rtol=0.0)

    def test_chains_apart(self) -> None:
        draws = chain(0.0, (4, 200, 1))
        draws[0] += 3
        assert float(diagnostics.rhat(draws)) > 1.3
        drifting = chain(0.0, (1, 400, 1)) + torch.linspace(0, 4, 400)[None, :, None]
        assert float(diagnostics.rhat(drifting)) > 1.3
        wider = chain(0.0, (4, 500, 1))
        wider[0] *= 4
        assert float(diagnostics.rhat(wider)) > 1.05

    def test_what_stands_still_agrees(self) -> None:
        draws = torch.ones(2, 10, 1)
        assert float(diagnostics.rhat(draws)) == 1.0
        assert float(diagnostics.ess_mean(draws)) == 20.0
        with pytest.raises(InputError, match="at least 4"):
            diagnostics.rhat(torch.ones(2, 3))

    @pytest.mark.parametrize(("rho", "shape", "sizes", "rhat"), [
        (0.9, (4, 250), (49.01374341590069, 133.75905305884692, 48.48329970271845), 1.0671669425721237),
        (-0.6, (2, 101), (460.2059991327962, 183.6023237079023, 460.2059991327962), 0.9985578066341764),
        (0.0, (3, 20), (60.64453978275829, 79.26605504587158, 63.910382237597304), 0.9943184843139777),
    ])  # fmt: skip
    def test_the_numbers_of_arviz(self, rho: float, shape: Any, sizes: tuple[float, ...], rhat: float) -> None:
        """Written down from arviz 0.23.4, so that they are compared where it is not installed."""
        draws = chain(rho, shape)
        ours = (diagnostics.ess_bulk(draws), diagnostics.ess_tail(draws), diagnostics.ess_mean(draws))
        assert [float(value) for value in ours] == pytest.approx(sizes, rel=1e-10)
        assert float(diagnostics.rhat(draws)) == pytest.approx(rhat, rel=1e-10)

    @pytest.mark.parametrize("shape", [(4, 250), (2, 101), (3, 20), (2, 8)])
    @pytest.mark.parametrize("rho", [-0.6, 0.0, 0.9])
    def test_against_arviz(self, shape: tuple[int, int], rho: float) -> None:
        arviz = needs("arviz")

        draws = chain(rho, shape)
        data = arviz.convert_to_dataset(draws.numpy())
        pairs = {"bulk": diagnostics.ess_bulk, "tail": diagnostics.ess_tail, "mean": diagnostics.ess_mean}
        for method, ours in pairs.items():
            assert float(ours(draws)) == pytest.approx(float(arviz.ess(data, method=method)["x"]), rel=1e-10)
        assert float(diagnostics.rhat(draws)) == pytest.approx(float(arviz.rhat(data)["x"]), rel=1e-10)
        energies = diagnostics.energy_fraction(draws)
        torch.testing.assert_close(energies, torch.as_tensor(arviz.bfmi(draws.numpy())))
