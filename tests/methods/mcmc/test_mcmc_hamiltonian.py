"""Hamiltonian Monte Carlo is reversible and draws from what it is given."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from mcmc_cases import banana_potential, classes, funnel_potential, gaussian_potential, network
from torch import Tensor

from dubito import HMC, select
from dubito.methods.mcmc import hamiltonian as hamiltonian_file
from dubito.methods.mcmc.adaptation import Masses, StepSize, reasonable_step, settling, windows
from dubito.methods.mcmc.diagnostics import ess_mean, ess_tail
from dubito.methods.mcmc.hamiltonian import (
    NoUTurn,
    Point,
    Transition,
    at,
    draw_momentum,
    hamiltonian,
    hmc_transition,
    leapfrog,
    microcanonical_transition,
)
from dubito.methods.mcmc.target import Potential

ONES = torch.ones(2, dtype=torch.float64)


def start(potential: Potential, size: int, seed: int = 0) -> tuple[Point, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    position = torch.randn(size, generator=generator, dtype=torch.float64)
    return at(potential, position), generator


@pytest.mark.parametrize(("potential", "size"), [(gaussian_potential, 3), (banana_potential, 2), (funnel_potential, 3)])
class TestLeapfrog:
    def test_turned_around_it_goes_back(self, potential: Potential, size: int) -> None:
        rest, generator = start(potential, size)
        mass = torch.rand(size, generator=generator, dtype=torch.float64) + 0.5
        first = draw_momentum(rest, mass, generator)
        point = first
        for _ in range(50):
            point = leapfrog(potential, point, 0.1, mass)
        point = point._replace(momentum=-point.momentum)
        for _ in range(50):
            point = leapfrog(potential, point, 0.1, mass)
        torch.testing.assert_close(point.position, first.position, rtol=0.0, atol=1e-9)
        torch.testing.assert_close(-point.momentum, first.momentum, rtol=0.0, atol=1e-9)

    def test_backwards_in_time_it_goes_back(self, potential: Potential, size: int) -> None:
        rest, generator = start(potential, size)
        first = draw_momentum(rest, torch.ones_like(rest.position), generator)
        there = leapfrog(potential, first, 0.1, torch.ones_like(rest.position))
        back = leapfrog(potential, there, -0.1, torch.ones_like(rest.position))
        torch.testing.assert_close(back.position, first.position, rtol=0.0, atol=1e-13)
        torch.testing.assert_close(back.momentum, first.momentum, rtol=0.0, atol=1e-13)

    def test_volume_is_kept(self, potential: Potential, size: int) -> None:
        rest, generator = start(potential, size)
        both = torch.cat([rest.position, torch.randn(size, generator=generator, dtype=torch.float64)])
        mass = torch.ones(size, dtype=torch.float64)

        def flow(state: Tensor) -> Tensor:
            energy, gradient = potential(state[:size])
            point = Point(state[:size], state[size:], float(energy.detach()), gradient)
            moved = leapfrog(lambda q: (potential(q)[0].detach(), potential(q)[1]), point, 0.1, mass)
            return torch.cat([moved.position, moved.momentum])

        jacobian = torch.autograd.functional.jacobian(flow, both)
        assert abs(float(torch.linalg.det(jacobian)) - 1) < 1e-10

    def test_the_error_of_the_energy_is_of_second_order(self, potential: Potential, size: int) -> None:
        rest, generator = start(potential, size)
        mass = torch.ones(size, dtype=torch.float64)
        first = draw_momentum(rest, mass, generator)
        errors = []
        for steps in (20, 40):
            point = first
            for _ in range(steps):
                point = leapfrog(potential, point, 0.4 / steps, mass)
            errors.append(abs(hamiltonian(point, mass) - hamiltonian(first, mass)))
        assert 3.5 < errors[0] / errors[1] < 4.5


def draw(potential: Potential, size: int, method: str, step: float, count: int) -> Tensor:
    point, generator = start(potential, size)
    mass, draws = torch.ones(size, dtype=torch.float64), []
    for _ in range(count):
        if method == "nuts":
            point = NoUTurn(potential, step, mass, 8, generator).transition(point).point
        else:
            point = hmc_transition(potential, point, step, mass, 8, generator).point
        draws.append(point.position)
    return torch.stack(draws)


def banana_parts(draws: Tensor) -> Tensor:
    """What should be independent standard normals."""
    x, y = draws.unbind(1)
    return torch.stack([x, y - (x**2 - 1) / 2], 1)


def funnel_parts(draws: Tensor) -> Tensor:
    return torch.cat([draws[:, :1], draws[:, 1:] * (-draws[:, :1] / 2).exp()], 1)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["nuts", "hmc"])
@pytest.mark.parametrize(
    ("potential", "size", "step", "parts"),
    [(banana_potential, 2, 0.4, banana_parts), (funnel_potential, 3, 0.35, funnel_parts)],
    ids=["banana", "funnel"],
)
def test_kolmogorov_smirnov(
    method: str, potential: Potential, size: int, step: float, parts: Callable[[Tensor], Tensor]
) -> None:
    from scipy import stats

    count = 1000 if method == "nuts" else 1500
    values = parts(draw(potential, size, method, step, count))
    measured = [measure(each[None]).min() for measure in (ess_mean, ess_tail) for each in (values, values**2)]
    effective = float(torch.stack(measured).min())
    assert effective > 100
    independent = values[:: math.ceil(count / effective)]
    for column in independent.unbind(1):
        assert stats.kstest(column.numpy(), "norm").pvalue > 0.01


@pytest.mark.slow
def test_kolmogorov_smirnov_notices_a_step_without_correction() -> None:
    """The test above can fail: without acceptance such steps leave a normal of variance 1 / (1 - step²/4)."""
    from scipy import stats

    def normal_potential(position: Tensor) -> tuple[Tensor, Tensor]:
        return position.square().sum() / 2, position

    point, generator = start(normal_potential, 2)
    draws = []
    for _ in range(2000):
        point = draw_momentum(point, ONES, generator)
        for _ in range(4):
            point = leapfrog(normal_potential, point, 1.6, ONES)
        draws.append(point.position)
    uncorrected, corrected = torch.stack(draws), draw(normal_potential, 2, "hmc", 1.6, 2000)
    found = [
        stats.kstest(values[::5].flatten().numpy(), "norm").pvalue
        for values in (uncorrected, 0.6 * uncorrected, corrected)
    ]
    assert found[0] < 1e-6
    assert min(found[1:]) > 0.01


def one_transition(potential: Potential, method: str, step: float, seed: int) -> Transition:
    point, generator = start(potential, 3, seed)
    mass = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
    if method == "nuts":
        return NoUTurn(potential, step, mass, 5, generator).transition(point)
    move = hmc_transition if method == "hmc" else microcanonical_transition
    return move(potential, point, step, mass, 6, generator)


@pytest.mark.parametrize("method", ["nuts", "hmc", "microcanonical"])
def test_numbers_that_are_not_read_give_the_same_transitions(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator, where both results are computed, and one is picked."""
    cases = [(step, seed) for step in (0.1, 0.5, 2.0, 200.0) for seed in range(6)]
    read = [one_transition(funnel_potential, method, *case) for case in cases]
    monkeypatch.setattr(hamiltonian_file, "number", lambda value: value)
    kept = [one_transition(funnel_potential, method, *case) for case in cases]
    assert {one.divergent for one in read} == {False, True}
    assert len({one.num_steps for one in read}) > 1
    for one, other in zip(read, kept, strict=True):
        assert all(isinstance(value, Tensor) for value in other[1:4])
        torch.testing.assert_close(other.point.position, one.point.position, rtol=1e-12, atol=1e-12)
        for name in ("acceptance", "energy", "divergent", "num_steps"):
            assert float(getattr(other, name)) == pytest.approx(float(getattr(one, name)), rel=1e-12), name


def test_dual_averaging_reaches_its_aim() -> None:
    point, generator = start(gaussian_potential, 3)
    mass, adapt = torch.ones(3, dtype=torch.float64), StepSize(0.8)
    state = adapt.init(reasonable_step(gaussian_potential, point.position, mass, generator))
    for _ in range(400):
        step = float(state["log_step"].exp())
        moved = hmc_transition(gaussian_potential, point, step, mass, 5, generator)
        adapt.learn(state, moved.acceptance)
        point = moved.point
    step = float(state["log_mean"].exp())
    accepted = []
    for _ in range(400):
        moved = hmc_transition(gaussian_potential, point, step, mass, 5, generator)
        accepted.append(moved.acceptance)
        point = moved.point
    assert abs(sum(accepted) / 400 - 0.8) < 0.1


def test_masses_are_shrunk_variances() -> None:
    values = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
    masses = Masses()
    state = masses.init(values[0])
    for value in values:
        masses.learn(state, value)
    expected = values.var(0) * 40 / 45 + 1e-3 * 5 / 45
    torch.testing.assert_close(masses.inverse_mass(state), expected, rtol=1e-12, atol=0.0)
    assert float(state["seen"]) == 0


def test_a_divergence_is_noticed() -> None:
    def cliff(position: Tensor) -> tuple[Tensor, Tensor]:
        return 1e8 * position.square().sum(), 2e8 * position

    point, generator = start(cliff, 2)
    for moved in (
        hmc_transition(cliff, point, 1.0, ONES, 5, generator),
        NoUTurn(cliff, 1.0, ONES, 5, generator).transition(point),
    ):
        assert moved.divergent
        assert torch.equal(moved.point.position, point.position)
        assert moved.acceptance < 1e-6


def test_the_first_steps_of_burn_in_do_not_count_for_the_masses(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    monkeypatch.setattr(Masses, "learn", lambda self, state, position: seen.append(position.clone()))
    monkeypatch.setattr(Masses, "inverse_mass", lambda self, state: torch.ones_like(state["mean"]))
    recipe = HMC("hmc", weights=select.last_layer(), burn_in=160, num_samples=1, chains=1, num_steps=1)
    recipe.fit(network(), classes(), progress=False)
    assert windows(160) == [110]
    assert len(seen) == 110 - settling(160) == 86
