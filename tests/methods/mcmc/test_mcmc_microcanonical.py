"""Microcanonical trajectories: the exact turn, a Gaussian target, and chains that start at an ensemble."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dubito.errors import InputError, UnsupportedError
from torch import Tensor, nn

from dubito import HMC, Ensemble, Training, priors, select
from dubito.methods.mcmc.hamiltonian import at, microcanonical_transition, turn
from oracles import close, fixed_normal, seeded_generator


def test_a_turn_solves_the_equation_of_motion_and_can_be_undone() -> None:
    u, gradient = fixed_normal(5), fixed_normal(5, seed=1)
    u = u / u.norm()
    found, kinetic = turn(u, gradient, 0.7)
    slow, energy = u.clone(), 0.0
    for _ in range(20_000):  # Euler's method for u' = -(I - u uᵀ) g / (d - 1)
        force = -gradient / 4
        energy += 4 * float(force.dot(slow)) * 0.7 / 20_000  # d/dt (d - 1) log(...) = -gᵀu
        slow = slow + 0.7 / 20_000 * (force - slow * slow.dot(force))
    close(found, slow / slow.norm(), 1e-4)
    assert kinetic == pytest.approx(energy, abs=1e-3)
    back, undone = turn(-found, gradient, 0.7)
    close(-back, u, 1e-12)
    assert undone == pytest.approx(-kinetic, abs=1e-12)
    assert bool(turn(u, 1e6 * gradient, 10.0)[0].isfinite().all())  # cosh would overflow


def gaussian(precision: Tensor) -> Any:
    return lambda q: (0.5 * q @ precision @ q, precision @ q)


@pytest.mark.slow
def test_samples_of_a_gaussian_have_its_moments_at_a_large_step() -> None:
    covariance = torch.tensor([[1.0, 0.6, 0.0], [0.6, 2.0, 0.3], [0.0, 0.3, 0.5]], dtype=torch.float64)
    potential, generator = gaussian(torch.linalg.inv(covariance)), seeded_generator()
    point, kept, acceptance = at(potential, torch.zeros(3, dtype=torch.float64)), [], 0.0
    for _ in range(3000):
        moved = microcanonical_transition(potential, point, 0.8, torch.tensor([1.0, 2.0, 0.5]).double(), 4, generator)
        point, acceptance = moved.point, acceptance + moved.acceptance / 3000
        kept.append(point.position)
    samples = torch.stack(kept)
    assert 0.6 < acceptance < 0.97  # so that the acceptance step is needed
    close(samples.mean(0), torch.zeros(3).double(), 0.15)
    close(torch.cov(samples.T), covariance, 0.15)


def test_the_energy_error_falls_with_the_square_of_the_step() -> None:
    potential = gaussian(torch.diag(torch.tensor([1.0, 3.0, 0.5, 2.0], dtype=torch.float64)))
    start, ones = at(potential, fixed_normal(4)), torch.ones(4, dtype=torch.float64)
    rises = []
    for steps in (10, 20, 40):
        step = 0.5 / steps
        errors = [
            1 - microcanonical_transition(potential, start, step, ones, steps, seeded_generator(k)).acceptance
            for k in range(40)
        ]
        rises.append(sum(errors) / 40)
    assert 2.5 < rises[0] / rises[1] < 6
    assert 2.5 < rises[1] / rises[2] < 6


def data() -> tuple[Tensor, Tensor]:
    x = fixed_normal(40, 2)
    return x, (x[:, 0] > 0).long()


@pytest.mark.slow
def test_chains_start_at_the_members_of_an_ensemble() -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    members: Any = Ensemble(2).fit(model, data(), training=Training(epochs=20, lr=1e-2))
    recipe = HMC("microcanonical", prior=priors.Normal(), chains=2, burn_in=0, num_samples=1, num_steps=1,
                 step_size=1e-9, adapt=False, start=members)  # fmt: skip
    found: Any = recipe.fit(model, data())
    for chain, member in zip(found.samples, members.members, strict=True):
        close(chain[0], torch.cat([value.flatten() for value in member.mean().values()]), 1e-6)
    longer: Any = recipe.replace(burn_in=30, num_samples=20, num_steps=5, step_size="auto", adapt=True)
    posterior = longer.fit(model, data())
    assert float((posterior.predict(data()[0]).probs.argmax(1) == data()[1]).double().mean()) > 0.9
    assert posterior.recipe.explores_modes


def test_what_cannot_be_sampled_is_refused() -> None:
    with pytest.raises(InputError, match="at least two random weights"):
        HMC("microcanonical").fit(
            nn.Linear(1, 1, bias=False), (torch.ones(5, 1), torch.ones(5, 1)), likelihood="gaussian"
        )
    normed = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    members = Ensemble(2).fit(normed, data(), training=Training(epochs=2))
    with pytest.raises(UnsupportedError, match="BatchNorm"):
        HMC(start=members, chains=2).fit(normed, data())
    plain = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    members = Ensemble(3).fit(plain, data(), training=Training(epochs=2))
    few = HMC("microcanonical", start=members, burn_in=2, num_samples=2, num_steps=1)
    with pytest.warns(UserWarning, match="2 of the 3 members: give chains=3"):
        few.fit(plain, data(), progress=False)
    with pytest.raises(InputError, match="weights that are not random"):
        few.replace(chains=3, weights=select.last_layer()).fit(plain, data(), progress=False)
