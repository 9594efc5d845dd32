"""How a chain finds its step size and masses during burn-in."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dubito.methods.mcmc.hamiltonian import at, draw_momentum, hamiltonian, leapfrog
from dubito.methods.mcmc.target import Potential

Numbers = dict[str, Tensor]  # of one chain, changed in place


class StepSize:
    r"""Dual averaging (Nesterov 2009; Hoffman & Gelman 2014, section 3.2): the acceptance approaches its aim.

    $$\log \epsilon_{t+1} = \mu - \frac{\sqrt t}{\gamma}\,\frac{1}{t + t_0} \sum_{i \le t} (\delta - a_i), \qquad
      \log \bar\epsilon_{t+1} = t^{-\kappa} \log \epsilon_{t+1} + (1 - t^{-\kappa}) \log \bar\epsilon_t$$

    Args:
        aim: δ, the acceptance that is wanted.
    """

    gamma, offset, kappa = 0.05, 10.0, 0.75

    def __init__(self, aim: float) -> None:
        self.aim = aim

    def init(self, step: float) -> Numbers:
        """Start around a step."""
        log = math.log(step)
        values = {"log_step": log, "log_mean": log, "center": math.log(10) + log, "deficit": 0.0, "count": 0.0}
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}

    def learn(self, state: Numbers, acceptance: float) -> None:
        """Take in the acceptance of one transition."""
        state["count"] += 1
        count = float(state["count"])
        rate = 1 / (count + self.offset)
        state["deficit"].mul_(1 - rate).add_(rate * (self.aim - acceptance))
        state["log_step"].copy_(state["center"] - math.sqrt(count) / self.gamma * state["deficit"])
        weight = count**-self.kappa
        state["log_mean"].mul_(1 - weight).add_(weight * state["log_step"])

    def restart(self, state: Numbers, step: float) -> None:
        """Forget all but a new step."""
        for name, value in self.init(step).items():
            state[name].copy_(value)


class Masses:
    """The running variance of positions (Welford), shrunk a little towards a small number, as inverse masses."""

    def init(self, position: Tensor) -> Numbers:
        """Nothing seen."""
        return {
            "seen": position.new_zeros(()),
            "mean": torch.zeros_like(position),
            "spread": torch.zeros_like(position),
        }

    def learn(self, state: Numbers, position: Tensor) -> None:
        """Take in one position."""
        state["seen"] += 1
        away = position - state["mean"]
        state["mean"] += away / state["seen"]
        state["spread"] += away * (position - state["mean"])

    def inverse_mass(self, state: Numbers) -> Tensor:
        """Return the variances, and forget what they were of."""
        seen = float(state["seen"])
        variance = state["spread"] / max(seen - 1, 1)
        for value in state.values():
            value.zero_()
        return variance * (seen / (seen + 5)) + 1e-3 * (5 / (seen + 5))


def settling(burn_in: int) -> int:
    """Return how many steps find the typical set, before positions are counted for the masses.

    Stan has 75 wherever there is room for them; with 15 % of a short burn-in the first masses are of more positions.

    >>> settling(1000), settling(200), settling(100)
    (75, 30, 15)
    """
    return min(75, int(0.15 * burn_in))


def windows(burn_in: int) -> list[int]:
    """Return after which steps of burn-in the masses are estimated anew; each window is twice as long as the last.

    The first steps find the typical set (`settling`) and the last ones the step size for the final masses; the ends are
    those of Stan. A burn-in of less than 50 leaves no room for masses.

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
    """Double or halve a step until one leapfrog step is accepted with probability about 0.8."""
    start = draw_momentum(at(potential, position), inverse_mass, generator)
    before, step = hamiltonian(start, inverse_mass), 0.1

    def accepted() -> bool:
        rise = hamiltonian(leapfrog(potential, start, step, inverse_mass), inverse_mass) - before
        return rise < -math.log(0.8)

    direction = 2.0 if accepted() else 0.5
    for _ in range(60):
        step *= direction
        if accepted() != (direction > 1):
            break
    return step
