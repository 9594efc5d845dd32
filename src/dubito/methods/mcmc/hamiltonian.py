r"""Hamiltonian Monte Carlo on a flat vector: leapfrog, the Metropolis transition and the no-U-turn transition.

$$H(q, p) = U(q) + \tfrac12 p^\top M^{-1} p$$

(Neal 2011, https://arxiv.org/abs/1206.1901). `inverse_mass` is the diagonal of $M^{-1}$, an estimate of variances.

Microcanonical trajectories have unit speed, and the gradient bends their direction:

$$\dot q = u, \qquad \dot u = -\frac{(I - u u^\top)\,\nabla U(q)}{d - 1}, \qquad \|u\| = 1$$

At a fixed position the second equation is solved exactly, so a step is half a turn, a drift and half a turn (Robnik et
al. 2023, https://arxiv.org/abs/2212.08549). Unlike a momentum, the direction cannot gain speed in steep valleys.
Chains that start at the members of a deep ensemble sample networks well (MILE, Sommer et al. 2025,
https://arxiv.org/abs/2502.06335); here the ends of trajectories are accepted or rejected, which removes the error of
the step size (Robnik et al. 2025, https://arxiv.org/abs/2503.01707).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dubito.methods.mcmc.numbers import (
    Flag,
    Number,
    exp,
    exp_at_most_one,
    finite_or_infinity,
    known,
    log,
    log_add,
    number,
    pick,
)
from dubito.methods.mcmc.target import Potential

# A trajectory whose energy rises by more than this is divergent.
DIVERGENCE = 1000.0


class Point(NamedTuple):
    """A position with its momentum, potential and the potential's gradient."""

    position: Tensor
    momentum: Tensor
    potential: Number
    gradient: Tensor


class Transition(NamedTuple):
    """The result of a transition."""

    point: Point  # the new position
    acceptance: Number  # the mean acceptance probability of its proposals
    energy: Number  # the Hamiltonian before the transition
    divergent: Flag  # whether the energy rose by too much
    num_steps: Number  # the number of leapfrog steps
    stopped: Flag = True  # whether the trajectory has ended; if not, it reached its largest number of doublings


def at(potential: Potential, position: Tensor) -> Point:
    """Return the point at a position with zero momentum."""
    energy, gradient = potential(position)
    return Point(position, torch.zeros_like(position), number(energy), gradient)


def leapfrog(potential: Potential, point: Point, step: Number, inverse_mass: Tensor) -> Point:
    r"""Take one step: half a kick, a drift, half a kick. Negating the momentum reverses it exactly."""
    momentum = point.momentum - 0.5 * step * point.gradient
    position = point.position + step * inverse_mass * momentum
    energy, gradient = potential(position)
    return Point(position, momentum - 0.5 * step * gradient, number(energy), gradient)


def hamiltonian(point: Point, inverse_mass: Tensor) -> Number:
    """Return the energy, or infinity if it is NaN."""
    kinetic = 0.5 * number((point.momentum.square() * inverse_mass).sum(dtype=torch.float64))
    return finite_or_infinity(point.potential + kinetic)


def draw_momentum(point: Point, inverse_mass: Tensor, generator: torch.Generator) -> Point:
    """Return the point with a new momentum from N(0, M)."""
    noise = torch.empty_like(point.position).normal_(generator=generator)
    return point._replace(momentum=noise * inverse_mass.rsqrt())


def uniform(generator: torch.Generator) -> Number:
    """Draw a number between 0 and 1."""
    return number(torch.rand((), generator=generator, dtype=torch.float64, device=generator.device))


class Rise:
    """How far the energy of a trajectory has risen; it stays as it was at the first divergence."""

    def __init__(self) -> None:
        self.value: Number = 0.0
        self.steps: Number = 0
        self.divergent: Flag = False

    def add(self, value: Number) -> bool:
        """Note the rise after one more step; return whether the trajectory is known to have diverged."""
        self.steps = self.steps + pick(self.divergent, 0, 1)
        self.value = pick(self.divergent, self.value, value)
        self.divergent = self.value > DIVERGENCE
        return known(self.divergent)

    def end(self, start: Point, last: Point, energy: Number, generator: torch.Generator) -> Transition:
        """Accept the last point with probability min(1, exp(−ΔH)), or stay at the first."""
        acceptance = exp_at_most_one(-self.value)
        accepted = (uniform(generator) < acceptance) & (self.value <= DIVERGENCE)
        return Transition(pick(accepted, last, start), acceptance, energy, self.divergent, self.steps)


def hmc_transition(
    potential: Potential, start: Point, step: Number, inverse_mass: Tensor, num_steps: int, generator: torch.Generator
) -> Transition:
    """Follow a trajectory of `num_steps` leapfrog steps, and accept its end with probability min(1, exp(−ΔH)).

    The step size is varied by up to a fifth, so that no orbit is exactly periodic. On an accelerator, a trajectory that
    diverges is followed to its end, and then rejected: nothing is read.
    """
    first = draw_momentum(start, inverse_mass, generator)
    before = hamiltonian(first, inverse_mass)
    size, point, rise = step * (0.8 + 0.4 * uniform(generator)), first, Rise()
    for _ in range(num_steps):
        point = leapfrog(potential, point, size, inverse_mass)
        if rise.add(hamiltonian(point, inverse_mass) - before):
            break
    return rise.end(start, point, before, generator)


class _Tree(NamedTuple):
    """A segment of a trajectory: its two ends, one point drawn from it, and the sums of the stopping rule."""

    inner: Point  # where it begins, in the direction in which it was grown
    outer: Point
    drawn: Point
    log_weight: Number  # of the whole segment, log Σ exp(H₀ − H)
    momenta: Tensor  # their sum
    stopped: Flag  # it made a U-turn or diverged; then its points and sums are not used
    divergent: Flag
    acceptance: Number  # sum over its points
    points: Number


class NoUTurn:
    """The no-U-turn sampler with multinomial weights (Hoffman & Gelman 2014; Betancourt 2017).

    A trajectory is doubled forwards or backwards in time until its ends approach each other; the next state is
    drawn from it in proportion to exp(−H). (https://arxiv.org/abs/1111.4246, https://arxiv.org/abs/1701.02434)
    On an accelerator nothing is read: all `max_depth` doublings are computed, and those after the last change nothing
    (see `dubito.methods.mcmc.blocks`).

    Args:
        potential: The potential and its gradient.
        step: The step size.
        inverse_mass: The diagonal of the inverse mass.
        max_depth: The largest number of doublings.
        generator: The source of randomness.
    """

    def __init__(
        self, potential: Potential, step: Number, inverse_mass: Tensor, max_depth: int, generator: torch.Generator
    ) -> None:
        self.potential, self.step, self.inverse_mass = potential, step, inverse_mass
        self.max_depth, self.generator = max_depth, generator
        self.before: Number = 0.0

    def transition(self, start: Point) -> Transition:
        """Make one transition."""
        first = draw_momentum(start, self.inverse_mass, self.generator)
        self.before = hamiltonian(first, self.inverse_mass)
        tree = _Tree(first, first, first, 0.0, first.momentum, False, False, 0.0, 0)
        ends = (first, first)  # in the order of time
        for depth in range(self.max_depth):
            forwards = uniform(self.generator) < 0.5
            inner, outer = pick(forwards, ends[0], ends[1]), pick(forwards, ends[1], ends[0])
            new = self._grow(outer, depth, pick(forwards, self.step, -self.step))
            tree = self._join(tree._replace(inner=inner, outer=outer), new, biased=True)
            if known(tree.stopped):
                break
            ends = (pick(forwards, inner, tree.outer), pick(forwards, tree.outer, inner))
        mean = tree.acceptance / tree.points
        return Transition(tree.drawn, mean, self.before, tree.divergent, tree.points, tree.stopped)

    def _grow(self, edge: Point, depth: int, step: Number) -> _Tree:
        """Return the segment of 2^depth points after `edge`; a negative step goes back in time."""
        if depth == 0:
            return self._leaf(leapfrog(self.potential, edge, step, self.inverse_mass))
        first = self._grow(edge, depth - 1, step)
        if known(first.stopped):
            return first
        return self._join(first, self._grow(first.outer, depth - 1, step), biased=False)

    def _leaf(self, point: Point) -> _Tree:
        rise = hamiltonian(point, self.inverse_mass) - self.before
        rise = pick(rise <= DIVERGENCE, rise, math.inf)
        divergent = rise > DIVERGENCE
        return _Tree(point, point, point, -rise, point.momentum, divergent, divergent, exp_at_most_one(-rise), 1)

    def _join(self, old: _Tree, new: _Tree, *, biased: bool) -> _Tree:
        """Join two segments; a stopped new segment adds no candidate, and nothing is added to a stopped one."""
        acceptance = old.acceptance + pick(old.stopped, 0.0, new.acceptance)
        points = old.points + pick(old.stopped, 0, new.points)
        divergent = old.divergent | pick(old.stopped, False, new.divergent)
        if known(new.stopped):
            return old._replace(stopped=True, divergent=divergent, acceptance=acceptance, points=points)
        weight = log_add(old.log_weight, new.log_weight)
        against = old.log_weight if biased else weight  # biased towards the new half at the top of the tree only
        chance = exp_at_most_one(new.log_weight - against)
        taken = pick(old.stopped | new.stopped, False, uniform(self.generator) < chance)
        momenta = old.momenta + new.momenta
        turned = (
            self._turns(old.inner, new.outer, momenta)
            # a U-turn may lie between two halves that have none
            | self._turns(old.inner, new.inner, old.momenta + new.inner.momentum)
            | self._turns(old.outer, new.outer, new.momenta + old.outer.momentum)
        )
        drawn, stopped = pick(taken, new.drawn, old.drawn), old.stopped | new.stopped | turned
        return _Tree(old.inner, new.outer, drawn, weight, momenta, stopped, divergent, acceptance, points)

    def _turns(self, one: Point, other: Point, momenta: Tensor) -> Flag:
        velocity = self.inverse_mass * momenta
        return (number(one.momentum.dot(velocity)) <= 0) | (number(other.momentum.dot(velocity)) <= 0)


def turn(direction: Tensor, gradient: Tensor, step: Number) -> tuple[Tensor, Number]:
    r"""Return the unit direction after a time at a fixed position, and the change of the kinetic energy.

    With $e = -\nabla U / \|\nabla U\|$, $\delta = \epsilon \|\nabla U\| / (d - 1)$ and $c = e^\top u$,

    $$u' = \frac{u + e\,(\sinh \delta + c\,(\cosh \delta - 1))}{\cosh \delta + c \sinh \delta}, \qquad
      \Delta K = (d - 1) \log(\cosh \delta + c \sinh \delta).$$

    Args:
        direction: u.
        gradient: ∇U.
        step: ε.
    """
    size, length = len(direction) - 1, number(gradient.norm())
    if isinstance(length, Tensor):
        length = length.double().clamp_min(torch.finfo(gradient.dtype).tiny)  # a gradient of 0 turns nothing
    elif length == 0:
        return direction, 0.0
    ahead, delta = -gradient / length, step * length / size
    along, shrunk = number(ahead.dot(direction)), exp(-delta)  # in terms of exp(-δ), which cannot overflow
    turned = ahead * ((1 - shrunk) * (1 + shrunk + along * (1 - shrunk))) + 2 * shrunk * direction
    inside = 1 + along + (1 - along) * shrunk**2
    return turned / turned.norm(), size * (delta - math.log(2) + log(inside, 1e-300))


def microcanonical_transition(
    potential: Potential, start: Point, step: Number, inverse_mass: Tensor, num_steps: int, generator: torch.Generator
) -> Transition:
    """Follow a trajectory of `num_steps` steps from a random direction, and accept its end by its energy error.

    The arguments are those of `hmc_transition`. A step moves each weight about as far as a leapfrog step of that size,
    so `step` is multiplied by the root of the number of weights. It is varied by up to a fifth.
    """
    scale = inverse_mass.sqrt()
    noise = torch.empty_like(start.position).normal_(generator=generator)
    direction, point, rise = noise / noise.norm(), start, Rise()
    size = step * (0.8 + 0.4 * uniform(generator)) * math.sqrt(len(direction))
    kinetic: Number = 0.0
    for _ in range(num_steps):
        direction, first = turn(direction, scale * point.gradient, size / 2)
        position = point.position + size * scale * direction
        energy, gradient = potential(position)
        direction, second = turn(direction, scale * gradient, size / 2)
        point, kinetic = Point(position, direction, number(energy), gradient), kinetic + first + second
        if rise.add(finite_or_infinity(point.potential - start.potential + kinetic)):
            break
    return rise.end(start, point, start.potential, generator)
