"""Adapt the step size and the masses of a chain during burn-in."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dubito.methods.mcmc.hamiltonian import at, draw_momentum, hamiltonian, leapfrog
from dubito.methods.mcmc.numbers import Number
from dubito.methods.mcmc.target import Potential

Numbers = dict[str, Tensor]  # the adaptation state of one chain, changed in place


class StepSize:
    r"""Dual averaging (Nesterov 2009; Hoffman & Gelman 2014, section 3.2): it reaches a target acceptance.

    $$\log \epsilon_{t+1} = \mu - \frac{\sqrt t}{\gamma}\,\frac{1}{t + t_0} \sum_{i \le t} (\delta - a_i), \qquad
      \log \bar\epsilon_{t+1} = t^{-\kappa} \log \epsilon_{t+1} + (1 - t^{-\kappa}) \log \bar\epsilon_t$$

    Args:
        aim: δ, the target acceptance probability.
    """

    gamma, offset, kappa = 0.05, 10.0, 0.75

    def __init__(self, aim: float) -> None:
        self.aim = aim

    def init(self, step: float, device: torch.device | None = None) -> Numbers:
        """Return the state for an initial step size; what acceptances change is on the device."""
        log = math.log(step)
        values = {"log_step": log, "log_mean": log, "center": math.log(10) + log, "deficit": 0.0, "count": 0.0}
        places = {name: None if name in ("center", "count") else device for name in values}
        return {name: torch.full((), value, dtype=torch.float64, device=places[name]) for name, value in values.items()}

    def learn(self, state: Numbers, acceptance: Number) -> None:
        """Update the step size with the acceptance of one transition."""
        state["count"] += 1
        count = float(state["count"])
        rate = 1 / (count + self.offset)
        state["deficit"].mul_(1 - rate).add_(rate * (self.aim - acceptance))
        state["log_step"].copy_(state["center"] - math.sqrt(count) / self.gamma * state["deficit"])
        weight = count**-self.kappa
        state["log_mean"].mul_(1 - weight).add_(weight * state["log_step"])

    def restart(self, state: Numbers, step: float) -> None:
        """Start again from a new step size."""
        for name, value in self.init(step).items():
            state[name].copy_(value)


class Masses:
    """Inverse masses: the running variance of the positions (Welford), shrunk slightly towards a small constant."""

    def init(self, position: Tensor) -> Numbers:
        """Nothing seen."""
        return {
            "seen": torch.zeros((), dtype=position.dtype),  # on the CPU, where it is read
            "mean": torch.zeros_like(position),
            "spread": torch.zeros_like(position),
        }

    def learn(self, state: Numbers, position: Tensor) -> None:
        """Add one position to the running variance."""
        state["seen"] += 1
        away = position - state["mean"]
        state["mean"] += away / state["seen"]
        state["spread"] += away * (position - state["mean"])

    def inverse_mass(self, state: Numbers) -> Tensor:
        """Return the variances, and reset the running estimate."""
        seen = float(state["seen"])
        variance = state["spread"] / max(seen - 1, 1)
        for value in state.values():
            value.zero_()
        return variance * (seen / (seen + 5)) + 1e-3 * (5 / (seen + 5))


def settling(burn_in: int) -> int:
    """Return the number of first burn-in steps whose positions the mass estimate ignores.

    Stan uses 75 where burn-in allows it; 15 % of a short burn-in leaves more positions for the first estimate.

    >>> settling(1000), settling(200), settling(100)
    (75, 30, 15)
    """
    return min(75, int(0.15 * burn_in))


def windows(burn_in: int) -> list[int]:
    """Return the burn-in steps after which the masses are estimated again; each window doubles in length.

    The first steps approach the typical set (`settling`), and the last ones adapt the step size to the final masses, as
    in Stan. A burn-in of fewer than 50 steps has no windows.

    >>> windows(1000)
    [100, 150, 250, 450, 950]
    >>> windows(100), windows(40)
    ([85], [])
    >>> windows(149), windows(150), windows(200)
    ([134], [100], [100, 150])
    """
    if burn_in < 50:
        return []
    end, last, length = 75, 50, 25
    if end + last + length > burn_in:
        end, last = settling(burn_in), 15
        length = burn_in - end - last
    ends = []
    while end + length <= burn_in - last:
        end += length
        length *= 2
        if end + length > burn_in - last:
            end = burn_in - last
        ends.append(end)
    return ends


def reasonable_step(potential: Potential, position: Tensor, inverse_mass: Tensor, generator: torch.Generator) -> float:
    """Return a step size, doubled or halved until one leapfrog step has an acceptance of about 0.8."""
    start = draw_momentum(at(potential, position), inverse_mass, generator)
    before, step = hamiltonian(start, inverse_mass), 0.1

    def accepted() -> bool:
        rise = hamiltonian(leapfrog(potential, start, step, inverse_mass), inverse_mass) - before
        return bool(rise < -math.log(0.8))

    direction = 2.0 if accepted() else 0.5
    for _ in range(60):
        step *= direction
        if accepted() != (direction > 1):
            break
    return step
