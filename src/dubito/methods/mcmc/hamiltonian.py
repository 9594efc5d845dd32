r"""Hamiltonian Monte Carlo on a flat vector: leapfrog, the Metropolis transition and the no-U-turn transition.

$$H(q, p) = U(q) + \tfrac12 p^\top M^{-1} p$$

(Neal 2011, https://arxiv.org/abs/1206.1901). `inverse_mass` is the diagonal of $M^{-1}$, an estimate of variances.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dubito.methods.mcmc.target import Potential

# A trajectory whose energy rises by more than this is divergent.
DIVERGENCE = 1000.0


class Point(NamedTuple):
    """A position with its momentum, potential and the potential's gradient."""

    position: Tensor
    momentum: Tensor
    potential: float
    gradient: Tensor


class Transition(NamedTuple):
    """The result of a transition.

    Args:
        point: The new position.
        acceptance: The mean acceptance probability of its proposals.
        energy: The Hamiltonian before the transition.
        divergent: Whether the energy rose by too much.
        num_steps: The number of leapfrog steps.
    """

    point: Point
    acceptance: float
    energy: float
    divergent: bool
    num_steps: int


def at(potential: Potential, position: Tensor) -> Point:
    """Return the point at a position with zero momentum."""
    energy, gradient = potential(position)
    return Point(position, torch.zeros_like(position), float(energy), gradient)


def leapfrog(potential: Potential, point: Point, step: float, inverse_mass: Tensor) -> Point:
    r"""Take one step: half a kick, a drift, half a kick. Negating the momentum reverses it exactly."""
    momentum = point.momentum - 0.5 * step * point.gradient
    position = point.position + step * inverse_mass * momentum
    energy, gradient = potential(position)
    return Point(position, momentum - 0.5 * step * gradient, float(energy), gradient)


def hamiltonian(point: Point, inverse_mass: Tensor) -> float:
    """Return the energy, or infinity if it is NaN."""
    kinetic = 0.5 * float((point.momentum.square() * inverse_mass).sum(dtype=torch.float64))
    energy = point.potential + kinetic
    return energy if math.isfinite(energy) else math.inf


def draw_momentum(point: Point, inverse_mass: Tensor, generator: torch.Generator) -> Point:
    """Return the point with a new momentum from N(0, M)."""
    noise = torch.empty_like(point.position).normal_(generator=generator)
    return point._replace(momentum=noise * inverse_mass.rsqrt())


def uniform(generator: torch.Generator) -> float:
    """Draw a number between 0 and 1."""
    return float(torch.rand((), generator=generator, dtype=torch.float64, device=generator.device))


def hmc_transition(
    potential: Potential, start: Point, step: float, inverse_mass: Tensor, num_steps: int, generator: torch.Generator
) -> Transition:
    """Follow a trajectory of `num_steps` leapfrog steps, and accept its end with probability min(1, exp(−ΔH)).

    The step size is varied by up to a fifth, so that no orbit is exactly periodic.
    """
    first = draw_momentum(start, inverse_mass, generator)
    before = hamiltonian(first, inverse_mass)
    size, point, taken = step * (0.8 + 0.4 * uniform(generator)), first, 0
    rise = 0.0
    for _ in range(num_steps):
        point, taken = leapfrog(potential, point, size, inverse_mass), taken + 1
        rise = hamiltonian(point, inverse_mass) - before
        if rise > DIVERGENCE:
            break
    acceptance = math.exp(min(0.0, -rise))
    accepted = uniform(generator) < acceptance and rise <= DIVERGENCE
    return Transition(point if accepted else start, acceptance, before, rise > DIVERGENCE, taken)


class _Tree(NamedTuple):
    """A segment of a trajectory: its two ends, one point drawn from it, and the sums of the stopping rule."""

    left: Point
    right: Point
    drawn: Point
    log_weight: float  # of the whole segment, log Σ exp(H₀ − H)
    momenta: Tensor  # their sum
    stopped: bool  # it made a U-turn or diverged
    divergent: bool
    acceptance: float  # sum over its points
    points: int


class NoUTurn:
    """The no-U-turn sampler with multinomial weights (Hoffman & Gelman 2014; Betancourt 2017).

    A trajectory is doubled forwards or backwards in time until its ends approach each other; the next state is
    drawn from it in proportion to exp(−H). (https://arxiv.org/abs/1111.4246, https://arxiv.org/abs/1701.02434)

    Args:
        potential: The potential and its gradient.
        step: The step size.
        inverse_mass: The diagonal of the inverse mass.
        max_depth: The largest number of doublings.
        generator: The source of randomness.
    """

    def __init__(
        self, potential: Potential, step: float, inverse_mass: Tensor, max_depth: int, generator: torch.Generator
    ) -> None:
        self.potential, self.step, self.inverse_mass = potential, step, inverse_mass
        self.max_depth, self.generator = max_depth, generator
        self.before = 0.0

    def transition(self, start: Point) -> Transition:
        """Make one transition."""
        first = draw_momentum(start, self.inverse_mass, self.generator)
        self.before = hamiltonian(first, self.inverse_mass)
        tree = _Tree(first, first, first, 0.0, first.momentum, False, False, 0.0, 0)
        for depth in range(self.max_depth):
            forwards = uniform(self.generator) < 0.5
            new = self._grow(tree.right if forwards else tree.left, depth, 1 if forwards else -1)
            tree = self._join(tree, new, forwards, biased=True)
            if tree.stopped:
                break
        return Transition(tree.drawn, tree.acceptance / max(tree.points, 1), self.before, tree.divergent, tree.points)

    def _grow(self, edge: Point, depth: int, direction: int) -> _Tree:
        """Return the segment of 2^depth points after `edge` in one direction of time."""
        if depth == 0:
            return self._leaf(leapfrog(self.potential, edge, direction * self.step, self.inverse_mass))
        first = self._grow(edge, depth - 1, direction)
        if first.stopped:
            return first
        forwards = direction > 0
        second = self._grow(first.right if forwards else first.left, depth - 1, direction)
        return self._join(first, second, forwards, biased=False)

    def _leaf(self, point: Point) -> _Tree:
        rise = hamiltonian(point, self.inverse_mass) - self.before
        divergent = not rise <= DIVERGENCE
        weight = -math.inf if divergent else -rise
        acceptance = 0.0 if divergent else math.exp(min(0.0, -rise))
        return _Tree(point, point, point, weight, point.momentum, divergent, divergent, acceptance, 1)

    def _join(self, old: _Tree, new: _Tree, forwards: bool, *, biased: bool) -> _Tree:
        """Join two segments; a stopped new segment adds no candidate."""
        acceptance, points = old.acceptance + new.acceptance, old.points + new.points
        divergent = old.divergent or new.divergent
        if new.stopped:
            return old._replace(stopped=True, divergent=divergent, acceptance=acceptance, points=points)
        weight = _log_add(old.log_weight, new.log_weight)
        against = old.log_weight if biased else weight  # biased towards the new half at the top of the tree only
        chance = math.exp(min(0.0, new.log_weight - against)) if new.log_weight > -math.inf else 0.0
        drawn = new.drawn if uniform(self.generator) < chance else old.drawn
        left, right = (old.left, new.right) if forwards else (new.left, old.right)
        momenta = old.momenta + new.momenta
        first, second = (old, new) if forwards else (new, old)
        turned = (
            self._turns(left, right, momenta)
            # a U-turn may lie between two halves that have none
            or self._turns(left, second.left, first.momenta + second.left.momentum)
            or self._turns(first.right, right, second.momenta + first.right.momentum)
        )
        return _Tree(left, right, drawn, weight, momenta, turned, divergent, acceptance, points)

    def _turns(self, left: Point, right: Point, momenta: Tensor) -> bool:
        velocity = self.inverse_mass * momenta
        return float(left.momentum.dot(velocity)) <= 0 or float(right.momentum.dot(velocity)) <= 0


def _log_add(a: float, b: float) -> float:
    high = max(a, b)
    return high if high == -math.inf else high + math.log(math.exp(a - high) + math.exp(b - high))
